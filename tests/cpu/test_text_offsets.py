"""Offsets of tokens in the text of a choice, whole and in a stream of several chunks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from fastapi.responses import StreamingResponse
from sglang.srt.entrypoints.openai.protocol import CompletionResponse, CompletionResponseChoice, LogProbs, UsageInfo

from sgl_prefill.http.text_offsets import with_offsets


def logprobs(*tokens: str) -> LogProbs:
    return LogProbs(text_offset=[-1] * len(tokens), token_logprobs=[0.0] * len(tokens), tokens=list(tokens))


def test_a_token_begins_where_the_ones_before_it_end() -> None:
    choices = [
        CompletionResponseChoice(index=0, text=" a bc", logprobs=logprobs(" a", " bc", ".")),
        CompletionResponseChoice(index=1, text="", logprobs=None),
    ]
    reply = with_offsets(CompletionResponse(id="x", model="m", choices=choices, usage=UsageInfo()))
    assert reply.choices[0].logprobs.text_offset == [0, 2, 5]


def test_the_offsets_of_a_stream_go_on_by_choice() -> None:
    def event(index: int, *tokens: str) -> str:
        body = {"choices": [{"index": index, "text": "".join(tokens), "logprobs": logprobs(*tokens).model_dump()}]}
        return f"data: {json.dumps(body)}\n\n"

    async def stream() -> AsyncIterator[str]:
        for one in (event(0, "ab", "c"), event(1, "x"), event(0, "d"), "data: [DONE]\n\n"):
            yield one

    async def run() -> list[Any]:
        found = with_offsets(StreamingResponse(stream())).body_iterator
        return [one.removeprefix("data: ").strip() async for one in found]

    *chunks, last = asyncio.run(run())
    offsets = [json.loads(one)["choices"][0]["logprobs"]["text_offset"] for one in chunks]
    assert offsets == [[0, 2], [0], [3]]
    assert last == "[DONE]"
