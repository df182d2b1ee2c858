"""SGLang's scheduler with this package on a GPU that is none: a fake driver over host memory. No claim about a device."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.children import result_of

CLOSE = 1e-4  # as in test_memory.py


device = result_of("device_child", "device")


@pytest.mark.parametrize("name", ["roomy", "tight"])
def test_memory_that_comes_with_the_plan_gives_the_answers_of_a_host(device: dict[str, Any], name: str) -> None:
    """777 tokens, cold and again; on the tight card they do not fit the durable slots. What has no memory ends the process."""
    found = device[name]
    for answer in found["answers"]:
        assert answer == pytest.approx(device["on_host"], abs=CLOSE)
    assert found["cached"] == (776 if name == "roomy" else found["kept"])
    assert found["kept"] == (777 if name == "roomy" else found["memory"]["durable_tokens"])
    assert found["is_empty"]


def test_a_start_leaves_the_margin_free(device: dict[str, Any]) -> None:
    """Of a card of 2 GiB half a GiB and a hundredth of the card."""
    assert device["tight"]["free_bytes"] >= 532 * 2**20
    assert device["tight"]["memory"]["durable_tokens"] < 777 < device["roomy"]["memory"]["durable_tokens"]


def test_a_start_that_runs_out_of_memory_says_so_and_leaves_nothing_mapped(device: dict[str, Any]) -> None:
    """Each ninth allocation of a start; tests/cpu/test_device_memory.py fails every one with a model that computes nothing."""
    assert len(device["failures"]) > 5
    for failure in device["failures"]:
        assert failure["is_empty"], failure
        assert failure["message"] is None or failure["message"].startswith(("NoMemoryLeftError", "MemoryPlanError"))
    assert sum(failure["message"] is not None for failure in device["failures"]) > 5
