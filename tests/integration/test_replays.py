"""Steps through SGLang's own runner of CUDA graphs with our hooks, on a host: what is replayed answers as if it were not."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.children import result_of

CLOSE = 1e-4


replays = result_of("replays_child", "replays")


@pytest.mark.parametrize(
    ("step", "sizes"),
    [
        pytest.param(
            "one", [16, 64, 128], id="hits of 15, 40 and 100 tokens, each alone"
        ),  # 1 token would be padded by 15
        pytest.param("several", [64], id="hits of 1, 15 and 40 tokens in one step"),
        pytest.param("tail", [64], id="log-probabilities of 30 tokens of the input"),
        pytest.param("in scratch", [128], id="a hit whose new tokens lie in scratch"),
    ],
)
def test_a_replayed_step_answers_as_an_eager_one(replays: dict[str, Any], step: str, sizes: list[int]) -> None:
    """Labels' log-probabilities, padded to the sizes that were recorded."""
    assert replays[step]["sizes"][-len(sizes) :] == sizes
    assert replays[step]["difference"] <= CLOSE
    assert replays["wrong replay"] > 100 * CLOSE  # a replay that hands on the wrong rows shows


def test_answers_of_several_tokens_are_not_replayed(replays: dict[str, Any]) -> None:
    """A replay's batch does not name its requests: the answers' rows would be taken for requests of a client's, and the scheduler
    would end."""
    assert replays["answers"] == {"difference": 0, "sizes": []}
    assert replays["answers replayed"], "an error"


def test_the_gate_compares_replays_and_reaches_the_hybrid_pass_in_spite_of_them(replays: dict[str, Any]) -> None:
    """Its prompt of 60 tokens would be replayed in all pairs; one of them is there for that."""
    assert set(replays["gate"]) == {
        "hybrid and plain",
        "cache hit and miss",
        "scratch and durable slots",
        "replay and plain",
    }
    assert max(replays["gate"].values()) <= CLOSE
    assert replays["gate replays"] == [64] * 3
