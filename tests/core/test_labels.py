"""Label arithmetic and resolution, without a model."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_prefill.core.labels import (
    Label,
    LabelError,
    bytes_of,
    check_distinct,
    hint_of,
    other_forms,
    resolve_in_context,
    restrict,
    text_of_bytes,
)

VOCABULARY = ["a", "b", "ab", " ", " yes", "yes", "no", " no", "n", "o", ":", "y", "e", "s"]


def encode(text: str) -> list[int]:
    """Greedy longest match over a toy vocabulary."""
    ids = []
    while text:
        token = max((t for t in VOCABULARY if text.startswith(t)), key=len)
        ids.append(VOCABULARY.index(token))
        text = text[len(token) :]
    return ids


def decode(ids: list[int]) -> str:
    return "".join(VOCABULARY[i] for i in ids)


def resolve(label: str, prompt_end: str) -> str:
    (token_id,) = resolve_in_context([label], prompt_end, lambda texts: [encode(text) for text in texts], decode)
    return VOCABULARY[token_id]


@given(st.lists(st.floats(-700, 0), min_size=1, max_size=20))
def test_restricted_probabilities_sum_to_one_and_keep_the_order(logprobs: list[float]) -> None:
    """However unlikely the labels are, their shares sum to 1 and the best is the most likely one."""
    result = restrict(logprobs)
    assert math.isclose(sum(result.probabilities), 1.0, rel_tol=1e-12)
    assert logprobs[result.best] == max(logprobs)
    assert 0.0 <= result.label_mass <= 1.0


def test_label_mass_is_the_share_of_the_whole_vocabulary() -> None:
    """Two labels of 0.3 and 0.1 hold 0.4 of the vocabulary, and 0.75 and 0.25 of each other."""
    result = restrict([math.log(0.3), math.log(0.1)])
    assert result.label_mass == pytest.approx(0.4)
    assert result.probabilities == pytest.approx([0.75, 0.25])


def test_a_label_of_probability_zero_gets_zero() -> None:
    """-inf is a legal log-probability as long as another label has more."""
    assert restrict([-math.inf, -3.0]).probabilities == [0.0, 1.0]


@pytest.mark.parametrize("logprobs", [[-math.inf, -math.inf], [math.nan, -1.0], []])
def test_unusable_log_probabilities_are_an_error(logprobs: list[float]) -> None:
    """Nothing is divided by zero and no NaN reaches a reply."""
    with pytest.raises(LabelError):
        restrict(logprobs)


def test_a_label_is_the_token_that_it_is_after_this_prompt() -> None:
    """The space is part of the label's text: `yes` and ` yes` are two tokens."""
    assert resolve(" yes", "a:") == " yes"
    assert resolve("yes", "a:") == "yes"


def test_a_label_that_would_merge_with_the_prompt_stays_a_token_of_its_own() -> None:
    """`a ` + `yes` would be encoded as `a`, ` yes`; the prompt's tokens stay and the label is `yes`."""
    assert resolve("yes", "a ") == "yes"
    assert resolve("b", "a") == "b"


def test_the_other_form_of_a_label_has_a_blank_more_or_less_and_is_one_token() -> None:
    """`a` with a blank is two tokens, and `ab` would merge with the prompt."""
    found = other_forms([" yes", "no", "a"], ":", lambda texts: [encode(text) for text in texts], decode)
    assert found == [("yes", VOCABULARY.index("yes")), (" no", VOCABULARY.index(" no")), None]


def test_a_hint_says_where_the_other_forms_hold_more() -> None:
    labels = [Label("yes", 5, other=(" yes", 4)), Label("no", 6, other=(" no", 7))]
    logprobs = {5: math.log(0.001), 6: math.log(0.002), 4: math.log(0.5), 7: math.log(0.3)}
    hint = hint_of(labels, 0.003, logprobs)
    assert (
        hint
        == "as written the labels hold 0.003 of the probability, and ' yes', ' no' 0.8: mind the blank before a label"
    )
    assert hint_of(labels, 0.9, logprobs) is None
    # Both forms are labels already.
    assert hint_of([*labels, Label(" yes", 4), Label(" no", 7)], 0.8, logprobs) is None


def test_a_label_of_several_tokens_names_them() -> None:
    """The message shows the label and its tokens."""
    with pytest.raises(LabelError, match=r"'yesno' is 2 tokens after this prompt: \['yes', 'no'\]"):
        resolve("yesno", ":")


def test_empty_lists_and_duplicates_are_named() -> None:
    """Each message says which field and which label."""
    with pytest.raises(LabelError, match="allowed_tokens is empty"):
        check_distinct([], "allowed_tokens")
    with pytest.raises(LabelError, match="allowed_token_ids holds 7 more than once"):
        check_distinct([7, 8, 7], "allowed_token_ids")
    with pytest.raises(LabelError, match="empty text"):
        resolve("", "a")


@given(st.binary(min_size=1, max_size=4))
def test_tokens_that_are_no_text_are_told_apart_and_have_their_bytes(token: bytes) -> None:
    assert bytes_of(text_of_bytes(token)) == token
    assert text_of_bytes(b"\xf0\x9f") == "bytes:\\xf0\\x9f"
    assert bytes_of("bytes:") == b"bytes:"
