"""Calibration of label probabilities: a model's distribution over the labels, corrected by labelled examples or content-free
prompts.

Whatever the method, a calibration is one scale and one bias a label: P(label) is the softmax of scale * log p + bias, where p is
the model's share of the label among the labels.

    temperature   one scale for all labels, no bias (Guo et al. 2017: 1 / temperature); keeps the order of the labels
    vector        a scale and a bias for each label (Guo et al. 2017), regularised
    contextual    no scale; the bias divides by the distribution after prompts without content (Zhao et al. 2021)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sgl_prefill.core.labels import restrict

FROM_EXAMPLES = ("temperature", "vector")
METHODS = (*FROM_EXAMPLES, "contextual")
N_BINS, N_FOLDS = 15, 5
FLOOR = -100.0  # a share below e^-100, also 0, counts as that: one example must not outweigh all others
LOWEST_SCALE, HIGHEST_SCALE = 0.05, 20.0
MOST_BIAS = -FLOOR
# How far from "as it was" a fit is without examples: a normal prior, which is worth less than a handful of them.
SCALE_DEVIATION, BIAS_DEVIATION = 1.0, 3.0

FloatArray = npt.NDArray[np.float64]


class Calibration(NamedTuple):
    """What is done to log-probabilities of labels, in the order of the labels."""

    scales: list[float]  # from LOWEST_SCALE to HIGHEST_SCALE
    biases: list[float]  # from -MOST_BIAS to MOST_BIAS

    def probabilities(self, logprobs: Sequence[float]) -> list[float]:
        """Returns the calibrated P(label), which sum to 1. logprobs: of each label, up to a common summand.

        Raises LabelError where all are -inf, or one is NaN.
        """
        logs = log_shares(logprobs)
        scores = [scale * log + bias for scale, log, bias in zip(self.scales, logs, self.biases, strict=True)]
        top = max(scores)
        return restrict([score - top for score in scores]).probabilities


class Bin(NamedTuple):
    """The examples whose confidence lies in one of the equal parts of 0 to 1."""

    n_examples: int
    confidence: float  # mean; 0 where there is none
    accuracy: float  # share whose likeliest label was right; 0 where there is none


class Quality(NamedTuple):
    """How good probabilities are, measured on labelled examples."""

    n_examples: int
    expected_calibration_error: float  # mean of |accuracy - confidence| over the bins, by how many examples each holds
    accuracy: float  # share of the examples whose likeliest label is theirs; of equal ones the first counts
    log_loss: float  # mean of -log P(the example's label)
    bins: list[Bin]


def identity(n_labels: int) -> Calibration:
    return Calibration([1.0] * n_labels, [0.0] * n_labels)


def log_shares(logprobs: Sequence[float]) -> list[float]:
    """Returns log P(label | one of the labels), none below FLOOR."""
    top = max(logprobs, default=0.0)
    shares = restrict([log - top for log in logprobs] if math.isfinite(top) else logprobs).probabilities
    return [max(math.log(share), FLOOR) if share > 0 else FLOOR for share in shares]


def fit(method: str, logprobs: Sequence[Sequence[float]], answers: Sequence[int]) -> Calibration:
    """Returns the calibration under which the examples are likeliest, with a weak prior for "as it was": never one under which
    they are less likely than as they were.

    Args:
        method: one of FROM_EXAMPLES.
        logprobs: of each label, a row an example.
        answers: which label is right, one an example.
    """
    from scipy.optimize import minimize
    from scipy.special import logsumexp

    assert method in FROM_EXAMPLES, method
    logs: FloatArray = np.array([log_shares(row) for row in logprobs])
    n_labels = logs.shape[1]
    n_scales, n_biases = (1, 0) if method == "temperature" else (n_labels, n_labels)
    is_answer = np.eye(n_labels)[np.asarray(answers)]
    start = np.concatenate([np.ones(n_scales), np.zeros(n_biases)])
    deviation = np.concatenate([np.full(n_scales, SCALE_DEVIATION), np.full(n_biases, BIAS_DEVIATION)])

    def loss(found: FloatArray) -> tuple[float, FloatArray]:
        scores = logs * found[:n_scales] + (found[n_scales:] if n_biases else 0.0)
        fitted = scores - logsumexp(scores, axis=1, keepdims=True)
        slope = np.exp(fitted) - is_answer  # by the scores
        by_scale, by_bias = (slope * logs).sum(axis=0), slope.sum(axis=0)
        away = (found - start) / deviation
        by_each = np.concatenate([by_scale if n_biases else [by_scale.sum()], by_bias[:n_biases]])
        return float((away**2).sum() / 2 - (fitted * is_answer).sum()), by_each + away / deviation

    bounds = [(LOWEST_SCALE, HIGHEST_SCALE)] * n_scales + [(-MOST_BIAS, MOST_BIAS)] * n_biases
    found = minimize(loss, start, jac=True, method="L-BFGS-B", bounds=bounds).x
    if not loss(found)[0] <= loss(start)[0]:
        return identity(n_labels)
    scales = np.broadcast_to(found[:n_scales], n_labels)
    return Calibration(scales.tolist(), found[n_scales:].tolist() if n_biases else [0.0] * n_labels)


def fit_contextual(logprobs: Sequence[Sequence[float]]) -> Calibration:
    """Returns the calibration that divides by the mean distribution after prompts without content: after one of them alone,
    every label is equally likely then. logprobs: of each label, a row a prompt."""
    mean = np.exp(np.array([log_shares(row) for row in logprobs])).mean(axis=0)
    return Calibration([1.0] * len(mean), (-np.log(mean)).tolist())


def cross_validated(
    method: str, logprobs: Sequence[Sequence[float]], answers: Sequence[int], n_folds: int = N_FOLDS
) -> list[list[float]]:
    """Returns the calibrated P(label) of each example, by a fit to the examples of the other folds alone. Each fold has its share
    of every label's examples."""
    by_label = sorted(range(len(answers)), key=lambda index: answers[index])
    found: dict[int, list[float]] = {}
    for fold in range(n_folds):
        others = [index for place, index in enumerate(by_label) if place % n_folds != fold]
        calibration = fit(method, [logprobs[index] for index in others], [answers[index] for index in others])
        found |= {index: calibration.probabilities(logprobs[index]) for index in by_label[fold::n_folds]}
    return [found[index] for index in range(len(answers))]


def quality(probabilities: Sequence[Sequence[float]], answers: Sequence[int]) -> Quality:
    """Measures distributions against the labels of their examples, with N_BINS bins of equal width: bin i holds the
    confidences (of the likeliest label) from i / N_BINS up to, and without, (i + 1) / N_BINS, the last one 1 too."""
    best = [max(range(len(row)), key=row.__getitem__) for row in probabilities]
    confidences = [row[index] for row, index in zip(probabilities, best, strict=True)]
    is_right = [index == answer for index, answer in zip(best, answers, strict=True)]
    binned: list[list[int]] = [[] for _ in range(N_BINS)]
    for example, confidence in enumerate(confidences):
        binned[min(int(confidence * N_BINS), N_BINS - 1)].append(example)
    bins = [
        Bin(len(within), sum(confidences[one] for one in within) / n, sum(is_right[one] for one in within) / n)
        for within in binned
        for n in [max(len(within), 1)]
    ]
    n_examples = len(answers)
    of_answers = [row[answer] for row, answer in zip(probabilities, answers, strict=True)]
    return Quality(
        n_examples,
        sum(one.n_examples * abs(one.accuracy - one.confidence) for one in bins) / n_examples,
        sum(is_right) / n_examples,
        -sum(math.log(max(one, math.exp(FLOOR))) for one in of_answers) / n_examples,
        bins,
    )
