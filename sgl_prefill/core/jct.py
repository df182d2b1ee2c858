"""Job completion time (JCT) models: what a prefill-only request costs, known before it runs (PrefillOnly, section 6.3)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import numpy as np


class JctModel(Protocol):
    """Predicted cost of one request, in any unit in which smaller means sooner done."""

    def __call__(self, n_input_tokens: int, n_cached_tokens: int) -> float:
        """Cost of a prompt of `n_input_tokens`, `n_cached_tokens` of which the prefix cache holds. Must be pure."""
        ...


def cache_miss_tokens(n_input_tokens: int, n_cached_tokens: int) -> float:
    """The paper's default proxy, in tokens: what the prefix cache does not hold (Pearson 0.987 with the true JCT there)."""
    assert 0 <= n_cached_tokens <= n_input_tokens, (n_cached_tokens, n_input_tokens)
    return float(n_input_tokens - n_cached_tokens)


# Of a step's time, where it is full.
FIXED_SHARE = 0.1


class Observation(NamedTuple):
    """One timed prefill."""

    n_input_tokens: int
    n_cached_tokens: int
    ms: float


class Work(NamedTuple):
    """Predicted milliseconds, apart by what they are spent on: a machine may be wrong about one of the two."""

    steps_ms: float  # beginning and ending forward passes
    tokens_ms: float  # what the tokens of the requests add


class FittedJct(NamedTuple):
    """Milliseconds of one prefill as a sum of what it consists of; every coefficient is >= 0."""

    step_ms: float  # a forward pass of any length
    miss_token_ms: float  # matrix products: for each token that is computed
    pair_ms: float  # attention: for each pair of a computed token and a token that it sees
    cached_token_ms: float  # lookups: for each token that is not computed

    def __call__(self, n_input_tokens: int, n_cached_tokens: int) -> float:
        _, n_miss, n_pairs, n_cached = _features(n_input_tokens, n_cached_tokens)
        return self.step_ms + self.miss_token_ms * n_miss + self.pair_ms * n_pairs + self.cached_token_ms * n_cached

    def of_step(self, requests: Iterable[tuple[int, int]]) -> Work:
        """One forward pass over several requests, each (n_input_tokens, n_cached_tokens)."""
        return Work(self.step_ms, sum(self(n_input, n_cached) - self.step_ms for n_input, n_cached in requests))

    def full_price_tokens(self) -> int | None:
        """Computed tokens from which on one more costs its full price: a step's fixed cost is a tenth of its time there.

        None where a token costs nothing, so that no step is ever full.
        """
        if self.miss_token_ms == 0:
            return None
        return math.ceil(self.step_ms / self.miss_token_ms * (1 / FIXED_SHARE - 1))


def _features(n_input_tokens: int, n_cached_tokens: int) -> tuple[float, float, float, float]:
    n_miss = n_input_tokens - n_cached_tokens
    n_pairs = n_miss * (n_input_tokens + n_cached_tokens + 1) / 2
    return 1.0, n_miss, n_pairs, n_cached_tokens


def fit(observations: Sequence[Observation]) -> FittedJct:
    """Least squares of the relative error, so that a hit of 5 ms counts as much as a miss of 5 s.

    A coefficient that came out negative (noise) is set to 0 and the others are fitted anew. Raises ValueError where there
    are fewer observations than coefficients.
    """
    n_features = len(FittedJct._fields)
    if len(observations) < n_features:
        raise ValueError(f"{len(observations)} observations cannot determine {n_features} coefficients")
    times_ms = np.array([one.ms for one in observations])
    rows = np.array([_features(one.n_input_tokens, one.n_cached_tokens) for one in observations]) / times_ms[:, None]
    scales = np.maximum(np.abs(rows).max(axis=0), 1e-300)  # the columns differ by eight orders of magnitude
    kept = list(range(n_features))
    while True:
        solution, *_ = np.linalg.lstsq((rows / scales)[:, kept], np.ones(len(times_ms)), rcond=None)
        if (solution >= 0).all() or not kept:
            break
        kept.pop(int(np.argmin(solution)))
    coefficients = np.zeros(n_features)
    coefficients[kept] = solution / scales[kept]
    return FittedJct(*coefficients.tolist())


class Drift:
    """How much slower than the profile the machine is at present: a factor for steps and one for their tokens.

    A Kalman filter over relative errors (the two factors wander a little with each observation), so that it follows a machine
    that slows down, and an outlier moves it little. It multiplies predictions and not the order of requests, which it could
    not change but for the weight of waiting.
    """

    NOISE = 0.1  # of one observation, relative
    WANDER = 0.005  # of a factor between two observations
    DOUBT = 0.5  # of a factor before the first, and at most: many steps alike say nothing of what else there is
    LARGEST_RATIO = 1.5  # one outlier counts as at most this factor
    SMALLEST_FACTOR = 0.05

    def __init__(self) -> None:
        self._factors = np.ones(2)
        self._covariance = np.eye(2) * self.DOUBT**2

    def ms(self, work: Work) -> float:
        """What the model predicts, corrected."""
        return float(self._factors @ work)

    def observe(self, work: Work, actual_ms: float) -> None:
        """One step has taken so long. Times of 0 say nothing."""
        predicted_ms = self.ms(work)
        if predicted_ms <= 0 or actual_ms <= 0:
            return
        shares = np.array(work) / predicted_ms
        error = min(max(actual_ms / predicted_ms, 1 / self.LARGEST_RATIO), self.LARGEST_RATIO) - 1
        spread = self._covariance @ shares
        gain = spread / (shares @ spread + self.NOISE**2)
        self._factors = np.maximum(self._factors + gain * error, self.SMALLEST_FACTOR)
        covariance = self._covariance - np.outer(gain, spread) + np.eye(2) * self.WANDER**2
        # Scaling rows and columns alike keeps it a covariance.
        scale = np.minimum(self.DOUBT / np.sqrt(covariance.diagonal()), 1.0)
        self._covariance = covariance * np.outer(scale, scale)
