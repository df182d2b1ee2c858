"""Job completion time (JCT) models: what a prefill-only request costs, known before it runs (PrefillOnly, section 6.3)."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol

import numpy as np


class JctModel(Protocol):
    """Predicted cost of one request, in any unit in which smaller means sooner done."""

    def __call__(self, n_input_tokens: int, n_cached_tokens: int) -> float:
        """Returns the cost of a prompt of `n_input_tokens`, `n_cached_tokens` of which the prefix cache holds. Must be pure."""
        ...


def cache_miss_tokens(n_input_tokens: int, n_cached_tokens: int) -> float:
    """Returns the paper's default proxy, in tokens: what the prefix cache does not hold (Pearson 0.987 with the true JCT
    there).
    """
    assert 0 <= n_cached_tokens <= n_input_tokens, (n_cached_tokens, n_input_tokens)
    return float(n_input_tokens - n_cached_tokens)


# Share of a full step's time that is its fixed cost.
FIXED_SHARE = 0.1
LEAST_FULL_PRICE_TOKENS = 64


class Observation(NamedTuple):
    """One timed step."""

    requests: tuple[tuple[int, int], ...]  # (input tokens, cached tokens) of each
    ms: float


class Work(NamedTuple):
    """Predicted milliseconds, apart by what they are spent on: a machine may be wrong about one of the two."""

    steps_ms: float  # beginning and ending forward passes, and each request's part of that
    tokens_ms: float  # what the tokens of the requests add


class FittedJct(NamedTuple):
    """Milliseconds of one step as a sum of what it consists of; every coefficient is >= 0."""

    step_ms: float  # a forward pass of any length
    miss_token_ms: float  # matrix products: for each token that is computed
    pair_ms: float  # attention: for each pair of a computed token and a token that it sees
    cached_token_ms: float  # lookups: for each token that is not computed
    request_ms: float = 0.0  # for each request: its place in the batch, its attention calls, its row of logits

    def __call__(self, n_input_tokens: int, n_cached_tokens: int) -> float:
        """Predicts a step of one request."""
        return self.step_ms + self.request_ms + self.tokens_ms(n_input_tokens, n_cached_tokens)

    def of_step(self, requests: Collection[tuple[int, int]]) -> Work:
        """Predicts one forward pass over several requests, each (n_input_tokens, n_cached_tokens)."""
        return self.work(1, len(requests), sum(self.tokens_ms(n_input, n_cached) for n_input, n_cached in requests))

    def work(self, n_steps: int, n_requests: int, tokens_ms: float) -> Work:
        """Predicts so many forward passes over so many requests, whose tokens add `tokens_ms`."""
        return Work(n_steps * self.step_ms + n_requests * self.request_ms, tokens_ms)

    def tokens_ms(self, n_input_tokens: int, n_cached_tokens: int) -> float:
        """Predicts what the tokens of one request add to a step."""
        n_miss, n_pairs, n_cached = token_features(n_input_tokens, n_cached_tokens)
        return self.miss_token_ms * n_miss + self.pair_ms * n_pairs + self.cached_token_ms * n_cached

    def in_units_of(self, n_tokens: int) -> FittedJct:
        """Returns the same model for lengths that are counted in units of so many tokens."""
        return self._replace(
            miss_token_ms=self.miss_token_ms * n_tokens - self.pair_ms * n_tokens * (n_tokens - 1) / 2,
            pair_ms=self.pair_ms * n_tokens**2,
            cached_token_ms=self.cached_token_ms * n_tokens,
        )

    def full_price_tokens(self) -> int | None:
        """Returns the computed tokens from which on one more costs its full price: a step's fixed cost is a tenth of its
        time there.

        None where a token costs nothing, so that no step is ever full. Not less than LEAST_FULL_PRICE_TOKENS: a machine that
        was busy while it was measured must not end up with one request a step.
        """
        if self.miss_token_ms == 0:
            return None
        return max(math.ceil(self.step_ms / self.miss_token_ms * (1 / FIXED_SHARE - 1)), LEAST_FULL_PRICE_TOKENS)


def token_features(n_input_tokens: int, n_cached_tokens: int) -> tuple[int, float, int]:
    """Returns the tokens that a request computes, the pairs of one and a token that it sees, and the tokens that it reuses."""
    n_miss = n_input_tokens - n_cached_tokens
    n_pairs = n_miss * (n_input_tokens + n_cached_tokens + 1) / 2
    return n_miss, n_pairs, n_cached_tokens


def _features(requests: Sequence[tuple[int, int]]) -> list[float]:
    """Returns what each coefficient of FittedJct is multiplied by, in their order."""
    of_tokens = np.array([token_features(n_input, n_cached) for n_input, n_cached in requests]).sum(axis=0)
    return [1.0, *of_tokens, len(requests)]


def fit(observations: Sequence[Observation]) -> FittedJct:
    """Fits by least squares of the relative error, so that a hit of 5 ms counts as much as a miss of 5 s.

    A coefficient that came out negative (noise) is set to 0 and the others are fitted anew. Only steps of
    several requests can separate `request_ms` from `step_ms`. Without such steps, or where noise would make `step_ms` 0 (so that
    packing could gain nothing), `request_ms` is 0 and `step_ms` holds both. Raises ValueError if there are fewer observations
    than coefficients.
    """
    step, request = (FittedJct._fields.index(name) for name in ("step_ms", "request_ms"))
    kept = list(range(len(FittedJct._fields)))
    if all(len(one.requests) == 1 for one in observations):
        kept.remove(request)
    if len(observations) < len(kept):
        raise ValueError(f"{len(observations)} observations cannot determine {len(kept)} coefficients")
    times_ms = np.array([one.ms for one in observations])
    rows = np.array([_features(one.requests) for one in observations]) / times_ms[:, None]
    scales = np.maximum(np.abs(rows).max(axis=0), 1e-300)  # the columns differ by eight orders of magnitude
    while True:
        solution, *_ = np.linalg.lstsq((rows / scales)[:, kept], np.ones(len(times_ms)), rcond=None)
        if (solution >= 0).all() or not kept:
            break
        most_negative = kept[int(np.argmin(solution))]
        kept.remove(request if most_negative == step and request in kept else most_negative)
    coefficients = np.zeros(len(FittedJct._fields))
    coefficients[kept] = solution / scales[kept]
    return FittedJct(*coefficients.tolist())


class Drift:
    """How much slower than the profile the machine is at present: a factor for steps and one for their tokens.

    What each request adds to a step (`request_ms`) goes with the step's factor: both are the time of starting kernels and of
    Python, which a busy host stretches alike, while tokens are arithmetic.

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
        # Of steps and of tokens. Plain numbers: of arrays so small every operation costs more than all of this.
        self._factors = (1.0, 1.0)
        self._variances = (self.DOUBT**2, self.DOUBT**2)
        self._covariance = 0.0

    def ms(self, work: Work) -> float:
        """Returns what the model predicts, corrected."""
        return self._factors[0] * work.steps_ms + self._factors[1] * work.tokens_ms

    def observe(self, work: Work, actual_ms: float) -> None:
        """Corrects the factors by one observed step. Times of 0 are ignored."""
        predicted_ms = self.ms(work)
        if predicted_ms <= 0 or actual_ms <= 0:
            return
        shares = work.steps_ms / predicted_ms, work.tokens_ms / predicted_ms
        error = min(max(actual_ms / predicted_ms, 1 / self.LARGEST_RATIO), self.LARGEST_RATIO) - 1
        spread = (
            self._variances[0] * shares[0] + self._covariance * shares[1],
            self._covariance * shares[0] + self._variances[1] * shares[1],
        )
        of_error = shares[0] * spread[0] + shares[1] * spread[1] + self.NOISE**2
        gain = spread[0] / of_error, spread[1] / of_error
        self._factors = (
            max(self._factors[0] + gain[0] * error, self.SMALLEST_FACTOR),
            max(self._factors[1] + gain[1] * error, self.SMALLEST_FACTOR),
        )
        variances = [self._variances[i] - gain[i] * spread[i] + self.WANDER**2 for i in range(2)]
        # Scaling rows and columns alike keeps it a covariance.
        scale = [min(self.DOUBT / math.sqrt(variance), 1.0) for variance in variances]
        self._variances = variances[0] * scale[0] ** 2, variances[1] * scale[1] ** 2
        self._covariance = (self._covariance - gain[0] * spread[1]) * scale[0] * scale[1]


class Predictor:
    """Milliseconds of steps before they run: a model of this machine, corrected by what steps have taken."""

    def __init__(self, model: FittedJct) -> None:
        self.model = model
        self.drift = Drift()

    def ms(self, work: Work) -> float:
        return self.drift.ms(work)

    def observe(self, work: Work, actual_ms: float) -> None:
        """Corrects the model by one observed step."""
        self.drift.observe(work, actual_ms)
