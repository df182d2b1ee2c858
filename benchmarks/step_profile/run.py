"""Where does the time of a request go, in ours and in stock SGLang?

    python benchmarks/step_profile/run.py [--quick] [--json PATH]

The workloads of other benchmarks, all at once. See the README beside this file.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "2")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import report, shapes
from benchmarks.guard import run as guard
from benchmarks.harness import client, engines, profile, traffic
from benchmarks.harness.turns import Served
from benchmarks.post_recommendation import run as post_recommendation
from benchmarks.reranking import run as reranking
from benchmarks.short_mix import run as short_mix

N_PASSAGES, QUICK_PASSAGES = 200, 10
N_MESSAGES, QUICK_MESSAGES = 100, 10
N_USERS, QUICK_USERS = 5, 1
N_EACH_LENGTH, QUICK_EACH_LENGTH = 10, 1
DEMO = Served(
    None,
    ["--context-length", "4096", "--max-total-tokens", "20000", "--max-running-requests", "64"],
    ["--max-input-length", "4000", *shapes.budget(3)],
)


class Work(NamedTuple):
    """What each of these engines does, and how much of it there is."""

    name: str
    served: Served
    chosen: Sequence[engines.Engine]
    n_requests: int
    send: Callable[[str], Any]  # to the server at this address, until all is answered


def main() -> int:
    arguments = report.arguments(__doc__, Path(__file__).with_name("result.json"))
    conditions: dict[str, Any] = {**report.conditions(), "commands": {}}
    records: dict[str, Any] = {}
    rows: list[dict[str, Any]] = []
    for work in works(arguments.quick):
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            model_flags = work.served.model_flags(folder)
            for engine in work.chosen[: 1 if arguments.quick else None]:
                flags = [*model_flags, *work.served.flags(engine)]
                with engines.running(engine, flags, folder / "log") as server:
                    name = f"{work.name}: {engine.name}"
                    conditions["commands"][name], records[name] = server.command, server.record
                    rows.append({"work": work.name, "engine": engine.name, **measure(work, server, folder / "trace")})
                    print(rows[-1], file=sys.stderr)
    report.finish({"conditions": conditions, "activation_records": records, "rows": rows}, [], arguments.json)
    return 0


def works(is_quick: bool) -> list[Work]:
    """Reranking and a guard model's messages (hits of a long prefix), WL1 (misses and short hits), the short mix (misses)."""
    n_passages, n_messages, n_users, n_each_length = (
        (QUICK_PASSAGES, QUICK_MESSAGES, QUICK_USERS, QUICK_EACH_LENGTH)
        if is_quick
        else (N_PASSAGES, N_MESSAGES, N_USERS, N_EACH_LENGTH)
    )
    from transformers import AutoTokenizer

    from sgl_prefill import demo_model

    tokenizer: Any = AutoTokenizer.from_pretrained(demo_model.ensure())
    body = reranking.body(tokenizer, 0, n_passages)
    messages = guard.prompts(n_messages)
    posts = traffic.post_recommendation(None, "single", post_recommendation.SCALE, n_users=n_users)
    lengths = traffic.short_mix(None, n_each_length)
    ours, lpm = (engines.OURS, engines.PAPER), engines.stock("lpm").on(engines.REFERENCES[-1])
    return [
        Work("reranking", DEMO, (*ours, lpm), n_passages, lambda url: reranking.score(url, body)),
        Work("guard", DEMO, (*ours, lpm), n_messages, lambda url: client.run(url, messages, "guard")),
        Work(
            "WL1",
            post_recommendation.SERVED,
            (*ours, engines.stock("dfs-weight").on(engines.REFERENCES[-1])),
            len(posts),
            lambda url: client.run(url, posts, "WL1"),
        ),
        Work(
            "short mix",
            short_mix.SERVED,
            (engines.OURS, engines.stock("fcfs").on(engines.REFERENCES[-1])),
            len(lengths),
            lambda url: client.run(url, lengths, "short mix"),
        ),
    ]


def measure(work: Work, server: engines.Running, folder: Path) -> dict[str, Any]:
    """Milliseconds a request: of the whole and of each process without the profiler, of groups of operators with it."""
    client.run(server.url, [client.Due(0.0, [1000] * 500)], "warm-up")
    server.flush_cache()
    before, started = profile.cpu_seconds(server), time.perf_counter()
    work.send(server.url)
    seconds = time.perf_counter() - started
    after = profile.cpu_seconds(server)
    server.flush_cache()
    operators = profile.operator_seconds(server, folder, lambda: work.send(server.url))

    def each_ms(total_s: float) -> float:
        return round(1000 * total_s / work.n_requests, 2)

    return {
        "requests": work.n_requests,
        "request_ms": each_ms(seconds),
        **{f"{role}, CPU ms": each_ms(after[role] - before[role]) for role in after},
        **{f"{group}, ms": each_ms(spent) for group, spent in operators.items()},
    }


if __name__ == "__main__":
    sys.exit(main())
