"""How long an input can each engine serve in 256 MiB beyond the weights? On a GPU: in the memory of the paper's devices?

    python benchmarks/mil/run.py [--quick] [--json PATH]       # BENCH_ENGINES="ours;ours, neither": these alone

Stock SGLang, chunked and unchunked; our engine, whole and without one or both of its techniques; vLLM. See the README.
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
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "2")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import psutil
import requests
import torch

from benchmarks import process_memory, report, shapes
from benchmarks.harness import client, engines, turns
from benchmarks.harness.kept import Kept
from sgl_prefill.entry import local_server
from sgl_prefill.errors import ServerStartError

BUDGET_BYTES = 256 << 20
ABLATION_BYTES = 1 << 30  # beyond the weights: more than what is measured
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
FIRST_TOKENS, SHORT_TOKENS = 2048, 300  # of the search; of the request that each server answers first
CLOSE_ENOUGH = 0.05  # of the budget, from above or below; equal lengths on two servers differ by some per cent
MAX_SEARCH_STEPS = 5
LARGEST_STEP = 3.0  # from one length to the next: memory is not quite linear
QUICK_TOKENS = 1000
WATCH_S = 120.0  # an input on a device
ANSWER_S = 3600.0
PRODUCT = "ours"  # no flag: both techniques, and the chunk size that is measured at start
# Bfloat16, in one pass and in chunks, of 32 layers. With weights as large as those of the other benchmarks, of 4 layers, bfloat16
# alone would move answers by more, so that the gate at start would refuse to serve.
MAX_LOGPROB_DIFFERENCE = 0.5
INITIALIZER_RANGE = 0.04
# The ablation, and the search for stock's best chunk size, are made on the first model alone.
RATIO_ENGINES = (f"stock, chunks of {STOCK_CHUNKS[0]}", "stock, unchunked", PRODUCT)


def rivals_and_ours() -> list[engines.Engine]:
    stock = "sglang.launch_server"
    vllm = [] if shapes.HAS_CUDA else [f"{n}" for n in STOCK_CHUNKS]
    return [
        *(engines.Engine(f"stock, chunks of {n}", stock, ("--chunked-prefill-size", str(n))) for n in STOCK_CHUNKS),
        engines.Engine("stock, unchunked", stock, ("--chunked-prefill-size", "-1")),
        *(
            engines.VLLM._replace(
                name=f"{engines.VLLM.name}, chunks of {n}",
                flags=(*engines.VLLM.flags, "--max-num-batched-tokens", n, "--max-num-seqs", "4"),
            )
            for n in vllm
        ),
        engines.ours("ours, neither", "--hybrid-prefill", "off", "--suffix-kv", "keep"),
        engines.ours("ours, eviction only", "--hybrid-prefill", "off", "--suffix-kv", "evict"),
        engines.ours("ours, hybrid only", "--hybrid-prefill", "on", "--suffix-kv", "keep"),
        engines.ours(PRODUCT),
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
    failed: list[dict[str, str]] = []
    asked = [name for name in os.environ.get("BENCH_ENGINES", "").split(";") if name]
    if unknown := set(asked) - {engine.name for engine in rivals_and_ours()}:
        raise report.InvalidRunError(f"BENCH_ENGINES names {unknown}: see rivals_and_ours")
    before = json.loads(arguments.json.read_text())["rows"] if asked and arguments.json is not None else []
    try:
        for model in MODELS[: 1 if arguments.quick else None]:
            for engine in rivals_and_ours():
                # On a device, which is lent for minutes, there is no ablation.
                is_ablation = engine.name not in RATIO_ENGINES
                if is_ablation and (arguments.quick or shapes.HAS_CUDA or model != MODELS[0]):
                    continue
                name, started = f"{model}, {engine.name}", time.monotonic()
                if asked and engine.name not in asked:
                    rows += [row for row in before if (row["model"], row["engine"]) == (model, engine.name)]
                    continue
                if engine.python_variable is not None and not os.environ.get(engine.python_variable):
                    failed.append({"engine": engine.name, "failed": f"{engine.python_variable} names no environment"})
                    continue
                if name not in kept:
                    kept[name] = (
                        measure_on_device(model, engine) if shapes.HAS_CUDA else measure(model, engine, arguments.quick)
                    )
                rows.append({"model": model, "engine": engine.name, "commit": conditions["commit"], **kept[name]})
                print(f"{json.dumps(rows[-1])}\n{time.monotonic() - started:.0f} s", file=sys.stderr)
    except SystemExit:  # `timeout`: what there is, where there is no result yet
        if arguments.json is not None and not arguments.json.exists():
            report.finish({"conditions": conditions, "rows": rows}, [], arguments.json)
        raise
    report.finish({"conditions": conditions, "rows": rows, "failed": failed}, targets_of(rows), arguments.json)
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


def measure(model: str, engine: engines.Engine, is_quick: bool) -> dict[str, Any]:
    """The longest input within the budget, and how it was served."""
    with tempfile.TemporaryDirectory() as name:
        folder = shapes.write(model, Path(name))
        # Its answers are compared; the other model's weights are too large to be written here.
        if is_checked := model == MODELS[0] and engine.name == PRODUCT:
            shapes.write_weights(folder, INITIALIZER_RANGE)
        if engine.name == PRODUCT:
            budget = memory_budget(model, BUDGET_BYTES)
            predicted, how = ask_mil(engine, folder, budget)
            length = min(QUICK_TOKENS, predicted) if is_quick else predicted
            served = serve(engine, folder, [*budget, "--max-input-length", str(length)], length, ANSWER_S)
            if is_checked and served["answered"]:
                served["difference"] = difference_from_stock(folder, length, served["logprobs"])
        else:
            tries = search(engine, folder, model, MAX_SEARCH_STEPS if not is_quick else 0)
            predicted, how, served = longest_within(tries), {"tries": tries}, tries[-1]
    return {"longest_input_tokens": predicted, "how": how, "served": served}


def memory_budget(model: str, beyond_weights_bytes: int) -> list[str]:
    return ["--memory-budget-gb", f"{(weight_bytes(model) + beyond_weights_bytes) / 2**30:.5f}"]


def difference_from_stock(folder: Path, n_tokens: int, logprobs: list[float]) -> float:
    """The largest, in a log-probability, from what stock SGLang answers in one pass with as much memory as it likes."""
    (unchunked,) = [one for one in rivals_and_ours() if one.name == "stock, unchunked"]
    memory = ["--max-total-tokens", str(n_tokens + FIRST_TOKENS), "--mem-fraction-static", "0.7"]
    with running(unchunked, folder, memory) as server:
        answer = ask(server.url, n_tokens, ANSWER_S)
    if answer is None:
        raise report.InvalidRunError(f"stock SGLang has not answered {n_tokens} tokens in {ANSWER_S:.0f} s")
    return max(abs(mine - theirs) for mine, theirs in zip(logprobs, answer.logprobs, strict=True))


def measure_on_device(model: str, engine: engines.Engine) -> dict[str, Any]:
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


def common_flags(engine: engines.Engine, folder: Path) -> list[str]:
    """But for the length of the context and the memory."""
    if engine.dialect == client.VLLM:
        return ["--model", *shapes.dummy_flags(folder)[1:], "--block-size", str(turns.VLLM_BLOCK_TOKENS)]
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


def ask_mil(engine: engines.Engine, folder: Path, budget: list[str]) -> tuple[int, dict[str, Any]]:
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


def search(engine: engines.Engine, folder: Path, model: str, max_steps: int) -> list[dict[str, Any]]:
    """Serve longer and longer inputs: each next length is where the line through the last two meets the budget.

    Each on a server of its own, since the memory of a longer input stays with its process. vLLM takes its memory at start, and
    ours runs a prompt then: with them the growth is from a server for a short input to one for this length.
    """
    takes_at_start = engine.dialect == client.VLLM or engine.is_ours
    small_bytes = None
    if takes_at_start:
        with running(engine, folder, memory_of(engine, model, SHORT_TOKENS)) as server:
            small_bytes = process_memory.resident_bytes(process_memory.scheduler_pid(server.process.pid))

    def serve_one(n_tokens: int) -> dict[str, Any]:
        return serve(engine, folder, memory_of(engine, model, n_tokens), n_tokens, baseline_bytes=small_bytes)

    tries = [{"tokens": 0, "peak_mib": 0.0}, serve_one(FIRST_TOKENS)]
    while len(tries) < 2 + max_steps and abs(share_of_budget(tries[-1]) - 1) > CLOSE_ENOUGH:
        tries.append(serve_one(next_length(tries)))
    return tries


def memory_of(engine: engines.Engine, model: str, n_tokens: int) -> list[str]:
    """Flags that leave more memory than the budget, and to vLLM, which would fill it, what such a prompt and the token that it is
    asked for need; one block is never used."""
    if engine.is_ours:
        return [*memory_budget(model, ABLATION_BYTES), "--max-input-length", str(n_tokens)]
    if engine.dialect != client.VLLM:
        return STOCK_MEMORY
    n_blocks = -(-(n_tokens + 1) // turns.VLLM_BLOCK_TOKENS) + 1
    return ["--max-model-len", str(n_tokens + 1), "--num-gpu-blocks-override", str(n_blocks)]


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


def serve(
    engine: engines.Engine,
    folder: Path,
    flags: list[str],
    n_tokens: int,
    timeout_s: float = 3600,
    baseline_bytes: int | None = None,
) -> dict[str, Any]:
    """One input of this length on a fresh server: its peak above what the server holds before it, or above `baseline_bytes`, and
    its answer if that came in time."""
    with running(engine, folder, flags) as server:
        pid = process_memory.scheduler_pid(server.process.pid)
        started = time.monotonic()
        before_bytes = process_memory.resident_bytes(pid) if baseline_bytes is None else baseline_bytes
        with process_memory.watch(pid, before_bytes) as watch:
            answer = ask(server.url, n_tokens, timeout_s, dialect=engine.dialect)
        seconds = time.monotonic() - started
    if answer is not None and answer.cached_tokens > 0:
        raise report.InvalidRunError(f"{answer.cached_tokens} tokens of {n_tokens} were cached")
    return {
        "tokens": n_tokens,
        "peak_mib": None if shapes.HAS_CUDA else mib(watch.peak_bytes),  # of host memory
        "seconds": round(seconds, 1),
        "answered": answer is not None,
        "logprobs": None if answer is None else answer.logprobs,
        "command": report.portable(server.command),
    }


@contextmanager
def running(engine: engines.Engine, folder: Path, flags: list[str]) -> Iterator[local_server.LocalServer]:
    """A healthy server that has answered one short request, whose prompt is not the beginning of the long one."""
    python = sys.executable if engine.python_variable is None else os.environ[engine.python_variable]
    environment = {"OMP_NUM_THREADS": os.environ["OMP_NUM_THREADS"], **dict(engine.environment)}
    all_flags = [*common_flags(engine, folder), *engine.flags, *flags]
    server = local_server.start(engine.module, all_flags, folder / "log", python=python, environment=environment)
    try:
        engines.look_at(engine, server.url, server.process.pid, server.command)
        ask(server.url, SHORT_TOKENS, first_token=500, dialect=engine.dialect)
        yield server
    finally:
        with suppress(psutil.NoSuchProcess):
            for child in psutil.Process(server.process.pid).children(recursive=True):
                child.kill()  # it may be in the middle of a forward pass of an hour
        server.stop()


def ask(
    url: str, n_tokens: int, timeout_s: float = 3600, first_token: int = 1000, dialect: client.Dialect = client.SGLANG
) -> client.Answer | None:
    """The answer to a prefill-only request; None where it took longer than `timeout_s`."""
    due = client.Due(0.0, [first_token + i % 40000 for i in range(n_tokens)], (100, 200))
    try:
        reply = requests.post(f"{url}{dialect.path}", json=dialect.body_of(due), timeout=timeout_s)
    except requests.Timeout:
        return None
    if reply.status_code != 200:
        raise report.InvalidRunError(f"{n_tokens} tokens: {reply.status_code} {reply.text[:500]}")
    answer = dialect.answer_of(reply.json(), due)
    check(answer.logprobs)
    return answer


def check(logprobs: list[float]) -> None:
    """Raises InvalidRunError where one is no log-probability."""
    if not all(math.isfinite(one) and one <= 0 for one in logprobs):
        raise report.InvalidRunError(f"the answer is {logprobs}")


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
        if others := [n for name, n in longest.items() if name.startswith(engines.VLLM.name)]:
            what = f"{model}: longest input, ours / {engines.VLLM.name} at its best chunk size"
            targets.append(report.Target.at_least(what, longest[PRODUCT] / max(others), 4))
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
