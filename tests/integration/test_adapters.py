"""LoRA: a request is answered by its adapter, and shares prefixes within it only."""

from __future__ import annotations

from typing import Any

from tests.integration.children import result_of

adapters = result_of("adapters_child", "adapters")


def largest(found: list[list[float]], expected: list[list[float]]) -> float:
    pairs = zip(found, expected, strict=True)
    return max(abs(a - b) for row, other in pairs for a, b in zip(row, other, strict=True))


def test_each_request_is_answered_by_its_adapter(adapters: dict[str, Any]) -> None:
    """Three requests at once with one prompt: without an adapter, and with each of two; cold, and cached."""
    assert adapters["policy"]
    for one in adapters["rounds"]:
        assert largest(one["logprobs"], adapters["expected"]) <= 2e-4
    base, first, second = adapters["expected"]
    assert min(largest([base], [first]), largest([base], [second]), largest([first], [second])) > 0.1


def test_a_prefix_is_reused_within_its_adapter_only(adapters: dict[str, Any]) -> None:
    cold, again = (one["cached"] for one in adapters["rounds"])
    assert cold == [0, 0, 0]
    assert again == [299, 299, 299]
