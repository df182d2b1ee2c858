"""Several ranks on a machine without an accelerator: gloo instead of NCCL, and each rank has its share of the cores."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from sglang.srt.distributed.parallel_state import GroupCoordinator

BIND_VARIABLE = "SGLANG_CPU_OMP_THREADS_BIND"


def register_sum() -> object:
    """Registers a CPU kernel for SGLang's all-reduce operation in traced graphs, while the returned object lives."""
    from sglang.srt.distributed import parallel_state

    def run(tensor: torch.Tensor, group_name: str) -> None:
        group = parallel_state._groups[group_name]()
        assert group is not None, group_name
        group._all_reduce_in_place(tensor)

    library: Any = torch.library.Library("sglang", "FRAGMENT")  # type: ignore[no-untyped-call]
    library.impl("inplace_all_reduce", run, "CPU")
    return library


def around_all_reduce(
    original: Callable[..., torch.Tensor], group: GroupCoordinator, input_: torch.Tensor
) -> torch.Tensor:
    """Hook: traces a sum over ranks on a CPU as one operation, as on a GPU."""
    if group.world_size == 1 or not input_.is_cpu or not torch.compiler.is_compiling():
        return original(group, input_)
    from sglang.srt.distributed.parallel_state import inplace_all_reduce

    inplace_all_reduce(input_, group_name=group.unique_name)
    return input_


def around_init_cpu_threads(original: Callable[..., None], *, local_omp_cpuid: Any, **options: Any) -> None:
    """Hook: binds threads to cores. SGLang's own code for several ranks needs `sgl_kernel`."""
    from sglang.srt.runtime_context import get_parallel

    if get_parallel().tp_size == 1:
        original(local_omp_cpuid=local_omp_cpuid, **options)
        return
    cores = cores_of(local_omp_cpuid)
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(min(len(cores), torch.get_num_threads()))


def cores_of(text: str) -> list[int]:
    """Parses the cores of one rank in BIND_VARIABLE, such as "0-3,8"."""
    cores: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        cores += range(int(first), int(last or first) + 1)
    return cores


def share_cores(n_ranks: int) -> None:
    """Sets BIND_VARIABLE to equal shares of the cores, unless the user has set it. Call it before the ranks start."""
    if n_ranks == 1 or BIND_VARIABLE in os.environ:
        return
    cores = sorted(os.sched_getaffinity(0))
    n_each = len(cores) // n_ranks
    shares = [cores[rank * n_each : (rank + 1) * n_each] for rank in range(n_ranks)]
    os.environ[BIND_VARIABLE] = "|".join(",".join(map(str, share)) for share in shares)
