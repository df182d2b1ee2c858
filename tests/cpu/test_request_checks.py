"""The checks in front of SGLang: what its scheduler would not survive, or would answer with a 500, gets a message."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.io_struct import EmbeddingReqInput, GenerateReqInput

from sgl_prefill.config import PrefillConfig
from sgl_prefill.errors import BadRequestError
from sgl_prefill.http import request_checks
from sgl_prefill.http.request_checks import check_lists_against_prompts, check_sampling_options
from sgl_prefill.http.rids import Rids
from sgl_prefill.http.tokenizer_manager import PrefillTokenizerManager

VOCABULARY_SIZE = 100
TOKENIZER = SimpleNamespace(encode=lambda text, add_special_tokens: list(text))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            {"min_new_tokens": 1, "stop_token_ids": [100]},
            "stop_token_ids holds token id 100, and the vocabulary has 100",
        ),
        ({"stop_token_ids": [-1]}, "token id -1"),
        ({"stop_token_ids": ["x"]}, "stop_token_ids is"),
        ({"top_k": 10**12}, "top_k is 1000000000000"),
        ({"sampling_seed": 2**70}, "sampling_seed is"),
        ({"n": 0}, "n is 0"),
        ({"temperature": "hot"}, "temperature is 'hot'"),
        ({"max_new_tokens": True}, "max_new_tokens is True"),
        ({"logit_bias": {"x": 1.0}}, "logit_bias holds 'x'"),
        ({"logit_bias": {"500": 1.0}}, "logit_bias"),
        ({"stop": [1]}, "stop is"),
        ({"stop_regex": "(("}, "unterminated"),
        ({"is_normalized": True}, "'is_normalized', which is no sampling option"),
        ({"no_such_option": 1}, "'no_such_option'"),
    ],
)
def test_an_option_that_sglang_would_not_survive_is_named(options: dict[str, Any], expected: str) -> None:
    """The message holds the option and its value."""
    with pytest.raises(BadRequestError) as caught:
        check_sampling_options(options, VOCABULARY_SIZE, TOKENIZER)
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0, "max_new_tokens": 1, "stop": ["a", "b"], "stop_token_ids": [0, 99], "top_k": -1},
        {"temperature": None, "n": None, "logit_bias": {"5": 1}, "sampling_seed": 5, "regex": "a|b"},
    ],
)
def test_good_options_pass(options: dict[str, Any]) -> None:
    """null means "not given", whole numbers are numbers."""
    check_sampling_options(options, VOCABULARY_SIZE, TOKENIZER)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"text": "a", "extra_key": ["x", "y"]}, "extra_key is a list"),
        ({"input_ids": [1, 2], "rid": ["x"]}, "rid is a list"),
        ({"text": ["a", "b"], "sampling_params": [{}]}, "sampling_params has 1 values, and the request has 2 prompts"),
        ({"text": "a", "input_ids": [1]}, "both given"),
        ({"text": []}, "holds no prompt"),
        ({"text": ["a", "b"], "sampling_logprobs_mode": []}, "sampling_logprobs_mode has 0 values"),
    ],
)
def test_lists_must_fit_the_prompts(fields: dict[str, Any], expected: str) -> None:
    """One value a prompt, and one prompt format."""
    with pytest.raises(BadRequestError) as caught:
        check_lists_against_prompts(GenerateReqInput(**fields))
    assert expected in str(caught.value)


def test_lists_that_fit_pass() -> None:
    """A batch of two with two keys; one value for all; label ids are a list for one prompt too."""
    check_lists_against_prompts(GenerateReqInput(text=["a", "b"], extra_key=["x", "y"], rid="r"))
    check_lists_against_prompts(GenerateReqInput(input_ids=[1, 2], token_ids_logprob=[5, 6], rid="r"))


def test_a_deadline_is_refused_where_nobody_keeps_it() -> None:
    """SGLang's own scheduler does not look at it: a late answer would come as if in time."""
    manager = PrefillTokenizerManager.__new__(PrefillTokenizerManager)
    options = {"custom_params": {"deadline_ms": 50}}
    manager.prefill_config = PrefillConfig()
    request_checks.check_deadline_is_known(manager, options)
    manager.prefill_config = PrefillConfig(scheduling="stock")
    request_checks.check_deadline_is_known(manager, {})
    with pytest.raises(BadRequestError, match=r"deadline_ms is 50, .* leave it out, or start the server without"):
        request_checks.check_deadline_is_known(manager, options)


def test_options_of_an_embedding_request_are_checked_too() -> None:
    """A deadline that is no number had ended the scheduler."""
    manager = PrefillTokenizerManager.__new__(PrefillTokenizerManager)
    manager.prefill_config, manager.preferred_sampling_params = PrefillConfig(), None
    manager.model_config, manager.tokenizer = SimpleNamespace(vocab_size=VOCABULARY_SIZE), TOKENIZER
    manager.server_args = SimpleNamespace(grammar_backend="none")
    request_checks.check_sampling_params(manager, EmbeddingReqInput(text="x"))
    wrong = EmbeddingReqInput(text="x", sampling_params={"custom_params": {"deadline_ms": "soon"}})
    with pytest.raises(BadRequestError, match="deadline_ms is 'soon'"):
        request_checks.check_sampling_params(manager, wrong)


def test_no_id_of_a_session_begins_another_and_earlier_requests_are_found_by_it() -> None:
    """SGLang ends all requests whose id begins with the one that is to be ended, and there were plain ids in sessions."""
    rids = Rids()
    inside = {}
    for rid in ("a", "ab", "1:a", "b"):
        obj = GenerateReqInput(input_ids=[1], rid=rid, session_params={"id": "s", "rid": "ab"})
        assert rids.hide(obj, "") == [obj.rid]
        inside[rid] = obj.rid
        assert obj.session_params["rid"] == inside.get("ab", obj.session_params["rid"])
        output = {"meta_info": {"id": obj.rid}}
        rids.show(output)
        assert output["meta_info"]["id"] == rid
    for one, other in itertools.permutations([*inside.values(), "0123456789abcdef0123456789abcdef"], 2):
        assert not one.startswith(other)
    unnamed = GenerateReqInput(input_ids=[1], session_params={})
    assert rids.hide(unnamed, "") == [unnamed.rid]
    output = {"meta_info": {"id": unnamed.rid}}
    rids.show(output)
    assert output["meta_info"]["id"] == unnamed.rid
    named = GenerateReqInput(input_ids=[1], rid="a", session_params={"id": None})
    assert rids.hide(named, "") == [named.rid]
    assert len(named.rid) == 32


def test_requests_are_found_by_their_names_and_their_owners_until_they_are_forgotten() -> None:
    """A batch by its name and by those of its prompts; nothing is left of those that are done."""
    rids = Rids()
    batch, same, unnamed = (GenerateReqInput(input_ids=[[1], [2]], rid=rid) for rid in ("job", "job", None))
    inside = [rids.hide(obj, owner) for obj, owner in ((batch, "ann"), (same, "bob"), (unnamed, "bob"))]
    assert rids.named("job") == [*inside[0], *inside[1]]
    assert rids.named("job_1") == [inside[0][1], inside[1][1]]
    assert rids.of("bob") == [*inside[1], *inside[2]]
    assert [rids.belongs_to_another(one, "bob") for one in (inside[0][0], inside[1][0], "unknown")] == [
        True,
        False,
        False,
    ]
    for one in itertools.chain.from_iterable(inside):
        rids.forget(one)
    assert rids.named("job") == ["job"]
    assert not vars(rids)["_given"]
    assert not vars(rids)["_inside"]
