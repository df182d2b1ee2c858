"""How much does our CPU attention backend gain over SGLang's torch_native, and how near is it to the machine's ceiling?

    python benchmarks/cpu_attention/run.py [--quick] [--json PATH]

Two stock SGLang servers with the same random-weight Llama, one with `cpu_flash` (ours), one with `torch_native`, asked
in turn. Times are those of whole HTTP requests. See the README beside this file.
"""

from __future__ import annotations

import os
import random
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "2")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import requests
import torch

from benchmarks import ceiling, report, shapes
from benchmarks.cpu_attention import kernels
from benchmarks.harness import engines as harness
from sgl_prefill.entry import local_server

MODEL = "llama-6-layers"
HIDDEN, MLP, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 1024, 4096, 6, 16, 4, 64
LABEL_IDS = [100, 200, 300]
# Both run the same bfloat16 arithmetic in another order; observed differences stay far below this.
MAX_LOGPROB_DIFFERENCE = 0.25


class Lengths(NamedTuple):
    """Tokens and repeats of the two questions."""

    cold: int = 16_000
    prefix: int = 16_000
    suffix: int = 200
    n_cold: int = 3
    n_suffix: int = 7


QUICK = Lengths(cold=2_000, prefix=2_000, suffix=200, n_cold=1, n_suffix=2)


def main() -> int:
    arguments = report.arguments(__doc__, Path(__file__).with_name("result.json"))
    lengths = QUICK if arguments.quick else Lengths()
    conditions = {**report.conditions(), "model": shapes.config(MODEL), "lengths": lengths._asdict()}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        flags = shapes.dummy_flags(shapes.write(MODEL, folder / "model"))
        flags += ["--max-total-tokens", "40000", "--mem-fraction-static", "0.4", "--chunked-prefill-size", "-1"]
        flags += ["--disable-overlap-schedule", "--sleep-on-idle", "--max-running-requests", "4"]
        engines = {}
        for name, module, more in (
            ("ours", "sgl_prefill.launch_server", []),
            ("torch_native", "sglang.launch_server", ["--attention-backend", "torch_native"]),
        ):
            print(f"starting {name}", file=sys.stderr)
            environment = {"OMP_NUM_THREADS": os.environ["OMP_NUM_THREADS"]}
            if name == "torch_native":  # as a user gets it
                environment[harness.KERNEL_VARIABLE] = harness.AS_SHIPPED.kernel
            options: dict[str, Any] = {"environment": environment}
            engines[name] = stack.enter_context(
                local_server.running(module, [*flags, *more], folder / f"{name}.log", **options)
            )
        record = check_engines(engines)
        rows = measure(engines, lengths)
        conditions["commands"] = {name: report.portable(engine.command) for name, engine in engines.items()}
    check_agreement(rows)
    measured = measure_ceiling(lengths.cold)
    alone = kernels.measure(arguments.quick)
    targets = [*targets_of(rows, measured, lengths), *kernels.targets_of(alone)]
    report.finish(
        {
            "conditions": conditions,
            "activation_record": record,
            "ceiling": measured,
            "kernel_alone": alone,
            "rows": rows,
        },
        targets,
        arguments.json,
    )
    return 0


def check_engines(engines: dict[str, local_server.LocalServer]) -> dict[str, Any]:
    """Raises InvalidRunError where an engine is not the one that it is taken for."""
    info = {name: requests.get(f"{engine.url}/server_info", timeout=60).json() for name, engine in engines.items()}
    record = info["ours"].get("sgl_prefill")
    if record is None or "sgl_prefill" in info["torch_native"]:
        raise report.InvalidRunError("the activation record is missing, or stock SGLang has one")
    if info["ours"]["attention_backend"] != "cpu_flash":
        raise report.InvalidRunError("our server does not run the cpu_flash attention backend")
    if info["torch_native"]["attention_backend"] != "torch_native":
        raise report.InvalidRunError("the stock server does not run torch_native")
    harness.check_kernel(harness.OURS, record, [])
    return dict(record)


def measure(engines: dict[str, local_server.LocalServer], lengths: Lengths) -> list[dict[str, Any]]:
    """The engines in turn, request by request, so that a slow minute of the machine hits both."""
    rng = random.Random(0)
    prefix = shapes.token_ids(rng, lengths.prefix)
    plan = [("cold", shapes.token_ids(rng, lengths.cold)) for _ in range(lengths.n_cold)]
    plan += [("prefix", prefix)]
    plan += [("suffix", [*prefix, *shapes.token_ids(rng, lengths.suffix)]) for _ in range(lengths.n_suffix)]
    for engine in engines.values():
        ask(engine, shapes.token_ids(rng, 64))  # warm-up: first-use allocations and kernels
    rows = []
    for number, (kind, prompt) in enumerate(plan):
        names = list(engines) if number % 2 == 0 else list(reversed(engines))
        for name in names:
            row = {"kind": kind, "number": number, "engine": name, **ask(engines[name], prompt)}
            rows.append(row)
            done = len(rows) / (len(plan) * len(engines))
            print(
                f"{done:4.0%}  {kind:6} {name:12} {row['seconds']:7.2f} s, {row['cached_tokens']} cached",
                file=sys.stderr,
            )
    return rows


def ask(engine: local_server.LocalServer, prompt: list[int]) -> dict[str, Any]:
    """One prefill-only request through SGLang's own fields, which both engines have."""
    body: dict[str, Any] = {
        "input_ids": prompt,
        "sampling_params": {"max_new_tokens": 0, "temperature": 0},
        "return_logprob": True,
        "token_ids_logprob": LABEL_IDS,
    }
    started = time.perf_counter()
    reply = requests.post(f"{engine.url}/generate", json=body, timeout=1800)
    seconds = time.perf_counter() - started
    if reply.status_code != 200:
        raise report.InvalidRunError(f"a request failed with {reply.status_code}: {reply.text[:300]}")
    meta = reply.json()["meta_info"]
    logprobs = [entry[0] for entry in meta["output_token_ids_logprobs"][0]]
    return {"seconds": seconds, "cached_tokens": meta["cached_tokens"], "logprobs": logprobs}


def check_agreement(rows: list[dict[str, Any]]) -> None:
    """The engines answered alike, and each suffix request really found its prefix. Raises InvalidRunError."""
    by_number: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        by_number.setdefault(row["number"], []).append(row)
    for first, second in by_number.values():
        if first["cached_tokens"] != second["cached_tokens"]:
            raise report.InvalidRunError(f"the engines reused different numbers of tokens: {first}, {second}")
        difference = max(abs(a - b) for a, b in zip(first["logprobs"], second["logprobs"], strict=True))
        if difference > MAX_LOGPROB_DIFFERENCE:
            raise report.InvalidRunError(f"the engines disagree by {difference} in a log-probability")


def flops(n_tokens: int) -> dict[str, float]:
    """Counts the operations of one cold prompt: every matrix product of the layers, and causal attention (half of the square)."""
    per_token = 2 * (HIDDEN * (HEADS + 2 * KV_HEADS) * HEAD_DIM + HEADS * HEAD_DIM * HIDDEN + 3 * HIDDEN * MLP)
    return {
        "linear": float(LAYERS * per_token * n_tokens),
        "attention": float(LAYERS * 2 * n_tokens * n_tokens * HEADS * HEAD_DIM),
    }


def measure_ceiling(n_tokens: int) -> dict[str, float]:
    """Measures what this machine reaches alone: the rate of its matrix products, which attention is held against too."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    rate = ceiling.matrix_product_flop_per_s("bfloat16")
    work = flops(n_tokens)
    return {
        "matrix_product_flop_per_s": rate,
        **{f"cold_prompt_{part}_seconds": flop / rate for part, flop in work.items()},
    }


def targets_of(rows: list[dict[str, Any]], measured: dict[str, float], lengths: Lengths) -> list[report.Target]:
    def median_s(kind: str, engine: str) -> float:
        return float(
            statistics.median(row["seconds"] for row in rows if (row["kind"], row["engine"]) == (kind, engine))
        )

    achieved = sum(flops(lengths.cold).values()) / median_s("cold", "ours")
    suffix = f"{lengths.suffix}-token suffix behind {lengths.prefix} cached tokens"
    cold = f"cold prompt of {lengths.cold} tokens"
    return [
        report.Target.at_least(
            f"{suffix}: torch_native / ours, seconds",
            median_s("suffix", "torch_native") / median_s("suffix", "ours"),
            60,
        ),
        report.Target.at_least(
            f"{cold}: torch_native / ours, seconds", median_s("cold", "torch_native") / median_s("cold", "ours"), 2.2
        ),
        report.Target.at_least(
            f"{cold}: achieved FLOP/s over the measured ceiling", achieved / measured["matrix_product_flop_per_s"], 0.7
        ),
    ]


if __name__ == "__main__":
    sys.exit(main())
