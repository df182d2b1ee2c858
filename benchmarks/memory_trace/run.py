"""Memory of the scheduler process during one cold prefill, plain and hybrid (the paper's Fig. 3).

    python benchmarks/memory_trace/run.py [--quick] [--json PATH]

On a host. See the README beside this file.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
import time
from pathlib import Path
from threading import Event, Thread
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "2")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import process_memory, report, shapes
from benchmarks.harness import client, engines

MODEL = "llama-6-layers"
PROMPT_TOKENS, QUICK_TOKENS = 8_000, 1_000
WARM_UP_TOKENS = 200
INTERVAL_S = 0.02
PLAIN, HYBRID, BOTH = "plain", "hybrid", "hybrid and evicted KV"
ENGINES = (
    engines.ours(PLAIN, "--hybrid-prefill", "off", "--suffix-kv", "keep"),
    engines.ours(HYBRID, "--hybrid-prefill", "on", "--suffix-kv", "keep"),
    engines.ours(BOTH, "--hybrid-prefill", "on", "--suffix-kv", "evict"),
)


def main() -> int:
    arguments = report.arguments(__doc__, Path(__file__).with_name("result.json"))
    n_tokens = QUICK_TOKENS if arguments.quick else PROMPT_TOKENS
    conditions: dict[str, Any] = {**report.conditions(), "model": shapes.config(MODEL), "prompt_tokens": n_tokens}
    conditions["commands"] = {}
    rows: list[dict[str, Any]] = []
    records = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        common = [*shapes.dummy_flags(shapes.write(MODEL, folder / "model")), "--sleep-on-idle"]
        common += ["--max-input-length", str(n_tokens + 100), *shapes.budget(4)]
        for engine in ENGINES:
            with engines.running(engine, common, folder / "log") as server:
                conditions["commands"][engine.name], records[engine.name] = server.command, server.record
                rows.append({"engine": engine.name, **trace(server, n_tokens)})
                print(engine.name, rows[-1]["peak_mib"], file=sys.stderr)
    peaks = {row["engine"]: row["peak_mib"] for row in rows}
    targets = [report.Target.at_most("memory of one prefill, hybrid / plain", peaks[HYBRID] / peaks[PLAIN], 1.0)]
    report.finish({"conditions": conditions, "activation_records": records, "rows": rows}, targets, arguments.json)
    return 0


def trace(server: engines.Running, n_tokens: int) -> dict[str, Any]:
    """Mebibytes of the process, from when the request is sent until it is answered."""
    rng = random.Random(0)
    client.run(server.url, [client.Due(0.0, shapes.token_ids(rng, WARM_UP_TOKENS))], "warm-up")
    server.flush_cache()
    pid = process_memory.scheduler_pid(server.pid)
    samples: list[tuple[float, float]] = []
    is_done = Event()

    def sample() -> None:
        started = time.perf_counter()
        while not is_done.wait(INTERVAL_S):
            samples.append((time.perf_counter() - started, process_memory.resident_bytes(pid) / (1 << 20)))

    watching = Thread(target=sample)
    watching.start()
    try:
        client.run(server.url, [client.Due(0.0, shapes.token_ids(rng, n_tokens))], "prefill")
    finally:
        is_done.set()
        watching.join()
    return {
        "peak_mib": max(mib for _, mib in samples),
        "seconds": [round(at_s, 3) for at_s, _ in samples],
        "mib": [round(mib, 2) for _, mib in samples],
    }


if __name__ == "__main__":
    sys.exit(main())
