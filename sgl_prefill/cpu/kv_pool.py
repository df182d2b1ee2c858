"""The stock KV pool in host memory that the kernel commits page by page, on first use."""

from __future__ import annotations

import math

import numpy as np
import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool


class LazyZeroKVPool(MHATokenToKVPool):  # type: ignore[misc]
    """`torch.zeros` writes every page at start, 1.5 s per GiB here; `numpy.zeros` maps zero pages at no cost."""

    def _create_buffers_normal(self) -> None:
        k_shape, v_shape = self._kv_buffer_shapes()
        self.k_buffer = [_lazy_zeros(k_shape, self.store_dtype) for _ in range(self.layer_num)]
        self.v_buffer = [_lazy_zeros(v_shape, self.store_dtype) for _ in range(self.layer_num)]


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    flat = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(flat).view(dtype).view(shape)
