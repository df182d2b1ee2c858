"""Runs the rows of a job through an engine in this process, in the order of a plan."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from sgl_prefill.answer import Answer
from sgl_prefill.core.batch.batch_plan import JobPlan
from sgl_prefill.core.batch.token_rows import IntArray

if TYPE_CHECKING:
    from sgl_prefill.entry.in_process import InProcessEngine

# Pause while no step can run: a thread is looking labels up.
IDLE_S = 0.005


class RowAnswer(NamedTuple):
    row: int
    answer: Answer


async def answers(
    engine: InProcessEngine,
    plan: JobPlan,
    row_of_prompt: IntArray,
    request_of: Callable[[int], tuple[str, dict[str, Any]]],
    max_inflight: int,
) -> AsyncIterator[list[RowAnswer]]:
    """Yields the answers of each step.

    Args:
        plan: of all prompts.
        row_of_prompt: ascending; the prompts of a row are consecutive, in the order of the request.
        request_of: returns url and body of a row.
        max_inflight: rows with the engine at a time.
    """
    places = plan.places()
    rows_in_order = _first_mentions(row_of_prompt[plan.rows])
    done: list[RowAnswer] = []

    async def run(row: int) -> None:
        url, body = request_of(row)
        first, end = np.searchsorted(row_of_prompt, [row, row + 1]).tolist()
        planned = [plan.row(place) for place in places[first:end].tolist()]
        done.append(RowAnswer(row, await engine.answer(url, body, planned)))

    running: set[asyncio.Task[None]] = set()
    failed: list[BaseException] = []

    def ended(task: asyncio.Task[None]) -> None:
        running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            failed.append(error)

    n_begun = 0
    try:
        while n_begun < len(rows_in_order) or running:
            room = max_inflight - len(running)
            for row in rows_in_order[n_begun : n_begun + room].tolist():
                task = asyncio.create_task(run(row))
                running.add(task)
                task.add_done_callback(ended)
                n_begun += 1
            await asyncio.sleep(0)  # lets new tasks send their requests
            if not await engine.step() and running:
                await asyncio.sleep(IDLE_S)
            await asyncio.sleep(0)  # lets answered tasks end
            if failed:
                raise failed[0]
            if done:
                answered, done[:] = list(done), []
                yield answered
        # The last tasks may have ended while the caller processed earlier answers.
        if failed:
            raise failed[0]
        if done:
            yield done
    finally:
        for task in running:
            task.cancel()


def _first_mentions(rows: IntArray) -> IntArray:
    """Each row once, in the order of its first occurrence."""
    found, places = np.unique(rows, return_index=True)
    in_order: IntArray = found[np.argsort(places)]
    return in_order
