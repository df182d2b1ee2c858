"""Does a log of a hundred thousand decisions replay to the same order, and what does writing them down cost?"""

from __future__ import annotations

import dataclasses
import itertools
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import report
from sgl_prefill.config import PrefillConfig
from sgl_prefill.core.jct import FittedJct
from sgl_prefill.core.job import Job
from sgl_prefill.planner import decisions, simulate
from sgl_prefill.planner.routing import RoundRobin
from sgl_prefill.planner.simulate import SimulatedEngine, Symbols, replay_cluster
from sgl_prefill.planner.workloads import Arrival
from sgl_prefill.scheduling.decision_log import DecisionLog
from sgl_prefill.scheduling.decision_record import Start, header
from sgl_prefill.scheduling.decisions import DecisionRecorder
from sgl_prefill.scheduling.live import CostMeter

DECISIONS, QUICK_DECISIONS = 100_000, 2_000
SHARE_WITHOUT_A_FILE = 5  # the first fifth of them is timed without a file too
# One start of the log each, with as many decisions.
SETTINGS: dict[str, dict[str, Any]] = {
    "as a server starts": {},
    "lambda 0, one request a step": {"fairness_lambda": 0.0, "pack_step_tokens": 0},
    "lambda 2000, steps of 2,000 tokens": {"fairness_lambda": 2000.0, "pack_step_tokens": 2000},
    "no fair shares": {"fair_by": "none"},
    "no fair shares, at most 0.5 s": {"fair_by": "none", "max_queue_s": 0.5},
    "sharers not counted, cache-miss tokens": {"sharers": "ignore", "jct_model": "cache-miss"},
    "srjf": {"scheduling": "srjf"},
    "as in the paper": {"paper": True},
}
OTHER_LAMBDA = 20_000.0  # of the replay that must not agree
JCT_MS = FittedJct(step_ms=4.0, miss_token_ms=0.05, pair_ms=2e-6, cached_token_ms=2e-4, request_ms=0.2)
KV_TOKENS, N_CLIENTS, PREFIX_TOKENS, MOST_TAIL_TOKENS = 20_000, 40, (0, 200, 600, 1200), 200
REQUESTS_PER_S, BURST_REQUESTS_PER_S, BURST_REQUESTS = (
    15.0,
    90.0,
    200,
)  # a burst is more than an engine can answer, a lull less
WITH_DEADLINE, DEADLINES_MS = 0.3, (30.0, 5_000.0)


class TimedRecorder(DecisionRecorder):
    """Counts the time that a scheduler spends writing down."""

    def __init__(self, log: DecisionLog | None) -> None:
        super().__init__(log)
        self.cost = CostMeter()

    def added(self, job: Job) -> None:
        with self.cost:
            super().added(job)

    def removed(self, job: Job) -> None:
        with self.cost:
            super().removed(job)

    def changed(self, job: Job) -> None:
        with self.cost:
            super().changed(job)

    def told(self, *what: Any) -> None:
        with self.cost:
            super().told(*what)

    def decided(self, *what: Any) -> None:
        with self.cost:
            super().decided(*what)

    def predicted(self, predicted_ms: float | None) -> None:
        with self.cost:
            super().predicted(predicted_ms)

    def step_ended(self, *what: Any) -> None:
        with self.cost:
            super().step_ended(*what)

    def forget_all_but(self, *what: Any) -> None:
        with self.cost:
            super().forget_all_but(*what)


def measure(quick: bool = False) -> dict[str, Any]:
    """Lets simulated engines decide under several settings into one log, and replays it."""
    n_decisions = QUICK_DECISIONS if quick else DECISIONS
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "decisions.jsonl"
        rows = [_row(name, path, -(-n_decisions // len(SETTINGS))) for name in SETTINGS]
        same, other = _replayed(path), _replayed(path, _with_another_lambda)
    if not other["same_share"] < 1:
        raise report.InvalidRunError(f"lambda {OTHER_LAMBDA:g} decides as all others do: this log proves nothing")
    targets = [
        report.Target.at_least("decisions of the log", same["decisions"], n_decisions),
        report.Target.at_least("share of decisions that replay to the same order", same["same_share"], 1.0),
    ]
    return report.part(rows, targets, replayed=same, with_another_lambda=other)


def _replayed(path: Path, change: Callable[[PrefillConfig], PrefillConfig] | None = None) -> dict[str, Any]:
    began_s = time.perf_counter()
    found = decisions.replay(decisions.read(path), change)
    if found.left_out:
        raise report.InvalidRunError(f"the log is not whole: {found.left_out[0]}")
    return {
        "decisions": found.n_decisions,
        "same": found.n_same,
        "same_share": found.n_same / found.n_decisions,
        "seconds": time.perf_counter() - began_s,
    }


def _with_another_lambda(config: PrefillConfig) -> PrefillConfig:
    return dataclasses.replace(config, fairness_lambda=OTHER_LAMBDA)


def _row(name: str, path: Path, n_decisions: int) -> dict[str, Any]:
    """Decides once with a log and, a fifth of it, once without, on the same traffic."""
    log = DecisionLog(str(path))
    n_bytes_before = path.stat().st_size
    with_file = _decide(name, n_decisions, log)
    log.close()
    if log.n_lost:
        raise report.InvalidRunError(f"{log.n_lost} lines are lost: is there room in {path.parent}?")
    without = _decide(name, n_decisions // SHARE_WITHOUT_A_FILE, None)
    return {
        "setting": name,
        "decisions": with_file.n_decisions,
        "requests": with_file.n_requests,
        "recorder_us_with_a_file": sum(with_file.steps_us) / with_file.n_decisions,
        "recorder_us_without": sum(without.steps_us) / without.n_decisions,
        "p99_us_with_a_file": statistics.quantiles(with_file.steps_us, n=100)[98],
        "bytes_a_decision": (path.stat().st_size - n_bytes_before) / with_file.n_decisions,
    }


class Decisions(NamedTuple):
    """What an engine has decided."""

    n_decisions: int
    n_requests: int  # that were answered
    steps_us: list[float]  # that the recorder took, up to each step that answered anybody


def _decide(name: str, n_decisions: int, log: DecisionLog | None) -> Decisions:
    config = PrefillConfig(**SETTINGS[name])
    start = Start(config, JCT_MS, simulate.settings_of(config, JCT_MS, page_tokens=1).step, KV_TOKENS)
    recorder, rng = TimedRecorder(log), random.Random(name)
    recorder.begin(header(config, JCT_MS, start.settings(), engine_version="", unix_s=time.time()))
    engine = SimulatedEngine(
        config,
        JCT_MS,
        KV_TOKENS,
        page_tokens=1,
        is_fair=config.is_fair,
        settings=start.settings(),
        job_of=_with_deadlines(rng),
        recorder=recorder,
        actual_ms=lambda ms: ms * rng.uniform(0.8, 1.6),  # predictions are corrected, and refusals hang on them
    )
    steps_us: list[float] = []
    start_s = -1.0
    n_requests = 0
    for _, served in replay_cluster(_traffic(rng), [engine], RoundRobin()):
        n_requests += 1
        if served.start_s > start_s:
            start_s = served.start_s
            steps_us.append(1e6 * recorder.cost.take_s())
            if recorder.n_decisions >= n_decisions:
                break
    return Decisions(recorder.n_decisions, n_requests, steps_us)


def _with_deadlines(rng: random.Random) -> Callable[[Any], Job]:
    symbols = Symbols(1)

    def job_of(arrival: Arrival) -> Job:
        job = symbols.job_of(arrival)
        job.deadline_ms = rng.uniform(*DEADLINES_MS) if rng.random() < WITH_DEADLINE else None
        return job

    return job_of


def _traffic(rng: random.Random) -> Iterator[Arrival]:
    """Yields requests of clients that share prefixes, in bursts and lulls, for ever."""
    prefixes = [(f"prefix {n}", rng.choice(PREFIX_TOKENS)) for n in range(3 * N_CLIENTS)]
    at_s = 0.0
    for n in itertools.count():
        at_s += rng.expovariate(BURST_REQUESTS_PER_S if n // BURST_REQUESTS % 2 else REQUESTS_PER_S)
        client = min(int(rng.expovariate(4 / N_CLIENTS)), N_CLIENTS - 1)  # some ask much more than others
        yield Arrival(at_s, *rng.choice(prefixes), rng.randint(1, MOST_TAIL_TOKENS), f"client {client}")
