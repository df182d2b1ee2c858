"""What does one step cost with and without the native kernel, and where does the time of a request go, beside stock SGLang?

    python benchmarks/step_profile/run.py [--quick] [--json PATH]

Single steps in a process without a server, by setting in turns; and the workloads of other benchmarks, all at once. See the
README beside this file.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "2")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import report, shapes
from benchmarks.harness import client, engines, profile, traffic
from benchmarks.harness.turns import Served
from benchmarks.load import wl1 as post_recommendation
from benchmarks.rivals import workloads as rivals

N_PASSAGES, QUICK_PASSAGES = 200, 10
N_MESSAGES, QUICK_MESSAGES = 100, 10
N_USERS, QUICK_USERS = 5, 1
N_EACH_LENGTH, QUICK_EACH_LENGTH = 10, 1
DEMO = Served(
    None,
    ["--context-length", "4096", "--max-total-tokens", "20000", "--max-running-requests", "64"],
    ["--max-input-length", "4000", *shapes.budget(3)],
)


# The same engine before it had a kernel, and as it is.
PYTORCH_PATH = engines.OURS._replace(name="PyTorch path", environment=((engines.KERNEL_VARIABLE, "off"),))
SETTINGS = (PYTORCH_PATH, engines.OURS)
TURNS = 3
AT_LEAST = {  # times as fast
    "8 x 20 behind 290": 2.2,
    "8 x 64 behind 1200": 2.6,
    "16 x 15 behind 1400, 4 layers of 512": 3.0,
    "one request of 20": 1.7,
}
MOST_CALLS = 3000


class Work(NamedTuple):
    """What each of these engines does, and how much of it there is."""

    name: str
    served: Served
    chosen: Sequence[engines.Engine]
    n_requests: int
    send: Callable[[str], Any]  # to the server at this address, until all is answered


def main() -> int:
    arguments = report.arguments(__doc__, Path(__file__).with_name("result.json"))
    conditions: dict[str, Any] = {**report.conditions(), "commands": {}, "kernel_of": {}}
    records: dict[str, Any] = {}
    rows: list[dict[str, Any]] = []
    step_rows, ceiling = measure_steps(1 if arguments.quick else TURNS, arguments.quick)
    steps = medians_of(step_rows, ceiling)
    for work in works(arguments.quick):
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            model_flags = work.served.model_flags(folder)
            for engine in work.chosen[: 1 if arguments.quick else None]:
                flags = [*model_flags, *work.served.flags(engine)]
                with engines.running(engine, flags, folder / "log") as server:
                    name = f"{work.name}: {engine.name}"
                    conditions["commands"][name], records[name] = server.command, server.record
                    conditions["kernel_of"][name] = server.kernel
                    rows.append({"work": work.name, "engine": engine.name, **measure(work, server, folder / "trace")})
                    print(rows[-1], file=sys.stderr)
    result = {"conditions": conditions, "activation_records": records, "steps": steps, "ceiling": ceiling, "rows": rows}
    report.finish({**result, "step_rows": step_rows}, targets_of(steps), arguments.json)
    return 0


def measure_steps(n_turns: int, is_quick: bool) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """(a row for each step, setting and turn; the highest rates that any turn found this machine to reach).

    Each turn is a process of its own. Raises InvalidRunError where it fails, or has another kernel than it is taken for.
    """
    rows: list[dict[str, Any]] = []
    ceilings: list[dict[str, float]] = []
    command = [sys.executable, str(Path(__file__).with_name("steps.py")), *(["--quick"] if is_quick else [])]
    for turn in range(1, n_turns + 1):
        for setting in SETTINGS:
            environment = {**os.environ, **engines.QUIET, **dict(setting.environment)}
            done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
            if done.returncode != 0:
                raise report.InvalidRunError(f"{setting.name}: {done.stderr[-2000:]}")
            told = json.loads(done.stdout.splitlines()[-1])
            kernel = engines.check_kernel(setting, told, [])
            rows += [{"setting": setting.name, "turn": turn, "kernel": kernel, **row} for row in told["rows"]]
            ceilings.append(told["ceiling"])
            print(f"turn {turn}, {setting.name}: {told['rows']}", file=sys.stderr)
    return rows, {name: max(one[name] for one in ceilings) for name in ceilings[0]}


def medians_of(rows: list[dict[str, Any]], ceiling: dict[str, float]) -> list[dict[str, Any]]:
    """Takes medians over the turns, with what the arithmetic of a step takes at the machine's own rates.

    A matrix product takes as long as its operations or as reading its weights, whichever is longer.
    """
    steps = []
    for step in dict.fromkeys(row["step"] for row in rows):
        for setting in SETTINGS:
            turns = [row for row in rows if (row["step"], row["setting"]) == (step, setting.name)]
            ms, work = statistics.median(row["ms"] for row in turns), turns[0]["work"]
            linear_s = max(
                work["linear_flop"] / ceiling["flop_per_s"], work["weight_bytes"] / ceiling["read_bytes_per_s"]
            )
            least_ms = 1000 * (linear_s + work["attention_flop"] / ceiling["flop_per_s"])
            row = {"step": step, "setting": setting.name, "kernel": turns[0]["kernel"], "ms": ms}
            calls = statistics.median(row["operator_calls"] for row in turns)
            steps.append({**row, "operator_calls": calls, "arithmetic_ms": least_ms, "arithmetic_share": least_ms / ms})
    return steps


def targets_of(steps: list[dict[str, Any]]) -> list[report.Target]:
    of = {(row["step"], row["setting"]): row for row in steps}
    targets = []
    for step, at_least in AT_LEAST.items():
        before, now = of[step, PYTORCH_PATH.name], of[step, engines.OURS.name]
        targets.append(report.Target.at_least(f"{step}: ms, PyTorch path / ours", before["ms"] / now["ms"], at_least))
        targets.append(report.Target.at_most(f"{step}: operator calls of ours", now["operator_calls"], MOST_CALLS))
    return targets


def works(is_quick: bool) -> list[Work]:
    """Reranking and a guard model's messages (hits of a long prefix), WL1 (misses and short hits), the short mix (misses)."""
    n_passages, n_messages, n_users, n_each_length = (
        (QUICK_PASSAGES, QUICK_MESSAGES, QUICK_USERS, QUICK_EACH_LENGTH)
        if is_quick
        else (N_PASSAGES, N_MESSAGES, N_USERS, N_EACH_LENGTH)
    )
    passages = rivals.reranking(n_passages)
    messages = rivals.guard(n_messages)
    posts = traffic.post_recommendation(None, "single", post_recommendation.SCALE, n_users=n_users)
    lengths = traffic.short_mix(None, n_each_length)
    ours, lpm = (engines.OURS, engines.PAPER), engines.stock("lpm").on(engines.REFERENCES[-1])
    return [
        Work("reranking", DEMO, (*ours, lpm), n_passages, lambda url: client.run(url, passages, "reranking")),
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
            rivals.MIXED,
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
