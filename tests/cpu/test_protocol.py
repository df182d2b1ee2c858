"""Bodies as clients send them: a field that asks for nothing is accepted, vLLM's names are read, slips are named."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from sgl_prefill.errors import BadRequestError
from sgl_prefill.http.protocol import (
    CONTRADICTING_FIELDS,
    OWN_FIELDS,
    LabelChatCompletionRequest,
    LabelCompletionRequest,
    LabelGenerateReqInput,
    allowed_answers,
    check_generate_label_request,
    check_label_request,
)

COMPLETION: dict[str, Any] = {"model": "m", "prompt": "a"}
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "a"}]}
GENERATE: dict[str, Any] = {"text": "a"}
GENERATE_BODY = TypeAdapter(LabelGenerateReqInput)
LABELS: dict[str, Any] = {"allowed_answers": ["x", "y"]}
NEUTRAL: dict[str, list[Any]] = {
    "best_of": [1],
    "echo": [False],
    "frequency_penalty": [0, 0.0],
    "logit_bias": [{}],
    "min_tokens": [0],
    "n": [1],
    "presence_penalty": [0],
    "regex": [""],
    "repetition_penalty": [1],
    "response_format": [{"type": "text"}],
    "suffix": [""],
    "tools": [[]],
    "tool_choice": ["none", "auto"],
    "stop": [[], ""],
    "stream": [False],
    "logprobs": [False],
}
ASKS: dict[str, Any] = {
    "best_of": 2,
    "echo": True,
    "frequency_penalty": 0.5,
    "logit_bias": {"5": 1.0},
    "n": 2,
    "regex": "a",
    "repetition_penalty": 1.1,
    "response_format": {"type": "json_object"},
    "suffix": "b",
    "tools": [{"type": "function", "function": {"name": "f"}}],
}


def bodies(model: Any, base: dict[str, Any]) -> list[tuple[str, Any]]:
    found = [(name, None) for name in model.model_fields if name not in base and name not in LABELS]
    found += [(name, value) for name in NEUTRAL if name in model.model_fields for value in NEUTRAL[name]]
    return found


@pytest.mark.parametrize(("name", "value"), bodies(LabelCompletionRequest, COMPLETION))
def test_a_completion_takes_what_asks_for_nothing(name: str, value: Any) -> None:
    value = 0 if name == "logprobs" and value is False else value
    request = LabelCompletionRequest(**COMPLETION, **LABELS, **{name: value})
    check_label_request(request, request.max_tokens)


@pytest.mark.parametrize(("name", "value"), bodies(LabelChatCompletionRequest, CHAT))
def test_a_chat_takes_what_asks_for_nothing(name: str, value: Any) -> None:
    check_label_request(LabelChatCompletionRequest(**CHAT, **LABELS, **{name: value}), None)


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(LabelGenerateReqInput)])
def test_generate_takes_null(name: str) -> None:
    obj = GENERATE_BODY.validate_python({**GENERATE, **LABELS, **({} if name in GENERATE else {name: None})})
    check_generate_label_request(obj)


@pytest.mark.parametrize("name", ["n", "logit_bias", "regex", "frequency_penalty", "repetition_penalty"])
def test_generate_takes_sampling_options_that_ask_for_nothing(name: str) -> None:
    for value in (None, *NEUTRAL[name]):
        check_generate_label_request(LabelGenerateReqInput(text="a", sampling_params={name: value}))


@pytest.mark.parametrize("name", ASKS)
def test_what_would_change_the_answer_is_refused(name: str) -> None:
    assert name in CONTRADICTING_FIELDS
    model: Any
    model, base = (
        (LabelCompletionRequest, COMPLETION)
        if name in LabelCompletionRequest.model_fields
        else (LabelChatCompletionRequest, CHAT)
    )
    with pytest.raises(BadRequestError, match=f"{name} cannot be combined"):
        check_label_request(model(**base, **LABELS, **{name: ASKS[name]}), 1)


@pytest.mark.parametrize("field", [{"guided_choice": ["x", "y"]}, {"structured_outputs": {"choice": ["x", "y"]}}])
def test_choices_of_vllm_are_allowed_answers(field: dict[str, Any]) -> None:
    for request in (
        LabelCompletionRequest(**COMPLETION, **field),
        LabelChatCompletionRequest(**CHAT, **field),
        GENERATE_BODY.validate_python({**GENERATE, **field}),
    ):
        answers = allowed_answers(request)
        assert answers is not None
        assert answers.long is not None
        assert answers.long.texts == ["x", "y"]
    with pytest.raises(ValidationError, match="are both given"):
        LabelCompletionRequest(**COMPLETION, **field, allowed_tokens=["a"])
    with pytest.raises(ValidationError, match="guided_choice must be a list"):
        LabelCompletionRequest(**COMPLETION, guided_choice="x")
    assert LabelCompletionRequest(**COMPLETION, structured_outputs={"regex": "a"}).allowed_answers is None


@pytest.mark.parametrize(
    ("slip", "meant"),
    [
        ("allowed_token", "allowed_tokens"),
        ("alowed_answers", "allowed_answers"),
        ("normalize", "normalise"),
        ("deadline", None),
        ("safety_identifier", None),
        ("allowed_openai_params", None),
    ],
)
def test_a_slip_is_named_and_other_unknown_fields_are_as_sglang_has_them(slip: str, meant: str | None) -> None:
    for make in (
        lambda **field: LabelCompletionRequest(**COMPLETION, **field),
        lambda **field: LabelChatCompletionRequest(**CHAT, **field),
        lambda **field: GENERATE_BODY.validate_python({**GENERATE, **field}),
    ):
        if meant is None:
            make(**{slip: "x"})
            continue
        with pytest.raises(ValidationError, match=f"{slip} is no field of this route: do you mean {meant}"):
            make(**{slip: "x"})


def test_own_fields_are_fields() -> None:
    names = {field.name for field in dataclasses.fields(LabelGenerateReqInput)}
    assert set(OWN_FIELDS) <= names & set(LabelCompletionRequest.model_fields) & set(
        LabelChatCompletionRequest.model_fields
    )
