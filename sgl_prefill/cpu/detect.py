"""Whether this machine is one for the CPU platform.

Imports nothing of SGLang's, which loads it while itself half imported, and torch only when asked, so that help comes at once.
"""

from __future__ import annotations

import os
from typing import Literal

ATTENTION_BACKEND_NAME = "cpu_flash"
Dtype = Literal["bfloat16", "float32"]


def has_accelerator() -> bool:
    """Tells whether this machine has any device that SGLang's own platforms would use."""
    import torch

    if torch.cuda.is_available() or torch.xpu.is_available() or torch.backends.mps.is_available():
        return True
    return bool(hasattr(torch, "npu") and torch.npu.is_available())


def fast_dtype() -> Dtype:
    """Returns what matrix products are fast in: float32 on an x86 processor without AVX-512, for which oneDNN has no bfloat16."""
    import torch

    is_old = torch.backends.cpu.get_cpu_capability() in ("NO AVX", "AVX2")
    return "float32" if is_old and not has_accelerator() else "bfloat16"


def activate() -> str | None:
    """Serves as entry point of `sglang.srt.platforms`: the class to load, or None to leave the choice to SGLang."""
    if has_accelerator() or os.environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1":
        return None
    return "sgl_prefill.cpu.platform.TorchCpuPlatform"
