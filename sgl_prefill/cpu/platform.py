"""The out-of-tree SGLang platform for machines without an accelerator.

SGLang's own CPU path needs a CPU build of `sgl_kernel`, which no package registry carries. This platform runs SGLang's
native PyTorch layers instead, under our launcher and under stock `sglang.launch_server`, the baseline on the same machine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform

from sgl_prefill.cpu.detect import ATTENTION_BACKEND_NAME

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs


class TorchCpuPlatform(CpuDeviceMixin, SRTPlatform):  # type: ignore[misc]
    """SGLang's native PyTorch layers, with our attention backend as the default."""

    _enum = PlatformEnum.OOT

    def apply_server_args_defaults(self, server_args: ServerArgs) -> None:
        """Replaces SGLang's CPU defaults, which need the missing kernels or a driver. The user's own choices stay."""
        if server_args.grammar_backend is None:
            # SGLang's default allocates pinned memory, which ends the scheduler without a driver. With "none", a request
            # for structured output gets a 400.
            server_args.grammar_backend = "none"
        # SGLang gives platforms of this kind a pool for all layers, and would then miss its pool for sliding windows.
        server_args.disable_hybrid_swa_memory = True
        server_args.disable_custom_all_reduce = True  # it copies between devices
        if server_args.attention_backend in (None, "intel_amx"):
            server_args.attention_backend = ATTENTION_BACKEND_NAME

    def get_device(self, device_id: int = 0) -> str:
        return "cpu"  # a string, which SGLang splits; the CPU mixin returns a `torch.device`

    def init_backend(self) -> None:
        """Runs in each model process before its model runner exists."""
        from sglang.kernels.fused_op import BaseFusedOp
        from sglang.srt.layers.attention.attention_registry import register_attention_backend
        from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod
        from sglang.srt.models.deepseek_common.attention_backend_handler import (
            AttentionBackendRegistry,
            AttnForwardMethod,
        )

        from sgl_prefill.cpu.attention import register_packed_attention
        from sgl_prefill.cpu.attention_backend import CpuFlashAttentionBackend
        from sgl_prefill.cpu.experts import forward_unquantized_experts, register_traced_experts
        from sgl_prefill.cpu.rank_threads import register_sum

        register_attention_backend(ATTENTION_BACKEND_NAME)(CpuFlashAttentionBackend)
        AttentionBackendRegistry.register(ATTENTION_BACKEND_NAME, lambda attention, batch: AttnForwardMethod.MLA)
        BaseFusedOp.register_oot_forward(
            UnquantizedFusedMoEMethod, forward_unquantized_experts, self.get_dispatch_key_name()
        )
        self._kernels = register_traced_experts(), register_sum(), register_packed_attention()

    def get_default_attention_backend(self) -> str:
        return ATTENTION_BACKEND_NAME

    # Without the next two methods `/start_profile` ends the scheduler.
    def get_torch_profiler_activity_str(self) -> str:
        return "CPU"

    def get_torch_profiler_activity(self) -> torch.profiler.ProfilerActivity:
        return torch.profiler.ProfilerActivity.CPU

    def get_dispatch_key_name(self) -> str:
        return "native"

    def get_kv_pool_cls(self, *, kind: str) -> type | None:
        """Returns this package's pools of K and V heads and of latent rows; for other kinds SGLang has its own."""
        from sgl_prefill.cpu.attention_backend import LatentKVPool, LazyZeroKVPool

        return {"mha": LazyZeroKVPool, "mla": LatentKVPool}.get(kind)
