"""Whether this machine is one for the CPU platform. Imports nothing of SGLang's, which loads it while itself half imported."""

from __future__ import annotations

import os

import torch

ATTENTION_BACKEND_NAME = "cpu_flash"


def has_accelerator() -> bool:
    """Whether this machine has any device that SGLang's own platforms would use."""
    if torch.cuda.is_available() or torch.xpu.is_available() or torch.backends.mps.is_available():
        return True
    return bool(hasattr(torch, "npu") and torch.npu.is_available())


def activate() -> str | None:
    """Entry point of `sglang.srt.platforms`: the class to load, or None to leave the choice to SGLang."""
    if has_accelerator() or os.environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1":
        return None
    return "sgl_prefill.cpu.platform.TorchCpuPlatform"
