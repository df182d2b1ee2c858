"""Where each token begins in a completion's text, in characters (`text_offset`, which is -1 in SGLang)."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from itertools import accumulate
from typing import Any

import orjson
from fastapi.responses import StreamingResponse
from pydantic import BaseModel

DATA = "data: "


def with_offsets(reply: Any) -> Any:
    """Sets the offsets in SGLang's reply, or in the chunks of its stream."""
    if isinstance(reply, BaseModel):
        for choice in getattr(reply, "choices", ()):  # an error has none
            if choice.logprobs is not None:
                choice.logprobs.text_offset = _offsets(choice.logprobs.tokens)
    elif isinstance(reply, StreamingResponse):
        reply.body_iterator = _with_offsets_in(reply.body_iterator)
    return reply


def _offsets(tokens: list[str], start: int = 0) -> list[int]:
    return list(accumulate(map(len, tokens), initial=start))[:-1]


async def _with_offsets_in(events: Any) -> AsyncIterator[Any]:
    starts = Counter[int]()  # by choice
    async for event in events:
        if '"text_offset"' not in event:
            yield event
            continue
        chunk = orjson.loads(event.removeprefix(DATA))
        for choice in chunk["choices"]:
            if (logprobs := choice.get("logprobs")) is not None:
                logprobs["text_offset"] = _offsets(logprobs["tokens"], starts[choice["index"]])
                starts[choice["index"]] += sum(map(len, logprobs["tokens"]))
        yield f"{DATA}{orjson.dumps(chunk).decode()}\n\n"
