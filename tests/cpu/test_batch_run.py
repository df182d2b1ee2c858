"""The rows of a job through an engine that is stepped by its caller."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from sgl_prefill.answer import Answer
from sgl_prefill.batch import run
from sgl_prefill.core.batch.batch_plan import depth_first
from sgl_prefill.core.batch.token_rows import TokenRows

N_ROWS = 4


class Stepped:
    """Answers one row a step, each a few turns of the event loop later than the one before it."""

    def __init__(self, fails: int | None = None) -> None:
        self._fails = fails

    async def answer(self, url: str, body: dict[str, Any], planned: Any) -> Answer:
        for _ in range(5 * body["row"]):
            await asyncio.sleep(0)
        if body["row"] == self._fails:
            raise RuntimeError("this engine is broken")
        return Answer(200, b"{}")

    async def step(self) -> bool:
        return True


async def answered_by(engine: Any, turns: int) -> list[int]:
    """The rows that a caller is told of who lets so many turns of the event loop pass before it asks for more."""
    order = depth_first(TokenRows.of([[row, 9] for row in range(N_ROWS)]))
    found = []
    async for some in run.answers(engine, order, np.arange(N_ROWS), lambda row: ("/generate", {"row": row}), N_ROWS):
        found += [one.row for one in some]
        for _ in range(turns):
            await asyncio.sleep(0)
    return found


@pytest.mark.parametrize("turns", [0, 1, 3, 7, 100])
def test_rows_that_end_while_the_caller_is_busy_are_not_lost(turns: int) -> None:
    """`batch.score` lost the last step's rows: they ended before it asked for more, and then nothing was running."""
    assert sorted(asyncio.run(answered_by(Stepped(), turns))) == list(range(N_ROWS))


@pytest.mark.parametrize("turns", [0, 100])
def test_a_failure_while_the_caller_is_busy_is_told(turns: int) -> None:
    with pytest.raises(RuntimeError, match="broken"):
        asyncio.run(answered_by(Stepped(fails=N_ROWS - 1), turns))
