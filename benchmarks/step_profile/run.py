"""What does a step cost with and without the native kernel, and where does the time of a request go, here and in its rivals?

    python benchmarks/step_profile/run.py [--quick] [--json PATH]       # BENCH_PARTS="steps guard": these alone

See the README beside this file.
"""

from __future__ import annotations

import functools
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

from benchmarks import ceiling as machine
from benchmarks import report, shapes
from benchmarks.harness import client, engines, profile, traffic
from benchmarks.harness.turns import Served, Servers
from benchmarks.load import wl1, wl2
from benchmarks.rivals import workloads as rivals
from benchmarks.step_profile.steps import arithmetic
from sgl_prefill.examples import demo_model

QUICK_REQUESTS = 8
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
    """Requests that come all at once, and the engines that answer them: ours, and the best policy of stock."""

    served: Served
    requests: Callable[[int], Sequence[client.Due]]
    n_requests: int  # or users
    policy: str
    more: Sequence[engines.Engine] = ()


WL1_POLICY = "shortest-prefill-first"
WORKS = {
    "reranking": Work(rivals.RERANKING, rivals.reranking, 60, "shortest-prefill-first"),
    "guard": Work(rivals.GUARD, rivals.guard, 60, "lpm"),
    "mixed": Work(rivals.MIXED, rivals.mixed, 40, "fcfs"),
    "WL1": Work(
        wl1.SERVED,
        lambda n_users: traffic.post_recommendation(None, "single", wl1.SCALE, n_users=n_users, n_posts=wl1.POSTS),
        wl1.USERS,
        WL1_POLICY,
        (engines.PAPER, engines.stock(WL1_POLICY).on(engines.PYTORCH_PATH)),
    ),
    "WL2": Work(
        wl2.SERVED,
        lambda n_users: traffic.credit_verification(None, wl2.SCALE, n_users=n_users),
        wl2.USERS,
        "fcfs",
    ),
}


def steps(quick: bool) -> dict[str, Any]:
    """Single steps in processes without a server."""
    rows, ceiling = measure_steps(1 if quick else TURNS, quick)
    medians = medians_of(rows, ceiling)
    return report.part(rows, targets_of(medians), steps=medians, ceiling=ceiling)


def load(name: str, quick: bool) -> dict[str, Any]:
    """A workload of another benchmark, all at once, on a server of each engine."""
    work = WORKS[name]
    config = shapes.config(work.served.model) if work.served.model else demo_config()
    dues = work.requests(QUICK_REQUESTS if quick else work.n_requests)
    stock = [engines.stock(work.policy).on(one) for one in (engines.NEW_KERNEL, engines.AS_SHIPPED)]
    ceiling = machine.matrix_product_flop_per_s()
    rows: list[dict[str, Any]] = []
    commands: dict[str, str] = {}
    for engine in (engines.OURS,) if quick else (engines.OURS, *stock, *work.more, engines.VLLM):
        with tempfile.TemporaryDirectory() as trace, Servers(work.served, 1) as servers:
            server = servers.of(with_profiler(engine, trace))
            commands[engine.name] = server.command
            found, outcomes = measure(dues, server, Path(trace))
            rows.append({"engine": engine.name, **found, **least_ms(config, outcomes, ceiling)})
        print(rows[-1], file=sys.stderr)
    return report.part(rows, [], commands=commands, ceiling_flop_per_s=ceiling)


def demo_config() -> dict[str, Any]:
    config: dict[str, Any] = json.loads((demo_model.ensure() / "config.json").read_text())
    return config


def least_ms(config: dict[str, Any], outcomes: Sequence[client.Outcome], flop_per_s: float) -> dict[str, float]:
    """Of a request: the tokens that were computed, and how long their products and attention take at this machine's rate."""
    new = [one.prompt_tokens - one.cached_tokens for one in outcomes]
    n_pairs = sum(n * one.cached_tokens + n * (n + 1) // 2 for n, one in zip(new, outcomes, strict=True))
    flop = sum(arithmetic(config, len(outcomes), sum(new), n_pairs).values())
    ms = 1000 * flop / flop_per_s / len(outcomes)
    return {"computed tokens": round(sum(new) / len(new), 1), "arithmetic, ms": round(ms, 2)}


def with_profiler(engine: engines.Engine, folder: str) -> engines.Engine:
    """SGLang's writes where the request says, vLLM's where its flags do."""
    if engine != engines.VLLM:
        return engine
    said = {"profiler": "torch", "torch_profiler_dir": folder, "ignore_frontend": True}
    said["torch_profiler_with_stack"] = False
    return engine._replace(flags=(*engine.flags, "--profiler-config", json.dumps(said)))


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


def measure(
    dues: Sequence[client.Due], server: engines.Running, folder: Path
) -> tuple[dict[str, Any], list[client.Outcome]]:
    """Milliseconds a request: of the whole and of each process without the profiler, of groups of operators with it."""

    def send() -> list[client.Outcome]:
        return client.run(server.url, dues, "profiled", server.dialect)

    client.run(server.url, [client.Due(0.0, [1000] * 500, dues[0].label_ids)], "warm-up", server.dialect)
    server.flush_cache()
    before, started = profile.cpu_seconds(server), time.perf_counter()
    outcomes = send()
    seconds = time.perf_counter() - started
    after = profile.cpu_seconds(server)
    server.flush_cache()
    operators = profile.operator_seconds(server, folder, send)

    def each_ms(total_s: float) -> float:
        return round(1000 * total_s / len(dues), 2)

    found = {
        "requests": len(dues),
        "request_ms": each_ms(seconds),
        **{f"{role}, CPU ms": each_ms(after[role] - before[role]) for role in after},
        **{f"{group}, ms": each_ms(spent) for group, spent in operators.items()},
    }
    return found, outcomes


PARTS: dict[str, Callable[[bool], dict[str, Any]]] = {
    "steps": steps,
    **{name: functools.partial(load, name) for name in WORKS},
}

if __name__ == "__main__":
    sys.exit(report.in_parts(__doc__, Path(__file__), PARTS))
