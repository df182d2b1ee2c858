"""Requests that arrive apart and share a new prefix: this checkout, where they follow the first of them in its step, against
another one."""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from benchmarks import report, shapes
from benchmarks.batch import job
from benchmarks.batch.workloads import Micro
from benchmarks.harness import client, engines
from benchmarks.two_commits.run import Tree, both_trees

TURNS = 5
LONGEST = 24_000
MICRO = (Micro(200, 20, 4, 640), Micro(200, 20, 16, 640))


class Work(NamedTuple):
    """Prompts that are sent at once to an empty cache."""

    name: str
    n_prefixes: int
    prefix_tokens: int
    n_each: int
    own_tokens: tuple[int, int]
    least: float | None = None  # requests a second, now / before
    kv_tokens: int = 60_000

    def prompts(self, rng: random.Random) -> list[list[int]]:
        made = []
        for _ in range(self.n_prefixes):
            prefix = shapes.token_ids(rng, self.prefix_tokens)
            made += [[*prefix, *shapes.token_ids(rng, rng.randint(*self.own_tokens))] for _ in range(self.n_each)]
        rng.shuffle(made)
        return made


WORKS = (
    Work("bursts of WL1: 2 users, 25 posts of 150 tokens behind 14,000", 2, 14_000, 25, (150, 150), 1.05),
    Work("reranking: a query of 100 tokens, 200 passages of 40 to 80", 1, 100, 200, (40, 80), 1.1),
    Work("reranking: a query of 1,000 tokens, 20 passages of 40 to 80", 1, 1_000, 20, (40, 80)),
    Work("a burst: 10 of 30 tokens behind 200", 1, 200, 10, (30, 30)),
    Work("nothing shared: 60 of 20 to 400 tokens", 60, 0, 1, (20, 400), 0.99),
    Work("a cache of half the prefix: 10 of 150 tokens behind 8,000", 1, 8_000, 10, (150, 150), None, 4_000),
)


def measure(model_folder: Path, *, quick: bool) -> dict[str, Any]:
    both, n_turns = both_trees(), 1 if quick else TURNS
    turns = [*on_servers(both, model_folder, n_turns), *in_jobs(both, model_folder, n_turns)]
    medians = []
    for what in dict.fromkeys(row["what"] for row in turns):
        of = {
            tree.name: statistics.median(
                row["per_s"] for row in turns if (row["what"], row["tree"]) == (what, tree.name)
            )
            for tree in both
        }
        medians.append({"what": what, **of, "ratio": of["now"] / of["before"]})
    least = {work.name: work.least or 0.99 for work in WORKS} | {micro.name: 1.1 for micro in MICRO}
    targets = [
        report.Target.at_least(f"{one['what']}: requests a second, now / before", one["ratio"], least[one["what"]])
        for one in medians
    ]
    return report.part(medians, targets, turns=turns, before=both[0].commit)


def on_servers(both: Sequence[Tree], folder: Path, n_turns: int) -> Iterator[dict[str, Any]]:
    """Both servers stay up, and take turns."""
    for kv_tokens in dict.fromkeys(work.kv_tokens for work in WORKS):
        with ExitStack() as stack:
            logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            flags = [*_flags(folder), "--max-total-tokens", str(kv_tokens)]
            servers = [
                (tree, stack.enter_context(
                    engines.running(engines.OURS, flags, logs / tree.name, tree.environment)
                ))
                for tree in both
            ]  # fmt: skip
            for turn in range(n_turns + 1):  # the first warms up
                for work in (one for one in WORKS if one.kv_tokens == kv_tokens):
                    dues = [client.Due(0.0, one) for one in work.prompts(random.Random(f"{work.name} {turn}"))]
                    answers = []
                    for tree, server in servers:
                        server.flush_cache()
                        started = time.perf_counter()
                        outcomes = client.run(server.url, dues, f"{tree.name}, {work.name}")
                        seconds = time.perf_counter() - started
                        answers.append([one.logprobs for one in outcomes])
                        if turn:
                            cached = client.figures(outcomes).cached_share
                            yield shown(work.name, tree, turn, len(dues) / seconds, cached)
                    client.check_agreement(answers[0], answers[1], 0.1, work.name)


def in_jobs(both: Sequence[Tree], folder: Path, n_turns: int) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as scratch:
        rows, answers = Path(scratch) / "rows.jsonl", Path(scratch) / "answers.jsonl"
        for turn in range(1, n_turns + 1):
            for micro in MICRO:
                job.write(micro.rows(), rows)
                for tree in both:
                    summary = job.run(rows, answers, [*_flags(folder), "--max-total-tokens", "60000"], tree.folder)
                    cached = summary["cached_tokens"] / summary["prompt_tokens"]
                    yield shown(micro.name, tree, turn, micro.n_rows / summary["answer_s"], cached)


def _flags(folder: Path) -> list[str]:
    weights = shapes.weight_flags(folder, shapes.DTYPE)
    return [*weights, "--context-length", "32768", "--max-input-length", str(LONGEST), *shapes.budget(3)]


def shown(what: str, tree: Tree, turn: int, per_s: float, cached_share: float) -> dict[str, Any]:
    row = {"what": what, "tree": tree.name, "turn": turn, "per_s": per_s, "cached_share": cached_share}
    print(orjson.dumps(row).decode(), file=sys.stderr)
    return row
