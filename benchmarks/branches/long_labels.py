"""Labels of several tokens: this checkout, where their tokens are branches, against another one."""

from __future__ import annotations

import itertools
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import orjson

from benchmarks import report, shapes
from benchmarks.harness import engines
from benchmarks.two_commits.run import both_trees

TURNS = 7
LABELS = [f" {' '.join(names)}" for names in itertools.permutations(("billing", "delivery", "returns"))]
N_REQUESTS = 30
WORKS = tuple(itertools.product((60, 600), (1, N_REQUESTS)))  # tokens of a prompt, requests at once
LEAST = 0.98

Send = Callable[[str, Sequence[tuple[str, bytes]]], tuple[float, list[Any]]]


def measure(folder: Path, send: Send, *, quick: bool) -> dict[str, Any]:
    trees = both_trees()
    turns: list[dict[str, Any]] = []
    with ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        flags = [*shapes.weight_flags(folder, shapes.DTYPE), "--context-length", "32768", *shapes.budget(3)]
        servers = [
            (tree, stack.enter_context(engines.running(engines.OURS, flags, logs / tree.name, tree.environment)))
            for tree in trees
        ]
        for turn, (n_tokens, at_once) in itertools.product(range(2 if quick else TURNS + 1), WORKS):
            rng = random.Random(f"{turn} {n_tokens} {at_once}")
            requests = [_request(rng, n_tokens) for _ in range(N_REQUESTS)]
            for tree, server in servers[:: 1 if turn % 2 else -1]:
                server.flush_cache()
                seconds = sum(send(server.url, requests[i : i + at_once])[0] for i in range(0, N_REQUESTS, at_once))
                if turn:  # the first warms up
                    row = {"tree": tree.name, "tokens": n_tokens, "at_once": at_once, "turn": turn}
                    turns.append(row | {"per_s": N_REQUESTS / seconds})
                    print(turns[-1], file=sys.stderr)
    rows = []
    for n_tokens, at_once in WORKS:
        of = {
            tree.name: statistics.median(
                row["per_s"]
                for row in turns
                if (row["tree"], row["tokens"], row["at_once"]) == (tree.name, n_tokens, at_once)
            )
            for tree in trees
        }
        rows.append({"tokens": n_tokens, "at_once": at_once, **of, "ratio": of["now"] / of["before"]})
    targets = [
        report.Target.at_least(
            f"{row['at_once']} at once behind {row['tokens']} tokens: requests a second, now / before",
            row["ratio"],
            LEAST,
        )
        for row in rows
    ]
    return report.part(rows, targets, turns=turns, before=trees[0].commit)


def _request(rng: random.Random, n_tokens: int) -> tuple[str, bytes]:
    body = {"model": "m", "prompt": shapes.token_ids(rng, n_tokens), "allowed_answers": LABELS}
    return "/v1/completions", orjson.dumps(body)
