"""What this machine reaches alone, in the dtype of all comparisons: the ceiling that steps are held against."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import shapes

# Large enough to fill two cores, small enough that its result is not memory which the kernel must find first: a product whose
# 64 MiB of results are new each time reaches a third of this.
ROWS, INNER, COLUMNS = 512, 1024, 4096
ROUNDS = 20


def matrix_product_flop_per_s(dtype_name: str = shapes.DTYPE) -> float:
    """The best of several products with weights packed for the processor."""
    dtype = getattr(torch, dtype_name)
    x, weight = torch.randn(ROWS, INNER).to(dtype), torch.randn(COLUMNS, INNER).to(dtype)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS)
    seconds = best_of(lambda: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], ""), ROUNDS)
    return 2 * ROWS * INNER * COLUMNS / seconds


def best_of(call: Callable[[], Any], n_times: int) -> float:
    """Seconds of the fastest call."""
    seconds = []
    for _ in range(n_times):
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return min(seconds)
