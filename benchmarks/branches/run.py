"""Questions about one state: one forward pass for all of them, against a request for each.

    python benchmarks/branches/run.py [--quick] [--json PATH]

See the README beside this file. BENCH_PARTS="speed" measures this part alone, and takes the others from the result that is there.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "2")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import aiohttp
import orjson
from transformers import AutoTokenizer

from benchmarks import report, shapes
from benchmarks.branches import followers, long_labels, rivals, threshold
from benchmarks.front.run import model_of
from benchmarks.front.texts import one_token_words
from benchmarks.harness import engines
from sgl_prefill.core.decision_prompts import Kind, Option, Question, last_line, prompts_of
from sgl_prefill.entry import local_server

STATES = (200, 2_000, 16_000)  # tokens
COUNTS = (1, 8, 32)  # questions
TURNS, N_LAYERS = 3, 4
STOCK = engines.stock("lpm")
SHIPPED = STOCK.on(engines.AS_SHIPPED)
ENGINES = (engines.OURS, SHIPPED, STOCK.on(engines.NEW_KERNEL))
LONGEST_OF_SHIPPED = 2_000  # tokens of a state: 8 questions about 16,000 take 96 s
LONGEST = 24_000
NAMES = ("billing", "delivery", "returns", "praise")
PREFILL_LINE = "Prefill batch"  # one line of SGLang's log for each forward pass


class Work(NamedTuple):
    """N questions about one new state."""

    body: bytes  # of /v1/systemone, in one order
    in_default_orders: bytes
    prompts: list[list[int]]  # the same in one order, each whole
    codes: list[list[int]]  # the token of each option after each


class Maker:
    """Makes questions, and renders them as the server does."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self._words = one_token_words(self._tokenizer)
        self._rng = random.Random(0)
        chat = [{"role": "user", "content": "CONTENT"}]
        rendered: Any = self._tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        self._head, _, self._tail = rendered.partition("CONTENT")
        end = last_line(Kind.CHOICE, len(NAMES)) + self._tail
        n_end = len(self._ids(end))
        self._code_of = {code: self._ids(end + code)[n_end] for code in "ABCD"}

    def _ids(self, text: str) -> list[int]:
        found: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return found

    def work(self, n_state: int, n_questions: int) -> Work:
        state = "".join(self._rng.choices(self._words, k=n_state)).strip()
        texts = [
            f"What is part {index} about,{''.join(self._rng.choices(self._words, k=8))}?"
            for index in range(n_questions)
        ]
        asked = {
            str(index): {"type": "choice", "instructions": text, "criteria": dict.fromkeys(NAMES)}
            for index, text in enumerate(texts)
        }
        body = {"model": "jev-latest", "state": state, "questions": asked}
        options = tuple(map(Option, NAMES))
        rendered = [prompts_of(Question(Kind.CHOICE, text, options), 1)[0] for text in texts]
        return Work(
            orjson.dumps({**body, "x_options": {name: {"orders": 1} for name in asked}}),
            orjson.dumps(body),
            [self._ids(f"{self._head}{state}\n\n{one.text}{self._tail}") for one in rendered],
            [[self._code_of[code] for code in one.codes] for one in rendered],
        )


def separately(work: Work) -> list[tuple[str, bytes]]:
    """A request for each question."""
    asked = {"sampling_params": {"max_new_tokens": 0, "temperature": 0}, "return_logprob": True}
    return [
        ("/generate", orjson.dumps({"input_ids": ids, "token_ids_logprob": codes, **asked}))
        for ids, codes in zip(work.prompts, work.codes, strict=True)
    ]


def send(url: str, requests: Sequence[tuple[str, bytes]]) -> tuple[float, list[Any]]:
    """Sends all at once. Returns the seconds until the last answer, and the answers."""

    async def run() -> tuple[float, list[bytes]]:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session:

            async def one(path: str, body: bytes) -> bytes:
                async with session.post(url + path, data=body, headers={"content-type": "application/json"}) as reply:
                    read = await reply.read()
                    if reply.status != 200:
                        raise report.InvalidRunError(f"{path} failed with {reply.status}: {read[:300]!r}")
                    return read

            started = time.perf_counter()
            replies = await asyncio.gather(*itertools.starmap(one, requests))
            return time.perf_counter() - started, list(replies)

    seconds, replies = asyncio.run(run())
    return seconds, [orjson.loads(reply) for reply in replies]


def flags_of(folder: Path, engine: engines.Engine, durable_tokens: int) -> list[str]:
    common = [*shapes.weight_flags(folder, shapes.DTYPE), "--max-total-tokens", str(durable_tokens)]
    memory = ["--max-input-length", str(LONGEST), *shapes.budget(3)] if engine.is_ours else shapes.stock_budget()
    return [*common, "--context-length", "32768", *memory]


def measure_tokens(quick: bool) -> dict[str, Any]:
    """Tokens and forward passes of questions about a new state; with room for all of its KV, and for half of it."""
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = model_of(Path(scratch) / "model", N_LAYERS)
        maker = Maker(folder)
        for n_state in STATES[: 1 if quick else None]:
            for cache, durable in (("all", 60_000), ("half", n_state // 2)):
                flags = [*flags_of(folder, engines.OURS, durable), "--log-level", "info"]
                log = Path(scratch) / "log"
                with local_server.running(engines.OURS.module, flags, log, environment=engines.QUIET) as server:
                    send(server.url, [("/v1/systemone", maker.work(n_state, 2).body)])
                    for n in COUNTS:
                        rows.append(
                            {"state": n_state, "questions": n, "cache": cache, **counted(server, maker, n_state, n)}
                        )
                        print(rows[-1], file=sys.stderr)
    return report.part(
        rows,
        [
            report.Target.at_most("tokens / (state + N x question), worst", max(row["ratio"] for row in rows), 1.01),
            report.Target.at_most("forward passes, worst", max(row["passes"] for row in rows), 1),
        ],
    )


def counted(server: Any, maker: Maker, n_state: int, n_questions: int) -> dict[str, Any]:
    work = maker.work(n_state, n_questions)
    before = server.log.read_text().count(PREFILL_LINE)
    _, (reply,) = send(server.url, [("/v1/systemone", work.body)])
    n_passes = server.log.read_text().count(PREFILL_LINE) - before
    n_shared = len(os.path.commonprefix(work.prompts))
    expected = n_shared + sum(len(one) - n_shared for one in work.prompts)
    computed = reply["usage"]["input_tokens"] - reply["x_cached_tokens"]
    return {"tokens": computed, "expected": expected, "ratio": computed / expected, "passes": n_passes}


def measure_speed(quick: bool) -> dict[str, Any]:
    """Questions a second, and the time of a request in default orders."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = model_of(Path(scratch) / "model", N_LAYERS)
        turns = [
            row
            for turn in range(1, 2 if quick else 1 + TURNS)
            for engine in ENGINES
            for row in timed(engine, folder, turn, Path(scratch), quick=quick)
        ]
    keys = ("engine", "way", "state", "questions")
    cells: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in turns:
        cells.setdefault(tuple(row[key] for key in keys), []).append(row)
    medians = [
        {**dict(zip(keys, cell, strict=True)), "seconds": statistics.median(row["seconds"] for row in rows)}
        for cell, rows in cells.items()
    ]
    differences = [row["difference"] for row in turns if "difference" in row]
    return report.part(medians, targets_of(medians, max(differences), quick=quick), turns=turns)


def timed(engine: engines.Engine, folder: Path, turn: int, scratch: Path, *, quick: bool) -> Iterator[dict[str, Any]]:
    """Yields a row for each state, number of questions and way. Each measurement has a new state."""
    maker = Maker(folder)
    with engines.running(engine, flags_of(folder, engine, 60_000), scratch / "speed.log") as server:
        discarded = maker.work(200, 8)  # a server's first requests take longer
        send(server.url, separately(discarded))
        if engine.is_ours:
            send(server.url, [("/v1/systemone", discarded.body)])
        for n_state, n_questions in itertools.product(STATES[: 1 if quick else None], COUNTS):
            if engine == SHIPPED and n_state > LONGEST_OF_SHIPPED:
                continue
            ways = ("together", "in default orders", "separately") if engine.is_ours else ("separately",)
            for way in ways:
                work = maker.work(n_state, n_questions)
                bodies = {
                    "together": [("/v1/systemone", work.body)],
                    "in default orders": [("/v1/systemone", work.in_default_orders)],
                    "separately": separately(work),
                }
                seconds, answers = send(server.url, bodies[way])
                row = {"engine": engine.name, "way": way, "state": n_state, "questions": n_questions, "turn": turn}
                row["seconds"] = seconds
                if way == "together":
                    _, alone = send(server.url, separately(work))
                    row["difference"] = largest_difference(work, answers[0], alone)
                print(row, file=sys.stderr)
                yield row


def largest_difference(work: Work, together: dict[str, Any], alone: Sequence[dict[str, Any]]) -> float:
    """Of the probabilities of all options."""
    found = [list(one["probabilities"].values()) for one in together["answers"].values()]
    largest = 0.0
    for codes, probabilities, answer in zip(work.codes, found, alone, strict=True):
        by_id = {token: logprob for logprob, token, _ in answer["meta_info"]["output_token_ids_logprobs"][0]}
        weights = [2.718281828459045 ** by_id[code] for code in codes]
        expected = [one / sum(weights) for one in weights]
        largest = max(largest, *(abs(a - b) for a, b in zip(probabilities, expected, strict=True)))
    return largest


# At least so many times the questions a second of stock SGLang, by tokens of the state: as a user gets it, with our attention.
RATIOS = {200: (8, 2.5), 2_000: (8, 2.2), 16_000: (8, 1.7)}
ORDERS = {200: 1.6, 2_000: 1.15, 16_000: 1.05}  # time of default orders / one order, at most
DIFFERENCE = {"float32": 1e-5, "bfloat16": 2e-2}


def targets_of(medians: Sequence[dict[str, Any]], difference: float, *, quick: bool) -> list[report.Target]:
    def of(engine: engines.Engine, way: str, n_state: int, n: int) -> float:
        cell = (engine.name, way, n_state, n)
        keys = ("engine", "way", "state", "questions")
        return float(next(row["seconds"] for row in medians if tuple(row[key] for key in keys) == cell))

    ours, targets = engines.OURS, []
    for n_state in STATES[: 1 if quick else None]:
        for n in COUNTS[1:]:
            for engine, least in zip(ENGINES[1:], RATIOS[n_state], strict=True):
                if engine == SHIPPED and n_state > LONGEST_OF_SHIPPED:
                    continue
                ratio = of(engine, "separately", n_state, n) / of(ours, "together", n_state, n)
                name = f"state {n_state}, {n} questions: questions a second, ours / {engine.name}"
                targets.append(report.Target.at_least(name, ratio, least))
        ratio = of(ours, "together", n_state, 1) / of(ours, "separately", n_state, 1)
        targets.append(report.Target.at_most(f"state {n_state}, 1 question: time, decision / labels", ratio, 1.05))
        ratio = of(ours, "in default orders", n_state, 8) / of(ours, "together", n_state, 8)
        name = f"state {n_state}, 8 questions: time, default orders / one order"
        targets.append(report.Target.at_most(name, ratio, ORDERS[n_state]))
    limit = DIFFERENCE[shapes.DTYPE]
    return [
        *targets,
        report.Target.at_most("probabilities, together / separately: largest difference", difference, limit),
    ]


def on_a_model(measure: Callable[..., dict[str, Any]], *arguments: Any, quick: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as scratch:
        return measure(model_of(Path(scratch) / "model", N_LAYERS), *arguments, quick=quick)


def measure_rivals(quick: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as scratch:
        qwen3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}  # vLLM decides with few architectures
        folder = model_of(Path(scratch) / "model", N_LAYERS, **qwen3)
        return rivals.measure(folder, lambda: Maker(folder), send, quick=quick)


PARTS: dict[str, Callable[[bool], dict[str, Any]]] = {
    "tokens": measure_tokens,
    "speed": measure_speed,
    "followers": lambda quick: on_a_model(followers.measure, quick=quick),
    "labels": lambda quick: on_a_model(long_labels.measure, send, quick=quick),
    "rivals": measure_rivals,
    "threshold": lambda quick: on_a_model(threshold.measure, quick=quick),
}

if __name__ == "__main__":
    sys.exit(report.in_parts(__doc__, Path(__file__), PARTS))
