"""What would SGLang's overlap loop gain a prefill-only server, and what does it cost calibration?
Stock SGLang, first come first served, with one request a step and with its own batches, with and without the overlap
loop.
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import report, shapes
from benchmarks.harness import client, engines

MODEL = "llama-small"
SHARED_TOKENS, SHARERS = 3_000, 4
PROFILE_TOKENS, POST_TOKENS, HITS, QUICK_HITS = 1_400, 15, 400, 40
ROUNDS, QUICK_ROUNDS = 5, 1
ONE = ("--prefill-max-requests", "1")
WITHOUT = ("--disable-overlap-schedule",)
ENGINES = {
    ("one a step", "overlap"): engines.stock("fcfs", *ONE),
    ("one a step", "no overlap"): engines.stock("fcfs", *ONE, *WITHOUT),
    ("batches", "overlap"): engines.stock("fcfs"),
    ("batches", "no overlap"): engines.stock("fcfs", *WITHOUT),
}


def measure(quick: bool) -> dict[str, Any]:
    n_hits, n_rounds = (QUICK_HITS, QUICK_ROUNDS) if quick else (HITS, ROUNDS)
    rows, commands = [], {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        common = [*shapes.dummy_flags(shapes.write(MODEL, folder / "model")), "--context-length", "4096"]
        common += ["--max-total-tokens", "20000", "--sleep-on-idle", "--max-running-requests", "64"]
        common += [] if shapes.HAS_CUDA else ["--mem-fraction-static", "0.3"]
        for (steps, loop), engine in ENGINES.items():
            with engines.running(engine, common, folder / "log") as server:
                commands[f"{steps}, {loop}"] = server.command
                rows.append({"steps": steps, "loop": loop, **figures(server, n_hits, n_rounds)})
                print(rows[-1], file=sys.stderr)
    return report.part(rows, targets_of(rows), model=shapes.config(MODEL), commands=commands)


def figures(server: engines.Running, n_hits: int, n_rounds: int) -> dict[str, Any]:
    """Cached tokens of sharers that arrive together, and hits a second where all wait already."""
    rng = random.Random(0)
    client.run(server.url, [client.Due(0.0, shapes.token_ids(rng, 500))], "warm-up")
    server.flush_cache()
    shared = shapes.token_ids(rng, SHARED_TOKENS)
    sharers = client.run(
        server.url, [client.Due(0.0, [*shared, *shapes.token_ids(rng, POST_TOKENS)]) for _ in range(SHARERS)], "sharers"
    )
    profile = shapes.token_ids(rng, PROFILE_TOKENS)
    client.run(server.url, [client.Due(0.0, [*profile, 1])], "profile")
    rates = []
    for _ in range(n_rounds):
        hits = [client.Due(0.0, [*profile, *shapes.token_ids(rng, POST_TOKENS)]) for _ in range(n_hits)]
        outcomes = client.run(server.url, hits, "hits")
        if min(one.cached_tokens for one in outcomes) < PROFILE_TOKENS:
            raise report.InvalidRunError("a request did not find the profile in the cache")
        rates.append(client.figures(outcomes).requests_per_s)
    in_order = sorted(sharers, key=lambda one: one.finish_s)
    return {"sharers_cached_tokens": [one.cached_tokens for one in in_order], "hits_per_s": statistics.median(rates)}


def targets_of(rows: list[dict[str, Any]]) -> list[report.Target]:
    """What the decision to run without it rests on."""

    def of(steps: str, loop: str, name: str) -> Any:
        return next(row[name] for row in rows if (row["steps"], row["loop"]) == (steps, loop))

    def gain(steps: str) -> float:
        return float(of(steps, "overlap", "hits_per_s") / of(steps, "no overlap", "hits_per_s"))

    twice = sum(cached < SHARED_TOKENS for cached in of("one a step", "overlap", "sharers_cached_tokens"))
    return [
        report.Target.at_most("hits a second, overlap / without, one a step", gain("one a step"), 1.05),
        report.Target.at_most("hits a second, overlap / without, batches", gain("batches"), 1.05),
        report.Target.at_least("sharers of one new prefix that compute it, with overlap, one a step", twice, 2),
    ]
