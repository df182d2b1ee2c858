"""Is calibrated SRJF faster than SGLang's own policies on live traffic that shares prefixes?

    python benchmarks/live_policy/run.py [--quick] [--json PATH]

The paper's WL1, scaled by 10, over HTTP: all requests at once, and Poisson arrivals at 1x, 2x and 4x of what our engine
serves at once. See the README beside this file.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "2")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import report, shapes
from benchmarks.harness import client, engines
from benchmarks.harness.kept import Kept
from sgl_prefill.planner import workloads

MODEL = "llama-small"
SCALE = 10
USERS, POSTS, QUICK_USERS = 20, 50, 3
LOADS = (1.0, 2.0, 4.0)  # of the reference's throughput with all submitted at once
# KV for two users: the longest profiles with a post, and SGLang's own page for padding.
KV_TOKENS = 2 * (17_000 + 150) // SCALE
# All compute the same in bfloat16, in steps of other sizes.
MAX_LOGPROB_DIFFERENCE = 0.25
# The paper's lambda is in tokens a second, and all numbers of tokens are divided by 10.
FAIRNESS = ("--fairness-lambda", str(500 / SCALE))
REFERENCE, PACKED = "ours, one a step", "ours, packed"
ENGINES = (
    engines.ours(REFERENCE, "--pack-step-tokens", "0", *FAIRNESS),
    engines.ours(PACKED, "--pack-step-tokens", "auto", "--sharers", "count", "--fairness-lambda", "2"),
    engines.stock("dfs-weight"),
    engines.stock("lpm"),
    engines.stock("fcfs"),
)
Row = dict[str, Any]


def main() -> int:
    arguments = report.arguments(__doc__, Path(__file__).with_name("result.json"))
    n_users, loads = (QUICK_USERS, LOADS[1:2]) if arguments.quick else (USERS, LOADS)
    conditions = {**report.conditions(), "model": shapes.config(MODEL), "kv_tokens": KV_TOKENS, "users": n_users}
    conditions["scaled_by"] = SCALE
    kept = Kept(arguments.json, conditions["commit"])
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        common = [*shapes.dummy_flags(shapes.write(MODEL, folder / "model")), "--context-length", "4096"]
        common += ["--max-total-tokens", str(KV_TOKENS), "--sleep-on-idle", "--max-running-requests", "64"]
        for engine in ENGINES:
            budget = ("--memory-budget-gb", "3") if engine.is_ours else ("--mem-fraction-static", "0.3")
            flags = [*common, *(("--max-input-length", "2048") if engine.is_ours else ())]
            measure(engine, [*flags, *(() if shapes.HAS_CUDA else budget)], n_users, loads, kept, folder / "log")
    runs = [kept[run_name(engine, load)] for engine in ENGINES for load in (None, *loads)]
    for run in runs:
        first = next(first for first in runs if first["row"]["load"] == run["row"]["load"])
        client.check_agreement(run["logprobs"], first["logprobs"], MAX_LOGPROB_DIFFERENCE, run["row"]["engine"])
    rows = [run["row"] for run in runs]
    conditions["commands"] = {engine.name: kept[engine.name]["command"] for engine in ENGINES}
    conditions["saturation_requests_per_s"] = saturation(kept)
    records = {engine.name: kept[engine.name]["record"] for engine in ENGINES}
    report.finish(
        {"conditions": conditions, "activation_records": records, "rows": rows}, targets_of(rows), arguments.json
    )
    kept.forget()
    return 0


def measure(
    engine: engines.Engine, flags: list[str], n_users: int, loads: tuple[float, ...], kept: Kept, log: Path
) -> None:
    """All loads that have not been measured yet, on one server."""
    missing = [load for load in (None, *loads) if run_name(engine, load) not in kept]
    if not missing:
        return
    print(f"starting {engine.name}", file=sys.stderr)
    with engines.running(engine, flags, log) as server:
        kept[engine.name] = {"command": server.command, "record": server.record}
        for load in missing:
            dues = requests_of(n_users, None if load is None else load * saturation(kept))
            client.run(server.url, dues[:5], "warm-up")
            server.flush_cache()
            outcomes = client.run(server.url, dues, run_name(engine, load))
            row = {"engine": engine.name, "load": load, **client.figures(outcomes)._asdict()}
            kept[run_name(engine, load)] = {"row": row, "logprobs": [one.logprobs for one in outcomes]}
            print(row, file=sys.stderr)


def run_name(engine: engines.Engine, load: float | None) -> str:
    return f"{engine.name}, " + ("all at once" if load is None else f"{load:g}x")


def saturation(kept: Kept) -> float:
    """The paper's x: what the reference serves with all submitted at once, requests a second."""
    return float(kept[run_name(ENGINES[0], None)]["row"]["requests_per_s"])


def requests_of(n_users: int, requests_per_s: float | None) -> list[client.Due]:
    """The same prompts for every engine; single arrivals, users mixed."""
    rng = random.Random(0)
    arrivals = workloads.post_recommendation(
        rng,
        requests_per_s or 1.0,
        n_users=n_users,
        n_posts=POSTS,
        post_tokens=150 // SCALE,
        profile_mean_tokens=14_000 / SCALE,
        profile_deviation_tokens=3_000 / SCALE,
        profile_range_tokens=(11_000 // SCALE, 17_000 // SCALE),
        arrivals="at-once" if requests_per_s is None else "single",
    )
    profiles: dict[str, list[int]] = {}
    dues = []
    for one in arrivals:
        profile = profiles.setdefault(one.prefix_id, shapes.token_ids(rng, one.prefix_tokens))
        dues.append(client.Due(one.arrival_s, [*profile, *shapes.token_ids(rng, one.tail_tokens)]))
    return dues


def targets_of(rows: list[Row]) -> list[report.Target]:
    def of(engine: str, load: float | None, figure: str) -> float:
        (value,) = (row[figure] for row in rows if row["engine"] == engine and row["load"] == load)
        return float(value)

    targets = []
    for load in dict.fromkeys(row["load"] for row in rows):
        shown = "all at once" if load is None else f"{load:g}x"
        rivals = ("stock lpm", "stock dfs-weight")
        best_mean = min(of(rival, load, "mean_s") for rival in rivals)
        best_p99 = min(of(rival, load, "p99_s") for rival in rivals)
        one, packed = of(REFERENCE, load, "mean_s"), of(PACKED, load, "mean_s")
        targets += [
            report.Target.at_least(f"{shown}: mean, fcfs / ours one a step", of("stock fcfs", load, "mean_s") / one, 4),
            report.Target.at_least(f"{shown}: mean, best of lpm and dfs-weight / ours packed", best_mean / packed, 1.2),
            report.Target.at_most(
                f"{shown}: P99, ours one a step / fcfs",
                of(REFERENCE, load, "p99_s") / of("stock fcfs", load, "p99_s"),
                1.0,
            ),
            report.Target.at_most(
                f"{shown}: P99, ours packed / best of lpm and dfs-weight", of(PACKED, load, "p99_s") / best_p99, 1.0
            ),
        ]
    return targets


if __name__ == "__main__":
    sys.exit(main())
