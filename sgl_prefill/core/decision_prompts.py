"""Decisions: questions about one state as prompts, and the probabilities of their labels as answers.

A prompt is one user message: the state, an empty line, the question, its options with their codes, and how to answer. The state
comes first, so all questions share it. Models prefer the options that come first: by default the answers to several orders of
the same options are averaged, and the orders do not depend on the client's.
"""

from __future__ import annotations

import enum
import itertools
import math
import string
from collections.abc import Sequence
from typing import NamedTuple

from sgl_prefill.core.labels import LabelDistribution

WORDING = 1  # version of the prompts; a test pins their text
LETTERS = tuple(string.ascii_uppercase)
PAIRS = tuple("".join(pair) for pair in itertools.product(LETTERS, repeat=2))
DIGITS = tuple(string.digits)
YES_NO_CODES = ("yes", "no")
MOST_ORDERS = 4
# Options of a choice, and in how many orders it is asked by default: the cost is their product.
ORDERS_BY_OPTIONS = ((16, MOST_ORDERS), (64, 2), (255, 1))


class Kind(enum.Enum):
    YES_NO = "yes_no"
    CHOICE = "choice"
    SCORE = "score"


class Option(NamedTuple):
    name: str  # of a level its text; of yes and no not shown
    description: str = ""


class Question(NamedTuple):
    kind: Kind
    text: str  # "": the options say all
    options: tuple[Option, ...]  # levels: the lowest first; yes before no


class Prompt(NamedTuple):
    text: str  # what follows the state
    codes: tuple[str, ...]  # the label of each option, in the question's order


class Answer(NamedTuple):
    probabilities: list[float]  # of the options, in the question's order; sum to 1
    label_mass: float  # share of the vocabulary's probability that all codes hold together; the mean over the orders
    orders: int

    @property
    def best(self) -> int:
        """Index of the likeliest option; the first of equals."""
        return self.probabilities.index(max(self.probabilities))

    @property
    def score(self) -> float:
        """Of levels: the mean of their indices."""
        return math.fsum(index * p for index, p in enumerate(self.probabilities))


def n_orders(question: Question) -> int:
    """In how many orders a question is asked by default."""
    if question.kind is Kind.YES_NO:
        return 1
    if question.kind is Kind.SCORE:
        return 2
    n = len(question.options)
    return next(min(n, orders) for most, orders in ORDERS_BY_OPTIONS if n <= most)


def prompts_of(question: Question, orders: int | None, pairs: Sequence[str] = PAIRS) -> list[Prompt]:
    """One prompt for each order. orders: None for the default; 1 asks in the client's order.

    pairs: codes of options beyond 26.
    """
    indices = list(range(len(question.options)))
    if question.kind is Kind.YES_NO:
        return [_prompt(question, indices, YES_NO_CODES)]
    if question.kind is Kind.SCORE:
        both = [indices, indices[::-1]]
        return [_prompt(question, order, DIGITS) for order in both[: orders or n_orders(question)]]
    codes = LETTERS if len(indices) <= len(LETTERS) else pairs
    if orders == 1:
        return [_prompt(question, indices, codes)]
    n = min(orders or n_orders(question), len(indices))
    by_text = sorted(indices, key=question.options.__getitem__)
    starts = [len(indices) * number // n for number in range(n)]
    return [_prompt(question, by_text[start:] + by_text[:start], codes) for start in starts]


def _prompt(question: Question, order: Sequence[int], codes: Sequence[str]) -> Prompt:
    """order: the index of the option at each place."""
    keeps = question.kind is Kind.SCORE  # a level keeps its number, whatever its place
    code_of = {index: codes[index if keeps else place] for place, index in enumerate(order)}
    lines = [f"{code_of[index]}: {shown}" for index in order if (shown := _shown(question, index))]
    if question.text:
        heading = "Is the following true?" if question.kind is Kind.YES_NO else "Question:"
        lines.insert(0, f"{heading} {question.text}")
    lines.append(last_line(question.kind, len(order)))
    return Prompt("\n".join(lines), tuple(code_of[index] for index in range(len(order))))


def _shown(question: Question, index: int) -> str:
    name, description = question.options[index]
    if question.kind is Kind.YES_NO:
        return description
    return f"{name} - {description}" if description else name


def last_line(kind: Kind, n_options: int) -> str:
    """How a prompt ends: what the model is to answer with."""
    if kind is Kind.YES_NO:
        asked = "yes or no"
    elif kind is Kind.SCORE:
        asked = "the number of one level"
    else:
        asked = "the letter of one option" if n_options <= len(LETTERS) else "the two letters of one option"
    return f"Answer with {asked} only."


def answer_of(found: Sequence[LabelDistribution], baseline: Sequence[LabelDistribution] = ()) -> Answer:
    """The mean over the orders. baseline: the same prompts without a state, whose probabilities are divided out."""
    rows = [one.probabilities for one in found]
    if baseline:
        rows = [_without(row, one.probabilities) for row, one in zip(rows, baseline, strict=True)]
    means = [math.fsum(column) / len(rows) for column in zip(*rows, strict=True)]
    mass = math.fsum(one.label_mass for one in found) / len(found)
    return Answer(means, mass, len(rows))


def _without(probabilities: list[float], baseline: list[float]) -> list[float]:
    least = min(p for p in baseline if p > 0)
    weights = [p / max(q, least) for p, q in zip(probabilities, baseline, strict=True)]
    total = math.fsum(weights)
    return [one / total for one in weights]


def confidence_of(kind: Kind, probabilities: Sequence[float]) -> float:
    """TypeSafe's published formula: 0 for equal probabilities, 1 for certainty."""
    n = len(probabilities)
    if n == 1:
        return 1.0
    highest = max(probabilities)
    if kind is not Kind.SCORE:
        return max((highest - 1 / n) / (1 - 1 / n), 0.0)
    mode = probabilities.index(highest)
    spread = math.fsum(p * abs(index - mode) for index, p in enumerate(probabilities))
    even = math.fsum(abs(index - (n - 1) / 2) for index in range(n)) / n
    return max(0.0, 1 - spread / even)
