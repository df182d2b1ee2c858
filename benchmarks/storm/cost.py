"""What fair shares and isolation cost in throughput, where users are named: WL1, whose users share nothing, and guard, whose
policy all may share.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import report
from benchmarks.harness import client, engines, traffic
from benchmarks.harness.turns import Served, Servers
from benchmarks.load.wl1 import POSTS, SCALE, USERS
from benchmarks.load.wl1 import SERVED as WL1
from benchmarks.rivals.workloads import GUARD
from benchmarks.rivals.workloads import guard as guard_prompts
from benchmarks.storm.part import Part

N_TURNS, N_MESSAGES, N_GUARD_USERS = 9, 300, 10
WITHOUT = "fair-by none"
N_WARM_UP = 5


class Workload(NamedTuple):
    """One of the two."""

    name: str
    served: Served
    dues: list[client.Due]
    public: Path | None  # what all share, as a file


def measure(quick: bool, model: Path, folder: Path) -> Part:
    """Runs all of both workloads at once, engines taking turns; model: not used, since theirs are those of their benchmarks."""
    n_turns = 1 if quick else N_TURNS
    rows: list[dict[str, Any]] = []
    targets: list[report.Target] = []
    commands: dict[str, str] = {}
    for workload in (wl1(quick), guard(quick, folder)):
        public = [] if workload.public is None else ["--shared-prefix", str(workload.public)]
        rivals = [
            engines.ours(WITHOUT, "--fair-by", "none"),
            engines.ours(f"{WITHOUT}, again", "--fair-by", "none"),
            engines.ours("fair-by user"),
            engines.ours("fair-by user, isolate-by user", "--isolate-by", "user", *public),
        ]
        found: dict[str, list[client.Figures]] = {engine.name: [] for engine in rivals}
        with Servers(workload.served, len(rivals)) as servers:
            for turn in range(n_turns):
                for engine in rivals:
                    figures = run(servers.of(engine), workload.dues, f"{workload.name}, {engine.name}, turn {turn + 1}")
                    found[engine.name].append(figures)
                    commands[f"{workload.name}, {engine.name}"] = servers.of(engine).command
        medians = {name: statistics.median(one.requests_per_s for one in of_turns) for name, of_turns in found.items()}
        for name, of_turns in found.items():
            rows.append(
                {
                    "part": "cost",
                    "workload": workload.name,
                    "engine": name,
                    "requests_per_s": medians[name],
                    "cached_share": statistics.median(one.cached_share for one in of_turns),
                    "turns_requests_per_s": [one.requests_per_s for one in of_turns],
                }
            )
        targets += [
            report.Target.at_least(
                f"{workload.name}, all at once: requests a second, {engine.name} / {WITHOUT}",
                medians[engine.name] / medians[WITHOUT],
                0.98,
            )
            for engine in rivals[2:]
        ]
    return Part(rows, targets, commands)


def run(server: engines.Running, dues: list[client.Due], name: str) -> client.Figures:
    """Begins with nothing in the cache."""
    client.run(server.url, dues[:N_WARM_UP], "warm-up")
    server.flush_cache()
    return client.figures(client.run(server.url, dues, name))


def wl1(quick: bool) -> Workload:
    n_users = 3 if quick else USERS
    dues = traffic.post_recommendation(None, "single", SCALE, n_users=n_users, n_posts=POSTS, names_users=True)
    return Workload("WL1", WL1, dues, None)


def guard(quick: bool, folder: Path) -> Workload:
    """Ten users behind one policy, whose text is the shared prefix."""
    from transformers import AutoTokenizer

    from sgl_prefill.examples import demo_model

    prompts = guard_prompts(20 if quick else N_MESSAGES)
    dues = [due._replace(user=f"user {number % N_GUARD_USERS}") for number, due in enumerate(prompts)]
    tokenizer: Any = AutoTokenizer.from_pretrained(demo_model.ensure())
    n_policy = next(n for n, ids in enumerate(zip(*(due.input_ids for due in dues), strict=False)) if len({*ids}) > 1)
    public = folder / "policy.txt"
    public.write_text(tokenizer.decode(dues[0].input_ids[:n_policy], clean_up_tokenization_spaces=False))
    return Workload("guard", GUARD, dues, public)
