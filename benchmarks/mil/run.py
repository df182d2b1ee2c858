"""How long an input can each engine serve in 256 MiB beyond the weights? On a GPU: in the memory of the paper's devices?

    python benchmarks/mil/run.py [--quick] [--json PATH]

Stock SGLang, chunked and unchunked; our engine, whole and without one or both of its techniques. See the README beside this.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "2")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import psutil
import requests
import torch

from benchmarks import process_memory, report, shapes
from benchmarks.harness.kept import Kept
from sgl_prefill.entry import local_server
from sgl_prefill.errors import ServerStartError

BUDGET_BYTES = 256 << 20
MODELS = (shapes.DEVICE_MODEL,) if shapes.HAS_CUDA else ("llama-3.1-8b-quarter", "llama-3.3-70b-quarter")
# The paper's devices for these models: L4, A100 40 GB, H100 80 GB (its Table 2).
DEVICE_GIB = {"llama-3.1-8b": 24, "qwen-32b-fp8": 40, "llama-3.3-70b-fp8": 80}
DEVICE_POSITIONS = 1 << 20  # a larger rotary table than the models have: memory is to be the limit, not they
LEAST_OF_CARD = 0.95  # of the size that a card is sold by
# Nothing is decoded here, and a start is shorter without those graphs.
DEVICE_FLAGS = ("--disable-decode-cuda-graph",)
# For stock: its default depends on the size of the whole device, which it takes for larger than it is here. Ours measures.
STOCK_FLAGS = ("--mem-fraction-static", "0.88")
DEVICE_TRIES, DEVICE_STEP = 4, 0.75
MARGIN_TOKENS = 16
# A server that does not start, refuses, ends, or leaves no memory for the input.
FAILURES = (ServerStartError, report.InvalidRunError, requests.RequestException)
STOCK_CHUNKS = (512,) if shapes.HAS_CUDA else (256, 512)
STOCK_MEMORY = ["--max-total-tokens", "20000", "--mem-fraction-static", "0.5"]
FIRST_TOKENS = 2048
CLOSE_ENOUGH = 0.05  # of the budget, from above or below; equal lengths on two servers differ by some per cent
MAX_SEARCH_STEPS = 5
LARGEST_STEP = 3.0  # from one length to the next: memory is not quite linear
QUICK_TOKENS = 1000
# The input of an ablation is watched for as long as this; then its memory has repeated layer by layer for a while. What the
# product serves is waited for to its end.
WATCH_S = 120.0
ANSWER_S = 3600.0
PRODUCT = "ours"  # no flag: both techniques, and the chunk size that is measured at start
# Bfloat16, in one pass and in chunks, of 32 layers. With weights as large as those of the other benchmarks, of 4 layers, bfloat16
# alone would move answers by more, so that the gate at start would refuse to serve.
MAX_LOGPROB_DIFFERENCE = 0.5
INITIALIZER_RANGE = 0.04
# The ablation, and the search for stock's best chunk size, are made on the first model alone.
RATIO_ENGINES = (f"stock, chunks of {STOCK_CHUNKS[0]}", "stock, unchunked", PRODUCT)


class Engine(NamedTuple):
    """One way to serve."""

    name: str
    module: str
    flags: tuple[str, ...]

    @property
    def is_ours(self) -> bool:
        return self.module.startswith("sgl_prefill")


def engines() -> list[Engine]:
    stock = "sglang.launch_server"
    ours = "sgl_prefill.launch_server"
    return [
        *(Engine(f"stock, chunks of {n}", stock, ("--chunked-prefill-size", str(n))) for n in STOCK_CHUNKS),
        Engine("stock, unchunked", stock, ("--chunked-prefill-size", "-1")),
        Engine("ours, neither", ours, ("--hybrid-prefill", "off", "--suffix-kv", "keep")),
        Engine("ours, eviction only", ours, ("--hybrid-prefill", "off", "--suffix-kv", "evict")),
        Engine("ours, hybrid only", ours, ("--hybrid-prefill", "on", "--suffix-kv", "keep")),
        Engine(PRODUCT, ours, ()),
    ]


def main() -> int:
    arguments = report.arguments(__doc__, Path(__file__).with_name("result.json"))
    conditions = report.conditions()
    if shapes.HAS_CUDA:
        conditions["device_gib"] = {model: DEVICE_GIB.get(model) for model in MODELS}
    else:
        conditions["budget_mib"] = BUDGET_BYTES >> 20
    kept = Kept(arguments.json, f"{conditions['commit']}, {conditions['command']}")  # a run takes most of an hour
    rows: list[dict[str, Any]] = []
    try:
        for model in MODELS[: 1 if arguments.quick else None]:
            for engine in engines():
                # On a device, which is lent for minutes, there is no ablation.
                is_ablation = engine.name not in RATIO_ENGINES
                if is_ablation and (arguments.quick or shapes.HAS_CUDA or model != MODELS[0]):
                    continue
                name, started = f"{model}, {engine.name}", time.monotonic()
                if name not in kept:
                    kept[name] = (
                        measure_on_device(model, engine) if shapes.HAS_CUDA else measure(model, engine, arguments.quick)
                    )
                rows.append({"model": model, "engine": engine.name, **kept[name]})
                print(f"{json.dumps(rows[-1])}\n{time.monotonic() - started:.0f} s", file=sys.stderr)
    except SystemExit:  # `timeout`: what there is, where there is no result yet
        if arguments.json is not None and not arguments.json.exists():
            report.finish({"conditions": conditions, "rows": rows}, [], arguments.json)
        raise
    report.finish({"conditions": conditions, "rows": rows}, targets_of(rows), arguments.json)
    kept.forget()
    return 0


@contextmanager
def only(gib: int | None) -> Iterator[float]:
    """Hold memory of the CUDA device so that other processes see one of `gib` GiB, or of all free memory if that is less.

    Yields the GiB that are left.
    """
    free_bytes, _ = torch.cuda.mem_get_info()
    held_bytes = 0 if gib is None else bytes_to_hold(free_bytes, gib)
    held = torch.empty(held_bytes, dtype=torch.uint8, device="cuda")
    try:
        yield (free_bytes - held_bytes) / 2**30
    finally:
        del held
        torch.cuda.empty_cache()


def bytes_to_hold(free_bytes: int, gib: int) -> int:
    """The bytes to allocate so that `gib` GiB are left; 0 where a card of that size has a little less free.

    Raises InvalidRunError where it has much less: a card sold as one of 80 GB shows 79.2 to 79.7 GiB, and its driver takes some.
    """
    if free_bytes < LEAST_OF_CARD * (gib << 30):
        raise report.InvalidRunError(
            f"{free_bytes / 2**30:.1f} GiB of the device are free, and {gib} are wanted: another program holds the rest, or"
            " BENCH_MODELS names a model for a larger card"
        )
    return max(0, free_bytes - (gib << 30))


def measure(model: str, engine: Engine, is_quick: bool) -> dict[str, Any]:
    """The longest input within the budget, and how it was served."""
    with tempfile.TemporaryDirectory() as name:
        folder = shapes.write(model, Path(name))
        # Its answers are compared; the other model's weights are too large to be written here.
        if is_checked := model == MODELS[0] and engine.name == PRODUCT:
            shapes.write_weights(folder, INITIALIZER_RANGE)
        if engine.is_ours:
            budget = ["--memory-budget-gb", f"{(weight_bytes(model) + BUDGET_BYTES) / 2**30:.5f}"]
            predicted, how = ask_mil(engine, folder, budget)
            length = min(QUICK_TOKENS, predicted) if is_quick else predicted
            limit_s = ANSWER_S if engine.name == PRODUCT else WATCH_S
            served = serve(engine, folder, [*budget, "--max-input-length", str(length)], length, limit_s)
            if is_checked and served["answered"]:
                served["difference"] = difference_from_stock(folder, length, served["logprobs"])
        else:
            tries = search_stock(engine, folder, MAX_SEARCH_STEPS if not is_quick else 0)
            predicted, how, served = longest_within(tries), {"tries": tries}, tries[-1]
    return {"longest_input_tokens": predicted, "how": how, "served": served}


def difference_from_stock(folder: Path, n_tokens: int, logprobs: list[float]) -> float:
    """The largest, in a log-probability, from what stock SGLang answers in one pass with as much memory as it likes."""
    (unchunked,) = [one for one in engines() if one.name == "stock, unchunked"]
    memory = ["--max-total-tokens", str(n_tokens + FIRST_TOKENS), "--mem-fraction-static", "0.7"]
    with running(unchunked, folder, memory) as server:
        answer = ask(server, n_tokens, ANSWER_S)
    if answer is None:
        raise report.InvalidRunError(f"stock SGLang has not answered {n_tokens} tokens in {ANSWER_S:.0f} s")
    return max(abs(mine - theirs) for mine, theirs in zip(logprobs, logprobs_of(answer), strict=True))


def measure_on_device(model: str, engine: Engine) -> dict[str, Any]:
    """Does the same where the memory left by `only` is the budget. No answer at all is a result: None."""
    with tempfile.TemporaryDirectory() as name, only(DEVICE_GIB.get(model)) as left_gib:
        folder = shapes.write(model, Path(name))
        (folder / "config.json").write_text(
            json.dumps({**shapes.config(model), "max_position_embeddings": DEVICE_POSITIONS})
        )
        try:
            if engine.is_ours:
                predicted, how = ask_mil(engine, folder, [])
                predicted = min(predicted, DEVICE_POSITIONS - MARGIN_TOKENS)
            else:
                with running(engine, folder, []) as server:
                    predicted = pool_tokens(server)
                how = {"max_total_num_tokens": predicted}

            def serve_one(n_tokens: int) -> dict[str, Any]:
                flags = ["--max-input-length", str(n_tokens)] if engine.is_ours else []
                return serve(engine, folder, flags, n_tokens, WATCH_S)

            # What the engine says, if it fits, or a shorter one.
            served = first_that_fits(serve_one, predicted)
        except FAILURES as error:
            how, served = {"failed": str(error)[-500:]}, None
    longest = None if served is None else served["tokens"]
    return {"longest_input_tokens": longest, "how": how, "served": served, "gib_free": round(left_gib, 1)}


def first_that_fits(serve: Callable[[int], dict[str, Any]], n_tokens: int) -> dict[str, Any]:
    """Finds the first that fits of inputs each 3/4 as long as the last. Raises the last failure where the server ends or
    refuses at all of them."""
    for _ in range(DEVICE_TRIES - 1):
        try:
            return serve(n_tokens)
        except FAILURES as error:
            print(f"{n_tokens} tokens: {error}", file=sys.stderr)
        n_tokens = int(n_tokens * DEVICE_STEP)
    return serve(n_tokens)


def weight_bytes(model: str) -> int:
    """Parameters of a Llama in bfloat16, and the rotary table that SGLang keeps for every position."""
    config = shapes.config(model)
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    kv_heads, head_dim = config["num_key_value_heads"], config["head_dim"]
    attention = hidden * head_dim * (heads + 2 * kv_heads) + heads * head_dim * hidden
    layer = attention + 3 * hidden * config["intermediate_size"] + 2 * hidden
    embeddings = (1 if config["tie_word_embeddings"] else 2) * config["vocab_size"] * hidden + hidden
    rotary = config["max_position_embeddings"] * head_dim
    return int(2 * (config["num_hidden_layers"] * layer + embeddings + rotary))


def common_flags(engine: Engine, folder: Path) -> list[str]:
    return [
        *(shapes.weight_flags(folder) if list(folder.glob("*.safetensors")) else shapes.dummy_flags(folder)),
        "--sleep-on-idle",
        "--max-running-requests",
        "4",
        "--disable-overlap-schedule",
        "--watchdog-timeout",
        "7200",
        *(DEVICE_FLAGS if shapes.HAS_CUDA else ()),
        *(STOCK_FLAGS if shapes.HAS_CUDA and not engine.is_ours else ()),
    ]


def ask_mil(engine: Engine, folder: Path, budget: list[str]) -> tuple[int, dict[str, Any]]:
    """`python -m sgl_prefill.mil` with the flags of the engine."""
    command = [sys.executable, "-m", "sgl_prefill.mil", *common_flags(engine, folder), *engine.flags, *budget]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    if done.returncode != 0 or not lines:
        raise report.InvalidRunError(f"{report.portable(command)}:\n{done.stderr[-2000:]}")
    return int(lines[-1].rpartition(":")[2]), {"mil_output": lines}


def pool_tokens(server: local_server.LocalServer) -> int:
    """On a CUDA device: the longest input that SGLang admits, its KV pool less a margin of its own."""
    info = requests.get(f"{server.url}/server_info", timeout=60).json()
    return int(min(info["max_total_num_tokens"], info.get("context_length") or DEVICE_POSITIONS)) - MARGIN_TOKENS


def search_stock(engine: Engine, folder: Path, max_steps: int) -> list[dict[str, Any]]:
    """Serve longer and longer inputs: each next length is where the line through the last two meets the budget.

    Each on a server of its own, since the memory of a longer input stays with its process.
    """
    tries = [{"tokens": 0, "peak_mib": 0.0}, serve(engine, folder, STOCK_MEMORY, FIRST_TOKENS)]
    while len(tries) < 2 + max_steps and abs(share_of_budget(tries[-1]) - 1) > CLOSE_ENOUGH:
        tries.append(serve(engine, folder, STOCK_MEMORY, next_length(tries)))
    return tries


def longest_within(tries: list[dict[str, Any]]) -> int:
    """The last try, in proportion to what it took of the budget: within a few per cent, from above or from below."""
    return int(tries[-1]["tokens"] / share_of_budget(tries[-1]))


def next_length(tries: list[dict[str, Any]]) -> int:
    """On the line through the last two tries, rounded down."""
    before, last = tries[-2:]
    per_token = (last["peak_mib"] - before["peak_mib"]) / (last["tokens"] - before["tokens"])
    if per_token <= 0:  # lengths so near that noise decides: the line through none and the last
        per_token = last["peak_mib"] / last["tokens"]
    wanted = last["tokens"] + (mib(BUDGET_BYTES) - last["peak_mib"]) / per_token
    return int(min(max(wanted, last["tokens"] / LARGEST_STEP), last["tokens"] * LARGEST_STEP))


def share_of_budget(served: dict[str, Any]) -> float:
    return float(served["peak_mib"] / mib(BUDGET_BYTES))


def serve(engine: Engine, folder: Path, flags: list[str], n_tokens: int, timeout_s: float = 3600) -> dict[str, Any]:
    """One input of this length on a fresh server: its peak, and its answer if that came in time."""
    with running(engine, folder, flags) as server:
        pid = process_memory.scheduler_pid(server.process.pid)
        started = time.monotonic()
        with process_memory.watch(pid, process_memory.resident_bytes(pid)) as watch:
            answer = ask(server, n_tokens, timeout_s=timeout_s)
        seconds = time.monotonic() - started
    if answer is not None and answer["cached_tokens"] > 0:
        raise report.InvalidRunError(f"{answer['cached_tokens']} tokens of {n_tokens} were cached")
    return {
        "tokens": n_tokens,
        "peak_mib": None if shapes.HAS_CUDA else mib(watch.peak_bytes),  # of host memory
        "seconds": round(seconds, 1),
        "answered": answer is not None,
        "kept_tokens": None if answer is None else answer.get("kept_tokens"),
        "logprobs": None if answer is None else logprobs_of(answer),
        "command": report.portable(server.command),
    }


@contextmanager
def running(engine: Engine, folder: Path, flags: list[str]) -> Iterator[local_server.LocalServer]:
    """A healthy server that has answered one short request, whose prompt is not the beginning of the long one."""
    log = folder / "server.log"
    environment = {"OMP_NUM_THREADS": os.environ["OMP_NUM_THREADS"]}
    all_flags = [*common_flags(engine, folder), *engine.flags, *flags]
    server = local_server.start(engine.module, all_flags, log, environment=environment)
    try:
        record = requests.get(f"{server.url}/server_info", timeout=60).json().get("sgl_prefill")
        if (record is not None) != engine.is_ours:
            raise report.InvalidRunError(f"{engine.name}: the activation record is {record}")
        ask(server, 300, first_token=500)
        yield server
    finally:
        with suppress(psutil.NoSuchProcess):
            for child in psutil.Process(server.process.pid).children(recursive=True):
                child.kill()  # it may be in the middle of a forward pass of an hour
        server.stop()


def ask(
    server: local_server.LocalServer, n_tokens: int, timeout_s: float = 3600, first_token: int = 1000
) -> dict[str, Any] | None:
    """`meta_info` of a prefill-only request; None where it took longer than `timeout_s`."""
    body: dict[str, Any] = {
        "input_ids": [first_token + i % 40000 for i in range(n_tokens)],
        "sampling_params": {"max_new_tokens": 0, "temperature": 0},
        "return_logprob": True,
        "token_ids_logprob": [100, 200],
    }
    try:
        reply = requests.post(f"{server.url}/generate", json=body, timeout=timeout_s)
    except requests.Timeout:
        return None
    if reply.status_code != 200:
        raise report.InvalidRunError(f"{n_tokens} tokens: {reply.status_code} {reply.text[:500]}")
    meta: dict[str, Any] = reply.json()["meta_info"]
    return meta


def logprobs_of(meta: dict[str, Any]) -> list[float]:
    """Raises InvalidRunError where one is no log-probability."""
    logprobs = [float(entry[0]) for entry in meta["output_token_ids_logprobs"][0]]
    if not all(math.isfinite(one) and one <= 0 for one in logprobs):
        raise report.InvalidRunError(f"the answer is {logprobs}")
    return logprobs


def mib(n_bytes: int) -> float:
    return round(n_bytes / 2**20, 1)


def targets_of(rows: list[dict[str, Any]]) -> list[report.Target]:
    targets = []
    for model in dict.fromkeys(row["model"] for row in rows):
        longest = {
            row["engine"]: row["longest_input_tokens"]
            for row in rows
            if row["model"] == model and row["longest_input_tokens"] is not None
        }
        if PRODUCT not in longest:
            continue
        chunked = max((n for name, n in longest.items() if name.startswith("stock, chunks")), default=None)
        if chunked is not None:
            targets.append(
                report.Target.at_least(
                    f"{model}: longest input, ours / stock at its best chunk size", longest[PRODUCT] / chunked, 4
                )
            )
        if "stock, unchunked" in longest:
            targets.append(
                report.Target.at_least(
                    f"{model}: longest input, ours / stock unchunked",
                    longest[PRODUCT] / longest["stock, unchunked"],
                    5,
                )
            )
        (product,) = [row for row in rows if row["model"] == model and row["engine"] == PRODUCT]
        if (served := product.get("served")) is not None:
            answered = f"{model}: the longest input is answered to its end (1: yes)"
            targets.append(report.Target.at_least(answered, float(served["answered"]), 1))
            if "difference" in served:
                right = f"{model}: its log-probabilities, largest difference from stock in one pass"
                targets.append(report.Target.at_most(right, served["difference"], MAX_LOGPROB_DIFFERENCE))
        measured, explained = activation_bytes_per_token(product["how"]["mil_output"]), explained_bytes_per_token(model)
        targets.append(
            report.Target.at_least(
                f"{model}: bytes per token, measured {measured:.0f} against {explained} explained, smaller / larger",
                min(measured, explained) / max(measured, explained),
                0.85,
            )
        )
    return targets


def activation_bytes_per_token(mil_output: list[str]) -> float:
    (line,) = [line for line in mil_output if line.startswith("activations of")]
    return float(line.partition("MiB")[2].split()[0])


def explained_bytes_per_token(model: str) -> int:
    """Residual stream, and query or attention output in one buffer, in bfloat16; three int64 indices and one int32."""
    config = shapes.config(model)
    query = config["num_attention_heads"] * config["head_dim"]
    return int(2 * (config["hidden_size"] + query) + 3 * 8 + 4)


if __name__ == "__main__":
    sys.exit(main())
