"""Guard, WL1 and reranking as text and as token ids, all requests at once: does text serve fewer a second?"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from transformers import AutoTokenizer

from benchmarks import report, shapes
from benchmarks.front.texts import one_token_words
from benchmarks.harness import client, engines, traffic
from benchmarks.harness.client import Due
from benchmarks.rivals.workloads import guard as guard_prompts
from sgl_prefill.examples import demo_model

STOCK = engines.stock("lpm").on(engines.AS_SHIPPED)
ENGINES = (engines.OURS, STOCK)
FORMS = ("text", "ids")
N_MESSAGES, N_USERS, N_POSTS, SCALE = 60, 6, 50, 10
N_PASSAGES, QUERY_CHARACTERS, PASSAGE_CHARACTERS = 60, 4_000, 240


class Workload(NamedTuple):
    name: str
    model: tuple[str, ...]  # flags
    dues: list[Due]  # of ids; the text of each has the same


def measure(folder: Path, scratch: Path, n_turns: int, *, quick: bool) -> Iterator[dict[str, Any]]:
    """Yields a row for each engine, workload, form and turn. folder: a model for WL1 with the demo model's tokenizer."""
    tokenizer: Any = AutoTokenizer.from_pretrained(demo_model.ensure())
    workloads = workloads_of(tokenizer, folder, quick=quick)
    models = list(dict.fromkeys(one.model for one in workloads))
    for turn in range(1, n_turns + 1):
        for model, engine in itertools.product(models, ENGINES):
            common = [*model, "--context-length", "4096", "--max-running-requests", "64"]
            memory = ["--max-input-length", "4000", *shapes.budget(3)] if engine.is_ours else shapes.stock_budget()
            with engines.running(engine, [*common, *memory], scratch / "workloads.log") as server:
                for workload in [one for one in workloads if one.model == model]:
                    run(server, workload, "ids", tokenizer)  # discarded: a server's first requests take longer
                    for form in FORMS if turn % 2 else FORMS[::-1]:
                        row = run(server, workload, form, tokenizer)
                        yield {"workload": workload.name, "engine": engine.name, "prompts": form, "turn": turn, **row}


def run(server: engines.Running, workload: Workload, form: str, tokenizer: Any) -> dict[str, float]:
    server.flush_cache()
    sent = dues_of(workload, form, tokenizer)
    outcomes = client.run(server.url, sent, f"{workload.name}, {form}")
    if [one.prompt_tokens for one in outcomes] != [len(due.input_ids) for due in sent]:
        raise report.InvalidRunError(f"{workload.name}, {form}: the texts have other tokens")
    figures = client.figures(outcomes)._asdict()
    return {name: figures[name] for name in ("requests_per_s", "mean_s", "p99_s", "cached_share")}


def workloads_of(tokenizer: Any, folder: Path, *, quick: bool) -> list[Workload]:
    demo = (*shapes.demo_flags(), "--max-total-tokens", "8000")
    users, posts = (2, 5) if quick else (N_USERS, N_POSTS)
    wl1 = traffic.post_recommendation(None, "single", SCALE, n_users=users, n_posts=posts)
    words = one_token_words(tokenizer)
    text = traffic.real_text()
    query, question = text[:QUERY_CHARACTERS], "\nDoes it answer? Answer yes or no:"
    passages = [text[at : at + PASSAGE_CHARACTERS] for at in range(QUERY_CHARACTERS, 10**6, PASSAGE_CHARACTERS)]
    reranking = [f"{query}\nPassage: {one}{question}" for one in passages[: 5 if quick else N_PASSAGES]]
    return [
        Workload("guard", demo, retokenised(tokenizer, guard_prompts(5 if quick else N_MESSAGES))),
        Workload("reranking", demo, [Due(0.0, tokenizer.encode(one)) for one in reranking]),
        Workload(
            "WL1",
            (*shapes.weight_flags(folder, shapes.DTYPE), "--max-total-tokens", "3430"),
            [
                due._replace(input_ids=tokenizer.encode("".join(words[one % len(words)] for one in due.input_ids)))
                for due in wl1
            ],
        ),
    ]


def retokenised(tokenizer: Any, dues: Sequence[Due]) -> list[Due]:
    """Prompts that were joined from tokens, as a tokenizer makes them of their text."""
    return [due._replace(input_ids=tokenizer.encode(tokenizer.decode(due.input_ids))) for due in dues]


def dues_of(workload: Workload, form: str, tokenizer: Any) -> list[Due]:
    if form == "ids":
        return workload.dues
    return [due._replace(text=tokenizer.decode(due.input_ids)) for due in workload.dues]


def medians_of(rows: Sequence[dict[str, Any]], names: Sequence[str], *columns: str) -> list[dict[str, Any]]:
    """Medians of columns over the turns with equal names, with the slowest and fastest of the first column."""
    found = []
    for key in dict.fromkeys(tuple(row[name] for name in names) for row in rows):
        of = [row for row in rows if tuple(row[name] for name in names) == key]
        medians = {column: statistics.median(row[column] for row in of) for column in columns}
        rates = [row[columns[0]] for row in of]
        found.append({**dict(zip(names, key, strict=True)), **medians, "slowest": min(rates), "fastest": max(rates)})
    return found


def targets_of(medians: Sequence[dict[str, Any]]) -> list[report.Target]:
    """Ours to stock as text is no lower than as token ids."""
    rates = {(row["workload"], row["engine"], row["prompts"]): row["requests_per_s"] for row in medians}
    found = []
    for name in dict.fromkeys(row["workload"] for row in medians):
        text, ids = (rates[name, engines.OURS.name, form] / rates[name, STOCK.name, form] for form in FORMS)
        found.append(report.Target.at_least(f"{name} as text: requests a second, ours / stock as shipped", text, ids))
    return found
