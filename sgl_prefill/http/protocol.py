"""The request bodies of the label routes: SGLang's with additional fields, and checks for options that contradict them."""

from __future__ import annotations

import dataclasses
import difflib
import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from pydantic import BaseModel, StrictBool, StrictInt, field_validator, model_validator
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest
from sglang.srt.managers.io_struct import GenerateReqInput

from sgl_prefill.core import long_labels
from sgl_prefill.core.labels import LabelError
from sgl_prefill.errors import BadRequestError
from sgl_prefill.http.label_scoring import AllowedAnswers
from sgl_prefill.http.scored_prompt import ReplyFields
from sgl_prefill.http.token_ids import InputIds, PromptOrPrompts
from sgl_prefill.port.steps import custom_params

# Penalties depend on generated tokens, and cannot change an answer of one token. Each with its neutral value.
PENALTIES = {"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0}

LABEL_FIELDS = ("allowed_tokens", "allowed_token_ids", "allowed_answers")
LONG_LABEL_OPTIONS = ("answer_end", "normalise", "baseline_prompt")  # in the order of `long_labels.parse`

# Fields that change what is generated, or ask for more than one answer: together with labels they contradict.
CONTRADICTING_FIELDS = (
    *("best_of", "echo", "suffix", "n", "logit_bias", "regex", "json_schema", "ebnf", "response_format", "tools"),
    *("custom_logit_processor", "min_tokens", "return_hidden_states", "continue_final_message"),
    *PENALTIES,
)


# This package's fields. A misspelt one would be ignored, as SGLang ignores all fields that it does not know.
OWN_FIELDS = (
    *LABEL_FIELDS,
    *LONG_LABEL_OPTIONS,
    *(
        "calibration",
        "raw_scores",
        "top_alternatives",
        "deadline_ms",
        "prompt_parts",
        "on_overflow",
        "max_prompt_tokens",
        "prefix",
    ),
)
LEAST_ALIKE = 0.85


class Mark(NamedTuple):
    """A message of a chat with a `keep` field: whether it must stay if the conversation is too long."""

    message: int  # its index
    keep: bool


def asks_for_nothing(name: str, value: Any) -> bool:
    """Whether a field has a value that clients send for "no", such as `null`, an empty list, or `n` of 1."""
    if getattr(value, "type", None) == "text" or value == {"type": "text"}:  # response_format
        return True
    return value in (None, False, "", [], {}, PENALTIES.get(name)) or (name in ("n", "best_of") and value == 1)


def check_names(body: Mapping[str, Any], known: Collection[str]) -> None:
    """Raises ValueError for an unknown field that resembles one of this package's: it would be ignored."""
    for name in body:
        if name not in known and (alike := difflib.get_close_matches(name, OWN_FIELDS, 1, LEAST_ALIKE)):
            raise ValueError(f"{name} is no field of this route: do you mean {alike[0]}?")


def choices_as_answers(body: dict[str, Any]) -> dict[str, Any]:
    """vLLM's `guided_choice` and `structured_outputs.choice` ask what `allowed_answers` asks. Raises ValueError."""
    structured = body.get("structured_outputs")
    given = {
        "guided_choice": body.get("guided_choice"),
        "structured_outputs.choice": structured.get("choice") if isinstance(structured, dict) else None,
    }
    for name, choices in given.items():
        if choices is None:
            continue
        if others := [one for one in LABEL_FIELDS if body.get(one) is not None]:
            raise ValueError(f"{name} and {others[0]} are both given: give the answers once")
        if not isinstance(choices, list):
            raise ValueError(f"{name} must be a list of texts")
        body = {**body, "allowed_answers": choices}
    return body


class LabelFields(ReplyFields):
    """Fields of label requests on the OpenAI routes."""

    allowed_tokens: list[str] | None = None
    allowed_token_ids: list[StrictInt] | None = None
    allowed_answers: Any = None  # checked with the next three by `core.long_labels.parse`
    answer_end: Any = None
    normalise: Any = None
    baseline_prompt: Any = None
    deadline_ms: float | None = None
    prompt_parts: Any = None  # refused in chats
    on_overflow: Any = None
    max_prompt_tokens: Any = None
    prefix: str | None = None  # `http.bodies` has put it in front of the prompts

    @model_validator(mode="before")
    @classmethod
    def _as_clients_send_it(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        check_names(values, cls.model_fields)
        if values.get("prompt_logprobs") is not None:
            raise ValueError(
                "prompt_logprobs is a field of vLLM's, and this server would ignore it: /generate with return_logprob and"
                " logprob_start_len gives log-probabilities of the prompt"
            )
        return choices_as_answers(values)


class LabelCompletionRequest(LabelFields, CompletionRequest):  # type: ignore[misc]
    """The body of /v1/completions. `max_tokens` left out means 1 on a prefill-only server; 0 is accepted too."""

    max_tokens: int | None = None
    prompt: PromptOrPrompts

    @model_validator(mode="before")
    @classmethod
    def _parts_are_a_prompt(cls, values: Any) -> Any:
        """SGLang requires `prompt`: a placeholder until `prompt_parts` are cut."""
        if isinstance(values, dict) and values.get("prompt_parts") is not None:
            if values.get("prompt") is not None:
                raise ValueError("prompt and prompt_parts are both given: give the prompt once")
            return {**values, "prompt": ""}
        return values

    @field_validator("max_tokens")
    @classmethod
    def validate_max_tokens_positive(cls, value: int | None) -> int | None:
        """Overrides SGLang's validator of this name, which refuses 0."""
        if value is not None and value < 0:
            raise ValueError(f"max_tokens is {value}: it must be 0 or more")
        return value


class LabelChatCompletionRequest(LabelFields, ChatCompletionRequest):  # type: ignore[misc]
    """The body of /v1/chat/completions. `max_tokens` and `max_completion_tokens` left out mean 1 on a prefill-only server."""

    _marks: tuple[Mark, ...] = ()

    @property
    def marks(self) -> tuple[Mark, ...]:
        """Messages with a `keep` field, which SGLang's message types drop."""
        return self._marks

    @model_validator(mode="wrap")
    @classmethod
    def _remember_marks(cls, values: Any, handler: Callable[[Any], Any]) -> Any:
        request = handler(values)
        request._marks = marks_of(values)
        return request

    @model_validator(mode="before")
    @classmethod
    def _is_an_object(cls, values: Any) -> Any:
        """SGLang's validators, which run later, would answer 500 for a list or a text."""
        if not isinstance(values, dict):
            raise ValueError("the request body must be a JSON object")
        if not isinstance(values.get("response_format"), dict | None):
            raise ValueError("response_format must be an object")
        return values


def marks_of(body: Any) -> tuple[Mark, ...]:
    """Messages with `keep` in an unvalidated chat body. Raises ValueError for a wrong value, or a part with `keep`."""
    messages = body.get("messages") if isinstance(body, dict) else None
    found = []
    for index, message in enumerate(messages if isinstance(messages, list) else []):
        if not isinstance(message, dict):
            continue
        content = message.get("content")
        for place, part in enumerate(content if isinstance(content, list) else []):
            if isinstance(part, dict) and "keep" in part:
                raise ValueError(
                    f"messages[{index}].content[{place}] has keep: whole messages are kept or dropped, give keep beside content"
                )
        if "keep" in message:
            if not isinstance(message["keep"], bool):
                raise ValueError(
                    f"messages[{index}].keep is {message['keep']!r}: give false (the message may be dropped) or true"
                )
            found.append(Mark(index, message["keep"]))
    return tuple(found)


@dataclasses.dataclass(kw_only=True)
class LabelGenerateReqInput(GenerateReqInput):  # type: ignore[misc]
    """The body of /generate."""

    input_ids: InputIds = None
    prefix: str | None = None
    allowed_tokens: list[str] | None = None
    allowed_token_ids: list[StrictInt] | None = None
    allowed_answers: Any = None
    answer_end: Any = None
    normalise: Any = None
    baseline_prompt: Any = None
    deadline_ms: float | None = None
    calibration: str | None = None
    raw_scores: StrictBool = False
    top_alternatives: StrictInt | None = None
    cache_salt: str | None = None
    prompt_parts: Any = None
    on_overflow: Any = None
    max_prompt_tokens: Any = None
    guided_choice: Any = None
    structured_outputs: Any = None

    @model_validator(mode="before")
    @classmethod
    def _as_clients_send_it(cls, values: Any) -> Any:
        if isinstance(values, dict):
            check_names(values, [field.name for field in dataclasses.fields(cls)])
            return choices_as_answers({name: value for name, value in values.items() if value is not None})
        return values

    is_single = True  # a default: error handling reads it for requests that SGLang has not normalised yet


def allowed_answers(request: Any) -> AllowedAnswers | None:
    """Parses the allowed answers; None for a request without. Raises BadRequestError."""
    given = [name for name in LABEL_FIELDS if getattr(request, name) is not None]
    if len(given) > 1:
        raise BadRequestError(f"{' and '.join(given)} are both given: give the answers once")
    if request.allowed_answers is None:
        beside = [name for name in LONG_LABEL_OPTIONS if getattr(request, name) is not None]
        if beside:
            raise BadRequestError(
                f"{', '.join(beside)} goes with allowed_answers: give the labels there, or leave it out"
            )
        return AllowedAnswers(request.allowed_tokens, request.allowed_token_ids) if given else None
    try:
        options = long_labels.parse(request.allowed_answers, *(getattr(request, name) for name in LONG_LABEL_OPTIONS))
    except LabelError as error:
        raise BadRequestError(str(error)) from error
    return AllowedAnswers(None, None, options)


def check_keys(request: CompletionRequest | ChatCompletionRequest) -> None:
    """Raises BadRequestError for a list in a field that takes one text on SGLang's routes."""
    for name in ("cache_salt", "extra_key"):
        if isinstance(getattr(request, name, None), list):
            raise BadRequestError(f"{name} is a list: give one text, or a request for each prompt")


def pass_deadline(request: CompletionRequest | ChatCompletionRequest) -> None:
    """Copies the deadline of a request without allowed answers to `custom_params`, for the scheduler."""
    request.custom_params = custom_params.with_deadline(request.deadline_ms, request.custom_params)


def pass_generate_deadline(obj: GenerateReqInput) -> None:
    """As `pass_deadline`, for /generate: one set of sampling options, or one per prompt."""
    if obj.deadline_ms is None:
        return
    put = functools.partial(custom_params.put, name=custom_params.DEADLINE, value=obj.deadline_ms)
    obj.sampling_params = custom_params.for_each(obj.sampling_params, put)


def check_penalties(
    request: CompletionRequest | ChatCompletionRequest | GenerateReqInput, max_tokens: int | None
) -> None:
    """Raises BadRequestError for penalties that cannot change an answer of one token. max_tokens: of the OpenAI routes."""
    for options in _sampling_options(request, max_tokens):
        length = options.get("max_new_tokens")
        if (found := _penalties(options)) and isinstance(length, int) and length <= 1:
            values = ", ".join(f"{name} is {options[name]}" for name in found)
            raise BadRequestError(
                f"{values}: penalties are for tokens that an answer has already, and this answer is one: leave them out"
            )


def _sampling_options(request: Any, max_tokens: int | None) -> list[dict[str, Any]]:
    """One set for the OpenAI routes; one for all or one per prompt of /generate."""
    if isinstance(request, BaseModel):
        return [{**{name: getattr(request, name) for name in request.model_fields_set}, "max_new_tokens": max_tokens}]
    params: Any = request.sampling_params or {}
    return params if isinstance(params, list) else [params]


def _penalties(given: Mapping[str, Any]) -> list[str]:
    return [name for name in PENALTIES if not asks_for_nothing(name, given.get(name))]


def check_label_request(request: BaseModel, max_tokens: int | None) -> None:
    """Raises BadRequestError naming all options that contradict label scoring."""
    fields = type(request).model_fields
    given = [
        name
        for name in CONTRADICTING_FIELDS
        if name in request.model_fields_set
        and getattr(request, name) != fields[name].default
        and not asks_for_nothing(name, getattr(request, name))
    ]
    _refuse("max_tokens", max_tokens, given)


def check_generate_label_request(obj: GenerateReqInput) -> None:
    """As `check_label_request`, for /generate, whose options are in `sampling_params`."""
    for options in _sampling_options(obj, None):
        names = ("n", "regex", "json_schema", "ebnf", "logit_bias")
        given = [name for name in names if not asks_for_nothing(name, options.get(name))]
        _refuse("max_new_tokens", options.get("max_new_tokens"), given + _penalties(options))


def _refuse(length_field: str, max_tokens: Any, contradicting: list[str]) -> None:
    if isinstance(max_tokens, int) and max_tokens > 1:
        raise BadRequestError(
            f"{length_field} is {max_tokens}, and labels are scored, not generated: leave it out, or ask for 0 or 1;"
            " for longer answers drop the allowed answers and start the server with --allow-generation"
        )
    if contradicting:
        them = "it" if len(contradicting) == 1 else "them"
        raise BadRequestError(f"{', '.join(contradicting)} cannot be combined with allowed answers: leave {them} out")
