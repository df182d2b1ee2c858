"""When the next step is chosen while one runs on a device, on a clock that the test sets."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from sgl_prefill.port import launched
from sgl_prefill.port.launched import FIRST_MARGIN_S, GROWS, SHRINKS, Pipeline

STEP_S = 0.1


class Clock:
    """The host's time, and a stream whose passes take STEP_S each."""

    def __init__(self) -> None:
        self.now_s = self.free_at_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def mark(self) -> float:
        return max(self.free_at_s, self.now_s)

    def is_reached(self, mark: float) -> bool:
        return self.now_s >= mark

    def ms_between(self, begin: float, end: float) -> float:
        return 1000 * (end - begin)

    def reading_after(self, mark: float) -> Any:
        self.now_s = max(self.now_s, mark)
        return nullcontext()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(launched, "time", SimpleNamespace(perf_counter=found.perf_counter, sleep=found.sleep))
    return found


def run_steps(clock: Clock, pipeline: Pipeline, n: int, *, decision_s: float, predicted_ms: float) -> list[float]:
    """Returns for each step how many seconds the device had waited when it was launched."""
    waits = []
    for _ in range(n):
        pipeline.await_decision(lambda: True)
        clock.now_s += decision_s
        pipeline.begin()
        waits.append(max(clock.now_s - clock.free_at_s, 0.0))
        clock.free_at_s = max(clock.now_s, clock.free_at_s) + STEP_S
        pipeline.launch([], predicted_ms, lambda: None, lambda ms: None)
    return waits


@pytest.mark.parametrize("error", [0.9, 1.0, 1.1])
@pytest.mark.parametrize("decision_s", [0.001, 0.03])
def test_a_device_seldom_waits_whatever_choices_take_and_predictions_miss(
    clock: Clock, decision_s: float, error: float
) -> None:
    """The margin is learned. Errors of predictions do not add up: each step's begin is known when it is launched late."""
    pipeline = Pipeline(clock)
    waits = run_steps(clock, pipeline, 400, decision_s=decision_s, predicted_ms=1000 * error * STEP_S)
    assert sum(one > 0 for one in waits[100:]) <= 300 * 0.1


def test_a_step_is_not_chosen_earlier_than_it_must(clock: Clock) -> None:
    """What is chosen late knows who has come meanwhile: with choices of 1 ms the margin shrinks from 10 ms on."""
    pipeline = Pipeline(clock)
    run_steps(clock, pipeline, 400, decision_s=0.001, predicted_ms=1000 * STEP_S)
    assert 0.001 <= pipeline._margin_s <= 0.001 * GROWS / SHRINKS + launched.POLL_S * 2
    assert pipeline._margin_s < FIRST_MARGIN_S
