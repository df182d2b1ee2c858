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
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "2")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import requests
from transformers import AutoTokenizer

from benchmarks import report, shapes
from benchmarks.harness import client, engines, traffic
from benchmarks.outsiders.server import common_prefix
from sgl_prefill import demo_model

N_PASSAGES, QUICK_PASSAGES = 200, 10
QUERIES, QUICK_QUERIES = 3, 1
QUERY_CHARACTERS, PASSAGE_CHARACTERS = 4_000, 240
MAX_PROBABILITY_DIFFERENCE = 0.05  # bfloat16, in steps of other sizes
ENGINES = (
    engines.ONE_A_STEP,
    engines.PACKED,
    engines.stock("fcfs"),
    engines.stock("lpm"),
)


def main() -> int:
    arguments = report.arguments(__doc__, Path(__file__).with_name("result.json"))
    n_queries, n_passages = (QUICK_QUERIES, QUICK_PASSAGES) if arguments.quick else (QUERIES, N_PASSAGES)
    conditions: dict[str, Any] = {**report.conditions(), "passages": n_passages, "commands": {}}
    rows: list[dict[str, Any]] = []
    records, scores = {}, {}
    chosen = [*ENGINES[: 3 if arguments.quick else None]]
    with tempfile.TemporaryDirectory() as scratch:
        tokenizer: Any = AutoTokenizer.from_pretrained(demo_model.ensure())
        common = [*shapes.demo_flags(), "--sleep-on-idle", "--enable-metrics", "--max-running-requests", "64"]
        common += ["--context-length", "4096", "--max-total-tokens", "20000"]
        bodies = [body(tokenizer, number, n_passages) for number in range(n_queries)]
        for engine in chosen:
            budget = ["--max-input-length", "4000", *shapes.budget(3)] if engine.is_ours else shapes.stock_budget()
            with engines.running(engine, [*common, *budget], Path(scratch) / "log") as server:
                conditions["commands"][engine.name], records[engine.name] = server.command, server.record
                client.run(server.url, [client.Due(0.0, [1000] * 500)], "warm-up")
                for number, one in enumerate(bodies):
                    server.flush_cache()
                    before = computed_tokens(server.url)
                    seconds, scores[engine.name, number] = score(server.url, one)
                    computed = computed_tokens(server.url) - before
                    rows.append(
                        {"engine": engine.name, "query": number, "seconds": seconds, "computed_tokens": computed}
                    )
                    print(rows[-1], file=sys.stderr)
    for (name, number), found in scores.items():
        client.check_agreement(found, scores[ENGINES[0].name, number], MAX_PROBABILITY_DIFFERENCE, name)
    medians = {
        engine.name: statistics.median(row["seconds"] for row in rows if row["engine"] == engine.name)
        for engine in chosen
    }
    best = min(seconds for name, seconds in medians.items() if name.startswith("stock"))
    targets = [
        report.Target.at_least(f"reranking {n_passages} passages, cold: stock / {name}", best / medians[name], 2.0)
        for name in medians
        if name.startswith("ours")
    ]
    # Computed once, a query costs its tokens; what a second time costs would be as much again.
    once = {number: needed_tokens(tokenizer, one) for number, one in enumerate(bodies)}
    ratios = [row["computed_tokens"] / once[row["query"]] for row in rows if row["engine"].startswith("ours")]
    targets.append(report.Target.at_most("reranking: tokens that ours computed / least that can be", max(ratios), 1.01))
    report.finish({"conditions": conditions, "activation_records": records, "rows": rows}, targets, arguments.json)
    return 0


def needed_tokens(tokenizer: Any, one: dict[str, Any]) -> int:
    """Of all prompts together, each distinct beginning once."""
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
