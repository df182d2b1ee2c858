"""`--stable-answers`: do bits differ over 10,000 answers in random company, cache states and chunk sizes, and what does it cost?

Schedulers in this process, without HTTP. With the option and without it take turns in one engine with the same weights: what the
option does is switched on and off between passes.
"""

from __future__ import annotations

import os
import random
import statistics
import struct
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import report, shapes
from benchmarks.harness import traffic
from benchmarks.harness.client import Due
from benchmarks.load import wl1
from benchmarks.rivals import workloads as rivals
from sgl_prefill.config import PrefillConfig
from sgl_prefill.core.jct import FittedJct
from sgl_prefill.examples import demo_model
from tests.support import tiny_models
from tests.support.in_process import InProcessScheduler

N_ANSWERS, QUICK_ANSWERS = 5_000, 100  # with the option, of each of two number types
N_WITHOUT, QUICK_WITHOUT = 1_000, 50
N_PROMPTS, PREFIX_TOKENS, TAIL_TOKENS = 50, (40, 90, 250, 400), (1, 60)
CHUNKS, MOST_COMPANY = (16, 50, 64, 100, 256, 1024), 24
# Deep enough that oneDNN has another kernel for one row than for two.
WIDE = {
    "hidden_size": 256,
    "intermediate_size": 1536,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
}
LABELS = tuple(range(5, 13))
# What a start would measure: which requests share a step shall not depend on the moment.
MACHINE = FittedJct(step_ms=5.0, miss_token_ms=0.05, pair_ms=1e-6, cached_token_ms=1e-4, request_ms=0.1)
TURNS, QUICK_TURNS = 3, 1
N_MESSAGES, N_USERS, QUICK_OF_EACH = 150, 6, 2
MOST_COST = 0.15


class Counted(NamedTuple):
    """What answers differ from those of the same prompts alone, cold, in chunks of 256 tokens."""

    answers: int
    differing_answers: int
    differing_bits: int  # of their float32 log-probabilities
    largest: float  # difference of a log-probability


def measure(quick: bool) -> dict[str, Any]:
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    with tempfile.TemporaryDirectory() as folder:
        rows = [row for dtype in ("bfloat16", "float32") for row in bits_of(Path(folder), dtype, quick=quick)]
        costs = cost(Path(folder), quick=quick)
    bits = sum(row["differing_bits"] for row in rows if row["stable"])
    at_most, what = report.Target.at_most, "--stable-answers"
    targets = [at_most(f"{what}: differing bits in random company, cache states and chunk sizes", bits, 0)]
    targets += [at_most(f"{what}: requests a second lost, {row['workload']}", row["cost"], MOST_COST) for row in costs]
    return report.part(rows, targets, stable_cost=costs)


def switch(engine: InProcessScheduler, *, stable: bool) -> None:
    """Puts the option on or off in a running engine that was started with it."""
    if not hasattr(engine, "counts_of_products"):
        engine.counts_of_products = [product.row_counts for product in engine.hybrid.products]  # type: ignore[attr-defined]
    counts: list[Sequence[int]] = engine.counts_of_products  # type: ignore[attr-defined]
    for product, row_counts in zip(engine.hybrid.products, counts, strict=True):
        product.row_counts = row_counts if stable else ()
    record = engine.parts.record
    record.stable_answers = {} if stable else None


# --- Bits


def bits_of(folder: Path, dtype: str, *, quick: bool) -> list[dict[str, Any]]:
    """A row with the option, and one without it for each thing that may differ."""
    model = tiny_models.write(folder / "wide", "llama", **WIDE)
    config = PrefillConfig(stable_answers="on", max_input_length=1000, memory_budget_gb=2, pack_step_tokens=600)
    server = {"max_total_tokens": 4000, "max_running_requests": MOST_COMPANY}
    engine = InProcessScheduler(config, model, jct_ms=MACHINE, dtype=dtype, **server)
    rng = random.Random(0)
    prefixes = [tokens(rng, n) for n in PREFIX_TOKENS]
    prompts = [[*rng.choice(prefixes), *tokens(rng, rng.randint(*TAIL_TOKENS))] for _ in range(N_PROMPTS)]
    prompts += [[*prefix, *tokens(rng, 1)] for prefix in prefixes]  # hits of one new token
    found = []
    every, n_stable = ("company", "cache", "chunks"), QUICK_ANSWERS if quick else N_ANSWERS
    n_without = QUICK_WITHOUT if quick else N_WITHOUT
    for stable, varied, n in ((True, every, n_stable), *((False, one, n_without) for one in (every, *zip(every)))):
        switch(engine, stable=stable)
        counted = differing(engine, prompts, n, varied)
        what = "all" if varied == every else varied[0]
        found.append({"dtype": dtype, "stable": stable, "varied": what, **counted._asdict()})
        print(found[-1], file=sys.stderr)
    return found


def differing(engine: InProcessScheduler, prompts: list[list[int]], n_answers: int, varied: Sequence[str]) -> Counted:
    """Compares `n_answers` answers, in random rounds, with those of the same prompts alone."""
    rng, found = random.Random(1), Counted(0, 0, 0, 0.0)
    engine.hybrid.chunk_tokens = 256
    alone = []
    for prompt in prompts:
        engine.flush()
        alone.append(logprobs_of(engine, [prompt])[0])
    while found.answers < n_answers:
        engine.hybrid.chunk_tokens = rng.choice(CHUNKS) if "chunks" in varied else 256
        if "cache" not in varied or rng.random() < 0.3:
            engine.flush()
        if "cache" in varied and rng.random() < 0.3:  # a prefix that ends anywhere
            logprobs_of(engine, [rng.choice(prompts)[: rng.randint(1, 300)]])
        n_together = rng.randint(2, MOST_COMPANY) if "company" in varied else 1
        together = [rng.randrange(len(prompts)) for _ in range(min(n_together, n_answers - found.answers))]
        for number, logprobs in zip(together, logprobs_of(engine, [prompts[one] for one in together]), strict=True):
            bits = sum(map(differing_bits, logprobs, alone[number]))
            apart = max(abs(a - b) for a, b in zip(logprobs, alone[number], strict=True))
            found = Counted(
                found.answers + 1,
                found.differing_answers + (bits > 0),
                found.differing_bits + bits,
                max(found.largest, apart),
            )
    return found


def logprobs_of(engine: InProcessScheduler, prompts: list[list[int]]) -> list[list[float]]:
    rids = [engine.submit(prompt, label_ids=LABELS) for prompt in prompts]
    engine.run_all()
    answers = [engine.answer(rid).label_logprobs for rid in rids]
    if not all(len(one) == len(LABELS) for one in answers):
        raise report.InvalidRunError("a request was not answered")
    return answers


def differing_bits(one: float, other: float) -> int:
    bits = struct.unpack("2I", struct.pack("2f", one, other))
    return int(bits[0] ^ bits[1]).bit_count()


def tokens(rng: random.Random, n_tokens: int) -> list[int]:
    return [rng.randrange(30, 500) for _ in range(n_tokens)]


# --- Cost


def cost(folder: Path, *, quick: bool) -> list[dict[str, Any]]:
    """Requests a second of both settings, all sent at once."""
    messages = rivals.guard(QUICK_OF_EACH if quick else N_MESSAGES)
    users = QUICK_OF_EACH if quick else N_USERS
    posts = traffic.post_recommendation(None, "single", wl1.SCALE, n_users=users, n_posts=wl1.POSTS)
    small = shapes.write(wl1.MODEL, folder / "small")
    shapes.write_weights(small)
    context = {"context_length": 40_960 // wl1.SCALE, "max_total_tokens": wl1.KV_TOKENS}
    return [
        cost_of("guard", demo_model.ensure(), messages, 4000, quick, context_length=4096, max_total_tokens=8000),
        cost_of("WL1", small, posts, 20_480 // wl1.SCALE, quick, **context),
    ]


def cost_of(
    workload: str, model: Path, dues: Sequence[Due], longest: int, quick: bool, **server: Any
) -> dict[str, Any]:
    config = PrefillConfig(stable_answers="on", max_input_length=longest, memory_budget_gb=3)
    engine = InProcessScheduler(config, model, dtype=shapes.DTYPE, max_running_requests=64, **server)
    per_s: dict[bool, list[float]] = {True: [], False: []}
    for stable in (True, False):
        switch(engine, stable=stable)
        one_pass(engine, dues[: len(dues) // 3])  # what is made at first use is there from now on
    for turn in range(QUICK_TURNS if quick else TURNS):
        for stable in (turn % 2 == 0, turn % 2 == 1):
            switch(engine, stable=stable)
            per_s[stable].append(one_pass(engine, dues))
    with_it, without = (statistics.median(per_s[stable]) for stable in (True, False))
    row = {
        "workload": workload,
        "dtype": shapes.DTYPE,
        "requests": len(dues),
        "chunk_tokens": engine.hybrid.chunk_tokens,
        "stable_requests_per_s": round(with_it, 2),
        "default_requests_per_s": round(without, 2),
        "cost": round(1 - with_it / without, 4),
        "turns": {"stable": [round(x, 2) for x in per_s[True]], "default": [round(x, 2) for x in per_s[False]]},
    }
    print(row, file=sys.stderr)
    return row


def one_pass(engine: InProcessScheduler, dues: Sequence[Due]) -> float:
    """Returns requests a second of all that are sent at once to an empty cache."""
    engine.flush()
    started = time.perf_counter()
    rids = [engine.submit(due.input_ids, label_ids=due.label_ids) for due in dues]
    engine.run_all()
    seconds = time.perf_counter() - started
    if not all(engine.answer(rid).label_logprobs for rid in rids):
        raise report.InvalidRunError(f"{engine}: a request was not answered")
    return len(dues) / seconds
