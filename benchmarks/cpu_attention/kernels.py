"""The attention kernel alone, against PyTorch's flash kernel on the same tensors: time, rate and error of each shape."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from benchmarks import ceiling, report
from sgl_prefill.core.shared_groups import shared_groups
from sgl_prefill.cpu.attention import KVRows, attend, runs_of
from sgl_prefill.cpu.native.calls import StepRequests
from sgl_prefill.cpu.native.library import native

ROUNDS, LONG_ROUNDS = 15, 3
LONG_TOKENS = 8192


class Shape(NamedTuple):
    """Requests of one step that share a cached prefix."""

    name: str
    n_requests: int
    new_tokens: int  # of each request
    shared_tokens: int
    heads: int
    kv_heads: int
    dim: int
    scattered: bool = False  # KV slots in disorder

    @property
    def flop(self) -> float:
        seen = self.new_tokens * self.shared_tokens + self.new_tokens * (self.new_tokens + 1) / 2
        return 4.0 * self.n_requests * seen * self.heads * self.dim


SHAPES = (
    Shape("cold 4,096, 16/4 heads of 64", 1, 4096, 0, 16, 4, 64),
    Shape("cold 16,384, 16/4 heads of 64", 1, 16384, 0, 16, 4, 64),
    Shape("cold 4,096, 32/8 heads of 128", 1, 4096, 0, 32, 8, 128),
    Shape("8 x 55 behind 1,200, 9/3 heads of 64", 8, 55, 1200, 9, 3, 64),
    Shape("16 x 15 behind 1,400, 16/4 heads of 64", 16, 15, 1400, 16, 4, 64),
    Shape("8 x 55 behind 1,200, scattered slots", 8, 55, 1200, 9, 3, 64, scattered=True),
    Shape("one token behind 1,400, 16/4 heads of 64", 1, 1, 1400, 16, 4, 64),
)


def measure(is_quick: bool) -> dict[str, Any]:
    """Times both kernels in turn on each shape. Raises InvalidRunError where there is no native kernel."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    torch.manual_seed(0)
    kernels = native().kernels
    if kernels is None:
        raise report.InvalidRunError(f"there is no native kernel: {native().reason}")
    shapes = [shape for shape in SHAPES if not is_quick or shape.new_tokens < LONG_TOKENS / 2]
    rate = ceiling.matrix_product_flop_per_s("bfloat16")
    rows = [_measure_shape(shape) for shape in shapes]
    return {"build": kernels.build, "matrix_product_flop_per_s": rate, "rows": rows}


def _measure_shape(shape: Shape) -> dict[str, Any]:
    kernels = native().kernels
    assert kernels is not None
    n_new, n_shared, n_requests = shape.new_tokens, shape.shared_tokens, shape.n_requests
    n_slots = n_shared + n_requests * n_new
    slots = (torch.randperm(n_slots) if shape.scattered else torch.arange(n_slots)).to(torch.int32) + 1
    table = torch.stack(
        [
            torch.cat([slots[:n_shared], slots[n_shared + i * n_new : n_shared + (i + 1) * n_new]])
            for i in range(n_requests)
        ]
    )
    query = torch.randn(n_requests * n_new, shape.heads, shape.dim).bfloat16()
    key, value = torch.randn(2, n_slots + 1, shape.kv_heads, shape.dim).bfloat16()
    groups = shared_groups(lambda request, position: int(table[request, position]), [n_shared] * n_requests)
    first_tokens = [i * n_new for i in range(n_requests + 1)]
    step = StepRequests(table, list(range(n_requests)), first_tokens, [n_shared + n_new] * n_requests, groups)
    scale = shape.dim**-0.5
    ours, today = torch.empty_like(query), torch.empty_like(query)
    runs = [runs_of(row) for row in table]

    def run_ours() -> None:
        kernels.attention(step, query, key, value, ours, scale=scale)

    def run_today() -> None:
        for i in range(n_requests):
            rows = slice(first_tokens[i], first_tokens[i + 1])
            attend(query[rows], KVRows(key, value, runs[i]), today[rows], scale=scale)

    ours_s, today_s = _in_turns(run_ours, run_today, LONG_ROUNDS if n_new >= LONG_TOKENS / 2 else ROUNDS)
    wanted = torch.empty(query.shape)
    if n_new < LONG_TOKENS:  # a float32 reference of the longest takes minutes
        for i in range(n_requests):
            rows = slice(first_tokens[i], first_tokens[i + 1])
            attend(query[rows].float(), KVRows(key.float(), value.float(), runs[i]), wanted[rows], scale=scale)
    errors = [float((x.float() - wanted).abs().max()) if n_new < LONG_TOKENS else None for x in (ours, today)]
    return {
        "shape": shape.name,
        "ours_ms": 1000 * ours_s,
        "today_ms": 1000 * today_s,
        "ours_flop_per_s": shape.flop / ours_s,
        "today_flop_per_s": shape.flop / today_s,
        "ours_error": errors[0],
        "today_error": errors[1],
    }


def _in_turns(one: Callable[[], None], other: Callable[[], None], n_rounds: int) -> tuple[float, float]:
    """Median seconds of each; the first round does not count."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(n_rounds + 1):
        for call, times in zip((one, other), seconds, strict=True):
            started = time.perf_counter()
            call()
            times.append(time.perf_counter() - started)
    return statistics.median(seconds[0][1:]), statistics.median(seconds[1][1:])


def targets_of(measured: dict[str, Any]) -> list[report.Target]:
    """The slowest shape with many tokens, and the smallest gain of all shapes."""
    rate = measured["matrix_product_flop_per_s"]
    full = [row for row in measured["rows"] if "one token" not in row["shape"]]
    slowest = min(row["ours_flop_per_s"] for row in full) / rate
    gain = min(row["today_ms"] / row["ours_ms"] for row in measured["rows"])
    return [
        report.Target.at_least("kernel alone, slowest shape: FLOP/s over the machine's matrix product", slowest, 0.7),
        report.Target.at_least("kernel alone, smallest gain of all shapes: PyTorch's flash kernel / ours", gain, 1.0),
    ]
