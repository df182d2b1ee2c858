"""What does calibrated SRJF cost a step, at 1,000, 3,000 and 10,000 waiting requests, with and without deadlines?

One process, SGLang's real scheduler, prefix cache and KV pool, a one-layer model.
"""

from __future__ import annotations

import gc
import json
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import report
from sgl_prefill.config import PrefillConfig
from tests.support import tiny_models
from tests.support.in_process import InProcessScheduler

WAITING = (1_000, 3_000, 10_000)
PROMPT_TOKENS, TAIL_TOKENS, PER_PREFIX = 14_000, 150, 50
CACHED_USERS = 4
WARM_UP_STEPS, STEPS = 60, 300
BURST = 2_000  # arrivals with deadlines between two steps; half of them cannot be done in time
DEADLINE_MS = 1e9  # far away: each arrival is forecast, and none is refused
TOO_SOON_MS = 1e-3
VOCABULARY = 512
STEP_SIZES: dict[str, dict[str, Any]] = {"packed steps": {}, "one request a step": {"pack_step_tokens": 0}}
RIVALS = ("lpm", "dfs-weight", "shortest-prefill-first")  # policies of stock SGLang


def measure_steps(quick: bool) -> dict[str, Any]:
    counts, steps, tokens = (WAITING, STEPS, PROMPT_TOKENS) if not quick else ((50, 150), 40, 1_000)
    rows, targets = [], []
    for step, options in STEP_SIZES.items():
        of_step = measure_all(options, counts, steps, tokens, burst=50 if quick else BURST)
        rows += [{"step": step, **row} for row in of_step]
        targets += targets_of(step, of_step)
    rivals = [measure_rival(policy, n, tokens) for policy in RIVALS for n in counts]
    return report.part(rows, targets, rivals=rivals)


def measure_all(
    options: dict[str, Any], counts: Sequence[int], n_steps: int, n_tokens: int, burst: int
) -> list[dict[str, Any]]:
    """Measures one engine: each count, then the largest with deadlines, then a burst beside it."""
    settings: list[tuple[int, float | None, int]] = [(n_waiting, None, 0) for n_waiting in counts]
    settings += [(counts[-1], DEADLINE_MS, 0), (counts[-1], DEADLINE_MS, burst)]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        engine = start(Path(folder), n_tokens, options)
        for n_waiting, deadline_ms, n_burst in settings:
            rows.append(measure(engine, n_waiting, n_steps, n_tokens, deadline_ms, n_burst))
            print(options, rows[-1], file=sys.stderr)
    return rows


def targets_of(step: str, rows: Sequence[dict[str, Any]]) -> list[report.Target]:
    fewest, most, with_deadlines, with_burst = rows[0], rows[-3], rows[-2], rows[-1]
    ratio = most["p50_ms"] / fewest["p50_ms"]
    return [
        *(
            report.Target.at_most(
                f"{step}: policy cost of a step, {what}, {percentile}, ms", row[f"{percentile}_ms"], limit
            )
            for what, row in (
                (f"{most['waiting']} waiting", most),
                (f"{most['waiting']} waiting with deadlines", with_deadlines),
                (f"a burst of {with_burst['burst']} arrivals with deadlines", with_burst),
            )
            for percentile, limit in (("p50", 1.0), ("p99", 5.0))
        ),
        report.Target.at_most(f"{step}: p50 at {most['waiting']} waiting / at {fewest['waiting']}", ratio, 2.0),
        report.Target.at_most(
            f"{step}: policy cost of the step that takes in {with_burst['burst']} arrivals with deadlines, ms",
            with_burst["burst_step_ms"],
            250.0,
        ),
    ]


def measure_rival(policy: str, n_waiting: int, prompt_tokens: int) -> dict[str, Any]:
    """Medians of a few steps, or the reason why there are none."""
    command = [sys.executable, str(Path(__file__).with_name("rival.py")), policy, str(n_waiting), str(prompt_tokens)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise report.InvalidRunError(f"{policy}: {done.stderr[-1000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    row = {
        "policy": policy,
        "sglang": found["sglang"],
        "waiting": n_waiting,
        "as_shipped_ms": statistics.median(found["as_shipped_ms"]),
        "unlimited_ms": statistics.median(found["unlimited_ms"]),
    }
    print(row, file=sys.stderr)
    return row


def start(folder: Path, prompt_tokens: int, options: dict[str, Any]) -> InProcessScheduler:
    small = {"num_hidden_layers": 1, "max_position_embeddings": 2 * prompt_tokens, "vocab_size": VOCABULARY}
    model = tiny_models.write(folder / "model", "llama", **small)
    config = PrefillConfig(
        hybrid_prefill="off",
        memory_budget_gb=2,
        max_input_length=prompt_tokens + TAIL_TOKENS,
        skip_parity_gate=True,
        **options,
    )
    engine = InProcessScheduler(config, model, dtype="float32", max_total_tokens=(CACHED_USERS + 1) * prompt_tokens)
    gc.collect()
    gc.freeze()  # as a server does once it has warmed up
    return engine


def measure(
    engine: InProcessScheduler,
    n_waiting: int,
    n_steps: int,
    prompt_tokens: int,
    deadline_ms: float | None,
    burst: int,
) -> dict[str, Any]:
    """Fill the queue, then serve a step and submit as many as it served, again and again; half-way through, `burst` more come
    at once."""
    rng = random.Random(n_waiting)
    engine.flush()
    prefixes = [
        [rng.randrange(3, VOCABULARY) for _ in range(prompt_tokens - TAIL_TOKENS)]
        for _ in range(max(n_waiting // PER_PREFIX, 1))
    ]

    def submit(prefix: list[int], deadline_ms: float | None = deadline_ms) -> None:
        tail = [rng.randrange(3, VOCABULARY) for _ in range(TAIL_TOKENS)]
        engine.submit([*prefix, *tail], deadline_ms=deadline_ms)

    for index in range(n_waiting):
        submit(prefixes[index % len(prefixes)])
    costs_ms, served = [], []
    engine.step()  # takes in all that waits
    ms_a_request = 1000 * engine.live.last_step_s / n_waiting
    for index in range(WARM_UP_STEPS + n_steps):
        # Every PER_PREFIX steps a new user with a new prefix replaces an old one.
        if index % PER_PREFIX == 0:
            prefixes[rng.randrange(len(prefixes))] = [rng.randrange(3, VOCABULARY) for _ in prefixes[0]]
        n_doomed = burst // 2 if index == WARM_UP_STEPS + n_steps // 2 else 0
        n_waiting += n_doomed  # as many that can be done
        for _ in range(n_waiting - len(engine.scheduler.waiting_queue)):
            submit(rng.choice(prefixes))
        for _ in range(n_doomed):
            submit(rng.choice(prefixes), TOO_SOON_MS)
        engine.step()
        if index >= WARM_UP_STEPS:
            costs_ms.append(1000 * engine.live.last_step_s)
            served.append(n_waiting - len(engine.scheduler.waiting_queue))
    if len(engine.refusals) != burst // 2:
        raise report.InvalidRunError(f"{len(engine.refusals)} requests were refused instead of {burst // 2}")
    engine.refusals.clear()
    for req in list(engine.scheduler.waiting_queue):
        engine.scheduler.waiting_queue.remove(req)
    engine.step()  # the policy forgets them
    return {
        "waiting": n_waiting - burst // 2,
        "with_deadlines": deadline_ms is not None,
        "burst": burst,
        "steps": n_steps,
        "p50_ms": statistics.median(costs_ms),
        "p99_ms": statistics.quantiles(costs_ms, n=100)[98],
        "longest_ms": max(costs_ms),
        "burst_step_ms": costs_ms[n_steps // 2],
        "served_a_step": statistics.mean(served),
        "ms_a_request_on_arrival": ms_a_request,
    }
