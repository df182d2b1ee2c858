"""What fair shares, isolation and stable answers cost in throughput, where users are named: WL1, whose users share nothing, and
guard, whose policy all may share.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from transformers import AutoTokenizer

from benchmarks import report
from benchmarks.harness import client, engines, traffic
from benchmarks.harness.turns import Served, Servers
from benchmarks.load.wl1 import POSTS, SCALE, USERS
from benchmarks.load.wl1 import SERVED as WL1
from benchmarks.rivals.workloads import GUARD
from benchmarks.rivals.workloads import guard as guard_prompts
from sgl_prefill.examples import demo_model

N_TURNS, N_MESSAGES, N_GUARD_USERS = 9, 300, 10
WITHOUT, DEFAULT = "fair-by none", "fair-by user"
ISOLATED, UNSTABLE = "fair-by user, isolate-by user", "stable-answers off"
PAIRS = ((DEFAULT, WITHOUT, 0.98), (ISOLATED, WITHOUT, 0.98), (DEFAULT, UNSTABLE, 0.85))
N_WARM_UP = 5


class Workload(NamedTuple):
    """One of the two."""

    name: str
    served: Served
    dues: list[client.Due]
    public: Sequence[str] = ()  # flags that name what all share


def measure(quick: bool) -> dict[str, Any]:
    """Runs all of both workloads at once, engines taking turns."""
    rows: list[dict[str, Any]] = []
    targets: list[report.Target] = []
    commands: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        for workload in (wl1(quick), guard(quick, Path(folder))):
            found = in_turns(workload, 1 if quick else N_TURNS, commands)
            medians = {name: statistics.median(one.requests_per_s for one in runs) for name, runs in found.items()}
            for name, runs in found.items():
                row = {"workload": workload.name, "engine": name, "requests_per_s": medians[name]}
                row["cached_share"] = statistics.median(one.cached_share for one in runs)
                rows.append({**row, "turns_requests_per_s": [one.requests_per_s for one in runs]})
            what = f"{workload.name}, all at once: requests a second"
            targets += [
                report.Target.at_least(f"{what}, {name} / {other}", medians[name] / medians[other], least)
                for name, other, least in PAIRS
            ]
    return report.part(rows, targets, commands=commands)


def in_turns(workload: Workload, n_turns: int, commands: dict[str, str]) -> dict[str, list[client.Figures]]:
    """Each run begins with nothing in the cache."""
    rivals = [
        engines.ours(WITHOUT, "--fair-by", "none"),
        engines.ours(f"{WITHOUT}, again", "--fair-by", "none"),
        engines.ours(DEFAULT),
        engines.ours(ISOLATED, "--isolate-by", "user", *workload.public),
        engines.ours(UNSTABLE, "--stable-answers", "off"),
    ]
    found: dict[str, list[client.Figures]] = {engine.name: [] for engine in rivals}
    with Servers(workload.served, len(rivals)) as servers:
        for turn in range(n_turns):
            for engine in rivals:
                server = servers.of(engine)
                client.run(server.url, workload.dues[:N_WARM_UP], "warm-up")
                server.flush_cache()
                name = f"{workload.name}, {engine.name}, turn {turn + 1}"
                found[engine.name].append(client.figures(client.run(server.url, workload.dues, name)))
                commands[f"{workload.name}, {engine.name}"] = server.command
    return found


def wl1(quick: bool) -> Workload:
    n_users = 3 if quick else USERS
    dues = traffic.post_recommendation(None, "single", SCALE, n_users=n_users, n_posts=POSTS, names_users=True)
    return Workload("WL1", WL1, dues)


def guard(quick: bool, folder: Path) -> Workload:
    """Ten users behind one policy, whose text is the shared prefix."""
    prompts = guard_prompts(20 if quick else N_MESSAGES)
    dues = [due._replace(user=f"user {number % N_GUARD_USERS}") for number, due in enumerate(prompts)]
    tokenizer: Any = AutoTokenizer.from_pretrained(demo_model.ensure())
    n_policy = next(n for n, ids in enumerate(zip(*(due.input_ids for due in dues), strict=False)) if len({*ids}) > 1)
    public = folder / "policy.txt"
    public.write_text(tokenizer.decode(dues[0].input_ids[:n_policy], clean_up_tokenization_spaces=False))
    return Workload("guard", GUARD, dues, ("--shared-prefix", str(public)))
