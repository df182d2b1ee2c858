"""The ranks of SGLang's tensor parallelism: how they agree (through gloo on any device), and how they find each other on one
machine: on the loopback interface, since PyTorch's store listens on every interface.
"""

from __future__ import annotations

import contextlib
import importlib
import socket
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

import torch

from sgl_prefill.core.ranks import ALONE, Ranks, Value

if TYPE_CHECKING:
    from sglang.srt.distributed.parallel_state import GroupCoordinator

LOOPBACK = "127.0.0.1"
SCHEME = "sgl-prefill-loopback"


class GlooRanks:
    """All ranks of this engine. Values are pickled, which is safe between this engine's own processes."""

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
    """Returns the ranks of this scheduler's engine; ALONE before torch.distributed is initialized."""
    if not torch.distributed.is_initialized():
        return ALONE
    from sglang.srt.distributed.parallel_state import get_world_group

    group = get_world_group()
    return GlooRanks(group) if group.world_size > 1 else ALONE


def around_resolve_dist_init_method(original: Callable[..., str], *, dist_port: int) -> str:
    """Hook: ranks of one node meet on the loopback interface; several nodes at SGLang's address."""
    from sglang.srt.runtime_context import get_parallel

    found = original(dist_port=dist_port)
    if get_parallel().nnodes > 1 or get_parallel().dist_init_addr or not found.startswith("tcp://"):
        return found
    rendezvous = importlib.import_module("torch.distributed.rendezvous")  # its package has a function of this name
    with contextlib.suppress(RuntimeError):  # registered already
        rendezvous.register_rendezvous_handler(SCHEME, _meet_on_loopback)
    return f"{SCHEME}://{LOOPBACK}:{dist_port}"


def _meet_on_loopback(url: str, timeout: Any = None, **_: Any) -> Iterator[tuple[Any, int, int]]:
    """Yields (store, rank, number of ranks), as PyTorch requires."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    address = urlsplit(url)
    rank, n_ranks = (int(parse_qs(address.query)[name][0]) for name in ("rank", "world_size"))
    options: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
    port = address.port or 0
    if rank == 0:
        # SGLang has chosen the port seconds ago, and another engine that starts may have taken it: one rank needs no known one.
        listener = socket.create_server((LOOPBACK, port if n_ranks > 1 else 0))
        port = listener.getsockname()[1]
        options |= {"master_listen_fd": listener.detach(), "use_libuv": True}  # the store closes it
    store = TCPStore(LOOPBACK, port, n_ranks, is_master=rank == 0, wait_for_workers=False, **options)
    yield store, rank, n_ranks
    raise RuntimeError("a second rendezvous of the ranks is not possible")
