"""Parts that need a scheduler in their process, as `python -m benchmarks.loop.ahead_child PART FOLDER NUMBER`."""

from __future__ import annotations

import gc
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

os.environ.setdefault("OMP_NUM_THREADS", "2")

from benchmarks.loop.policy import VOCABULARY
from sgl_prefill.config import PrefillConfig
from sgl_prefill.core.jct import FittedJct
from sgl_prefill.port import launched
from sgl_prefill.port.launched import Pipeline
from tests.integration import late_child
from tests.support import tiny_models
from tests.support.in_process import InProcessScheduler

WAITING, REQUESTS_A_STEP, PREFIX_TOKENS, TAIL_TOKENS, USERS = 1_000, 20, 2_000, 50, 20
STEP_MS = (5, 10, 20, 50, 100)
NOISE = 0.05  # a step takes up to so much more or less than another of its size
WARM_UP_STEPS = 30
MACHINE = FittedJct(step_ms=2.0, miss_token_ms=0.01, pair_ms=0.0, cached_token_ms=0.0, request_ms=0.1)


class SimulatedDevice:
    """A stream whose passes take a given time each. They are computed at their launch, on a clock that then stands still."""

    def __init__(self, engine: InProcessScheduler, step_ms: float) -> None:
        self._rng, self._step_s, self._stood_s = random.Random(0), step_ms / 1000, 0.0
        self.free_at_s = 0.0
        self.waits_ms: list[float] = []  # of the device, for each launch
        worker = engine.scheduler.model_worker
        self._forward, worker.forward_batch_generation = worker.forward_batch_generation, self._launch

    def now_s(self) -> float:
        return time.perf_counter() - self._stood_s

    @contextmanager
    def standing_still(self) -> Iterator[None]:
        started_s = time.perf_counter()
        yield
        self._stood_s += time.perf_counter() - started_s

    def _launch(self, batch: Any, **options: Any) -> Any:
        with self.standing_still():
            result = self._forward(batch, **options)
        begin_s = max(self.now_s(), self.free_at_s)
        self.waits_ms.append(1000 * (begin_s - self.free_at_s))
        self.free_at_s = begin_s + self._step_s * self._rng.uniform(1 - NOISE, 1 + NOISE)
        return result

    def mark(self) -> float:
        return max(self.now_s(), self.free_at_s)

    def is_reached(self, mark: float) -> bool:
        return self.now_s() >= mark

    def ms_between(self, begin: float, end: float) -> float:
        return 1000 * (end - begin)

    @contextmanager
    def reading_after(self, mark: float) -> Iterator[None]:
        while not self.is_reached(mark):
            time.sleep(0.0001)
        yield


def wait(folder: Path, n_steps: int) -> list[dict[str, Any]]:
    """How long the device waits for its host between two steps, after each result and with steps launched ahead."""
    small = {"num_hidden_layers": 1, "max_position_embeddings": 2 * PREFIX_TOKENS, "vocab_size": VOCABULARY}
    config = PrefillConfig(
        hybrid_prefill="off",
        memory_budget_gb=2,
        max_input_length=PREFIX_TOKENS + TAIL_TOKENS,
        skip_parity_gate=True,
        pack_step_tokens=100_000,
    )
    engine = InProcessScheduler(
        config,
        tiny_models.write(folder / "model", "llama", **small),
        jct_ms=MACHINE,
        dtype="float32",
        max_total_tokens=2 * USERS * PREFIX_TOKENS,
        prefill_max_requests=REQUESTS_A_STEP,
        max_running_requests=2 * REQUESTS_A_STEP,
    )
    gc.collect()
    gc.freeze()  # as a server does once it has warmed up
    return [
        of_setting(engine, step_ms, n_steps, is_ahead=is_ahead) for step_ms in STEP_MS for is_ahead in (False, True)
    ]


def of_setting(engine: InProcessScheduler, step_ms: float, n_steps: int, *, is_ahead: bool) -> dict[str, Any]:
    engine.flush()
    rng = random.Random(0)
    prefixes = [tokens(rng, PREFIX_TOKENS) for _ in range(USERS)]
    scheduler, device = engine.scheduler, SimulatedDevice(engine, step_ms)
    pipeline = Pipeline(device) if is_ahead else None
    processor = type(scheduler.batch_result_processor)
    read = processor.process_batch_result_prefill

    def pull(_: Any) -> list[Any]:
        with device.standing_still():  # what clients do
            missing = WAITING - len(scheduler.waiting_queue)
            return [engine.message([*rng.choice(prefixes), *tokens(rng, TAIL_TOKENS)]) for _ in range(missing)]

    def awaited(*arguments: Any, **options: Any) -> Any:
        with device.reading_after(0.0 if is_ahead else device.free_at_s):
            return read(*arguments, **options)

    engine.parts.steps.pipeline = pipeline
    clock = SimpleNamespace(perf_counter=device.now_s, sleep=time.sleep)
    with (
        mock.patch.object(type(scheduler.request_receiver), "_pull_raw_reqs", pull),
        mock.patch.object(processor, "process_batch_result_prefill", awaited),
        mock.patch.object(launched, "time", clock),
    ):
        while len(device.waits_ms) < WARM_UP_STEPS + n_steps:
            scheduler.process_input_requests(scheduler.request_receiver.recv_requests())
            engine.step()
    if pipeline is not None:
        pipeline.finish()
    engine.parts.steps.pipeline = None
    del scheduler.model_worker.forward_batch_generation
    for req in list(scheduler.waiting_queue):
        scheduler.waiting_queue.remove(req)
    engine.step()
    waits = device.waits_ms[WARM_UP_STEPS:]
    return {
        "step_ms": step_ms,
        "launched": "while one runs" if is_ahead else "after the result",
        "steps": len(waits),
        "wait_p50_ms": statistics.median(waits),
        "wait_p99_ms": statistics.quantiles(waits, n=100)[98],
        "waits_share": sum(one > 0 for one in waits) / len(waits),
    }


def tokens(rng: random.Random, n: int) -> list[int]:
    return [rng.randrange(3, VOCABULARY) for _ in range(n)]


PARTS: dict[str, Callable[[Path, int], Any]] = {"wait": wait, "late": late_child.launched}

if __name__ == "__main__":
    print(json.dumps(PARTS[sys.argv[1]](Path(sys.argv[2]), int(sys.argv[3]))))
