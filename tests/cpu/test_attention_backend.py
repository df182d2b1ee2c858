"""Which layers of a model the CPU attention backend leaves to PyTorch."""

from __future__ import annotations

import torch
from sglang.srt.layers.radix_attention import RadixAttention

from sgl_prefill.cpu.attention_backend import CpuFlashAttentionBackend
from sgl_prefill.cpu.native.calls import Kernels


def test_layers_that_no_kernel_computes_are_named(kernels: Kernels) -> None:
    """Heads of odd or of several dimensions, and all of a number type that no kernel has; none are named without kernels."""
    model = torch.nn.ModuleList(
        [
            RadixAttention(4, 64, 0.125, 2, 0),
            RadixAttention(4, 64, 0.125, 2, 1, v_head_dim=32),
            RadixAttention(4, 63, 0.125, 2, 2),
            RadixAttention(9, 64, 0.125, 3, 3),
        ]
    )
    backend = CpuFlashAttentionBackend.__new__(CpuFlashAttentionBackend)
    backend.kernels = kernels
    assert backend.pytorch_layers(model, torch.bfloat16) == [1, 2]
    assert backend.pytorch_layers(model, torch.float16) == [0, 1, 2, 3]
    backend.kernels = None
    assert backend.pytorch_layers(model, torch.bfloat16) == []
