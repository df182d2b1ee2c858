"""Calibration of label probabilities: what each method keeps, and what its numbers mean."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_prefill.core.label_calibration import (
    FLOOR,
    FROM_EXAMPLES,
    HIGHEST_SCALE,
    LOWEST_SCALE,
    N_BINS,
    Calibration,
    cross_validated,
    fit,
    fit_contextual,
    identity,
    log_shares,
    quality,
)
from sgl_prefill.core.labels import LabelError

ANY = st.one_of(st.just(-math.inf), st.floats(-1e6, 0), st.floats(-20, 0))


@st.composite
def rows(draw: st.DrawFn, n_labels: int | None = None) -> list[float]:
    """Log-probabilities of which one at least is usable."""
    n = n_labels or draw(st.integers(2, 5))
    row = draw(st.lists(ANY, min_size=n, max_size=n))
    row[draw(st.integers(0, n - 1))] = draw(st.floats(-1e6, 0))
    return row


@st.composite
def labelled(draw: st.DrawFn) -> tuple[list[list[float]], list[int]]:
    n_labels, n_examples = draw(st.integers(2, 4)), draw(st.integers(2, 30))
    examples = [draw(rows(n_labels)) for _ in range(n_examples)]
    return examples, draw(st.lists(st.integers(0, n_labels - 1), min_size=n_examples, max_size=n_examples))


def log_loss(calibration: Calibration, examples: list[list[float]], answers: list[int]) -> float:
    return quality([calibration.probabilities(row) for row in examples], answers).log_loss


@given(rows(), st.floats(LOWEST_SCALE, HIGHEST_SCALE))
def test_a_temperature_keeps_the_order(row: list[float], scale: float) -> None:
    """Whatever it is: a label that was likelier is not less likely afterwards."""
    found = Calibration([scale] * len(row), [0.0] * len(row)).probabilities(row)
    for left, p_left in zip(row, found, strict=True):
        assert all(p_left >= p_right for right, p_right in zip(row, found, strict=True) if left >= right)


@settings(max_examples=40, deadline=None)
@given(labelled(), st.sampled_from(FROM_EXAMPLES))
def test_a_fit_is_never_worse_on_its_own_examples_than_what_was_there(
    given_: tuple[list[list[float]], list[int]], method: str
) -> None:
    """By likelihood; and its numbers are finite and in bounds, whatever the examples are."""
    examples, answers = given_
    found = fit(method, examples, answers)
    assert all(LOWEST_SCALE <= scale <= HIGHEST_SCALE for scale in found.scales)
    assert all(abs(bias) <= -FLOOR for bias in found.biases)
    before, after = (log_loss(one, examples, answers) for one in (identity(len(examples[0])), found))
    assert after <= before + 1e-9 * max(before, 1.0)


@given(rows())
def test_a_prompt_without_content_has_no_preference_after_contextual_calibration(row: list[float]) -> None:
    found = fit_contextual([row]).probabilities(row)
    assert found == pytest.approx([1 / len(row)] * len(row), abs=1e-9)


@given(rows(3), st.lists(st.floats(LOWEST_SCALE, HIGHEST_SCALE), min_size=3, max_size=3), rows(3))
def test_calibrated_probabilities_are_a_distribution_however_extreme_the_scores(
    row: list[float], scales: list[float], content_free: list[float]
) -> None:
    for calibration in (Calibration(scales, fit_contextual([content_free]).biases), identity(3)):
        found = calibration.probabilities(row)
        assert all(0 <= p <= 1 for p in found)
        assert math.fsum(found) == pytest.approx(1.0)


@given(rows(), st.floats(-1e3, 1e3))
def test_a_common_summand_changes_nothing(row: list[float], summand: float) -> None:
    """Log-probabilities may be over the whole vocabulary or over the labels alone."""
    assert log_shares([log + summand for log in row]) == pytest.approx(log_shares(row), abs=1e-6)


@pytest.mark.parametrize("row", [[-math.inf, -math.inf], [math.nan, -1.0]])
def test_what_no_label_can_be_told_from_is_an_error(row: list[float]) -> None:
    with pytest.raises(LabelError):
        identity(2).probabilities(row)


def test_the_expected_calibration_error_of_two_bins_by_hand() -> None:
    """0.9 sure and right twice of three, 0.6 sure and right once of one: 3/4 * |2/3 - 0.9| + 1/4 * |1 - 0.6|."""
    found = quality([[0.9, 0.1], [0.9, 0.1], [0.1, 0.9], [0.6, 0.4]], [0, 0, 0, 0])
    assert found.expected_calibration_error == pytest.approx(0.75 * (0.9 - 2 / 3) + 0.25 * 0.4)
    assert found.accuracy == 0.75
    assert [one.n_examples for one in found.bins if one.n_examples] == [1, 3]
    assert (len(found.bins), found.n_examples) == (N_BINS, 4)
    assert found.log_loss == pytest.approx(-(2 * math.log(0.9) + math.log(0.1) + math.log(0.6)) / 4)


def test_certainty_is_in_the_last_bin() -> None:
    assert quality([[1.0, 0.0]], [0]).bins[-1].n_examples == 1


def skewed(n_examples: int) -> tuple[list[list[float]], list[int]]:
    """A model that is three times too sure, and prefers the first label by two."""
    rng = random.Random(1)
    examples, answers = [], []
    for _ in range(n_examples):
        true = rng.gauss(0, 1.5)
        answers.append(int(rng.random() > 1 / (1 + math.exp(-true))))
        examples.append([3 * true + 2.0, 0.0])
    return examples, answers


def test_a_known_skew_is_found() -> None:
    """The scale is a third, the biases take the preference back, and what was not fitted is calibrated too."""
    examples, answers = skewed(600)
    vector = fit("vector", examples, answers)
    share_of_two = vector.probabilities([2.0, 0.0])
    assert share_of_two == pytest.approx([0.5, 0.5], abs=0.1)
    before = quality([identity(2).probabilities(row) for row in examples], answers)
    after = quality(cross_validated("vector", examples, answers), answers)
    assert after.expected_calibration_error < before.expected_calibration_error / 3
    assert after.accuracy > before.accuracy
    temperature = fit("temperature", *skewed(300))
    assert temperature.scales[0] == temperature.scales[1] < 0.7


def test_cross_validation_fits_to_none_of_what_it_measures() -> None:
    """An example whose label is changed changes its own fold's fit, and so what others get, but not what it gets itself."""
    examples, answers = skewed(20)
    changed = [*answers]
    index = 7
    changed[index] = 1 - changed[index]
    # The folds stay what they are where both orders agree on them.
    found = [cross_validated("temperature", examples, labels, n_folds=len(answers)) for labels in (answers, changed)]
    assert found[0][index] == pytest.approx(found[1][index])
    assert found[0] != found[1]
