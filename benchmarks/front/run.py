"""What the way to the engine costs: text and token ids behind one cached prefix, on a model of one layer.

    python benchmarks/front/run.py [--quick] [--json PATH]

See the README beside this file. BENCH_PARTS="texts" measures this part alone, and takes the others from the result that is there.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
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
import psutil
import requests
from transformers import AutoTokenizer

from benchmarks import process_memory, report, shapes
from benchmarks.front import texts, workloads
from benchmarks.harness import engines
from sgl_prefill.examples import demo_model

TURNS, AT_ONCE = 3, 16
N_TEXTS = 200_000
STOCK = engines.stock("lpm").on(engines.NEW_KERNEL)
# Of its tokenizer options, the one with which it serves here; with --enable-dynamic-batch-tokenizer it lost its scheduler. A
# worker imports SGLang for longer than the five seconds after which uvicorn would end it.
WORKERS = STOCK._replace(
    name=f"{STOCK.name}, 2 tokenizer workers",
    flags=(*STOCK.flags, "--tokenizer-worker-num", "2"),
    environment=(*STOCK.environment, ("SGLANG_UVICORN_WORKER_HEALTHCHECK_TIMEOUT", "300")),
)
# What is sent to each. A handle: token ids behind a prefix of /v1/prefixes.
FORMS = {engines.OURS: ("text", "ids", "handle"), STOCK: ("text", "ids"), WORKERS: ("text",)}
LABEL_IDS = [500, 600]
PROCESSES = ("scheduler", "http_and_tokenizer")


class Work(NamedTuple):
    prefix: str
    prefix_ids: list[int]
    texts: list[str]  # whole prompts
    ids: list[list[int]]  # of the same


def measure_hits(quick: bool) -> dict[str, Any]:
    n_turns, n_requests, n_words = (1, 20, 1000) if quick else (TURNS, 200, 14_000)
    with tempfile.TemporaryDirectory() as scratch:
        folder = model_of(Path(scratch) / "model", 1)
        work = make_work(folder, n_words, n_requests)
        turns = [row for turn in range(1, n_turns + 1) for row in measure(folder, work, turn, Path(scratch))]
    cpu = [f"{name}_cpu_ms" for name in PROCESSES]
    medians = workloads.medians_of(turns, ("engine", "prompts"), "hits_per_s", *cpu)
    sizes = {"requests": n_requests, "at_once": AT_ONCE, "characters": len(work.prefix), "tokens": len(work.ids[0])}
    return report.part(medians, targets_of(medians), turns=turns, **sizes)


def measure_workloads(quick: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as scratch:
        wl1 = model_of(Path(scratch) / "wl1", 4)
        turns = list(workloads.measure(wl1, Path(scratch), 1 if quick else TURNS, quick=quick))
    medians = workloads.medians_of(turns, ("workload", "engine", "prompts"), "requests_per_s")
    return report.part(medians, workloads.targets_of(medians), turns=turns)


def measure_texts(quick: bool) -> dict[str, Any]:
    rows = texts.compare(600 if quick else N_TEXTS)
    n_different = sum(row["different"] for row in rows)
    return report.part(rows, [report.Target.at_most("texts with other ids than the tokenizer's", n_different, 0)])


def model_of(folder: Path, n_layers: int, **settings: object) -> Path:
    """A model with the demo model's tokenizer, and random weights. settings: added to its config."""
    folder.mkdir()
    config = {
        **shapes.config("llama-small"),
        "num_hidden_layers": n_layers,
        "vocab_size": 49_152,
        "max_position_embeddings": 32_768,
        **settings,
    }
    (folder / "config.json").write_text(json.dumps(config))
    shapes.write_weights(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo_model.ensure() / name, folder)
    return folder


def make_work(folder: Path, n_words: int, n_requests: int) -> Work:
    """A prefix of words that are one token each, and different ends of some 15 tokens."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    rng = random.Random(0)
    words = texts.one_token_words(tokenizer)
    prefix = "".join(rng.choices(words, k=n_words))
    whole = [prefix + "".join(rng.choices(words, k=15)) for _ in range(n_requests)]
    return Work(prefix, tokenizer.encode(prefix), whole, [tokenizer.encode(text) for text in whole])


def measure(folder: Path, work: Work, turn: int, scratch: Path) -> Iterator[dict[str, Any]]:
    """Yields a row for each engine and form. The engines run one at a time: stock's idle processes take a core."""
    common = [*shapes.weight_flags(folder, shapes.DTYPE), "--max-total-tokens", "60000", "--context-length", "32768"]
    for engine, forms in FORMS.items():
        memory = shapes.budget(3) if engine.is_ours else shapes.stock_budget()
        with engines.running(engine, [*common, *memory], scratch / f"{turn}.log") as server:
            for form in forms:
                bodies = bodies_of(server.url, form, work)
                send(server.url, bodies[:2], 1)  # the prefix is cached, tokenised and in shape
                before = cpu_ms(server.pid)
                seconds, answers = send(server.url, bodies, AT_ONCE)
                after = cpu_ms(server.pid)
                spent = {f"{name}_cpu_ms": (after[name] - before[name]) / len(bodies) for name in PROCESSES}
                row = {
                    "engine": engine.name,
                    "prompts": form,
                    "turn": turn,
                    "hits_per_s": len(bodies) / seconds,
                    **spent,
                }
                least = min(answer["meta_info"]["cached_tokens"] for answer in answers)
                if least < len(work.ids[0]) - 100:
                    raise report.InvalidRunError(f"{engine.name}, {form}: {least} tokens were cached")
                if [one["meta_info"]["prompt_tokens"] for one in answers] != list(map(len, work.ids)):
                    raise report.InvalidRunError(f"{engine.name}, {form}: the texts have other tokens")
                print(row, file=sys.stderr)
                yield row


def bodies_of(url: str, form: str, work: Work) -> list[bytes]:
    asked = {
        "sampling_params": {"max_new_tokens": 0, "temperature": 0},
        "return_logprob": True,
        "token_ids_logprob": LABEL_IDS,
    }
    if form == "text":
        return [orjson.dumps({"text": text, **asked}) for text in work.texts]
    if form == "ids":
        return [orjson.dumps({"input_ids": ids, **asked}) for ids in work.ids]
    reply = requests.post(f"{url}/v1/prefixes", json={"input_ids": work.prefix_ids}, timeout=60)
    reply.raise_for_status()
    rests = [ids[len(work.prefix_ids) :] for ids in work.ids]
    return [orjson.dumps({"input_ids": rest, "prefix": reply.json()["id"], **asked}) for rest in rests]


def send(url: str, bodies: Sequence[bytes], n_at_once: int) -> tuple[float, list[Any]]:
    """Sends each as soon as one of n_at_once has been answered. Returns the seconds of all, and the answers."""

    async def run() -> tuple[float, list[Any]]:
        slots = asyncio.Semaphore(n_at_once)
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session:

            async def one(body: bytes) -> bytes:
                async with (
                    slots,
                    session.post(f"{url}/generate", data=body, headers={"content-type": "application/json"}) as reply,
                ):
                    read = await reply.read()
                    if reply.status != 200:
                        raise report.InvalidRunError(f"a request failed with {reply.status}: {read[:300]!r}")
                    return read

            started = time.perf_counter()
            replies = await asyncio.gather(*map(one, bodies))
            seconds = time.perf_counter() - started
        return seconds, [orjson.loads(reply) for reply in replies]

    return asyncio.run(run())


def cpu_ms(pid: int) -> dict[str, float]:
    """CPU time of the scheduler process, and of the server's other processes."""
    scheduler = process_memory.scheduler_pid(pid)
    found = dict.fromkeys(PROCESSES, 0.0)
    for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
        times = process.cpu_times()
        name = "scheduler" if process.pid == scheduler else "http_and_tokenizer"
        found[name] += 1000 * (times.user + times.system)
    return found


def targets_of(medians: list[dict[str, Any]]) -> list[report.Target]:
    def of(engine: engines.Engine, form: str, column: str = "hits_per_s") -> float:
        return float(next(row[column] for row in medians if (row["engine"], row["prompts"]) == (engine.name, form)))

    ours, cpu = engines.OURS, "scheduler_cpu_ms"
    return [
        report.Target.at_least("text: hits a second, ours / stock", of(ours, "text") / of(STOCK, "text"), 5.0),
        report.Target.at_least(
            "text: hits a second, ours / stock, 2 workers", of(ours, "text") / of(WORKERS, "text"), 1.5
        ),
        report.Target.at_least("ids: hits a second, ours / stock", of(ours, "ids") / of(STOCK, "ids"), 1.1),
        report.Target.at_least("handle / ids: hits a second, ours", of(ours, "handle") / of(ours, "ids"), 2.0),
        report.Target.at_most(
            "ids: CPU ms of the scheduler, ours / stock", of(ours, "ids", cpu) / of(STOCK, "ids", cpu), 1.0
        ),
    ]


PARTS: dict[str, Callable[[bool], dict[str, Any]]] = {
    "hits": measure_hits,
    "workloads": measure_workloads,
    "texts": measure_texts,
}

if __name__ == "__main__":
    sys.exit(report.in_parts(__doc__, Path(__file__), PARTS))
