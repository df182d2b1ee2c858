"""How long does a device wait between two forward passes, and how much of that is done while it computes?

One process, SGLang's real scheduler, prefix cache and KV pool, a one-layer model.
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from benchmarks import report
from benchmarks.loop import policy
from sgl_prefill.port import loop
from tests.support.in_process import InProcessScheduler

WAITING, QUICK_WAITING = (1_000, 10_000), (50,)
PROMPT_TOKENS, QUICK_TOKENS = 14_000, 1_000
WARM_UP_STEPS, STEPS, TURNS = 10, 60, 4
ORDERS = ("while it computes", "after its result")


class Gap(NamedTuple):
    """Between two forward passes, in milliseconds."""

    before_result_ms: float  # since the launch has returned: a device computes meanwhile
    behind_result_ms: float  # until the next launch: it waits


class Wire:
    """What clients send while a step runs, in the place of SGLang's sockets; and a clock at the ends of a forward pass."""

    def __init__(self, engine: InProcessScheduler, make: Callable[[], Any], n_waiting: int) -> None:
        self._engine, self._make, self._n_waiting = engine, make, n_waiting
        self._messages: list[Any] = []
        self._launched_s: float | None = None
        self._read_s = 0.0
        self.gaps: list[Gap] = []

    def refill(self) -> None:
        missing = self._n_waiting - len(self._engine.scheduler.waiting_queue)
        self._messages += [self._make() for _ in range(missing)]

    def pull(self) -> list[Any]:
        found, self._messages = self._messages, []
        return found

    @contextmanager
    def watching(self) -> Iterator[None]:
        scheduler = self._engine.scheduler
        kind, processor = type(scheduler), type(scheduler.batch_result_processor)
        run_batch, read = kind.run_batch, processor.process_batch_result_prefill

        def run(of: Any, batch: Any, *rest: Any) -> Any:
            now_s = time.perf_counter()
            if self._launched_s is not None:
                self.gaps.append(Gap(1e3 * (self._read_s - self._launched_s), 1e3 * (now_s - self._read_s)))
            self.refill()
            result = run_batch(of, batch, *rest)
            self._launched_s = time.perf_counter()
            return result

        def reading(*arguments: Any, **options: Any) -> Any:
            self._read_s = time.perf_counter()
            return read(*arguments, **options)

        with (
            mock.patch.object(type(scheduler.request_receiver), "_pull_raw_reqs", self.pull),
            mock.patch.object(kind, "run_batch", run),
            mock.patch.object(processor, "process_batch_result_prefill", reading),
        ):
            yield


def measure(quick: bool) -> dict[str, Any]:
    counts, tokens = (QUICK_WAITING, QUICK_TOKENS) if quick else (WAITING, PROMPT_TOKENS)
    with tempfile.TemporaryDirectory() as folder:
        engine = policy.start(Path(folder), tokens, {})
        rows = [row for n_waiting in counts for row in of_both_orders(engine, n_waiting, tokens)]
    return report.part(rows, targets_of(rows))


def targets_of(rows: list[dict[str, Any]]) -> list[report.Target]:
    targets = []
    for during, after in zip(rows[::2], rows[1::2], strict=True):
        waiting = during["waiting"]
        targets += [
            report.Target.at_most(
                f"{waiting} waiting: ms that a device waits, taking in while it computes / after its result",
                during["behind_result_ms"] / after["behind_result_ms"],
                1.0,
            ),
            report.Target.at_most(
                f"{waiting} waiting: ms between two passes on a host, taking in before the result is read / after it",
                during["gap_ms"] / after["gap_ms"],
                1.05,
            ),
        ]
    return targets


def of_both_orders(engine: InProcessScheduler, n_waiting: int, prompt_tokens: int) -> list[dict[str, Any]]:
    """A row for each order of things, in turns."""
    rng = random.Random(n_waiting)
    engine.flush()
    n_prefixes = max(n_waiting // policy.PER_PREFIX, 1)
    prefixes = [_tokens(rng, prompt_tokens - policy.TAIL_TOKENS) for _ in range(n_prefixes)]

    def make() -> Any:
        return engine.message([*rng.choice(prefixes), *_tokens(rng, policy.TAIL_TOKENS)])

    wire = Wire(engine, make, n_waiting)
    found: dict[str, list[Gap]] = {order: [] for order in ORDERS}
    with wire.watching():
        wire.refill()
        turn(engine, WARM_UP_STEPS)
        for _ in range(TURNS):
            for order in ORDERS:
                takes_in_later = mock.patch.object(loop, "take_in", return_value=None)
                wire.gaps.clear()
                if order == ORDERS[0]:
                    turn(engine, STEPS)
                else:
                    with takes_in_later:
                        turn(engine, STEPS)
                found[order] += wire.gaps[1:]  # the first one began in the other order
    for req in list(engine.scheduler.waiting_queue):
        engine.scheduler.waiting_queue.remove(req)
    engine.step()  # the policy forgets them
    rows = [
        {"waiting": n_waiting, "taking_in": order, "steps": len(gaps), **_medians(gaps)}
        for order, gaps in found.items()
    ]
    for row in rows:
        print(row, file=sys.stderr)
    return rows


def turn(engine: InProcessScheduler, n_steps: int) -> None:
    """So many turns of SGLang's own loop."""
    scheduler = engine.scheduler
    for _ in range(n_steps):
        scheduler.process_input_requests(scheduler.request_receiver.recv_requests())
        engine.step()


def _tokens(rng: random.Random, n_tokens: int) -> list[int]:
    return [rng.randrange(3, policy.VOCABULARY) for _ in range(n_tokens)]


def _medians(gaps: list[Gap]) -> dict[str, float]:
    parts = {name: statistics.median(getattr(gap, name) for gap in gaps) for name in Gap._fields}
    return {**parts, "gap_ms": statistics.median(sum(gap) for gap in gaps)}
