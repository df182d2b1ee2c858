"""What is a hit worth on a GPU: with CUDA graphs and without, one a step and packed, shared prefixes attended together or not?

    python benchmarks/gpu_hits/run.py [--quick] [--json PATH]

Runs without a GPU too, where the switches of CUDA graphs change nothing. See the README beside this file.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "2")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import requests

from benchmarks import report, shapes
from benchmarks.harness import client, engines
from benchmarks.harness.client import Due, Outcome
from benchmarks.harness.kept import Kept
from benchmarks.harness.turns import Served, Servers
from sgl_prefill.errors import ServerStartError
from sgl_prefill.port.runner.shared_prefixes import COUNTS_KEY

MODEL, SCALE = (shapes.DEVICE_MODEL, 1) if shapes.HAS_CUDA else ("llama-small", 10)
PREFIX_TOKENS = 14_000 // SCALE  # a profile of the paper's WL1
SUFFIXES_TOKENS = (15, 150)
N_HITS, QUICK_HITS = 300, 20
N_ROUNDS = 3
NO_GRAPHS, ONE_A_STEP = ("--disable-prefill-cuda-graph",), ("--set", "pack_step_tokens=0")
PACKED_EAGER = engines.ours("ours, packed, no graphs", *NO_GRAPHS)
SINGLE = engines.ours("ours, one a step", *ONE_A_STEP)
SINGLE_EAGER = engines.ours("ours, one a step, no graphs", *ONE_A_STEP, *NO_GRAPHS)
TOGETHER = engines.ours("ours, shared prefixes together", "--set", "shared_prefix_attention=on")
APART = engines.ours("ours, shared prefixes apart", "--set", "shared_prefix_attention=off")
STOCK = engines.stock("lpm", "--enable-metrics").on(engines.REFERENCES[-1])
ENGINES = (engines.OURS, STOCK, SINGLE, SINGLE_EAGER, APART, TOGETHER, PACKED_EAGER)
QUICK_ENGINES = (SINGLE_EAGER, TOGETHER, APART)
# (numerator, denominator, what is expected of each suffix): the README says how.
RATIOS = (
    (SINGLE, SINGLE_EAGER, (1.5, 1.2)),
    (engines.OURS, SINGLE, (3.0, 1.5)),
    (TOGETHER, APART, (1.3, 1.05)),
    (engines.OURS, APART, (1.3, 1.05)),
    (engines.OURS, STOCK, (1.0, 1.0)),
)
LEAST_REPLAYED = 0.95
SERVED = Served(
    MODEL,
    ["--context-length", str(PREFIX_TOKENS + 2_000), "--max-total-tokens", "60000", "--max-running-requests", "64"],
    ["--max-input-length", str(PREFIX_TOKENS + 1_000), *shapes.budget(3)],
)


class Passes(NamedTuple):
    """How many prefills of a server so far were replayed from a CUDA graph, and how many ran without."""

    replayed: int
    eager: int

    @property
    def n_all(self) -> int:
        return self.replayed + self.eager


def main() -> int:
    arguments = report.arguments(__doc__, Path(__file__).with_name("result.json"))
    n_hits, n_rounds = (QUICK_HITS, 1) if arguments.quick else (N_HITS, N_ROUNDS)
    conditions: dict[str, Any] = {**report.conditions(), "model": shapes.config(MODEL), "scaled_by": SCALE}
    conditions |= {"prefix_tokens": PREFIX_TOKENS, "hits_a_round": n_hits, "rounds": n_rounds}
    kept = Kept(arguments.json, f"{conditions['commit']}, {conditions['command']}")
    measured: dict[str, dict[str, Any]] = {}
    chosen = QUICK_ENGINES if arguments.quick else ENGINES
    with Servers(SERVED, n_most=1) as servers:
        conditions["servers_at_once"] = servers.n_most
        try:
            for first in range(0, len(chosen), servers.n_most):
                group = chosen[first : first + servers.n_most]
                missing = [engine for engine in group if engine.name not in kept]
                try:
                    measure(servers, missing, n_hits, n_rounds, measured)
                finally:
                    for engine in missing:
                        if engine.name in measured:
                            kept[engine.name] = measured[engine.name]
                measured |= {engine.name: kept[engine.name] for engine in group}
                for engine in group:
                    print(json.dumps(kept[engine.name]["means"] or kept[engine.name]["failed"]), file=sys.stderr)
        except SystemExit:  # `timeout`: what there is, where there is no result yet
            if arguments.json is not None and not arguments.json.exists():
                conditions["cut_off"] = True
                write(arguments.json, conditions, measured, targets_of(measured))
            raise
    check_agreement(measured)
    write(arguments.json, conditions, measured, targets_of(measured))
    kept.forget()
    return 0


def measure(
    servers: Servers, group: Sequence[engines.Engine], n_hits: int, n_rounds: int, measured: dict[str, dict[str, Any]]
) -> None:
    """Rounds of hits of each length, in turns, into `measured`, also where `timeout` cuts them off.

    One that cannot be started or answers wrongly says why, and the others go on.
    """
    if not group:
        return
    failed: dict[engines.Engine, Exception] = dict(servers.start(group))
    rows: dict[engines.Engine, list[dict[str, Any]]] = {engine: [] for engine in group}
    try:
        for number, n_tokens, engine in itertools.product(range(n_rounds), SUFFIXES_TOKENS, group):
            if engine in failed:
                continue
            try:
                server = servers.of(engine)
                client.run(server.url, hits(0, 1, "the prefix"), "prefix")
                rows[engine].append(one_round(server, engine, n_tokens, number, n_hits))
            except (ServerStartError, report.InvalidRunError) as error:
                print(f"{engine.name} failed: {error}", file=sys.stderr)
                failed[engine] = error
    finally:
        for engine in group:
            if engine in failed:
                measured[engine.name] = {"failed": str(failed[engine])[-500:], "rows": [], "means": []}
            elif rows[engine]:
                server = servers.of(engine)
                found = {"rows": rows[engine], "means": medians(rows[engine])}
                measured[engine.name] = {"command": server.command, "record": server.record, **found}


def one_round(
    server: engines.Running, engine: engines.Engine, n_tokens: int, number: int, n_hits: int
) -> dict[str, Any]:
    """So many different hits at once. Raises InvalidRunError where one is no hit."""
    before, saved_before = passes_of(server), saved_tokens_of(server)
    outcomes = client.run(server.url, hits(n_tokens, n_hits, f"round {number}"), f"{engine.name}, {n_tokens} tokens")
    after = passes_of(server)
    check_hits(outcomes, engine.name)
    n_steps = after.n_all - before.n_all
    return {
        "engine": engine.name,
        "suffix_tokens": n_tokens,
        "number": number,
        "requests_per_s": client.figures(outcomes).requests_per_s,
        "steps": n_steps,
        "replayed_share": (after.replayed - before.replayed) / max(n_steps, 1),
        "saved_tokens": saved_tokens_of(server) - saved_before,
        "logprobs": [one.logprobs for one in outcomes],
    }


def hits(n_tokens: int, n_hits: int, seed: str) -> list[Due]:
    """Requests behind the one prefix, alike for all engines, all due at once."""
    prefix = shapes.token_ids(random.Random("prefix"), PREFIX_TOKENS)
    rng = random.Random(f"{seed}, {n_tokens}")
    return [Due(0.0, [*prefix, *shapes.token_ids(rng, n_tokens)]) for _ in range(n_hits)]


def check_hits(outcomes: Sequence[Outcome], name: str) -> None:
    """Raises InvalidRunError unless each request found the whole prefix; page sizes may cost some tokens of it."""
    if missed := [one for one in outcomes if one.cached_tokens < 0.98 * PREFIX_TOKENS]:
        raise report.InvalidRunError(
            f"{name}: {len(missed)} of {len(outcomes)} requests were no hits: {missed[0].cached_tokens} of {PREFIX_TOKENS}"
            " tokens were cached"
        )


def passes_of(server: engines.Running) -> Passes:
    reply = requests.get(f"{server.url}/metrics", timeout=60)
    if reply.status_code != 200:
        raise report.InvalidRunError(f"/metrics answers {reply.status_code}")
    return passes_in(reply.text)


def saved_tokens_of(server: engines.Running) -> int:
    """Cached positions that GPU steps read once instead of once a request; 0 where the server does not count them."""
    reply = requests.get(f"{server.url}/server_info", timeout=60)
    if reply.status_code != 200:
        raise report.InvalidRunError(f"/server_info answers {reply.status_code}")
    return int(reply.json()["internal_states"][0].get(COUNTS_KEY, {}).get("saved_tokens", 0))


def passes_in(metrics: str) -> Passes:
    """Sums SGLang's counter of forward passes by what ran them. A mode that has not occurred has no line."""
    counts = {"prefill_cuda_graph": 0.0, "prefill_none": 0.0}
    for labels, value in re.findall(r"^sglang:cuda_graph_passes_total\{(.*)\} (\S+)", metrics, re.M):
        mode = re.search(r'mode="(\w+)"', labels)
        if mode is not None and mode.group(1) in counts:
            counts[mode.group(1)] += float(value)
    return Passes(*map(int, counts.values()))


def medians(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each length of suffix, in the shape of a table."""
    made = []
    for n_tokens in dict.fromkeys(row["suffix_tokens"] for row in rows):
        of_length = [row for row in rows if row["suffix_tokens"] == n_tokens]
        figures = {
            name: statistics.median(row[name] for row in of_length)
            for name in ("requests_per_s", "steps", "replayed_share", "saved_tokens")
        }
        made.append({"engine": of_length[0]["engine"], "suffix_tokens": n_tokens, **figures})
    return made


def check_agreement(measured: dict[str, dict[str, Any]]) -> None:
    """Raises InvalidRunError where two engines answer one request differently."""
    first: dict[tuple[int, int], list[list[float]]] = {}
    for name, one in measured.items():
        answers: list[list[float]] = []
        expected: list[list[float]] = []
        for row in one["rows"]:
            answers += row["logprobs"]
            expected += first.setdefault((row["suffix_tokens"], row["number"]), row["logprobs"])
        client.check_agreement(answers, expected, engines.MAX_LOGPROB_DIFFERENCE, name)


def targets_of(measured: dict[str, dict[str, Any]]) -> list[report.Target]:
    """Ratios of the measured settings, and whether graphs were replayed wherever a gain is put down to them."""
    found = {(row["engine"], row["suffix_tokens"]): row for one in measured.values() for row in one["means"]}
    targets = []
    for mine, theirs, expected in RATIOS:
        for n_tokens, least in zip(SUFFIXES_TOKENS, expected, strict=True):
            if (mine.name, n_tokens) in found and (theirs.name, n_tokens) in found:
                ratio = found[mine.name, n_tokens]["requests_per_s"] / found[theirs.name, n_tokens]["requests_per_s"]
                name = f"hits of {n_tokens} tokens a second, {mine.name} / {theirs.name}"
                targets.append(report.Target.at_least(name, ratio, least))
    if shapes.HAS_CUDA:
        # A gain that is put down to shared prefixes while none was attended together would be seen.
        targets += [
            report.Target.at_least(f"hits of {n_tokens} tokens, {name}: tokens not read again", row["saved_tokens"], 1)
            for (name, n_tokens), row in found.items()
            if name == TOGETHER.name
        ]
        targets += [
            report.Target.at_least(
                f"hits of {n_tokens} tokens, {name}: share of steps that a CUDA graph replayed",
                row["replayed_share"],
                LEAST_REPLAYED,
            )
            for (name, n_tokens), row in found.items()
            if name == SINGLE.name
        ]
    return targets


def write(
    path: Path | None,
    conditions: dict[str, Any],
    measured: dict[str, dict[str, Any]],
    targets: list[report.Target],
) -> None:
    """The rows without their log-probabilities, which were compared."""
    conditions["commands"] = {name: one["command"] for name, one in measured.items() if "command" in one}
    result = {
        "conditions": conditions,
        "activation_records": {name: one.get("record") for name, one in measured.items()},
        "means": [row for one in measured.values() for row in one["means"]],
        "failed": [{"engine": name, "failed": one["failed"]} for name, one in measured.items() if "failed" in one],
        "rounds": [
            {key: value for key, value in row.items() if key != "logprobs"}
            for one in measured.values()
            for row in one["rows"]
        ],
    }
    report.finish(result, targets, path)


if __name__ == "__main__":
    sys.exit(main())
