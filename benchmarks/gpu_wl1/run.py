"""WL1 of PrefillOnly on a GPU in minutes: who is answered within the time limit, at what rate and latency, ids and text?

    python benchmarks/gpu_wl1/run.py [--quick] [--limit-s 45] [--turns 3] [--json PATH]

20 users, 50 posts each, KV for two users. Servers start one after the other (a start measures the card), stay up, and take turns.
A run ends at its limit; who has no answer then is counted as unanswered. See the README beside this file.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "2")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import aiohttp
import orjson

from benchmarks import report, shapes
from benchmarks.harness import engines, traffic
from benchmarks.harness.client import Due, body_of
from sgl_prefill.errors import ServerStartError
from sgl_prefill.plan import percentile

MODEL, SCALE = (shapes.DEVICE_MODEL, 1) if shapes.HAS_CUDA else ("llama-small", 10)
USERS, POSTS = 20, 50
KV_TOKENS = 2 * (17_000 + 150) // SCALE
ENGINES = (
    engines.OURS,
    engines.stock("lpm").on(engines.REFERENCES[-1]),
    engines.stock("dfs-weight").on(engines.REFERENCES[-1]),
    engines.PAPER,
)
TOKENIZER = os.environ.get("BENCH_TOKENIZER")  # a folder with tokenizer.json of real words; None: the demo model's
WORDS_PER_TOKEN = 0.83


class Sent(NamedTuple):
    at_s: float
    body: bytes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit-s", type=float, default=45.0, help="of a run (default: 45)")
    parser.add_argument("--turns", type=int, default=3, help="of all at once (default: 3)")
    parser.add_argument("--quick", action="store_true", help="two engines, three users; proves nothing about speed")
    parser.add_argument("--json", type=Path, default=Path(__file__).with_name("result.json"))
    arguments = parser.parse_args()
    report.end_with_timeout()
    n_users, chosen = (3, ENGINES[:2]) if arguments.quick else (USERS, ENGINES)
    conditions: dict[str, Any] = {**report.conditions(), "model": shapes.config(MODEL), "scaled_by": SCALE}
    conditions |= {"users": n_users, "posts": POSTS, "kv_tokens": KV_TOKENS, "limit_s": arguments.limit_s}
    result: dict[str, Any] = {"conditions": conditions, "activation_records": {}, "rows": [], "failed": []}
    commands = conditions["commands"] = {}
    try:
        with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
            servers = start(chosen, Path(scratch), stack, result)
            for name, server in servers.items():
                commands[name], result["activation_records"][name] = server.command, server.record
            compare(servers, n_users, arguments, result["rows"])
    finally:
        report.finish(result, targets_of(result["rows"]), arguments.json)
    return 0


def start(chosen: Any, scratch: Path, stack: ExitStack, result: dict[str, Any]) -> dict[str, engines.Running]:
    """One after the other. One that does not start says why, and the others go on."""
    folder = shapes.write(MODEL, scratch / "model")
    tokenizer = Path(TOKENIZER) if TOKENIZER else demo_tokenizer()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((tokenizer / name).read_bytes())
    flags = [*shapes.dummy_flags(folder), "--sleep-on-idle", "--context-length", str(40_960 // SCALE)]
    flags += ["--max-total-tokens", str(KV_TOKENS), "--max-running-requests", "64"]
    servers = {}
    for engine in chosen:
        own = (
            ["--max-input-length", str(20_480 // SCALE), *shapes.budget(3)] if engine.is_ours else shapes.stock_budget()
        )
        started = time.monotonic()
        try:
            running = engines.running(engine, [*flags, *own], scratch / f"{engine.name}.log")
            servers[engine.name] = stack.enter_context(running)
        except (ServerStartError, report.InvalidRunError) as error:
            result["failed"].append({"engine": engine.name, "failed": str(error)[-2000:]})
        print(f"{engine.name}: up or failed after {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
    return servers


def demo_tokenizer() -> Path:
    from sgl_prefill.examples import demo_model

    return demo_model.ensure()


def compare(servers: dict[str, engines.Running], n_users: int, arguments: Any, rows: list[dict[str, Any]]) -> None:
    def measure(load: str, sent: list[Sent], turn: int) -> None:
        for name, server in servers.items():
            server.flush_cache()
            row = {"engine": name, "load": load, "turn": turn, **run(server.url, sent, arguments.limit_s)}
            rows.append(row)
            print(row, file=sys.stderr, flush=True)

    at_once = requests_of(None, n_users)
    for turn in range(1, arguments.turns + 1):
        measure("ids, all at once", at_once, turn)
    mine = [row["requests_per_s"] for row in rows if row["engine"] == engines.OURS.name]
    if not mine or not mine[0]:
        return
    half = statistics.median(mine) / 2
    measure("ids, half of what ours serves", requests_of(half, n_users), 1)
    measure("text, all at once", texts(n_users), 1)


def requests_of(requests_per_s: float | None, n_users: int) -> list[Sent]:
    dues = traffic.post_recommendation(requests_per_s, "single", SCALE, n_users=n_users, n_posts=POSTS)
    return [Sent(due.at_s, orjson.dumps(body_of(due))) for due in dues]


def texts(n_users: int) -> list[Sent]:
    """The same shape in words: a user's profile of some 14,000 tokens, a post of some 150 after it."""
    vocabulary = sorted({word for word in traffic.real_text().split() if word.isalpha()})
    rng = random.Random(0)

    def words(n_tokens: float) -> str:
        return " ".join(rng.choices(vocabulary, k=int(WORDS_PER_TOKEN * n_tokens)))

    profiles = [words(14_000 / SCALE) for _ in range(n_users)]
    bodies = []
    for _ in range(POSTS):
        for profile in profiles:
            body = body_of(Due(0.0, []))
            del body["input_ids"]
            bodies.append(orjson.dumps({**body, "text": f"{profile} {words(150 / SCALE)}"}))
    rng.shuffle(bodies)
    return [Sent(0.0, body) for body in bodies]


def run(url: str, sent: list[Sent], limit_s: float) -> dict[str, Any]:
    latencies, cached, prompt, ended, failed = asyncio.run(_run(url, sent, limit_s))
    latencies.sort()
    shown = {f"p{p}_s": round(percentile(latencies, p), 3) for p in (50, 99)} if latencies else {}
    return {
        "requests": len(sent),
        "answered": len(latencies),
        "failed": failed[:3],
        "n_failed": len(failed),
        "seconds": round(ended, 2),
        "requests_per_s": round(len(latencies) / ended, 2),
        "mean_s": round(statistics.fmean(latencies), 3) if latencies else None,
        **shown,
        "cached_share": round(cached / max(prompt, 1), 4),
        "prompt_tokens": prompt,
    }


async def _run(url: str, sent: list[Sent], limit_s: float) -> tuple[list[float], int, int, float, list[str]]:
    latencies: list[float] = []
    failed: list[str] = []
    n_cached = n_prompt = 0
    last_s = 0.0
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as session:
        started = time.perf_counter()

        async def one(request: Sent) -> None:
            nonlocal n_cached, n_prompt, last_s
            await asyncio.sleep(max(0.0, started + request.at_s - time.perf_counter()))
            headers = {"content-type": "application/json"}
            try:
                async with session.post(f"{url}/generate", data=request.body, headers=headers) as reply:
                    raw = await reply.read()
            except aiohttp.ClientError as error:
                failed.append(repr(error)[:200])
                return
            if reply.status != 200:
                failed.append(f"{reply.status} {raw[:200]!r}")
                return
            last_s = time.perf_counter() - started
            meta = orjson.loads(raw)["meta_info"]
            latencies.append(last_s - request.at_s)
            n_cached, n_prompt = n_cached + meta["cached_tokens"], n_prompt + meta["prompt_tokens"]

        tasks = [asyncio.create_task(one(request)) for request in sent]
        done, late = await asyncio.wait(tasks, timeout=limit_s)
        ended = limit_s if late else last_s
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        for task in done:
            task.result()
        if late:  # a client that leaves ends its requests; the step that runs is waited for by the next flush
            with contextlib.suppress(aiohttp.ClientError):
                await session.post(f"{url}/abort_request", json={"rid": "", "abort_all": True})
    return latencies, n_cached, n_prompt, max(ended, 1e-9), failed


def targets_of(rows: list[dict[str, Any]]) -> list[report.Target]:
    """Medians over the turns."""
    found: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        found.setdefault((row["load"], row["engine"]), []).append(row["requests_per_s"])
    targets = []
    for load in dict.fromkeys(row["load"] for row in rows):
        mine = found.get((load, engines.OURS.name))
        for (of_load, name), theirs in found.items():
            if mine and of_load == load and name.startswith("stock") and statistics.median(theirs):
                ratio = statistics.median(mine) / statistics.median(theirs)
                targets.append(
                    report.Target.at_least(f"WL1, {load}: requests answered a second, ours / {name}", ratio, 1.0)
                )
    return targets


if __name__ == "__main__":
    sys.exit(main())
