"""What does hybrid prefilling cost, and what does it gain over chunked prefill, with the same kernels and weights?

    python benchmarks/hybrid/run.py [--quick] [--json PATH]       # BENCH_PARTS="longest": this part alone

One cold prompt after the other on servers of this package that take turns: in one hybrid pass, in one pass whose chunk is the
whole prompt, and with SGLang's chunked prefill. See the README beside this file.
"""

from __future__ import annotations

import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "2")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import requests

from benchmarks import report, shapes
from benchmarks.cpu_attention.run import MAX_LOGPROB_DIFFERENCE, ask
from benchmarks.harness import engines
from benchmarks.harness.kept import Kept
from sgl_prefill.entry import local_server

MODEL = shapes.DEVICE_MODEL if shapes.HAS_CUDA else "llama-6-layers"
PROMPT_TOKENS, QUICK_TOKENS = 8_000, 2_000
N_PROMPTS = 5
INITIALIZER_RANGE = 0.05
CHUNKS = (512, 2048)
HYBRID, UNCHUNKED = "hybrid", "unchunked"
WHOLE = ("--set", "hybrid_chunk_tokens=1000000")
STEPWISE = ("--hybrid-prefill", "on", "--scheduling", "stock", "--suffix-kv", "keep")
ENGINES = {
    HYBRID: ("--hybrid-prefill", "on"),
    UNCHUNKED: ("--hybrid-prefill", "on", *WHOLE),
    # A request of several steps needs SGLang's scheduler and keeps its KV.
    **{f"chunks of {n}": (*STEPWISE, "--chunked-prefill-size", str(n)) for n in CHUNKS},
}
# One request at a time is never chosen from others, and the answers are compared here.
QUICK_START = ("--set", "skip_parity_gate=true", "--set", "jct_model=cache-miss")
WITHOUT = ("not-preallocated", "not-in-place")
MIL_BUDGET = ("--memory-budget-gb", "1")


def throughput(quick: bool) -> dict[str, Any]:
    """One cold prompt after the other, on servers that take turns."""
    n_tokens, n_prompts = (QUICK_TOKENS, 1) if quick else (PROMPT_TOKENS, N_PROMPTS)
    place = report.beside(__file__, "throughput", quick=quick)
    kept = Kept(place.json, report.conditions()["commit"])
    rows: list[dict[str, Any]] = []
    records: dict[str, dict[str, Any] | None] = {}
    commands: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory() as name:
        model_flags = flags_of_model(shapes.write(MODEL, Path(name) / "model"))
        # A device may hold the weights once only: there one engine comes after the other.
        for together in [[one] for one in ENGINES] if shapes.HAS_CUDA else [list(ENGINES)]:
            if (group := ", ".join(together)) not in kept:
                kept[group] = measured(together, model_flags, n_tokens, n_prompts, Path(name))
            rows += kept[group]["rows"]
            records |= kept[group]["records"]
            commands |= kept[group]["commands"]
    check(rows, records)
    kept.forget()
    conditions = {"model": MODEL, "prompt_tokens": n_tokens, "prompts": n_prompts, "commands": commands}
    return report.part(rows, ratios(rows), conditions=conditions)


def longest(quick: bool) -> dict[str, Any]:
    """What `python -m sgl_prefill.mil` measures as the longest input in one GiB, weights included, whatever the model allows."""
    variants = {HYBRID: "whole", UNCHUNKED: "whole", **{one: one for one in WITHOUT}}
    rows: list[dict[str, Any]] = []
    commands = {}
    with tempfile.TemporaryDirectory() as name:
        model_flags = flags_of_model(shapes.write(MODEL, Path(name) / "model"))
        for engine in () if quick else variants:  # minutes each
            flags = [*model_flags, *ENGINES.get(engine, ENGINES[HYBRID]), *MIL_BUDGET]
            command = [sys.executable, "-m", "benchmarks.hybrid.variants", variants[engine], *flags]
            # Profiles that are kept there are not known by the variant.
            environment = {**os.environ, "XDG_CACHE_HOME": str(Path(name) / engine)}
            done = subprocess.run(
                command, cwd=report.REPOSITORY, env=environment, capture_output=True, text=True, check=False
            )
            said = re.search(r"by memory: (\d+)", done.stdout)
            if done.returncode != 0 or said is None:
                raise report.InvalidRunError(f"{report.portable(command)}:\n{done.stderr[-2000:]}")
            plan = done.stdout.splitlines()[:-2]
            rows.append({"engine": engine, "longest_input_tokens": int(said[1]), "plan": plan})
            commands[engine] = report.portable(command)
            print(f"{engine}: {said[1]} tokens", file=sys.stderr)
    tokens = {row["engine"]: row["longest_input_tokens"] for row in rows}
    targets = [
        report.Target.at_least(f"longest input in 1 GiB, hybrid / {name}", tokens[HYBRID] / tokens[name], least)
        for name, least in ((UNCHUNKED, 2.0), *((one, 1.1) for one in WITHOUT))
        if not quick
    ]
    return report.part(rows, targets, conditions={"model": MODEL, "commands": commands})


def flags_of_model(folder: Path) -> list[str]:
    if shapes.HAS_CUDA:
        return shapes.dummy_flags(folder)
    shapes.write_weights(folder, INITIALIZER_RANGE)
    return shapes.weight_flags(folder, shapes.DTYPE)


def measured(
    together: list[str], model_flags: list[str], n_tokens: int, n_prompts: int, folder: Path
) -> dict[str, Any]:
    """Asks these engines in turn, each on a server that stays up."""
    with ExitStack() as stack:
        servers = {one: stack.enter_context(serving(one, model_flags, n_tokens, folder)) for one in together}
        return {
            "records": {one: record_of(server) for one, server in servers.items()},
            "rows": measure(servers, n_tokens, n_prompts),
            "commands": {one: report.portable(server.command) for one, server in servers.items()},
        }


def serving(
    name: str, model_flags: list[str], n_tokens: int, folder: Path
) -> AbstractContextManager[local_server.LocalServer]:
    print(f"starting {name}", file=sys.stderr)
    flags = [*model_flags, "--sleep-on-idle", "--max-running-requests", "4", "--max-input-length", str(n_tokens)]
    # As the comparisons do it (harness/engines.py): threads that spin take the cores from the HTTP process.
    environment = {"OMP_NUM_THREADS": os.environ["OMP_NUM_THREADS"], **engines.QUIET}
    flags += [*ENGINES[name], *shapes.budget(6), *QUICK_START]
    log = folder / f"{name.replace(' ', '-')}.log"
    return local_server.running("sgl_prefill.launch_server", flags, log, environment=environment)


def record_of(server: local_server.LocalServer) -> dict[str, Any] | None:
    record: dict[str, Any] | None = requests.get(f"{server.url}/server_info", timeout=60).json().get("sgl_prefill")
    return record


def measure(servers: dict[str, local_server.LocalServer], n_tokens: int, n_prompts: int) -> list[dict[str, Any]]:
    """The servers in turn, prompt by prompt, in changing order: a slow minute of the machine hits all."""
    for server in servers.values():
        ask(server, shapes.token_ids(random.Random(1), 2000))  # warm-up: longer than a chunk
    rng = random.Random(0)
    rows: list[dict[str, Any]] = []
    for number in range(n_prompts):
        prompt = shapes.token_ids(rng, n_tokens)
        names = list(servers)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            rows.append({"number": number, "engine": name, **ask(servers[name], prompt)})
            done = len(rows) / (n_prompts * len(servers))
            print(f"{done:4.0%}  {name:22} {rows[-1]['seconds']:7.2f} s", file=sys.stderr)
    return rows


def check(rows: list[dict[str, Any]], records: dict[str, dict[str, Any] | None]) -> None:
    """Raises InvalidRunError unless each engine runs as configured, every prompt was cold, and all answers agree."""
    modes = {name: record and record["config"]["hybrid_prefill"] for name, record in records.items()}
    if modes != dict.fromkeys(ENGINES, "on"):
        raise report.InvalidRunError(f"the servers are not the ones that were asked for: {modes}")
    if any(row["cached_tokens"] for row in rows):
        raise report.InvalidRunError("a prompt was not cold")
    for number in {row["number"] for row in rows}:
        answers = [row["logprobs"] for row in rows if row["number"] == number]
        for answer in answers[1:]:
            if max(abs(a - b) for a, b in zip(answers[0], answer, strict=True)) > MAX_LOGPROB_DIFFERENCE:
                raise report.InvalidRunError(f"the engines disagree on prompt {number}: {answers}")


def ratios(rows: list[dict[str, Any]]) -> list[report.Target]:
    def ratio(one: str, other: str) -> float:
        """Median over the prompts of other's seconds over one's, prompt by prompt."""
        seconds = {(row["number"], row["engine"]): row["seconds"] for row in rows}
        numbers = sorted({row["number"] for row in rows})
        return float(statistics.median(seconds[number, other] / seconds[number, one] for number in numbers))

    targets = [report.Target.at_least("throughput, hybrid / unchunked", ratio(HYBRID, UNCHUNKED), 0.97)]
    for n in CHUNKS:
        targets += [
            report.Target.at_least(f"throughput, hybrid / chunks of {n}", ratio(HYBRID, f"chunks of {n}"), 1.0),
            report.Target.at_least(f"throughput, chunks of {n} / unchunked", ratio(f"chunks of {n}", UNCHUNKED), 0.86),
        ]
    return targets


PARTS = {"throughput": throughput} if shapes.HAS_CUDA else {"throughput": throughput, "longest": longest}

if __name__ == "__main__":
    sys.exit(report.in_parts(__doc__, Path(__file__), PARTS))
