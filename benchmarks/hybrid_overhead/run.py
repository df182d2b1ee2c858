"""What does hybrid prefilling cost, and what does it gain over chunked prefill?

    python benchmarks/hybrid_overhead/run.py [--quick] [--json PATH]

One cold prompt after the other on six servers in turn: ours with hybrid prefilling, ours without (the same request
unchunked), and stock SGLang with chunks of 512 to 4,096. See the README beside this file.
"""

from __future__ import annotations

import os
import random
import statistics
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
PROMPT_TOKENS, QUICK_TOKENS = 16_000, 2_000
N_PROMPTS = 5
CHUNKS = (512, 1024, 2048, 4096)
ENGINES = {
    "hybrid": ("sgl_prefill.launch_server", ["--hybrid-prefill", "on"]),
    "unchunked": ("sgl_prefill.launch_server", ["--hybrid-prefill", "off"]),
    **{f"stock, chunks of {n}": ("sglang.launch_server", ["--chunked-prefill-size", str(n)]) for n in CHUNKS},
}


def main() -> int:
    arguments = report.arguments(__doc__, Path(__file__).with_name("result.json"))
    n_tokens, n_prompts = (QUICK_TOKENS, 1) if arguments.quick else (PROMPT_TOKENS, N_PROMPTS)
    conditions = {**report.conditions(), "model": MODEL, "prompt_tokens": n_tokens, "prompts": n_prompts}
    rows: list[dict[str, Any]] = []
    records: dict[str, dict[str, Any] | None] = {}
    conditions["commands"] = {}
    kept = Kept(arguments.json, f"{conditions['commit']}, {conditions['command']}")
    with tempfile.TemporaryDirectory() as name:
        model_flags = shapes.dummy_flags(shapes.write(MODEL, Path(name) / "model"))
        # A device may hold the weights once only: there one engine comes after the other.
        for together in [[one] for one in ENGINES] if shapes.HAS_CUDA else [list(ENGINES)]:
            if (group := ", ".join(together)) not in kept:
                kept[group] = measured(together, model_flags, n_tokens, n_prompts, Path(name))
            rows += kept[group]["rows"]
            records |= kept[group]["records"]
            conditions["commands"] |= kept[group]["commands"]
    check(rows, records)
    report.finish(
        {"conditions": conditions, "activation_records": records, "rows": rows}, targets_of(rows), arguments.json
    )
    kept.forget()
    return 0


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
    module, flags = ENGINES[name]
    print(f"starting {name}", file=sys.stderr)
    common = [*model_flags, "--disable-overlap-schedule", "--sleep-on-idle", "--max-running-requests", "4"]
    budget = ["--max-input-length", str(n_tokens), *shapes.budget(6)]
    if not module.startswith("sgl_prefill"):
        budget = shapes.stock_budget()
    # As the comparisons do it (harness/engines.py): threads that spin take the cores from the HTTP process.
    environment = {"OMP_NUM_THREADS": os.environ["OMP_NUM_THREADS"], **engines.QUIET}
    log = folder / f"{name.replace(' ', '-')}.log"
    return local_server.running(module, [*common, *flags, *budget], log, environment=environment)


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
    switches = {name: record and record["config"]["hybrid_prefill"] for name, record in records.items()}
    if switches != {**dict.fromkeys(ENGINES), "hybrid": "on", "unchunked": "off"}:
        raise report.InvalidRunError(f"the servers are not the ones that were asked for: {switches}")
    if any(row["cached_tokens"] for row in rows):
        raise report.InvalidRunError("a prompt was not cold")
    for number in {row["number"] for row in rows}:
        answers = [row["logprobs"] for row in rows if row["number"] == number]
        for answer in answers[1:]:
            if max(abs(a - b) for a, b in zip(answers[0], answer, strict=True)) > MAX_LOGPROB_DIFFERENCE:
                raise report.InvalidRunError(f"the engines disagree on prompt {number}: {answers}")


def targets_of(rows: list[dict[str, Any]]) -> list[report.Target]:
    def ratio(other: str) -> float:
        """Median over the prompts of other's seconds over hybrid's, prompt by prompt."""
        seconds = {(row["number"], row["engine"]): row["seconds"] for row in rows}
        numbers = sorted({row["number"] for row in rows})
        return float(statistics.median(seconds[number, other] / seconds[number, "hybrid"] for number in numbers))

    of_chunks = {n: ratio(f"stock, chunks of {n}") for n in CHUNKS}
    return [
        report.Target.at_least("throughput, hybrid / the same request unchunked", ratio("unchunked"), 0.97),
        *(
            report.Target.at_least(f"throughput, hybrid / stock SGLang with chunks of {n}", value, 1.10)
            for n, value in of_chunks.items()
        ),
        report.Target.at_least(
            "throughput, hybrid / stock SGLang at its best chunk size", min(of_chunks.values()), 1.10
        ),
    ]


if __name__ == "__main__":
    sys.exit(main())
