"""Branches behind a prompt: what is computed for labels and questions, and probabilities in which no text counts twice."""

from __future__ import annotations

import collections
import functools
import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_prefill.core.branches import Branches, Tokens, _Group, asked_of_label, divide, log_sum, told_apart

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


def paths_of(branches: Branches) -> list[Tokens]:
    """The tokens from the prompt to the end of each branch."""
    paths: list[Tokens] = []
    for branch in branches.branches:
        before = paths[branch.parent] if branch.parent >= 0 else ()
        assert len(before) == branch.n_before
        paths.append((*before, *branch.tokens))
    return paths


def computed(branches: Branches) -> tuple[list[float], list[list[float]]]:
    """What an engine finds, branch by branch."""
    behind = [
        [MODEL.logprobs(path[: len(path) - len(branch.asked) + n + 1])[token] for token in tokens]
        for path, branch in zip(paths_of(branches), branches.branches, strict=True)
        for n, tokens in enumerate(branch.asked)
    ]
    return [MODEL.logprobs(())[token] for token in branches.first], behind


@given(SOME_ANSWERS)
def test_each_label_gets_the_probabilities_of_its_own_tokens(labels: list[Tokens]) -> None:
    all_asked = [asked_of_label(label) for label in labels]
    branches = Branches(all_asked)
    found = computed(branches)
    for label, asked in zip(labels, all_asked, strict=True):
        assert math.isclose(sum(branches.logprobs(asked, *found)), MODEL.begins_with(label), abs_tol=1e-12)
    beginnings = {label[:n] for label in labels for n in range(1, len(label))}
    assert branches.n_tokens == len(beginnings), "what two labels begin with is computed once, and no last token is"


SOME_QUESTIONS = st.dictionaries(
    st.lists(st.integers(0, 2), max_size=6).map(tuple), st.sets(st.integers(0, 2), min_size=1).map(tuple), min_size=1
)


@given(SOME_QUESTIONS)
def test_questions_are_asked_at_their_ends_only_in_as_few_branches_as_they_part(
    questions: dict[Tokens, Tokens],
) -> None:
    branches = Branches([[one] for one in questions.items()])
    found = computed(branches)
    for sequence, tokens in questions.items():
        expected = [MODEL.logprobs(sequence)[token] for token in tokens]
        assert branches.logprobs([(sequence, tokens)], *found) == expected
    assert sum(map(bool, itertools.chain.from_iterable(one.asked for one in branches.branches))) == len(
        questions.keys() - {()}
    )
    assert all(one.asked[0] for one in branches.branches if one.asked), (
        "logits are computed from the first that is asked"
    )
    children = collections.Counter(one.parent for one in branches.branches)
    assert all(children[place] != 1 for place in range(len(branches.branches))), "a chain is one branch"


@given(SOME_ANSWERS, st.integers(3, 12), st.integers(4, 12))
def test_many_sequences_are_divided_and_nothing_is_lost(labels: list[Tokens], most: int, most_tokens: int) -> None:
    of_prompts = [labels, [(*label, 9)[-len(label) :] for label in labels]]
    groups = divide(of_prompts, most, most_tokens)
    assert sorted(itertools.chain(*groups)) == list(range(len(labels)))
    for group in groups:
        for sequences in of_prompts:
            branches = Branches([[(sequences[place], (1,))] for place in group])
            assert len(branches.branches) <= most
            assert branches.n_tokens <= most_tokens


@given(SOME_ANSWERS)
def test_the_size_of_a_group_is_known_before_it_is_built(labels: list[Tokens]) -> None:
    group = _Group()
    for label in labels:
        group.add(label)
    branches = Branches([[(label, (1,))] for label in labels])
    assert (group.n_branches, group.n_tokens) == (len(branches.branches), branches.n_tokens)


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
