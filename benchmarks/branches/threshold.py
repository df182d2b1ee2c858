"""From how many shared tokens on should a request follow another one in its step, and not wait for the next?

As a program: `python -m benchmarks.branches.threshold TOKENS MODEL` measures one threshold, in a process of its own.
"""

from __future__ import annotations

import itertools
import json
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import report, shapes
from sgl_prefill import batch
from sgl_prefill.core import packing

TURNS, REPEATS = 3, 3
ALWAYS, NEVER = 1, 1_000_000
SHARED = (8, 16, 32, 64, 128, 256)  # tokens
N_GROUPS, N_EACH, OWN_TOKENS = 40, 4, 30


def measure(folder: Path, *, quick: bool) -> dict[str, Any]:
    turns = []
    for turn, least in itertools.product(range(1 if quick else TURNS), (ALWAYS, NEVER)):
        command = [sys.executable, "-m", __name__, str(least), str(folder)]
        done = subprocess.run(command, cwd=report.REPOSITORY, stdout=subprocess.PIPE, text=True, check=True)
        turns += [{"from": least, "turn": turn, **row} for row in json.loads(done.stdout.splitlines()[-1])]
    rows = []
    for n_shared in SHARED:
        follow, wait = (
            statistics.median(row["per_s"] for row in turns if (row["from"], row["shared"]) == (least, n_shared))
            for least in (ALWAYS, NEVER)
        )
        rows.append({"shared": n_shared, "follow_per_s": follow, "wait_per_s": wait, "ratio": follow / wait})
    return report.part(rows, [], turns=turns)


def main(least: int, folder: str) -> None:
    from sgl_prefill.port.steps import jobs

    for module in (packing, jobs):
        vars(module)["LEAST_LED_TOKENS"] = least
    rows = []
    with batch.Engine(model_path=folder, dtype=shapes.DTYPE, memory_budget_gb=3.0, max_total_tokens=60_000) as engine:
        for repeat, n_shared in itertools.product(range(REPEATS + 1), SHARED):  # the first warms up
            prompts = made(random.Random(f"{repeat} {n_shared}"), n_shared)
            started = time.perf_counter()
            n = sum(1 for _ in batch.score(prompts, labels=["A", "B"], engine=engine))
            if repeat:
                rows.append({"shared": n_shared, "per_s": n / (time.perf_counter() - started)})
    print(json.dumps(rows))


def made(rng: random.Random, n_shared: int) -> list[list[int]]:
    prefixes = [shapes.token_ids(rng, n_shared) for _ in range(N_GROUPS)]
    prompts = [[*prefix, *shapes.token_ids(rng, OWN_TOKENS)] for prefix in prefixes for _ in range(N_EACH)]
    rng.shuffle(prompts)
    return prompts


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
