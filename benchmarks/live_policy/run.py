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
    conditions |= {"commands": {}, "scaled_by": SCALE}
    rows: list[Row] = []
    records: dict[str, Any] = {}
    answers: dict[str, list[list[float]]] = {}
    saturation = 0.0
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        common = [*shapes.dummy_flags(shapes.write(MODEL, folder / "model")), "--context-length", "4096"]
        common += ["--max-total-tokens", str(KV_TOKENS), "--sleep-on-idle", "--max-running-requests", "64"]
        for engine in ENGINES:
            print(f"starting {engine.name}", file=sys.stderr)
            memory = ["--memory-budget-gb", "3", "--max-input-length", "2048"]
            budget = memory if engine.is_ours else ["--mem-fraction-static", "0.3"]
            with engines.running(engine, [*common, *([] if shapes.HAS_CUDA else budget)], folder / "log") as server:
                conditions["commands"][engine.name], records[engine.name] = server.command, server.record
                for load in (None, *loads):
                    dues = requests_of(n_users, None if load is None else load * saturation)
                    client.run(server.url, dues[:5], "warm-up")
                    server.flush_cache()
                    name = f"{engine.name}, " + ("all at once" if load is None else f"{load:g}x")
                    outcomes = client.run(server.url, dues, name)
                    figures = client.figures(outcomes)
                    if engine.name == REFERENCE and load is None:
                        saturation = figures.requests_per_s
                    check_answers(answers, str(load), outcomes, name)
                    rows.append({"engine": engine.name, "load": load, **figures._asdict()})
                    print(rows[-1], file=sys.stderr)
    conditions["saturation_requests_per_s"] = saturation
    report.finish(
        {"conditions": conditions, "activation_records": records, "rows": rows}, targets_of(rows), arguments.json
    )
    return 0


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


def check_answers(answers: dict[str, list[list[float]]], load: str, outcomes: list[client.Outcome], name: str) -> None:
    """The first engine's answers to these prompts, or compared with them. Raises InvalidRunError."""
    expected = answers.setdefault(load, [one.logprobs for one in outcomes])
    for ours, theirs in zip((one.logprobs for one in outcomes), expected, strict=True):
        # NaN is no agreement either.
        if not all(abs(a - b) <= MAX_LOGPROB_DIFFERENCE for a, b in zip(ours, theirs, strict=True)):
            raise report.InvalidRunError(f"{name} disagrees with the first engine: {ours} and {theirs}")


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
