"""Whole jobs from Python."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import orjson

from sgl_prefill.answer import Answer
from sgl_prefill.batch import answer_file
from sgl_prefill.batch.asked import MASS, Asked
from sgl_prefill.batch.backends import Backend, OwnEngine, RunningServers, tokens_of
from sgl_prefill.batch.options import INFLIGHT_OWN_ENGINE, SCHEDULING
from sgl_prefill.batch.prompts import FoundPrompt, Prompts
from sgl_prefill.core.batch.batch_plan import JobPlan, depth_first
from sgl_prefill.core.batch.token_rows import TokenRows


class RowScore(NamedTuple):
    """The answer to one row."""

    number: int  # of the row, from 0
    probabilities: dict[str, float] | None  # by label, in their order; None after an error and for questions
    label_mass: float | None  # the labels' share of the whole vocabulary's probability
    error: str | None  # why this row has no answer
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of these, found in the prefix cache
    columns: dict[str, Any] | None = None  # as a table's; None after an error


class RowGroup(NamedTuple):
    """Consecutive rows of a plan, each sharing a prefix with the row before it."""

    rows: list[int]  # row numbers, in running order
    saved_tokens: int  # that prefix reuse avoids computing


class Engine:
    """An engine in this process, and in this thread. At most one a process.

    Takes the arguments of `sglang.Engine` (names of ServerArgs) and those of PrefillConfig. Raises ConfigurationError,
    SeamError, and the other errors of a server's start.
    """

    def __init__(self, **options: Any) -> None:
        from sgl_prefill.entry import engine as port

        config, server_args = port.arguments_of({"log_level": "error", **options}, {"scheduling": SCHEDULING})
        from sgl_prefill.entry.in_process import InProcessEngine

        self.backend = OwnEngine(InProcessEngine(config, server_args))
        self.backend.start()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Does nothing: the engine ends with its process."""


def score(
    rows: Sequence[str] | Sequence[Sequence[int]],
    *,
    labels: Sequence[str] = (),
    questions: dict[str, Any] | None = None,
    engine: Engine | str | Sequence[str],
    max_inflight: int = INFLIGHT_OWN_ENGINE,
) -> Iterator[RowScore]:
    """Yields the label probabilities after each prompt, or the answers to questions about it, as they are computed, in the order
    that computes least.

    Args:
        rows: prompts, as text or as token ids.
        labels: the allowed answers, of any length.
        questions: in their place, as `questions` of /v1/systemone; each prompt is a state.
        engine: an engine in this process, or URLs of running servers.
    """
    backend: Backend = engine.backend if isinstance(engine, Engine) else RunningServers(_urls(engine))
    loop = asyncio.new_event_loop()
    try:
        asked = Asked(labels, questions)
        bodies = _Bodies(rows, asked)
        found, refused = loop.run_until_complete(_prompts_of(backend, bodies))
        yield from (_row_score(row, answer, asked) for row, answer in refused)
        answers = backend.answers(depth_first(found.tokens), found, bodies.request_of, max_inflight)
        while (answered := loop.run_until_complete(_next(answers))) is not None:
            yield from (_row_score(row, answer, asked) for row, answer in answered)
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


def plan(rows: Sequence[Sequence[int]]) -> list[RowGroup]:
    """The groups of a job in running order. rows: token ids of the prompts."""
    order = depth_first(TokenRows.of(rows))
    return list(_groups(order))


def _groups(order: JobPlan) -> Iterator[RowGroup]:
    bounds = [*order.group_begins().tolist(), len(order)]
    for first, end in itertools.pairwise(bounds):
        yield RowGroup(order.rows[first:end].tolist(), int(order.reused_tokens[first:end].sum()))


class _Bodies:
    def __init__(self, rows: Sequence[Any], asked: Asked) -> None:
        self._rows, self._asked = rows, asked

    def __len__(self) -> int:
        return len(self._rows)

    def request_of(self, row: int) -> tuple[str, dict[str, Any]]:
        prompt = self._rows[row]
        return self._asked.request(prompt if isinstance(prompt, str) else list(prompt))


async def _prompts_of(backend: Backend, bodies: _Bodies) -> tuple[Prompts, list[tuple[int, Answer]]]:
    from sgl_prefill.errors import BadRequestError

    tokens, numbers, refused = [], [], list[tuple[int, Answer]]()
    for row in range(len(bodies)):
        try:
            found: list[FoundPrompt] = await backend.find_prompts(*bodies.request_of(row))
        except BadRequestError as error:
            refused.append((row, Answer(400, orjson.dumps({"message": str(error)}))))
            continue
        tokens += [one for one, _ in found]
        numbers += [row] * len(found)
    row_numbers = np.array(numbers, np.int64)
    return Prompts(TokenRows.of(tokens), row_numbers, np.ones_like(row_numbers), np.empty(0, np.uint64), []), refused


async def _next(answers: Any) -> Any:
    return await anext(answers, None)


def _row_score(row: int, answer: Answer, asked: Asked) -> RowScore:
    if not answer.is_ok:
        return RowScore(row, None, None, answer_file.message_of(answer.body))
    columns, tokens = asked.values(orjson.loads(answer.body)), tokens_of(answer.body)
    probabilities = {label: columns[label] for label in asked.labels} or None
    return RowScore(row, probabilities, columns.get(MASS), None, *tokens, columns)


def _urls(given: Any) -> list[str]:
    return [given] if isinstance(given, str) else list(given)
