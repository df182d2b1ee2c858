"""How long does a snapshot for the dashboard hold a scheduler up, and how large is it?"""

from __future__ import annotations

import gc
import statistics
import time
from typing import Any

from benchmarks import report
from sgl_prefill.port.dashboard import watch
from tests.support.filled_engine import filled_engine

WAITING, N_CLIENTS, PREFIXES, QUICK_PREFIXES = 10_000, 1_000, 50_000, 2_000
N_SNAPSHOTS, MOST_MS, MOST_BYTES = 200, 20.0, 100_000


def measure(quick: bool = False) -> dict[str, Any]:
    """Makes snapshots of an engine with no model, ten thousand waiting requests and as many cached prefixes."""
    n_prefixes = QUICK_PREFIXES if quick else PREFIXES
    engine = filled_engine(WAITING, n_prefixes, now_s=time.perf_counter(), n_clients=N_CLIENTS)
    assert engine.state.scheduling is not None
    engine.state.scheduling.live.decide(time.perf_counter())  # the next step orders new arrivals anyway
    gc.collect()
    gc.freeze()  # as a server does at its start
    times_ms, n_bytes = [], []
    for _ in range(N_SNAPSHOTS):
        began_s = time.perf_counter()
        made = watch.taken(engine.state, engine.scheduler)
        times_ms.append(1000 * (time.perf_counter() - began_s))
        n_bytes.append(len(made))
    gc.unfreeze()
    row = {
        "waiting": WAITING,
        "prefixes": n_prefixes,
        "snapshots": N_SNAPSHOTS,
        "median_ms": statistics.median(times_ms),
        "longest_ms": max(times_ms),
        "bytes": max(n_bytes),
    }
    name = f"a snapshot of {WAITING} waiting and {n_prefixes} cached prefixes"
    targets = [
        report.Target.at_most(f"{name}: longest, ms", row["longest_ms"], MOST_MS),
        report.Target.at_most(f"{name}: bytes", row["bytes"], MOST_BYTES),
    ]
    return report.part([row], targets)
