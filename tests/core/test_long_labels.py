"""What a request may say of labels of any length, and how their probabilities come about."""

from __future__ import annotations

import math
from typing import Any

import pytest

from sgl_prefill.core.labels import LabelError
from sgl_prefill.core.long_labels import check_tokens, parse, score, ways_to_end


def log(*probabilities: float) -> list[float]:
    return [math.log(p) for p in probabilities]


def test_labels_may_be_texts_texts_with_forms_or_one_object() -> None:
    as_list = parse(["A+", {"no": ["no", "No"]}], None, None, None)
    assert as_list == parse({"A+": ["A+"], "no": ["no", "No"]}, None, None, None)
    assert as_list.texts == ["A+", "no", "No"]
    assert parse(["x"], {"text": "\n"}, None, None).texts == ["x\n"], "what ends an answer is looked up with it"


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (([], None, None, None), "allowed_answers is empty"),
        (("yes", None, None, None), "must be a list"),
        (([""], None, None, None), "no text may be empty"),
        (([{"a": []}], None, None, None), "no text may be empty"),
        (([{"a": ["x"], "b": ["y"]}], None, None, None), "one text with its surface forms"),
        (([{"a": [1]}], None, None, None), "must be a list of texts"),
        (([7], None, None, None), "holds 7"),
        ((["a", "a"], None, None, None), "label 'a' 2 times"),
        (([{"a": ["x"]}, {"b": ["x"]}], None, None, None), "surface form 'x' 2 times"),
        ((["a"], "eos", None, None), "answer_end is 'eos'"),
        ((["a"], {"text": ""}, None, None), "answer_end"),
        ((["a"], {"text": 1}, None, None), "answer_end"),
        ((["a"], None, "median", None), "sum, mean, pmi"),
        ((["a"], None, "pmi", None), "baseline_prompt"),
        ((["a"], None, None, "Answer:"), "baseline_prompt"),
        ((["a"], None, "pmi", ""), "not empty"),
        ((["a"], None, "pmi", [1, "x"]), "baseline_prompt"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(given: tuple[Any, ...], named: str) -> None:
    with pytest.raises(LabelError, match=named):
        parse(*given)


def test_labels_that_are_the_same_tokens_or_too_many_are_refused() -> None:
    with pytest.raises(LabelError, match="'Yes' and 'yes' are the same tokens"):
        check_tokens(["Yes", "no", "yes"], [(1,), (2,), (1,)])
    with pytest.raises(LabelError, match="65 tokens after this prompt, and 64 are the limit"):
        check_tokens(["long"], [tuple(range(65))])


def test_forms_add_up_and_the_mass_is_that_of_all() -> None:
    options = parse([{"yes": ["yes", "Yes"]}, "no"], None, None, None)
    answers = [(1,), (2, 3), (4,)]
    found = score(options, answers, [], dict(zip(answers, log(0.2, 0.1, 0.3), strict=True)))
    assert found.distribution.probabilities == pytest.approx([0.5, 0.5])
    assert [math.exp(x) for x in found.distribution.logprobs] == pytest.approx([0.3, 0.3])
    assert found.distribution.label_mass == pytest.approx(0.6)
    assert [[form.text for form in forms] for forms in found.forms] == [["yes", "Yes"], ["no"]]


def test_a_label_that_begins_another_is_told_apart_by_what_follows() -> None:
    answers = [(1,), (1, 2)]
    begins = dict(zip(answers, log(0.5, 0.4), strict=True))
    found = score(parse(["A", "A+"], None, None, None), answers, [], begins)
    assert found.distribution.probabilities == pytest.approx([0.2, 0.8])
    ends = [way for answer in answers for way in ways_to_end(answer, [8, 9])]
    assert ends == [(1, 8), (1, 9), (1, 2, 8), (1, 2, 9)]
    probabilities = dict(zip(ends, log(0.06, 0.04, 0.1, 0.2), strict=True))
    found = score(parse(["A", "A+"], "end_token", None, None), answers, [8, 9], probabilities)
    assert found.distribution.probabilities == pytest.approx([0.25, 0.75])


def test_means_and_ratios_to_a_baseline_change_the_shares_and_not_the_mass() -> None:
    answers = [(1,), (2, 3)]
    logprobs = dict(zip(answers, log(0.2, 0.04), strict=True))
    by_sum = score(parse(["a", "bb"], None, "sum", None), answers, [], logprobs)
    by_mean = score(parse(["a", "bb"], None, "mean", None), answers, [], logprobs)
    assert by_mean.distribution.probabilities == pytest.approx([0.5, 0.5]), "0.2, and twice 0.2"
    baseline = dict(zip(answers, log(0.4, 0.02), strict=True))
    by_pmi = score(parse(["a", "bb"], None, "pmi", "?"), answers, [], logprobs, answers, baseline)
    assert by_pmi.distribution.probabilities == pytest.approx([0.2, 0.8]), "0.5 to 2"
    assert {one.distribution.label_mass for one in (by_sum, by_mean, by_pmi)} == {by_sum.distribution.label_mass}
    assert by_pmi.distribution.logprobs == by_sum.distribution.logprobs


def test_a_baseline_without_probability_is_refused_by_name() -> None:
    options, answers = parse(["a", "b"], None, "pmi", "?"), [(1,), (2,)]
    with pytest.raises(LabelError, match="baseline_prompt: the model gives 'b' no probability"):
        score(options, answers, [], {(1,): -1.0, (2,): -2.0}, answers, {(1,): -1.0, (2,): -math.inf})
