"""Backends that answer a job: an engine in this process, or running servers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import orjson

from sgl_prefill.batch import answer_file, run, servers
from sgl_prefill.batch.prompts import UNLIMITED, FoundPrompt, Prompts
from sgl_prefill.batch.run import RowAnswer
from sgl_prefill.core.batch.batch_plan import JobPlan
from sgl_prefill.core.batch.token_rows import IntArray
from sgl_prefill.errors import BadRequestError
from sgl_prefill.port.steps import custom_params

if TYPE_CHECKING:
    from sgl_prefill.entry.in_process import InProcessEngine
    from sgl_prefill.startup.record import StartRecord

RequestOf = Callable[[int], tuple[str, dict[str, Any]]]


class Backend(Protocol):
    """Finds the prompts of requests, and answers them."""

    @property
    def unit(self) -> str:
        """Unit of prompt lengths: "tokens" or "bytes"."""

    @property
    def n_prompt_tokens(self) -> int:
        """Prompt tokens of all answers so far."""

    @property
    def n_cached_tokens(self) -> int:
        """Of these, found in the prefix cache."""

    async def find_prompts(self, url: str, body: dict[str, Any]) -> list[FoundPrompt]:
        """The prompts of a request, each with its output limit in tokens. Raises BadRequestError."""

    def start(self) -> None:
        """To be called once before `answers`."""

    def answers(
        self, order: JobPlan, prompts: Prompts, request_of: RequestOf, max_inflight: int
    ) -> AsyncIterator[list[RowAnswer]]:
        """Yields the answers to all rows."""


class OwnEngine:
    """An engine in this process."""

    unit = "tokens"

    def __init__(self, engine: InProcessEngine) -> None:
        self.engine = engine
        self.state: StartRecord | None = None  # set by `start`

    async def find_prompts(self, url: str, body: dict[str, Any]) -> list[FoundPrompt]:
        found = await self.engine.prompts_of(url, body)
        if isinstance(found, list):
            return [(one.tokens, UNLIMITED if one.max_new_tokens is None else one.max_new_tokens) for one in found]
        raise BadRequestError(answer_file.message_of(found.body))

    def start(self) -> None:
        self.state = self.engine.start()

    @property
    def n_prompt_tokens(self) -> int:
        return self.engine.n_prompt_tokens

    @property
    def n_cached_tokens(self) -> int:
        return self.engine.n_cached_tokens

    def answers(
        self, order: JobPlan, prompts: Prompts, request_of: RequestOf, max_inflight: int
    ) -> AsyncIterator[list[RowAnswer]]:
        return run.answers(self.engine, order, prompts.row, request_of, max_inflight)


class RunningServers:
    """Servers that are already running. Their tokenizer is unknown: prompts are compared by their bytes."""

    unit = "bytes"

    def __init__(
        self, urls: Sequence[str], headers: dict[str, str] | None = None, *, is_background: bool = False
    ) -> None:
        """is_background: rows use only the capacity that other requests of an sgl_prefill server leave."""
        self._urls, self._headers = urls, dict(headers or {})
        self._adds: dict[str, Any] = {}  # added to each body
        if is_background:
            self._headers[custom_params.BACKGROUND_HEADER] = "1"
            self._adds[custom_params.BACKGROUND_FIELD] = True
        self.n_prompt_tokens = self.n_cached_tokens = 0

    async def find_prompts(self, url: str, body: dict[str, Any]) -> list[FoundPrompt]:
        return [(beginning_of(url, body), 1)]

    def start(self) -> None:
        """They are running."""

    async def answers(
        self, order: JobPlan, prompts: Prompts, request_of: RequestOf, max_inflight: int
    ) -> AsyncIterator[list[RowAnswer]]:
        rows = prompts.row[order.rows]

        def request(row: int) -> tuple[str, dict[str, Any]]:
            url, body = request_of(row)
            return url, {**body, **self._adds}

        async for answered in servers.answers(
            self._urls, rows, order.group_begins(), request, max_inflight, headers=self._headers
        ):
            for _, answer in answered:
                n_prompt, n_cached = tokens_of(answer.body)
                self.n_prompt_tokens += n_prompt
                self.n_cached_tokens += n_cached
            yield answered


def beginning_of(url: str, body: dict[str, Any]) -> Sequence[int] | IntArray:
    """Bytes or token ids by which requests are sorted: requests with a common prompt prefix share a prefix of these."""
    match url:
        case "/v1/completions":
            given = body.get("prompt", _as_text(body.get("prompt_parts")))
        case "/v1/chat/completions":
            given = _as_text(body.get("messages"))
        case "/generate":
            given = body.get("text", body.get("input_ids", _as_text(body.get("prompt_parts"))))
        case "/v1/embeddings" | "/v1/decisions":
            given = body.get("input")
        case "/v1/systemone":
            given = body.get("state")
        case _:
            given = body.get("query")
    if isinstance(given, list) and given and not isinstance(given[0], int):
        given = given[0]
    if isinstance(given, list) and all(isinstance(one, int) and 0 <= one < 2**31 - 1 for one in given):
        return given
    text = given if isinstance(given, str) else orjson.dumps(given).decode()
    return np.frombuffer(text.encode(errors="replace"), np.uint8)


def _as_text(given: Any) -> str:
    return orjson.dumps(given).decode()


def tokens_of(body: bytes) -> tuple[int, int]:
    """Prompt tokens and cached tokens of an answer; zeros where the server does not report them."""
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError:
        return 0, 0
    parts = fields if isinstance(fields, list) else [fields]
    n_prompt = n_cached = 0
    for part in parts:
        if not isinstance(part, dict):
            continue
        if isinstance(usage := part.get("usage"), dict):
            n_prompt += usage.get("prompt_tokens") or usage.get("input_tokens") or 0
            n_cached += (
                (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or part.get("x_cached_tokens") or 0
            )
        elif isinstance(meta := part.get("meta_info"), dict):
            n_prompt += meta.get("prompt_tokens") or 0
            n_cached += meta.get("cached_tokens") or 0
    return n_prompt, n_cached
