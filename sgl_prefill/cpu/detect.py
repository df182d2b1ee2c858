"""Whether SGLang uses the CPU platform on this machine.

Does not import SGLang, which imports this module before it is imported itself; and torch only in functions, to keep `--help`
fast.
"""

from __future__ import annotations

import os
from typing import Literal

ATTENTION_BACKEND_NAME = "cpu_flash"
Dtype = Literal["bfloat16", "float32"]


def has_accelerator() -> bool:
    """Whether this machine has a device that SGLang's own platforms would use."""
    import torch

    if torch.cuda.is_available() or torch.xpu.is_available() or torch.backends.mps.is_available():
        return True
    return bool(hasattr(torch, "npu") and torch.npu.is_available())


def fast_dtype() -> Dtype:
    """Returns the number type of fast matrix products: oneDNN has no bfloat16 on x86 processors without AVX-512."""
    import torch

    is_old = torch.backends.cpu.get_cpu_capability() in ("NO AVX", "AVX2")
    return "float32" if is_old and not has_accelerator() else "bfloat16"


def activate() -> str | None:
    """Entry point of `sglang.srt.platforms`: the class to load, or None to leave the choice to SGLang."""
    if has_accelerator() or os.environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1":
        return None
    return "sgl_prefill.cpu.platform.TorchCpuPlatform"
