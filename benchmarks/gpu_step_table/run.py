"""What does one step cost on a GPU, and for how much of it does the card compute?

    python benchmarks/gpu_step_table/run.py [--quick] [--json PATH]         # BENCH_AT_ONCE=5: processes side by side

One process for each setting, without HTTP: a scheduler with its model, whose steps hold exactly the requests of a row. The
processes start side by side and measure one after the other. See the README beside this file.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "2")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from benchmarks import report, shapes
from benchmarks.harness.turns import AT_ONCE_ON_A_DEVICE
from sgl_prefill.config import PrefillConfig
from tests.support.in_process import InProcessScheduler

MODEL, SCALE = (shapes.DEVICE_MODEL, 1) if shapes.HAS_CUDA else ("llama-small", 10)
PREFIX_TOKENS = 14_000 // SCALE
LONGEST_TOKENS = 51_000 // SCALE
N_ROUNDS, QUICK_ROUNDS, N_WARM_UP = 7, 2, 2
LABEL_IDS = (100, 200, 300)
START_S, MEASURE_S = 200.0, 120.0
CHUNKS_TOKENS = (1024, 2048, 4096, 8192)


class Row(NamedTuple):
    """Requests that come together, each with tokens of its own behind one cached prefix, or a cold prompt (nothing cached)."""

    n_requests: int
    own_tokens: int
    cached_tokens: int = PREFIX_TOKENS

    @property
    def name(self) -> str:
        return f"{self.n_requests} x {self.own_tokens} behind {self.cached_tokens}"


HITS = [Row(n, own) for own in (15, 150) for n in (1, 8, 20, 50)] + [Row(n, 1_000 // SCALE) for n in (1, 8, 20)]
COLD = [Row(1, 14_000 // SCALE, 0), Row(1, 50_000 // SCALE, 0)]
MOST_GRAPHED_ROW = 2_048  # tokens of a step that is replayed


class Setting(NamedTuple):
    """A process: how its scheduler is started, and what it is asked."""

    rows: list[Row]
    server_options: dict[str, Any] = {}
    config: dict[str, Any] = {}
    is_stock: bool = False
    has_variants: bool = False  # graphs off and other chunks, in the same process


FULL = {"prefill": {"backend": "full", "max_bs": 2_048, "full_prefill_max_req": 64}}
SETTINGS = {
    "ours": Setting([*HITS, *COLD], has_variants=True),
    "stock": Setting([*HITS, *COLD], is_stock=True),
    "ours, full graphs": Setting(HITS, {"cuda_graph_config": json.dumps(FULL)}),
    "ours, shared prefix together": Setting(HITS, config={"shared_prefix_attention": "on"}),
    "ours, pages of 64": Setting([*HITS, *COLD], {"page_size": 64}),
}


def main() -> int:
    if len(sys.argv) == 4 and sys.argv[1] in SETTINGS:
        return child(sys.argv[1], Path(sys.argv[2]), is_quick=sys.argv[3] == "quick")
    arguments = report.arguments(__doc__, Path(__file__).with_name("result.json"))
    conditions = {**report.conditions(), "model": shapes.config(MODEL), "scaled_by": SCALE, "rounds": N_ROUNDS}
    conditions["processes_at_once"] = at_once = AT_ONCE_ON_A_DEVICE
    rows: list[dict[str, Any]] = []
    failed: dict[str, str] = {}
    names = list(SETTINGS)[: 2 if arguments.quick else None]
    measured_ceilings = ceilings()
    try:
        with tempfile.TemporaryDirectory() as scratch:
            for first in range(0, len(names), at_once):
                run_group(names[first : first + at_once], Path(scratch), arguments.quick, rows, failed)
    finally:  # what there is, where `timeout` ends it
        for row in rows:
            print({key: value for key, value in row.items() if key not in ("wall_each_ms", "kernels_ms")})
        result = {"conditions": conditions, "ceilings": measured_ceilings, "rows": rows, "failed": failed}
        report.finish(result, targets_of(rows), arguments.json)
    return 0


def run_group(
    names: list[str], scratch: Path, is_quick: bool, rows: list[dict[str, Any]], failed: dict[str, str]
) -> None:
    """Starts these side by side; once all are up, or have failed, each measures alone."""
    words = "quick" if is_quick else "whole"
    begun = []
    for name in names:
        folder = scratch / name.replace(" ", "_")
        folder.mkdir()
        log = (folder / "log").open("wb")
        command = [sys.executable, str(Path(__file__).resolve()), name, str(folder), words]
        begun.append((name, folder, subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)))
    end_s = time.monotonic() + START_S
    while time.monotonic() < end_s:
        if all((folder / "ready").exists() or process.poll() is not None for _, folder, process in begun):
            break
        time.sleep(0.2)
    for name, folder, process in begun:
        print(f"{name}: measures", file=sys.stderr, flush=True)
        (folder / "go").touch()
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=MEASURE_S)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        if process.returncode != 0:
            failed[name] = f"ended with {process.returncode}: " + (folder / "log").read_text(errors="replace")[-3000:]
            print(f"{name}: {failed[name]}", file=sys.stderr)
        found = folder / "rows.jsonl"
        rows += [json.loads(line) for line in found.read_text().splitlines()] if found.exists() else []


def child(name: str, folder: Path, *, is_quick: bool) -> int:
    setting = SETTINGS[name]
    scheduler = start(setting, folder)
    (folder / "ready").touch()
    while not (folder / "go").exists():
        time.sleep(0.05)
    n_rounds = QUICK_ROUNDS if is_quick else N_ROUNDS
    with (folder / "rows.jsonl").open("w") as found:

        def note(row: Row, variant: str = name, within: AbstractContextManager[Any] | None = None) -> None:
            with within or nullcontext():
                measured = measure(scheduler, row, n_rounds)
            found.write(json.dumps({"setting": variant, "row": row.name, **measured}) + "\n")
            found.flush()

        for row in setting.rows[:: 3 if is_quick else 1]:
            note(row)
        if setting.has_variants:
            for row in HITS:
                if row.own_tokens * row.n_requests <= MOST_GRAPHED_ROW:
                    note(row, f"{name}, no graphs", scheduler.model.without_graphs())
            chosen = scheduler.hybrid.chunk_tokens
            for n_tokens in CHUNKS_TOKENS:
                for row in (*COLD, Row(20, 150), Row(8, 1_000 // SCALE)):
                    note(
                        row,
                        f"{name}, chunks of {n_tokens}{' (chosen)' * (n_tokens == chosen)}",
                        chunks(scheduler, n_tokens),
                    )
    return 0


def start(setting: Setting, folder: Path) -> InProcessScheduler:
    model = shapes.write(MODEL, folder / "model")
    options: dict[str, Any] = {
        "dtype": shapes.DTYPE,
        "load_format": "dummy",
        "context_length": LONGEST_TOKENS + 1_000,
        "max_total_tokens": 64_000 // SCALE if setting.is_stock else 40_000 // SCALE,
        "max_running_requests": 64,
        **setting.server_options,
    }
    if setting.is_stock:
        return stock_scheduler(model, options)
    limits: dict[str, Any] = {} if shapes.HAS_CUDA else {"memory_budget_gb": 3}
    # All that wait go into one step. With dummy weights the gate would compare zeros.
    config = PrefillConfig(
        pack_step_tokens=100_000, max_input_length=LONGEST_TOKENS, skip_parity_gate=True, **limits, **setting.config
    )
    return InProcessScheduler(config, model, **options)


def stock_scheduler(model: Path, options: dict[str, Any]) -> InProcessScheduler:
    """SGLang's own scheduler without any hook, in the same harness: its default policy and chunks, stepped by its caller."""
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.plugins import load_plugins
    from sglang.srt.runtime_context import publish
    from sglang.srt.server_args import PortArgs, ServerArgs

    load_plugins()
    given = {"disable_overlap_schedule": True, "disable_decode_cuda_graph": True, "log_level": "error", **options}
    server_args = ServerArgs(model_path=str(model), skip_tokenizer_init=True, random_seed=1, **given)
    publish(server_args, role="scheduler")
    ranks = dict.fromkeys(("tp_rank", "moe_ep_rank", "pp_rank", "attn_cp_rank", "moe_dp_rank"), 0)
    made = object.__new__(InProcessScheduler)
    made.scheduler = Scheduler(server_args, PortArgs.init_new(server_args), gpu_id=0, **ranks, dp_rank=None)
    made._numbers, made._outputs, made.answered, made.refusals = itertools.count(), {}, [], {}
    made.scheduler.output_streamer.send_to_detokenizer = made
    made.scheduler.ipc_channels.send_to_tokenizer.send_output = made._refused
    return made


@contextmanager
def chunks(scheduler: InProcessScheduler, n_tokens: int) -> Iterator[None]:
    """Within the block hybrid prefilling has chunks of so many tokens, and steps of at most one chunk run in SGLang's layers."""
    before, scheduler.hybrid.chunk_tokens = scheduler.hybrid.chunk_tokens, n_tokens
    try:
        yield
    finally:
        scheduler.hybrid.chunk_tokens = before


def measure(scheduler: InProcessScheduler, row: Row, n_rounds: int) -> dict[str, Any]:
    """Milliseconds from waiting requests to the last answer, and of them those in which the card computes."""
    rng = random.Random(0)
    scheduler.flush()
    prefix = shapes.token_ids(rng, row.cached_tokens)
    first_tokens = itertools.count(1000)  # two requests that go on alike would share that too
    if prefix:
        scheduler.ask([*prefix, next(first_tokens)], label_ids=LABEL_IDS)

    def one() -> tuple[float, int]:
        if not prefix:
            scheduler.flush()
        prompts = [
            [*prefix, next(first_tokens), *shapes.token_ids(rng, row.own_tokens - 1)] for _ in range(row.n_requests)
        ]
        rids = [scheduler.submit(prompt, LABEL_IDS) for prompt in prompts]
        synchronize()
        started, n_steps = time.perf_counter(), 0
        while not all(scheduler.has_answer(rid) for rid in rids):
            scheduler.step()
            n_steps += 1
            assert n_steps < 200, "a request was refused, or never ends"
        synchronize()
        seconds = time.perf_counter() - started
        cached = {scheduler.answer(rid).cached_tokens for rid in rids}
        assert min(cached) >= 0.99 * row.cached_tokens, cached
        scheduler.run_all()
        return seconds, n_steps

    for _ in range(N_WARM_UP):
        one()
    found = [one() for _ in range(n_rounds)]
    return {
        "ms": round(1000 * statistics.median(seconds for seconds, _ in found), 3),
        "steps": statistics.median(n_steps for _, n_steps in found),
        "wall_each_ms": [round(1000 * seconds, 3) for seconds, _ in found],
        **(busy(lambda: one()[0]) if shapes.HAS_CUDA else {}),
    }


def busy(one: Any) -> dict[str, Any]:
    """Of one more round, profiled: when the card computed, with how many kernels, and what they did."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
        seconds = one()
    spans, groups = [], {"attention": 0, "products": 0, "other": 0}
    for event in profiled.profiler.kineto_results.events():
        if "CUDA" not in str(event.device_type()) or event.duration_ns() <= 0:
            continue
        spans.append((event.start_ns(), event.start_ns() + event.duration_ns()))
        groups[group_of(event.name())] += event.duration_ns()
    spans.sort()
    busy_ns, end = 0, 0
    for begin, stop in spans:
        busy_ns += max(0, stop - max(begin, end))
        end = max(end, stop)
    return {
        "profiled_ms": round(1000 * seconds, 3),
        "busy_ms": round(busy_ns / 1e6, 3),
        "span_ms": round((end - spans[0][0]) / 1e6, 3) if spans else None,
        "kernels": len(spans),
        "kernels_ms": {name: round(spent / 1e6, 3) for name, spent in groups.items()},
    }


def group_of(kernel: str) -> str:
    name = kernel.lower()
    if any(word in name for word in ("flash", "attn", "attention", "fwd_kernel")):
        return "attention"
    return "products" if any(word in name for word in ("gemm", "nvjet", "cutlass", "cublas")) else "other"


def synchronize() -> None:
    if shapes.HAS_CUDA:
        torch.cuda.synchronize()


def ceilings() -> dict[str, float] | None:
    """What the card reaches alone: bytes a second of a copy, read and written, and operations of a product of 8,192^3."""
    if not shapes.HAS_CUDA:
        return None
    from triton.testing import do_bench  # type: ignore[import-untyped]

    source = torch.empty(4 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    copy_ms = do_bench(lambda: target.copy_(source), return_mode="median")
    product_ms = do_bench(lambda: a @ b, return_mode="median")
    found = {
        "copy_bytes_per_s": 2 * source.numel() / copy_ms * 1e3,
        "product_flop_per_s": 2 * 8192**3 / product_ms * 1e3,
    }
    torch.cuda.empty_cache()
    return found


def targets_of(rows: list[dict[str, Any]]) -> list[report.Target]:
    ms = {(row["setting"], row["row"]): row["ms"] for row in rows}
    targets = []
    for row in (Row(20, 150), Row(50, 15), *COLD):
        if ("ours", row.name) in ms and ("stock", row.name) in ms:
            ratio = ms["stock", row.name] / ms["ours", row.name]
            targets.append(report.Target.at_least(f"{row.name}: ms, stock / ours", ratio, 0.97))
    together = "ours, shared prefix together"
    if (together, Row(50, 15).name) in ms and ("ours", Row(50, 15).name) in ms:
        ratio = ms["ours", Row(50, 15).name] / ms[together, Row(50, 15).name]
        targets.append(report.Target.at_least(f"{Row(50, 15).name}: ms, apart / together", ratio, 1.1))
    return targets


if __name__ == "__main__":
    sys.exit(main())
