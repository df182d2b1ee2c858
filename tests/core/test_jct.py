"""The fitted JCT model and its online correction, on made-up machines whose times are known."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_prefill.core.jct import Drift, FittedJct, Observation, Work, fit

TRUE = FittedJct(step_ms=4.0, miss_token_ms=0.8, pair_ms=3e-5, cached_token_ms=0.001, request_ms=1.5)
GRID = [
    ((n_cached + n_miss, n_cached),) for n_cached, n_miss in itertools.product((0, 500, 2000, 8000), (8, 64, 256, 1024))
]
SEVERAL = [((504, 500),) * n_requests for n_requests in (1, 4, 16)]


def timed(machine: FittedJct, noise: float = 0.0) -> list[Observation]:
    rng = random.Random(0)
    steps = [*GRID, *SEVERAL]
    return [Observation(step, sum(machine.of_step(step)) * (1 + rng.uniform(-noise, noise))) for step in steps]


def test_pairs_are_what_attention_computes() -> None:
    """Each computed token sees all before it and itself: 3 cached and 2 computed tokens make 4 + 5 pairs."""
    assert FittedJct(0, 0, 1, 0)(5, 3) == 9


def test_a_packed_step_pays_for_its_start_once_and_for_each_request() -> None:
    """2 ms, twice 3 ms, and 10 and 20 computed tokens of 0.5 ms. A step of one costs what the request alone costs."""
    machine = FittedJct(step_ms=2.0, miss_token_ms=0.5, pair_ms=0.0, cached_token_ms=0.0, request_ms=3.0)
    assert sum(machine.of_step([(10, 0), (50, 30)])) == 2 + 2 * 3 + 0.5 * 30
    assert sum(machine.of_step([(10, 0)])) == machine(10, 0) == 10
    assert sum(machine.work(3, 2, tokens_ms=15.0)) == 3 * 2 + 2 * 3 + 0.5 * 30


def test_lengths_may_be_counted_in_pages() -> None:
    """A simulation counts 50 tokens as one: the same steps take the same time."""
    in_pages = TRUE.in_units_of(50)
    for n_input, n_cached in ((50, 0), (1000, 950), (14_000, 13_850)):
        assert in_pages(n_input // 50, n_cached // 50) == pytest.approx(TRUE(n_input, n_cached))


def test_the_fit_finds_a_machine_without_noise_and_extrapolates() -> None:
    """To 16 times the longest computed part of the grid."""
    fitted = fit(timed(TRUE))
    assert fitted == pytest.approx(TRUE, rel=1e-6)
    assert fitted(16000, 0) == pytest.approx(TRUE(16000, 0), rel=1e-6)
    packed = [(120, 100)] * 30
    assert sum(fitted.of_step(packed)) == pytest.approx(sum(TRUE.of_step(packed)), rel=1e-6)


def test_steps_of_one_request_cannot_tell_a_request_from_a_step() -> None:
    """All of it is the step's, and what a request alone costs is as well known."""
    alone = [one for one in timed(TRUE) if len(one.requests) == 1]
    fitted = fit(alone)
    assert fitted.request_ms == 0
    assert fitted.step_ms == pytest.approx(TRUE.step_ms + TRUE.request_ms, rel=1e-6)
    assert fitted(700, 500) == pytest.approx(TRUE(700, 500), rel=1e-6)


def test_noise_that_leaves_a_step_without_a_cost_is_not_believed() -> None:
    """On a busy machine 4 requests took as long as 16 steps: packing would have been switched off by the profile."""
    noisy = [one._replace(ms=one.ms * 16) if len(one.requests) == 4 else one for one in timed(TRUE)]
    noisy = [one._replace(ms=one.ms * 40) if len(one.requests) == 16 else one for one in noisy]
    assert fit(noisy).step_ms > 0
    assert fit(noisy).full_price_tokens()


def test_noise_of_a_fifth_moves_a_long_prediction_by_less_than_a_fifth() -> None:
    fitted = fit(timed(TRUE, noise=0.2))
    assert fitted(16000, 0) == pytest.approx(TRUE(16000, 0), rel=0.2)
    assert min(fitted) >= 0


@given(st.lists(st.floats(0.01, 1e4), min_size=len(GRID), max_size=len(GRID)))
def test_whatever_is_observed_more_work_never_costs_less(times_ms: list[float]) -> None:
    """Negative coefficients would let a longer request go first."""
    fitted = fit([Observation(step, ms) for step, ms in zip(GRID, times_ms, strict=True)])
    assert min(fitted) >= 0
    assert fitted(2000, 0) >= fitted(1000, 0) >= 0


def test_too_few_observations_are_refused() -> None:
    with pytest.raises(ValueError, match="3 observations cannot determine 4"):
        fit(timed(TRUE)[:3])
    with pytest.raises(ValueError, match="4 observations cannot determine 5"):
        fit(timed(TRUE)[-4:])


def test_drift_finds_which_part_of_the_profile_is_wrong() -> None:
    """Steps cost twice what the profile says and tokens 0.8 of it, each time within 5 %."""
    drift, rng = Drift(), random.Random(0)
    for _ in range(100):
        work = Work(10.0, math.exp(rng.uniform(0, 7)))
        drift.observe(work, (2.0 * work.steps_ms + 0.8 * work.tokens_ms) * rng.uniform(0.95, 1.05))
    assert drift.ms(Work(10.0, 0.0)) == pytest.approx(20.0, rel=0.1)
    assert drift.ms(Work(0.0, 1000.0)) == pytest.approx(800.0, rel=0.1)


def test_drift_follows_a_machine_that_slows_down_and_an_outlier_moves_it_little() -> None:
    """Twice as slow after 1,000 steps; then one step takes 1,000 times as long, or no time at all."""
    drift, work = Drift(), Work(2.0, 8.0)
    for _ in range(1000):
        drift.observe(work, 10.0)
    assert drift.ms(work) == pytest.approx(10.0)
    for _ in range(200):
        drift.observe(work, 20.0)
    assert drift.ms(work) == pytest.approx(20.0, rel=0.02)
    drift.observe(work, 10_000.0)
    after = drift.ms(work)
    assert 20.0 < after < 1.3 * 20.0
    drift.observe(work, 0.0)
    assert drift.ms(work) == after


@pytest.mark.parametrize("n_before", [0, 3000])
def test_an_outlier_among_steps_of_another_kind_is_soon_forgotten(n_before: int) -> None:
    """A cold prompt takes 50 times too long, as the first request or after thousands of hits; ten more later it is known."""
    drift, cold = Drift(), Work(2.0, 800.0)
    for _ in range(n_before):
        drift.observe(Work(2.0, 8.0), 10.0)
    drift.observe(cold, 50 * 802.0)
    assert drift.ms(cold) < 1.6 * 802.0
    for _ in range(10):
        drift.observe(cold, 802.0)
    assert drift.ms(cold) == pytest.approx(802.0, rel=0.12)


def test_thousands_of_steps_that_are_alike_do_not_spoil_what_is_known_of_others() -> None:
    """Hits of one size, with noise; a prefill of 100 times their tokens is still predicted within a third."""
    drift, rng = Drift(), random.Random(0)
    for _ in range(5000):
        drift.observe(Work(2.0, 8.0), 10.0 * rng.uniform(0.9, 1.1))
    assert drift.ms(Work(2.0, 800.0)) == pytest.approx(802.0, rel=1 / 3)
