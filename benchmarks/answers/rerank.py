"""How long does a query with 200 documents take by /v2/rerank, and by /v1/score of stock SGLang as a user gets it?

The demo model and real text, each call on an empty cache, in turns. Stock is asked what our template asks: what stands before the
document is its query, the document and the rest are an item. In bfloat16 a score depends on the rows beside it, of either engine;
so a few documents are scored by both in float32 too, where they must agree.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import requests
from transformers import AutoTokenizer

from benchmarks import report, shapes
from benchmarks.harness import engines, traffic
from benchmarks.harness.turns import MANY, Served, Servers
from sgl_prefill.core.rerank_template import load
from sgl_prefill.examples import demo_model

N_DOCUMENTS, QUICK_DOCUMENTS = 200, 10
N_TURNS, QUICK_TURNS = 3, 1
N_EXACT = 20  # documents that are scored in float32
DOCUMENT_CHARACTERS = 600  # some 150 tokens
TEMPLATE = load("yes-no")
QUERY = "Which rules say how the names that a function binds are resolved, and what happens to those of an enclosing function?"
STOCK = engines.stock("fcfs").on(engines.AS_SHIPPED)
ENGINES = (engines.OURS, STOCK)
COMMON = ["--context-length", "4096", "--max-total-tokens", "40000"]
AT_LEAST, AT_MOST = 8.0, 1e-3


def measure(quick: bool) -> dict[str, Any]:
    documents = documents_of(QUICK_DOCUMENTS if quick else N_DOCUMENTS)
    rows: list[dict[str, Any]] = []
    scores: dict[str, list[float]] = {}
    with Servers(Served(None, COMMON, shapes.budget(3)), MANY) as servers:
        commands = {engine.name: servers.of(engine).command for engine in ENGINES}
        for turn in range(1, 1 + (QUICK_TURNS if quick else N_TURNS)):
            for engine in ENGINES:
                seconds, scores[engine.name] = _timed(servers.of(engine), engine, documents, is_first=turn == 1)
                rows.append({"engine": engine.name, "turn": turn, "seconds": round(seconds, 3)})
                print(rows[-1], file=sys.stderr)
    medians = {name: statistics.median(row["seconds"] for row in rows if row["engine"] == name) for name in scores}
    with Servers(Served(None, [*COMMON, "--dtype", "float32"], shapes.budget(3)), MANY) as servers:
        exact = [_timed(servers.of(engine), engine, documents[:N_EXACT], is_first=True)[1] for engine in ENGINES]
    differences = {shapes.DTYPE: _difference(*scores.values()), "float32": _difference(*exact)}
    name = f"rerank of {len(documents)} documents: stock's /v1/score / our /v2/rerank, seconds"
    worst = differences["float32"]["largest"]
    targets = [
        report.Target.at_least(name, medians[STOCK.name] / medians[engines.OURS.name], AT_LEAST),
        report.Target.at_most("rerank: scores against stock's, float32, largest difference", worst, AT_MOST),
    ]
    found = {"commands": commands, "median_s": medians, "tokens": tokens_of(documents)}
    return report.part(rows, targets, **found, score_difference=differences)


def documents_of(n: int) -> list[str]:
    text = traffic.real_text()
    return [text[index * DOCUMENT_CHARACTERS :][:DOCUMENT_CHARACTERS] for index in range(n)]


def request_of(engine: engines.Engine, documents: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """Returns path and body."""
    if engine.is_ours:
        return "/v2/rerank", {"model": "demo", "query": QUERY, "documents": documents}
    prompts = TEMPLATE.prompts(None, QUERY, documents)
    start = prompts[0].index(documents[0])
    labels = [_tokenizer().encode(label)[0] for label in TEMPLATE.labels]
    body = {"query": prompts[0][:start], "items": [prompt[start:] for prompt in prompts], "label_token_ids": labels}
    return "/v1/score", {"model": "demo", **body, "apply_softmax": True}


def tokens_of(documents: Sequence[str]) -> dict[str, float]:
    """How long prompts are, and what all of them share."""
    prompts = [_tokenizer().encode(prompt) for prompt in TEMPLATE.prompts(None, QUERY, documents)]
    shared = len(os.path.commonprefix(prompts))
    return {"shared": shared, "mean_of_prompt": round(statistics.mean(map(len, prompts)), 1)}


def _tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(demo_model.ensure())


def _timed(
    server: engines.Running, engine: engines.Engine, documents: Sequence[str], *, is_first: bool
) -> tuple[float, list[float]]:
    """Returns the seconds and the scores of one call on an empty cache. Raises InvalidRunError where it fails."""
    if is_first:  # what is made at first use is there in every turn
        path, body = request_of(engine, documents[:2])
        requests.post(server.url + path, json=body, timeout=600).raise_for_status()
    server.flush_cache()
    path, body = request_of(engine, documents)
    started = time.perf_counter()
    reply = requests.post(server.url + path, json=body, timeout=1800)
    seconds = time.perf_counter() - started
    if reply.status_code != 200:
        raise report.InvalidRunError(f"{path} failed with {reply.status_code}: {reply.text[:300]}")
    answer = reply.json()
    if engine.is_ours:
        in_order = sorted(answer["results"], key=lambda one: int(one["index"]))
        return seconds, [one["relevance_score"] for one in in_order]
    return seconds, [row[0] for row in answer["scores"]]


def _difference(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    apart = [abs(a - b) for a, b in zip(ours, theirs, strict=True)]
    return {"largest": round(max(apart), 6), "mean": round(statistics.mean(apart), 6)}
