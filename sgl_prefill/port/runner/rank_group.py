"""The ranks of SGLang's tensor parallelism, and how they agree: through gloo, whatever the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from sgl_prefill.core.ranks import ALONE, Ranks, Value

if TYPE_CHECKING:
    from sglang.srt.distributed.parallel_state import GroupCoordinator


class GlooRanks:
    """All ranks of this engine. Values are pickled: they come from processes of ours alone."""

    def __init__(self, group: GroupCoordinator) -> None:
        self._group = group
        self.index: int = group.rank_in_group
        self.count: int = group.world_size

    def of_first(self, value: Value) -> Value:
        found: list[Any] = [value if self.index == 0 else None]
        torch.distributed.broadcast_object_list(found, src=self._group.ranks[0], group=self._group.cpu_group)
        first: Value = found[0]
        return first

    def of_all(self, value: Value) -> list[Value]:
        found: list[Any] = [None] * self.count
        torch.distributed.all_gather_object(found, value, group=self._group.cpu_group)
        return found


class TensorExchange:
    """`hybrid.shared_rows.Exchange` over the ranks of tensor parallelism."""

    def __init__(self, group: GroupCoordinator) -> None:
        self._group = group
        self.index: int = group.rank_in_group
        self.count: int = group.world_size

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        gathered: torch.Tensor = self._group.all_gather(part.contiguous(), dim=0)
        return gathered

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = self._group.all_reduce(tensor)
        return total


def tensor_exchange() -> TensorExchange:
    from sglang.srt.distributed.parallel_state import get_tp_group

    return TensorExchange(get_tp_group())


def these_ranks() -> Ranks:
    """Returns the ranks of the engine that this scheduler process belongs to; alone where there are no groups of processes."""
    if not torch.distributed.is_initialized():
        return ALONE
    from sglang.srt.distributed.parallel_state import get_world_group

    group = get_world_group()
    return GlooRanks(group) if group.world_size > 1 else ALONE
