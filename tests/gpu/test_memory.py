"""Aliased KV memory on a CUDA device, without a server: whose memory is whose, and how much of it is there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from sgl_prefill.errors import AliasedMemoryError
from sgl_prefill.startup.device import Device, this_device

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

N_BUFFERS = 8
MIB = 1 << 20
OWN_BYTES, SHARED_BYTES = 64 * MIB, 256 * MIB
SLACK_BYTES = 64 * MIB  # of the driver's own tables


@pytest.fixture
def device() -> Device:
    torch.zeros(1, device="cuda")  # makes torch's context
    torch.cuda.empty_cache()
    return this_device()


@pytest.fixture
def memory(device: Device) -> Iterator[Any]:
    """All of it committed."""
    made: Any = device.aliased_memory(N_BUFFERS, OWN_BYTES, SHARED_BYTES)
    made.commit_own(OWN_BYTES)
    made.commit_shared(SHARED_BYTES)
    yield made
    made.close()


def free_bytes() -> int:
    torch.cuda.synchronize()
    return int(torch.cuda.mem_get_info()[0])


def test_all_tails_are_the_same_memory_and_all_fronts_are_not(memory: Any) -> None:
    """What one buffer writes behind its own part every other one reads there, and only there."""
    for number, tensor in enumerate(memory.tensors):
        tensor[:OWN_BYTES].fill_(number + 1)
        tensor[OWN_BYTES:].fill_(100 + number)
        for other in memory.tensors:
            assert bool((other[OWN_BYTES:] == 100 + number).all())
    for number, tensor in enumerate(memory.tensors):
        assert bool((tensor[:OWN_BYTES] == number + 1).all())


def test_the_tail_takes_memory_once(device: Device) -> None:
    """Not once a buffer; and all of it comes back when it is closed, twice if need be."""
    before = free_bytes()
    memory: Any = device.aliased_memory(N_BUFFERS, OWN_BYTES, SHARED_BYTES)
    memory.commit_own(OWN_BYTES)
    memory.commit_shared(SHARED_BYTES)
    taken = before - free_bytes()
    expected = N_BUFFERS * OWN_BYTES + SHARED_BYTES
    assert expected <= taken <= expected + SLACK_BYTES
    memory.close()
    memory.close()
    assert before - free_bytes() <= SLACK_BYTES


def test_memory_that_was_reserved_takes_none_before_it_is_committed(device: Device) -> None:
    """Ten times the device can be reserved, as a start does before it knows how much is left."""
    before = free_bytes()
    granule = device.granularity_bytes()
    size = torch.cuda.mem_get_info()[1] // granule * granule
    memory: Any = device.aliased_memory(10, size, granule)
    assert before - free_bytes() <= 10 * granule + SLACK_BYTES
    memory.close()


def test_committed_memory_holds_zeros(device: Device) -> None:
    """Others have left NaN in it, and attention multiplies rows that nobody has written by 0."""
    poison = torch.full((free_bytes() // 2 // 4,), float("nan"), device="cuda")
    del poison
    torch.cuda.empty_cache()
    n_bytes = free_bytes() // 4 // N_BUFFERS // (2 * MIB) * (2 * MIB)
    memory: Any = device.aliased_memory(N_BUFFERS, n_bytes, SHARED_BYTES)
    memory.commit_own(n_bytes)
    memory.commit_shared(SHARED_BYTES)
    assert not any(bool(tensor.any()) for tensor in memory.tensors)
    memory.close()


def test_what_was_written_stays_when_more_is_committed(device: Device) -> None:
    """A second commit begins where the first one ended."""
    memory: Any = device.aliased_memory(2, OWN_BYTES, SHARED_BYTES)
    memory.commit_own(OWN_BYTES // 4)
    memory.tensors[0][: OWN_BYTES // 4].fill_(7)
    memory.commit_own(OWN_BYTES)
    assert bool((memory.tensors[0][: OWN_BYTES // 4] == 7).all())
    assert not bool(memory.tensors[0][OWN_BYTES // 4 : OWN_BYTES].any())
    memory.close()


def test_more_than_the_device_has_is_refused_by_name_and_costs_nothing(device: Device) -> None:
    """The buffers stay as they were, and the memory of the buffers that came first is given back."""
    granule = device.granularity_bytes()
    size = torch.cuda.mem_get_info()[1] // granule * granule
    memory: Any = device.aliased_memory(3, size, granule)
    memory.commit_own(granule)
    memory.tensors[2][:granule].fill_(9)
    before = free_bytes()
    with pytest.raises(AliasedMemoryError, match="cuMemCreate"):
        memory.commit_own(size)
    assert before - free_bytes() <= SLACK_BYTES
    assert bool((memory.tensors[2][:granule] == 9).all())
    memory.close()


def test_what_torch_has_kept_for_itself_can_be_committed_once_it_is_released(device: Device) -> None:
    """A start's profile run leaves its peak in torch's cache, of which the driver knows nothing."""
    n_bytes = int(0.6 * free_bytes())
    peak = torch.empty(n_bytes, dtype=torch.uint8, device="cuda")
    del peak
    assert torch.cuda.memory_reserved() >= n_bytes
    device.release_unused()
    granule = device.granularity_bytes()
    memory: Any = device.aliased_memory(1, n_bytes // granule * granule, granule)
    memory.commit_own(n_bytes // granule * granule)
    memory.close()


def test_kernels_of_torch_reach_the_memory(memory: Any) -> None:
    """Slots are written and read by index, in the types that K and V have."""
    rows = memory.tensors[0].view(torch.bfloat16).view(-1, 4, 64)
    slots = torch.randperm(rows.shape[0], device="cuda")[:1000]
    keys = torch.randn(1000, 4, 64, device="cuda", dtype=torch.bfloat16)
    rows[slots] = keys
    assert torch.equal(rows[slots], keys)


def test_memory_is_given_back_only_when_nothing_writes_to_it_any_more(device: Device) -> None:
    """A step that still runs at the end of a server would otherwise fault, and every call after it."""
    memory: Any = device.aliased_memory(1, SHARED_BYTES, SHARED_BYTES)
    memory.commit_own(SHARED_BYTES)
    memory.commit_shared(SHARED_BYTES)
    for _ in range(1000):
        memory.tensors[0].add_(1)
    memory.close()
    torch.cuda.synchronize()
    assert int(torch.ones(1, device="cuda").sum()) == 1
