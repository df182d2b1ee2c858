"""How far from float32 are the label log-probabilities of each engine?"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from benchmarks import report, shapes
from benchmarks.harness import client, engines, traffic
from benchmarks.harness.outsiders import Slot, Transformers
from benchmarks.harness.turns import Served, Servers
from benchmarks.load import wl1
from benchmarks.rivals import workloads as rivals
from sgl_prefill.plan import percentile

STOCK = tuple(engines.stock("lpm").on(reference) for reference in engines.REFERENCES)
ENGINES = (engines.OURS, engines.PAPER, *STOCK)
N_MESSAGES, QUICK_MESSAGES = 150, 10
USERS, QUICK_USERS, POSTS = 10, 2, 15


def measure(quick: bool) -> dict[str, Any]:
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    conditions: dict[str, Any] = {"dtype": shapes.DTYPE, "commands": {}, "kernel_of": {}}
    n_users = QUICK_USERS if quick else USERS
    workloads = {
        "guard, demo model": (rivals.GUARD, rivals.guard(QUICK_MESSAGES if quick else N_MESSAGES)),
        "WL1, random weights": (
            wl1.SERVED,
            traffic.post_recommendation(None, "single", wl1.SCALE, n_users=n_users, n_posts=POSTS),
        ),
    }
    rows = []
    for workload, (served, dues) in workloads.items():
        for row in distances(workload, served, dues, conditions):
            print(row, file=sys.stderr)
            rows.append(row)
    return report.part(rows, targets_of(rows), conditions=conditions)


def distances(
    workload: str, served: Served, dues: Sequence[client.Due], conditions: dict[str, Any]
) -> list[dict[str, Any]]:
    """A row for each engine: absolute differences of label log-probabilities to float32, over all prompts and labels."""
    answers: dict[str, list[list[float]]] = {}
    with ExitStack() as stack:
        servers = stack.enter_context(Servers(served, 1))
        for engine in ENGINES:
            server = servers.of(engine)
            name = f"{engine.name}, {workload}"
            conditions["commands"][name], conditions["kernel_of"][name] = server.command, server.kernel
            answers[engine.name] = [one.logprobs for one in client.run(server.url, dues, name)]
        truth = in_float32(servers.model_folder, dues)
    rows = []
    for name, of_engine in answers.items():
        pairs = [(a, b) for one, true in zip(of_engine, truth, strict=True) for a, b in zip(one, true, strict=True)]
        apart = sorted(abs(a - b) for a, b in pairs)
        rows.append(
            {
                "workload": workload,
                "engine": name,
                "prompts": len(dues),
                "mean": statistics.mean(apart),
                "p99": percentile(apart, 99),
                "largest": apart[-1],
                "signed_mean": statistics.mean(a - b for a, b in pairs),
            }
        )
    return rows


def in_float32(folder: Path, dues: Sequence[client.Due]) -> list[list[float]]:
    """What transformers says; prompts in their order, so that each prefix is computed once."""
    slot, found = Slot(Transformers(folder, "float32")), {}
    for due in sorted(dues, key=lambda due: due.input_ids):
        _, found[tuple(due.input_ids)] = slot.score(due.input_ids, due.label_ids)
    return [found[tuple(due.input_ids)] for due in dues]


def targets_of(rows: Sequence[dict[str, Any]]) -> list[report.Target]:
    """Ours is on the average no further away than stock SGLang as a user gets it."""
    mean = {(row["workload"], row["engine"]): row["mean"] for row in rows}
    return [
        report.Target.at_most(
            f"{workload}: mean distance to float32, {engine.name} / stock, {engines.REFERENCES[0].name}",
            mean[workload, engine.name] / mean[workload, STOCK[0].name],
            1.0,
        )
        for workload in dict.fromkeys(row["workload"] for row in rows)
        for engine in ENGINES
        if engine.is_ours
    ]
