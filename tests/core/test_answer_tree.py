"""Answers of several tokens: the tree that is computed for them, and probabilities in which no text counts twice."""

from __future__ import annotations

import functools
import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_prefill.core.answer_tree import AnswerTree, Tokens, divide, log_sum, told_apart

TOKENS = range(3)
SOME_ANSWERS = st.lists(
    st.lists(st.integers(0, 2), min_size=1, max_size=4).map(tuple), min_size=1, max_size=12, unique=True
)


class ToyModel:
    """Each text has a distribution of the next token, made up from the text."""

    @functools.cache  # noqa: B019  (one model)
    def logprobs(self, text: Tokens) -> list[float]:
        weights = [random.Random(repr((text, token))).random() + 0.01 for token in TOKENS]
        return [math.log(weight / sum(weights)) for weight in weights]

    def begins_with(self, answer: Tokens) -> float:
        return sum(self.logprobs(answer[:n])[token] for n, token in enumerate(answer))


MODEL = ToyModel()


def computed(tree: AnswerTree) -> tuple[list[float], list[list[float]]]:
    """What an engine finds for a tree, node by node."""
    paths: list[Tokens] = []
    for node in tree.nodes:
        before = paths[node.parent] if node.parent >= 0 else ()
        assert len(before) == node.depth
        paths.append((*before, node.token))
    behind = [
        [MODEL.logprobs(path)[token] for token in node.asked_tokens]
        for path, node in zip(paths, tree.nodes, strict=True)
    ]
    return [MODEL.logprobs(())[token] for token in tree.first], behind


@given(SOME_ANSWERS)
def test_a_tree_gives_each_answer_the_probabilities_of_its_own_tokens(answers: list[Tokens]) -> None:
    tree = AnswerTree(answers)
    found = computed(tree)
    for answer in answers:
        assert math.isclose(sum(tree.logprobs(answer, *found)), MODEL.begins_with(answer), abs_tol=1e-12)
    beginnings = {answer[:n] for answer in answers for n in range(1, len(answer))}
    assert len(tree.nodes) == len(beginnings), "what two answers begin with is computed once, and no last token is"


@given(SOME_ANSWERS, st.integers(3, 12))
def test_large_trees_are_divided_and_nothing_is_lost(answers: list[Tokens], most: int) -> None:
    groups = divide([answers, [(*answer, 9)[-len(answer) :] for answer in answers]], most)
    assert sorted(itertools.chain(*groups)) == list(range(len(answers)))
    for group in groups:
        assert len(AnswerTree([answers[place] for place in group]).nodes) <= most


@given(SOME_ANSWERS)
def test_answers_that_begin_others_count_only_where_the_model_does_not_go_on_to_them(answers: list[Tokens]) -> None:
    """Against a sum over all texts of 5 tokens: each belongs to the longest answer that it begins with."""
    expected = dict.fromkeys(answers, 0.0)
    for text in itertools.product(TOKENS, repeat=5):
        longest = max((answer for answer in answers if text[: len(answer)] == answer), key=len, default=None)
        if longest is not None:
            expected[longest] += math.exp(MODEL.begins_with(text))
    found = told_apart({answer: MODEL.begins_with(answer) for answer in answers})
    for answer in answers:
        assert math.isclose(math.exp(found[answer]), expected[answer], abs_tol=1e-12)


def test_an_answer_that_always_goes_on_has_no_probability_of_its_own() -> None:
    found = told_apart({(1,): math.log(0.5), (1, 2): math.log(0.5), (3,): -math.inf})
    assert found == {(1,): -math.inf, (1, 2): math.log(0.5), (3,): -math.inf}


@pytest.mark.parametrize(("logprobs", "total"), [([-1e4, -1e4], -1e4 + math.log(2)), ([-math.inf], -math.inf)])
def test_sums_of_tiny_probabilities(logprobs: list[float], total: float) -> None:
    assert log_sum(logprobs) == total
