"""The ranks of one machine find each other on its loopback interface. PyTorch's own store for them listens on every interface,
and answers whoever asks.
"""

from __future__ import annotations

import contextlib
import importlib
import socket
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import parse_qs, urlsplit

LOOPBACK = "127.0.0.1"
SCHEME = "sgl-prefill-loopback"


def around_resolve_dist_init_method(original: Callable[..., str], *, server_args: Any, dist_port: int) -> str:
    """Hook: of one node; where several were asked for, SGLang's own address serves."""
    found = original(server_args=server_args, dist_port=dist_port)
    if server_args.nnodes > 1 or server_args.dist_init_addr or not found.startswith("tcp://"):
        return found
    register()
    return f"{SCHEME}://{LOOPBACK}:{dist_port}"


def register() -> None:
    """Makes PyTorch know what addresses of ours mean, in this process."""
    rendezvous = importlib.import_module("torch.distributed.rendezvous")  # where there is a function of its name too
    with contextlib.suppress(RuntimeError):  # it is known already
        rendezvous.register_rendezvous_handler(SCHEME, _find_each_other)


def _find_each_other(url: str, timeout: Any = None, **_: Any) -> Iterator[tuple[Any, int, int]]:
    """Yields (store, rank, number of ranks), as PyTorch wants it."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    address = urlsplit(url)
    rank, n_ranks = (int(parse_qs(address.query)[name][0]) for name in ("rank", "world_size"))
    options: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
    if rank == 0:
        listener = socket.create_server((LOOPBACK, address.port or 0))
        options |= {"master_listen_fd": listener.detach(), "use_libuv": True}  # the store closes it
    store = TCPStore(LOOPBACK, address.port or 0, n_ranks, is_master=rank == 0, wait_for_workers=False, **options)
    yield store, rank, n_ranks
    raise RuntimeError("ranks cannot be found a second time")
