"""Two ranks of one machine find each other, and nobody else finds them."""

from __future__ import annotations

import socket
import threading
from typing import Any

import psutil
import pytest
from sglang.srt.runtime_context import get_parallel
from torch.distributed import rendezvous  # type: ignore[attr-defined]

from sgl_prefill.entry.local_server import free_port
from sgl_prefill.port.runner import rank_group

pytestmark = pytest.mark.usefixtures("published")
PORT = free_port()


def address(found: str = "tcp://10.0.0.1:5", port: int = PORT, **given: Any) -> str:
    with get_parallel().override(**given):
        return rank_group.around_resolve_dist_init_method(lambda **_: found, dist_port=port)


def test_where_several_nodes_were_asked_for_their_address_serves() -> None:
    assert address(nnodes=2) == "tcp://10.0.0.1:5"
    assert address(dist_init_addr="10.0.0.1:5") == "tcp://10.0.0.1:5"


def test_two_ranks_meet_on_the_loopback_interface() -> None:
    url = address()
    found: dict[int, Any] = {}

    def meet(rank: int) -> None:
        found[rank] = next(rendezvous(url, rank, 2))

    threads = [threading.Thread(target=meet, args=(rank,)) for rank in (1, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert {rank: one[1:] for rank, one in found.items()} == {0: (0, 2), 1: (1, 2)}
    found[0][0].set("key", "value")
    assert found[1][0].get("key") == b"value"
    listening = {
        one.laddr.ip
        for one in psutil.Process().net_connections("inet")
        if one.status == psutil.CONN_LISTEN and one.laddr.port == PORT
    }
    assert listening == {"127.0.0.1"}


def test_one_rank_takes_another_port_where_its_own_is_taken() -> None:
    """SGLang chooses a port seconds before it listens: an engine of a cluster had ended because another one had it then."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = address(port=taken.getsockname()[1])
        store, rank, n_ranks = next(rendezvous(url, 0, 1))
        store.set("key", "value")
    assert (rank, n_ranks, store.get("key")) == (0, 1, b"value")


@pytest.mark.parametrize("found", ["env://", "file:///tmp/x"])
def test_another_way_that_was_asked_for_is_kept(found: str) -> None:
    assert address(found) == found
