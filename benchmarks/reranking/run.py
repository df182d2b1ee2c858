"""200 passages scored for one query through /v1/score: how long until all scores are there?

    python benchmarks/reranking/run.py [--quick] [--json PATH]

The demo model and real text. See the README beside this file.
"""

from __future__ import annotations

import itertools
import os
import re
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

os.environ.setdefault("OMP_NUM_THREADS", "2")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import requests
from transformers import AutoTokenizer

from benchmarks import report, shapes
from benchmarks.harness import client, engines, traffic
from benchmarks.harness.turns import MANY, Contest, Served, Servers, of_reference, take_turns
from benchmarks.outsiders.server import common_prefix
from sgl_prefill.errors import ServerStartError
from sgl_prefill.examples import demo_model

N_PASSAGES, QUICK_PASSAGES = 200, 10
QUERIES, QUICK_QUERIES = 3, 1
QUERY_CHARACTERS, PASSAGE_CHARACTERS = 4_000, 240
# bfloat16, in steps of other sizes: of 600 log-odds some lie 0.2 from float32's, on any path, 0.04 on average.
MAX_PROBABILITY_DIFFERENCE = 0.1
CONTEST = Contest((engines.stock("lpm"), engines.stock("fcfs"), engines.stock("shortest-prefill-first")))
SERVED = Served(
    None,
    ["--enable-metrics", "--max-running-requests", "64", "--context-length", "4096", "--max-total-tokens", "20000"],
    ["--max-input-length", "4000", *shapes.budget(3)],
)
AT_LEAST = {engines.AS_SHIPPED: 8.0, engines.PYTORCH_PATH: 2.0, engines.ON_DEVICE: 2.0}


def main() -> int:
    arguments = report.arguments(__doc__, Path(__file__).with_name("result.json"))
    n_queries, n_passages = (QUICK_QUERIES, QUICK_PASSAGES) if arguments.quick else (QUERIES, N_PASSAGES)
    contest = CONTEST.smoke() if arguments.quick else CONTEST
    tokenizer: Any = AutoTokenizer.from_pretrained(demo_model.ensure())
    bodies = [body(tokenizer, number, n_passages) for number in range(n_queries)]
    with Scoring(bodies) as scoring:
        found = take_turns(contest, scoring.measure, statistics.median)
    conditions = {**report.conditions(), "passages": n_passages, **scoring.conditions}
    median_s = {engine: statistics.median([s for turn in turns for s in turn]) for engine, turns in found.items()}
    targets = []
    for engine in contest.ours:
        for reference in contest.references:
            if (best := of_reference(found, reference)) is not None:
                name = f"reranking {n_passages} passages, cold: best stock, {reference.name} / {engine.name}"
                ratio = median_s[best] / median_s[engine]
                targets.append(report.Target.at_least(name, ratio, AT_LEAST[reference]))
    # Computed once, a query costs its tokens; what a second time costs would be as much again.
    once = {number: needed_tokens(tokenizer, one) for number, one in enumerate(bodies)}
    ratios = [row["computed_tokens"] / once[row["query"]] for row in scoring.rows if row["engine"].startswith("ours")]
    targets.append(report.Target.at_most("reranking: tokens that ours computed / least that can be", max(ratios), 1.01))
    result = {"conditions": conditions, "activation_records": scoring.records, "rows": scoring.rows}
    result |= {"medians": [{"engine": engine.name, "seconds": seconds} for engine, seconds in median_s.items()]}
    report.finish({**result, "failed": scoring.failed}, targets, arguments.json)
    return 0


class Scoring:
    """The queries to one engine after the other; a context manager, which ends the servers."""

    def __init__(self, bodies: Sequence[dict[str, Any]]) -> None:
        self.conditions: dict[str, Any] = {"commands": {}, "kernel_of": {}, "sglang_of": {}}
        self.records: dict[str, Any] = {}
        self.rows: list[dict[str, Any]] = []
        self.failed: list[dict[str, str]] = []
        self._bodies, self._servers = bodies, Servers(SERVED, MANY)
        self._scores: dict[int, list[list[float]]] = {}  # by query: the first engine's scores

    def __enter__(self) -> Self:
        self._servers.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._servers.__exit__()

    def measure(self, engine: engines.Engine, turn: str) -> list[float] | None:
        """Seconds of each query, on an empty cache; None where a rival cannot be started or ends.

        Raises InvalidRunError where passages or scores are wrong.
        """
        try:
            server = self._servers.of(engine)
            client.run(server.url, [client.Due(0.0, [1000] * 500)], "warm-up")
            rows = [self._score(engine, server, turn, number) for number in range(len(self._bodies))]
        except (ServerStartError, report.InvalidRunError) as error:
            if engine.is_ours or (why := self._servers.why_failed(engine, error)) is None:
                raise
            self.failed.append({"engine": engine.name, "failed": why})
            return None
        self.rows += rows
        self.records[engine.name] = server.record
        for name, value in (("commands", server.command), ("kernel_of", server.kernel), ("sglang_of", server.version)):
            self.conditions[name][engine.name] = value
        return [row["seconds"] for row in rows]

    def _score(self, engine: engines.Engine, server: engines.Running, turn: str, number: int) -> dict[str, Any]:
        server.flush_cache()
        before = computed_tokens(server.url)
        seconds, scores = score(server.url, self._bodies[number])
        computed = computed_tokens(server.url) - before
        client.check_agreement(scores, self._scores.setdefault(number, scores), MAX_PROBABILITY_DIFFERENCE, engine.name)
        row = {"engine": engine.name, "turn": turn, "query": number, "seconds": seconds, "computed_tokens": computed}
        print(row, file=sys.stderr)
        return row


def needed_tokens(tokenizer: Any, one: dict[str, Any]) -> int:
    """Counts the tokens of all prompts together, each distinct beginning once."""
    prompts = sorted(tokenizer.encode(one["query"] + passage) for passage in one["items"])
    shared = [common_prefix(a, b) for a, b in itertools.pairwise(prompts)]
    return sum(map(len, prompts)) - sum(shared)


def body(tokenizer: Any, number: int, n_passages: int) -> dict[str, Any]:
    """A page of Python's documentation as query, cuts of other pages as passages; the answers are Yes and No."""
    text = traffic.real_text()
    page = text[number * QUERY_CHARACTERS :][:QUERY_CHARACTERS]
    rest = text[QUERIES * QUERY_CHARACTERS :]
    passages = [rest[index * PASSAGE_CHARACTERS :][:PASSAGE_CHARACTERS] for index in range(n_passages)]
    labels = [tokenizer.encode(word)[0] for word in (" Yes", " No")]
    asked = "\n\nDoes the following passage belong to this page? Answer Yes or No.\n\n"
    return {"model": "demo", "query": page + asked, "items": passages, "label_token_ids": labels, "apply_softmax": True}


def computed_tokens(url: str) -> int:
    """So far: prompt tokens that no cache held, by SGLang's own counters."""
    text = requests.get(f"{url}/metrics", timeout=60).text

    def total(name: str) -> float:
        return sum(float(value) for value in re.findall(rf"^sglang:{name}_total{{.*}} (\S+)$", text, re.MULTILINE))

    return round(total("prompt_tokens") - total("cached_tokens"))


def score(url: str, one: dict[str, Any]) -> tuple[float, list[list[float]]]:
    started = time.perf_counter()
    reply = requests.post(f"{url}/v1/score", json=one, timeout=1800)
    seconds = time.perf_counter() - started
    if reply.status_code != 200:
        raise report.InvalidRunError(f"/v1/score failed with {reply.status_code}: {reply.text[:300]}")
    found: list[list[float]] = reply.json()["scores"]
    if len(found) != len(one["items"]):
        raise report.InvalidRunError(f"{len(one['items'])} passages got {len(found)} scores")
    return seconds, found


if __name__ == "__main__":
    sys.exit(main())
