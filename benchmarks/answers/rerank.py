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
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "2")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

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
COMMON = ["--context-length", "4096", "--max-total-tokens", "40000"]
AT_LEAST, AT_MOST = 8.0, 1e-3


def measure(quick: bool) -> dict[str, Any]:
    """Returns rows and targets of this part."""
    documents = documents_of(QUICK_DOCUMENTS if quick else N_DOCUMENTS)
    rows: list[dict[str, Any]] = []
    bodies = bodies_of(documents)
    with Servers(Served(None, COMMON, shapes.budget(3)), MANY) as servers:
        for turn in range(QUICK_TURNS if quick else N_TURNS):
            rows += [_timed(servers, engine, turn, *bodies[engine.name]) for engine in (engines.OURS, STOCK)]
        commands = {engine.name: servers.of(engine).command for engine in (engines.OURS, STOCK)}
    medians = {
        engine.name: statistics.median(row["seconds"] for row in rows if row["engine"] == engine.name)
        for engine in (engines.OURS, STOCK)
    }
    difference = _difference(*(next(row["scores"] for row in rows if row["engine"] == name) for name in medians))
    exact = exactness(documents[:N_EXACT])
    name = f"rerank of {len(documents)} documents: stock's /v1/score / our /v2/rerank, seconds"
    targets = [
        report.Target.at_least(name, medians[STOCK.name] / medians[engines.OURS.name], AT_LEAST),
        report.Target.at_most("rerank: scores against stock's, float32, largest difference", exact["largest"], AT_MOST),
    ]
    for row in rows:
        del row["scores"]
    return {
        "rows": rows,
        "commands": commands,
        "median_s": medians,
        "tokens": tokens_of(documents),
        "score_difference": {shapes.DTYPE: difference, "float32": exact},
        "targets": [target._asdict() for target in targets],
    }


def exactness(documents: Sequence[str]) -> dict[str, float]:
    """How far the two engines' scores are from each other in float32."""
    bodies = bodies_of(documents)
    with Servers(Served(None, [*COMMON, "--dtype", "float32"], shapes.budget(3)), MANY) as servers:
        found = [_timed(servers, engine, 0, *bodies[engine.name])["scores"] for engine in (engines.OURS, STOCK)]
    return _difference(*found)


def documents_of(n: int) -> list[str]:
    text = traffic.real_text()
    return [text[index * DOCUMENT_CHARACTERS :][:DOCUMENT_CHARACTERS] for index in range(n)]


def bodies_of(documents: Sequence[str]) -> dict[str, tuple[str, dict[str, Any]]]:
    """Returns path and body for either engine, by its name."""
    prompts = TEMPLATE.prompts(None, QUERY, documents)
    start = prompts[0].index(documents[0])
    labels = [_tokenizer().encode(label)[0] for label in TEMPLATE.labels]
    ours = {"model": "demo", "query": QUERY, "documents": documents}
    items = [prompt[start:] for prompt in prompts]
    theirs = {"model": "demo", "query": prompts[0][:start], "items": items, "label_token_ids": labels}
    return {
        engines.OURS.name: ("/v2/rerank", ours),
        STOCK.name: ("/v1/score", {**theirs, "apply_softmax": True}),
    }


def tokens_of(documents: Sequence[str]) -> dict[str, float]:
    """How long prompts are, and what all of them share."""
    prompts = [_tokenizer().encode(prompt) for prompt in TEMPLATE.prompts(None, QUERY, documents)]
    shared = len(os.path.commonprefix(prompts))
    return {"shared": shared, "mean_of_prompt": round(statistics.mean(map(len, prompts)), 1)}


def _tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(demo_model.ensure())


def _timed(servers: Servers, engine: engines.Engine, turn: int, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """One call on an empty cache. Raises InvalidRunError where it fails."""
    server = servers.of(engine)
    if turn == 0:  # what is made at first use is there in every turn
        field = "documents" if engine.is_ours else "items"
        requests.post(server.url + path, json={**body, field: body[field][:2]}, timeout=600).raise_for_status()
    server.flush_cache()
    started = time.perf_counter()
    reply = requests.post(server.url + path, json=body, timeout=1800)
    seconds = time.perf_counter() - started
    if reply.status_code != 200:
        raise report.InvalidRunError(f"{path} failed with {reply.status_code}: {reply.text[:300]}")
    answer = reply.json()
    if engine.is_ours:
        scores = [one["relevance_score"] for one in sorted(answer["results"], key=lambda one: int(one["index"]))]
    else:
        scores = [row[0] for row in answer["scores"]]
    print(f"{engine.name}, turn {turn + 1}: {seconds:.2f} s", file=sys.stderr)
    return {"engine": engine.name, "turn": turn + 1, "seconds": round(seconds, 3), "scores": scores}


def _difference(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    apart = [abs(a - b) for a, b in zip(ours, theirs, strict=True)]
    return {"largest": round(max(apart), 6), "mean": round(statistics.mean(apart), 6)}
