"""What do labels of several tokens cost, and how long does a query with 200 documents take?

The demo model and real text: one request at a time on an empty cache, 8 labels of 1 to 4 tokens against 8 of one token, in turns;
the same labels by SGLang's `select`, and by one request a label on stock as a user gets it.

Documents go to /v2/rerank, and to /v1/score of stock as a user gets it, which is asked what our template asks: what stands before
the document is its query, the document and the rest are an item. In bfloat16 a score depends on the rows beside it, of either
engine; so a few documents are scored by both in float32 too, where they must agree.
"""

from __future__ import annotations

import functools
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import requests
import sglang as sgl
from transformers import AutoTokenizer

from benchmarks import report, shapes
from benchmarks.harness import engines, traffic
from benchmarks.harness.turns import MANY, Served, Servers
from sgl_prefill.core.rerank_template import load
from sgl_prefill.examples import demo_model

SHORT = [" sports", " music", " food", " weather", " politics", " science", " history", " art"]
# Two of each length from 1 to 4 tokens.
LONG = [
    *(" sports", " music", " classical music", " video games", " the weather forecast", " a cooking recipe"),
    *(" the history of science", " a piece of art"),
]
MOST_RATIO = {200: 1.3, 1000: 1.1}  # by new tokens
N_TURNS, QUICK_TURNS = 15, 2
# Prompts of each way, of which the last counts: the first after another engine's took up to 1.8 times as long.
IN_A_ROW = 3
STOCK = engines.stock("lpm").on(engines.AS_SHIPPED)
SERVED = Served(None, ["--context-length", "8192", "--max-total-tokens", "20000"], shapes.budget(2))
N_DOCUMENTS, N_EXACT, DOCUMENT_CHARACTERS = 200, 20, 600  # exact: scored in float32; some 150 tokens
N_RERANK_TURNS = 3
TEMPLATE = load("yes-no")
QUERY = "Which rules say how the names that a function binds are resolved, and what happens to those of an enclosing function?"
RERANK_FLAGS = ["--context-length", "4096", "--max-total-tokens", "40000"]
_session = requests.Session()


def measure(quick: bool) -> dict[str, Any]:
    with Servers(SERVED, MANY) as servers:
        ours, stock = servers.of(engines.OURS), servers.of(STOCK)
        rows = _times(ours.url, stock.url, QUICK_TURNS if quick else N_TURNS)
    found = {(row["tokens"], row["how"]): row["median_ms"] for row in rows}
    long = "ours, 8 labels of 1 to 4 tokens"
    targets = [
        report.Target.at_most(
            f"{n} new tokens: 8 labels of 1 to 4 tokens / 8 of one",
            found[n, long] / found[n, "ours, 8 labels of one token"],
            most,
        )
        for n, most in MOST_RATIO.items()
    ]
    for how in ("ours, select", "stock, select", "stock, one request a label"):
        ratio = min(found[n, how] / found[n, long] for n in MOST_RATIO)
        targets.append(report.Target.at_least(f"{how} / ours, the lesser of both lengths", ratio, 3.0))
    return report.part(rows, targets, commands={"ours": ours.command, "stock": stock.command})


def _times(ours: str, stock: str, n_turns: int) -> list[dict[str, Any]]:
    """The medians of each way to ask, at each length; ours, stock: addresses."""
    backends = {url: sgl.RuntimeEndpoint(url) for url in (ours, stock)}
    ways: dict[str, Callable[[str], None]] = {
        "ours, 8 labels of one token": lambda text: _ask(ours, text, SHORT),
        "ours, 8 labels of 1 to 4 tokens": lambda text: _ask(ours, text, LONG),
        "ours, 8 labels of one token, again": lambda text: _ask(ours, text, SHORT),
        "ours, select": lambda text: _select(backends[ours], text),
        "stock, select": lambda text: _select(backends[stock], text),
        "stock, one request a label": lambda text: _one_request_a_label(stock, text),
    }
    spent: dict[tuple[int, str], list[float]] = {}
    number = 0
    for turn in range(n_turns + 1):  # the first is for what is made at first use
        for n_tokens in MOST_RATIO:
            for how, ask in ways.items():
                for _ in range(IN_A_ROW):
                    number += 1
                    text = _text(number, n_tokens)
                    begin_s = time.perf_counter()
                    ask(text)
                    seconds = time.perf_counter() - begin_s
                if turn:
                    spent.setdefault((n_tokens, how), []).append(1e3 * seconds)
    return [
        {"tokens": n_tokens, "how": how, "median_ms": round(statistics.median(all_ms), 2), "n": len(all_ms)}
        for (n_tokens, how), all_ms in spent.items()
    ]


@functools.cache
def _tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(demo_model.ensure())


@functools.cache
def _ids_of_text() -> list[int]:
    ids: list[int] = _tokenizer().encode(traffic.real_text())
    return ids


def _text(number: int, n_tokens: int) -> str:
    """A prompt of that many tokens, which shares no prefix with another number's."""
    ids = _ids_of_text()
    head, end = (_tokenizer().encode(text) for text in (f"Text {number}:", "\nThis text is about"))
    start = 37 * number % (len(ids) - n_tokens)
    text: str = _tokenizer().decode([*head, *ids[start : start + n_tokens - len(head) - len(end)], *end])
    return text


def _post(url: str, body: dict[str, Any]) -> Any:
    reply = _session.post(url, json=body, timeout=300)
    if reply.status_code != 200:
        raise report.InvalidRunError(reply.text)
    return reply.json()


def _ask(url: str, prompt: str, labels: list[str]) -> None:
    _post(f"{url}/v1/completions", {"model": "default", "prompt": prompt, "allowed_answers": labels})


@sgl.function  # type: ignore[untyped-decorator]
def _program(s: Any, text: str) -> None:
    s += text
    s += sgl.select("label", choices=LONG)


def _select(backend: Any, text: str) -> None:
    state = _program.run(text=text, backend=backend)
    if state["label"] not in LONG:
        raise report.InvalidRunError(f"select gave {state['label']!r}")


def _one_request_a_label(url: str, text: str) -> None:
    """One after the other: each but the first finds the prompt in the prefix cache."""
    prompt = _tokenizer().encode(text)
    for label in LONG:
        answer = _tokenizer().encode(label)
        body = {
            "input_ids": [*prompt, *answer],
            "sampling_params": {"max_new_tokens": 0, "temperature": 0},
            "return_logprob": True,
            "logprob_start_len": len(prompt) - 1,
        }
        if len(_post(f"{url}/generate", body)["meta_info"]["input_token_logprobs"]) < len(answer):
            raise report.InvalidRunError(f"the label {label!r} was not scored")


def measure_rerank(quick: bool) -> dict[str, Any]:
    text, n_documents = traffic.real_text(), N_EXACT if quick else N_DOCUMENTS
    documents = [text[index * DOCUMENT_CHARACTERS :][:DOCUMENT_CHARACTERS] for index in range(n_documents)]
    rivals = {"ours": engines.OURS, "stock": STOCK}
    seconds: dict[str, list[float]] = {name: [] for name in rivals}
    scores: dict[str, list[float]] = {}
    exact: dict[str, list[float]] = {}
    with Servers(Served(None, RERANK_FLAGS, shapes.budget(3)), MANY) as servers:
        commands = {name: servers.of(engine).command for name, engine in rivals.items()}
        for turn in range(2 if quick else N_RERANK_TURNS + 1):  # the first is for what is made at first use
            for name, engine in rivals.items():
                servers.of(engine).flush_cache()
                begin_s = time.perf_counter()
                scores[name] = _rerank(servers.of(engine).url, engine, documents)
                if turn:
                    seconds[name].append(round(time.perf_counter() - begin_s, 3))
    with Servers(Served(None, [*RERANK_FLAGS, "--dtype", "float32"], shapes.budget(3)), MANY) as servers:
        for name, engine in rivals.items():
            exact[name] = _rerank(servers.of(engine).url, engine, documents[:N_EXACT])
    apart = [max(abs(a - b) for a, b in zip(*found.values(), strict=True)) for found in (scores, exact)]
    prompts = [_tokenizer().encode(prompt) for prompt in TEMPLATE.prompts(None, QUERY, documents)]
    row = {
        "seconds": seconds,
        "tokens_of_prompt": round(statistics.mean(map(len, prompts)), 1),
        "tokens_shared": len(os.path.commonprefix(prompts)),
        "largest_difference_of_scores": {shapes.DTYPE: round(apart[0], 6), "float32": round(apart[1], 6)},
    }
    times = statistics.median(seconds["stock"]) / statistics.median(seconds["ours"])
    targets = [
        report.Target.at_least(f"{len(documents)} documents: stock's /v1/score / our /v2/rerank, seconds", times, 8.0),
        report.Target.at_most("rerank: scores against stock's, float32, largest difference", apart[1], 1e-3),
    ]
    return report.part([row], targets, commands=commands)


def _rerank(url: str, engine: engines.Engine, documents: Sequence[str]) -> list[float]:
    """The scores in the order of the documents."""
    if engine.is_ours:
        results = _post(f"{url}/v2/rerank", {"model": "demo", "query": QUERY, "documents": documents})["results"]
        return [one["relevance_score"] for one in sorted(results, key=lambda one: int(one["index"]))]
    prompts = TEMPLATE.prompts(None, QUERY, documents)
    start = prompts[0].index(documents[0])
    labels = [_tokenizer().encode(label)[0] for label in TEMPLATE.labels]
    body = {"query": prompts[0][:start], "items": [prompt[start:] for prompt in prompts], "label_token_ids": labels}
    return [row[0] for row in _post(f"{url}/v1/score", {"model": "demo", **body, "apply_softmax": True})["scores"]]
