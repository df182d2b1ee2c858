"""Steps that are chosen and launched before the one before has run, on a device that runs late and fills free slots with NaN."""

from __future__ import annotations

from typing import Any

from tests.integration.children import result_of

launched = result_of("late_child", "launched")


def test_a_storm_on_a_late_device_is_answered_as_each_request_alone(launched: dict[str, Any]) -> None:
    for of_cache in launched["storm"]:
        assert of_cache["unanswered"] == 0
        assert of_cache["not_a_number"] == 0
        assert of_cache["worst"] <= 1e-4
        assert of_cache["behind"] > of_cache["passes"] / 10


def test_the_next_step_is_chosen_with_full_knowledge_of_the_cache(launched: dict[str, Any]) -> None:
    """SGLang's overlap loop chooses a step before the prefix of the last one is in the cache."""
    assert launched["order"]["differ"] == 0
    assert launched["order"]["behind"] > launched["order"]["passes"] / 2
