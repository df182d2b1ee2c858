"""Prompts of decisions: their text, the orders of their options, and the arithmetic of their answers."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from sgl_prefill.core.decision_prompts import (
    DIGITS,
    PAIRS,
    WORDING,
    Answer,
    Kind,
    Option,
    Question,
    answer_of,
    confidence_of,
    n_orders,
    prompts_of,
)
from sgl_prefill.core.labels import restrict

DESKS = Question(Kind.CHOICE, "Who handles it?", (Option("workshop", "repairs"), Option("sales"), Option("nobody")))
MOOD = Question(Kind.SCORE, "How annoyed?", (Option("calm"), Option("annoyed"), Option("furious")))
REFUND = Question(Kind.YES_NO, "Is money asked back?", (Option("yes", "they ask for it"), Option("no")))


def test_the_wording_is_pinned() -> None:
    """A change of these texts changes answers: it needs another WORDING."""
    assert WORDING == 1
    assert prompts_of(DESKS, 1)[0].text == (
        "Question: Who handles it?\nA: workshop - repairs\nB: sales\nC: nobody\nAnswer with the letter of one option only."
    )
    assert [one.text for one in prompts_of(MOOD, None)] == [
        "Question: How annoyed?\n0: calm\n1: annoyed\n2: furious\nAnswer with the number of one level only.",
        "Question: How annoyed?\n2: furious\n1: annoyed\n0: calm\nAnswer with the number of one level only.",
    ]
    assert prompts_of(REFUND, None)[0].text == (
        "Is the following true? Is money asked back?\nyes: they ask for it\nAnswer with yes or no only."
    )
    many = Question(Kind.CHOICE, "", tuple(Option(f"option {number:02}") for number in range(30)))
    assert prompts_of(many, 1)[0].text.startswith("AA: option 00\nAB: option 01\n")
    assert prompts_of(many, 1)[0].text.endswith("BD: option 29\nAnswer with the two letters of one option only.")


@pytest.mark.parametrize("n_options", [2, 3, 4, 5, 16, 17, 64, 65, 255])
def test_by_default_answers_do_not_depend_on_the_clients_order(n_options: int) -> None:
    rng = random.Random(n_options)
    options = [Option(f"name {rng.random()}", rng.choice(["", "more"])) for _ in range(n_options)]
    question = Question(Kind.CHOICE, "Which?", tuple(options))
    other = question._replace(options=tuple(rng.sample(options, n_options)))
    prompts, others = prompts_of(question, None), prompts_of(other, None)
    assert [one.text for one in prompts] == [one.text for one in others]
    for one, same in zip(prompts, others, strict=True):
        assert dict(zip(options, one.codes, strict=True)) == dict(zip(other.options, same.codes, strict=True))
    assert (
        len({one.text for one in prompts})
        == n_orders(question)
        == (min(4, n_options) if n_options <= 16 else 2 if n_options <= 64 else 1)
    )


def test_as_many_orders_as_options_put_each_option_at_each_place_once() -> None:
    prompts = prompts_of(DESKS, 3)
    for codes in zip(*(one.codes for one in prompts), strict=True):
        assert sorted(codes) == ["A", "B", "C"]
    for one in prompts:
        for option, code in zip(DESKS.options, one.codes, strict=True):
            assert f"\n{code}: {option.name}" in one.text
    assert len(prompts_of(DESKS, 255)) == 3
    assert [one.codes for one in prompts_of(MOOD, None)] == [DIGITS[:3]] * 2


def test_codes_of_many_options_are_those_that_are_given() -> None:
    many = Question(Kind.CHOICE, "", tuple(Option(str(number)) for number in range(27)))
    assert prompts_of(many, 1, PAIRS[100:])[0].codes == PAIRS[100:127]


def test_an_answer_is_the_mean_of_the_orders_and_a_baseline_is_divided_out() -> None:
    rows = [restrict([math.log(p) for p in row]) for row in ((0.6, 0.2), (0.1, 0.3))]
    answer = answer_of(rows)
    assert answer.probabilities == pytest.approx([(0.75 + 0.25) / 2, (0.25 + 0.75) / 2])
    assert answer.label_mass == pytest.approx(0.6)
    assert (answer.orders, answer.best) == (2, 0)
    leaning = restrict([math.log(0.4), math.log(0.1)])
    assert answer_of([leaning], [leaning]).probabilities == pytest.approx([0.5, 0.5])
    certain = restrict([0.0, -math.inf])
    assert answer_of([leaning], [certain]).probabilities == pytest.approx([0.8, 0.2])
    assert Answer([0.2, 0.5, 0.3], 1.0, 1).score == pytest.approx(1.1)


def test_confidence_is_0_for_equal_probabilities_and_1_for_certainty() -> None:
    for kind, n in itertools.product((Kind.CHOICE, Kind.SCORE), range(2, 11)):
        assert confidence_of(kind, [1 / n] * n) == pytest.approx(0, abs=1e-12) or kind is Kind.SCORE
        assert confidence_of(kind, [1.0, *[0.0] * (n - 1)]) == 1
        assert 0 <= confidence_of(kind, [1 / n] * n) <= 1
    assert confidence_of(Kind.CHOICE, [0.8, 0.15, 0.05]) == pytest.approx(0.7)
    assert confidence_of(Kind.SCORE, [0.05, 0.8, 0.15]) == pytest.approx(0.7)
    assert confidence_of(Kind.CHOICE, [1.0]) == 1
