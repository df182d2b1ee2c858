"""Whether NVIDIA's driver is new enough for the installed PyTorch, asked without a CUDA context, which a launcher must not hold.

PyTorch takes a machine with an older driver for one without a GPU, and a server would run on the CPU without a word.
"""

from __future__ import annotations

import ctypes
import glob
import os

from sgl_prefill.errors import ConfigurationError

NVIDIA_DEVICES = "/dev/nvidia[0-9]*"
# The first driver of each version of CUDA that PyTorch is built for.
DRIVER_OF_CUDA = {12: "525.60", 13: "580.65"}


def check() -> None:
    """Raise ConfigurationError where there is a GPU of NVIDIA's that this process may use, and its driver is too old."""
    import torch

    if problem := problem_of(has_card(), driver_version(), torch.version.cuda):
        raise ConfigurationError(problem)


def has_card() -> bool:
    """Tells whether this process sees a GPU of NVIDIA's, whatever its driver can do."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "all") in ("", "-1")
    wants_cpu = os.environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1"
    return not hidden and not wants_cpu and bool(glob.glob(NVIDIA_DEVICES))


def driver_version() -> int | None:
    """Returns the newest CUDA that the driver knows, 1000 x major + 10 x minor; None where there is no driver."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    found = ctypes.c_int(0)
    return None if library.cuDriverGetVersion(ctypes.byref(found)) != 0 else found.value


def problem_of(has_card: bool, driver: int | None, torch_cuda: str | None) -> str | None:
    """Says what is wrong, or None. torch_cuda: the version of CUDA that PyTorch was built for; None: for none."""
    if not has_card or torch_cuda is None:
        return None
    needed = int(torch_cuda.split(".")[0])
    first = DRIVER_OF_CUDA.get(needed)
    update = f"update NVIDIA's driver{f' to {first} or newer' if first else ''}"
    otherwise = "or hide the GPU with CUDA_VISIBLE_DEVICES= to serve on the CPU"
    if driver is None:
        return (
            "there is a GPU of NVIDIA's, and no driver library (libcuda.so.1) that answers: in a container, start it with the"
            f" GPU's driver (--gpus all); else {update}; {otherwise}"
        )
    if driver // 1000 >= needed:
        return None
    return (
        f"the driver of this GPU knows CUDA {driver // 1000}.{driver % 1000 // 10}, and the installed PyTorch is for CUDA"
        f" {torch_cuda}: {update} (`nvidia-smi` shows which it is); on a data centre's card the package cuda-compat-{needed}-0"
        f" does too; {otherwise}"
    )
