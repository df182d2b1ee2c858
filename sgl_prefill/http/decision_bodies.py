"""The bodies of `/v1/decisions` (OpenAI's) and `/v1/systemone` (TypeSafe's): what they may hold, and what is asked by them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import orjson
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    StrictBool,
    StrictInt,
    StrictStr,
    Tag,
    TypeAdapter,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError

from sgl_prefill.core.decision_prompts import Kind, Option, Question
from sgl_prefill.errors import BadRequestError

MOST_QUESTIONS, MOST_CHOICES, MOST_LEVELS = 400, 255, 10
JSON_DEPTH, JSON_VALUES, JSON_BYTES = 32, 10_000, 256 << 10  # of an `input_json` part
MOST_ERRORS, LONGEST_INPUT = 20, 200  # in a reply: validation errors, and characters of a value in one


class Options(BaseModel):
    """One question's entry of `x_options`."""

    model_config = ConfigDict(extra="forbid")

    orders: Annotated[StrictInt, Field(ge=1, le=MOST_CHOICES)] | None = None
    calibration: StrictStr | None = None
    baseline: StrictBool = False
    abstain_below: Annotated[float, Field(ge=0, le=1)] | None = None
    deadline_ms: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None


class Asked(NamedTuple):
    """A request of either API."""

    state: str
    names: Sequence[str | None]  # of the questions
    questions: list[Question]
    options: list[Options]
    cache_key: str | None  # requests share prefixes only where it is equal


class BodyError(BadRequestError):
    """A body that does not match its API. `errors`: pydantic's, at least one."""

    def __init__(self, errors: Sequence[Mapping[str, Any]]) -> None:
        self.errors = errors
        super().__init__("; ".join(f"{path_of(one['loc'])}: {one['msg']}" for one in errors[:MOST_ERRORS]))


class Unread(NamedTuple):
    """Why there is no body."""

    kind: str
    problem: str


def _refuse_images(_: Any) -> Any:
    raise PydanticCustomError("images_not_served", "this server's model reads text only: leave images out")


def _check_json(value: Any) -> Any:
    """A string, an object or an array."""
    if not isinstance(value, str | dict | list):
        raise PydanticCustomError("text_type", "give a string, an object or an array")
    return value


def _check_filled(value: Any) -> Any:
    if not shown(value).strip():
        raise PydanticCustomError("blank", "it is blank: give a text")
    return value


Text = Annotated[Any, BeforeValidator(_check_json)]
Filled = Annotated[Any, BeforeValidator(_check_filled), BeforeValidator(_check_json)]
FilledString = Annotated[StrictStr, BeforeValidator(_check_filled), BeforeValidator(_check_json)]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


# ---- OpenAI


class InputText(Strict):
    type: Literal["input_text"]
    text: StrictStr
    prompt_cache_breakpoint: dict[str, Any] | None = None


class InputJson(Strict):
    type: Literal["input_json"]
    data: Annotated[Any, BeforeValidator(lambda value: _check_data(value))]


class InputImage(BaseModel):
    type: Annotated[Literal["input_image"], BeforeValidator(_refuse_images)]


class OutputText(BaseModel):
    type: Literal["output_text"]
    text: StrictStr


class RefusalPart(BaseModel):
    type: Literal["refusal"]
    refusal: StrictStr


def _check_data(value: Any) -> Any:
    objects = value if isinstance(value, list) else [value]
    if not all(isinstance(one, dict) for one in objects):
        raise PydanticCustomError("json_type", "give an object, or an array of objects")
    n_values, level = 0, [value]
    for _ in range(JSON_DEPTH + 1):
        n_values += len(level)
        level = [one for holder in level for one in _children(holder)]
        if not level:
            break
    if level or n_values > JSON_VALUES or len(orjson.dumps(value)) > JSON_BYTES:
        raise PydanticCustomError(
            "json_size",
            f"it is deeper than {JSON_DEPTH} levels, or holds more than {JSON_VALUES} values or {JSON_BYTES} bytes",
        )
    return value


def _children(value: Any) -> Iterator[Any]:
    yield from value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _by_type(default: str = "") -> Discriminator:
    return Discriminator(lambda value: value.get("type") or default if isinstance(value, dict) else default)


def _string_or(name: str) -> Discriminator:
    return Discriminator(lambda value: "text" if isinstance(value, str) else name)


Part = Annotated[
    Annotated[InputText, Tag("input_text")]
    | Annotated[InputJson, Tag("input_json")]
    | Annotated[InputImage, Tag("input_image")]
    | Annotated[OutputText, Tag("output_text")]
    | Annotated[RefusalPart, Tag("refusal")],
    _by_type(),
]
TextOrParts = Annotated[Annotated[StrictStr, Tag("text")] | Annotated[list[Part], Tag("parts")], _string_or("parts")]
PARTS_OF = {
    "user": {"input_text", "input_json"},
    "developer": {"input_text"},
    "system": {"input_text"},
    "assistant": {"output_text", "refusal"},
}


class Message(BaseModel):
    type: Literal["message"] = "message"
    role: Literal["user", "developer", "system", "assistant"]
    content: TextOrParts

    @model_validator(mode="after")
    def _parts_are_of_the_role(self) -> Message:
        types: set[str] = set() if isinstance(self.content, str) else {one.type for one in self.content}
        if wrong := types - PARTS_OF[self.role]:
            raise PydanticCustomError("part_type", f"a message of role {self.role} takes no {', '.join(sorted(wrong))}")
        return self


class Call(BaseModel):
    type: Literal["function_call", "custom_tool_call"]
    call_id: StrictStr
    name: StrictStr
    arguments: StrictStr = ""
    input: StrictStr = ""


class CallOutput(BaseModel):
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: StrictStr
    output: TextOrParts


Item = Annotated[
    Annotated[Message, Tag("message")]
    | Annotated[Call, Tag("function_call")]
    | Annotated[Call, Tag("custom_tool_call")]
    | Annotated[CallOutput, Tag("function_call_output")]
    | Annotated[CallOutput, Tag("custom_tool_call_output")],
    _by_type("message"),
]
Instructions = Annotated[
    Annotated[FilledString, Tag("text")] | Annotated[list[Part], Field(min_length=1), Tag("parts")], _string_or("parts")
]


def _check_choice_value(value: Any) -> Any:
    if not isinstance(value, bool) and not (isinstance(value, str) and value.strip()):
        raise PydanticCustomError("choice_value", "give a text or a boolean")
    return value


class Choice(Strict):
    value: Annotated[Any, BeforeValidator(_check_choice_value)]
    description: StrictStr | None = None


class Level(Strict):
    label: FilledString
    description: StrictStr | None = None


class Named(Strict):
    name: StrictStr | None = None
    instructions: Instructions


class Predicate(Named):
    type: Literal["predicate"]


class ChoiceQuestion(Named):
    type: Literal["choice"]
    choices: list[Choice] = Field(min_length=2, max_length=MOST_CHOICES)

    @model_validator(mode="after")
    def _values_differ(self) -> ChoiceQuestion:
        values = [(type(one.value), one.value) for one in self.choices]
        if len({*values}) < len(values):
            raise PydanticCustomError("choices_doubled", "two choices have the same value")
        return self


class ScoreQuestion(Named):
    type: Literal["score"]
    levels: list[Level] = Field(min_length=2, max_length=MOST_LEVELS)


OpenAIQuestion = Annotated[
    Annotated[Predicate, Tag("predicate")]
    | Annotated[ChoiceQuestion, Tag("choice")]
    | Annotated[ScoreQuestion, Tag("score")],
    _by_type(),
]


class DecisionsBody(Strict):
    model: StrictStr
    input: Annotated[Annotated[StrictStr, Tag("text")] | Annotated[list[Item], Tag("items")], _string_or("items")]
    questions: list[OpenAIQuestion] = Field(min_length=1, max_length=MOST_QUESTIONS)
    prompt_cache_key: StrictStr | None = None
    prompt_cache_options: dict[str, Any] | None = None  # prefixes are cached with or without
    safety_identifier: StrictStr | None = Field(None, max_length=128)
    user: StrictStr | None = None
    cache_salt: StrictStr | None = None
    x_options: dict[str, Options] | None = None

    @model_validator(mode="after")
    def _outputs_have_calls(self) -> DecisionsBody:
        items = [] if isinstance(self.input, str) else self.input
        calls = {one.call_id for one in items if isinstance(one, Call)}
        for one in items:
            if isinstance(one, CallOutput) and one.call_id not in calls:
                raise PydanticCustomError(
                    "call_id", f"call_id {one.call_id!r} of an output names no call of this input"
                )
        return self

    def asked(self) -> Asked:
        state = self.input if isinstance(self.input, str) else "\n\n".join(_items_shown(self.input))
        questions = [_question_of_openai(one) for one in self.questions]
        names = [one.name for one in self.questions]
        keys = [name if name is not None else str(index) for index, name in enumerate(names)]
        return Asked(state, names, questions, _options_of(keys, self.x_options), self.prompt_cache_key)


def _items_shown(items: Sequence[Any]) -> Iterator[str]:
    """Messages of users as they are, if there are no others; else each with its role."""
    has_roles = any(not isinstance(one, Message) or one.role != "user" for one in items)
    for one in items:
        if isinstance(one, Message):
            yield f"{one.role}: {_parts_shown(one.content)}" if has_roles else _parts_shown(one.content)
        elif isinstance(one, Call):
            yield f"call of {one.name}: {one.arguments or one.input}"
        else:
            yield f"output: {_parts_shown(one.output)}"


def _parts_shown(content: str | list[Any]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(
        shown(one.data) if isinstance(one, InputJson) else one.refusal if isinstance(one, RefusalPart) else one.text
        for one in content
    )


def _question_of_openai(question: Predicate | ChoiceQuestion | ScoreQuestion) -> Question:
    text = _parts_shown(question.instructions)
    if isinstance(question, Predicate):
        return Question(Kind.YES_NO, text, (Option("yes"), Option("no")))
    if isinstance(question, ScoreQuestion):
        levels = [(one.label, one.description) for one in question.levels]
        return Question(Kind.SCORE, text, tuple(Option(label, more or "") for label, more in levels))
    booleans = {shown(one.value) for one in question.choices if isinstance(one.value, bool)}

    def name_of(value: str | bool) -> str:
        """true and "true" may both be choices."""
        return f'"{value}"' if isinstance(value, str) and value in booleans else shown(value)

    options = [Option(name_of(one.value), one.description or "") for one in question.choices]
    return Question(Kind.CHOICE, text, tuple(options))


# ---- TypeSafe


class Criteria(Strict):
    true: Text | None = None
    false: Text | None = None


class SystemOneQuestion(Strict):
    instructions: Text | None = None


class Noul(SystemOneQuestion):
    type: Literal["noul"]
    criteria: Criteria | None = None

    @model_validator(mode="after")
    def _asks_something(self) -> Noul:
        sides = (None, None) if self.criteria is None else (self.criteria.true, self.criteria.false)
        if not any(shown(text).strip() for text in (self.instructions, *sides)):
            raise PydanticCustomError("blank", "instructions and criteria are blank: give one of them")
        return self


class SystemOneChoice(SystemOneQuestion):
    type: Literal["choice"]
    criteria: dict[FilledString, Text | None] = Field(min_length=2, max_length=MOST_CHOICES)


class SystemOneScore(SystemOneQuestion):
    type: Literal["score"]
    criteria: list[Filled] = Field(min_length=2, max_length=MOST_LEVELS)


class Box(BaseModel):
    type: Annotated[Literal["box"], BeforeValidator(_refuse_images)]


class SystemOneBody(BaseModel):
    """Other fields are ignored, as the API demands."""

    model: StrictStr
    state: Text
    questions: dict[
        Annotated[StrictStr, Field(min_length=1)],
        Annotated[
            Annotated[Noul, Tag("noul")]
            | Annotated[SystemOneChoice, Tag("choice")]
            | Annotated[SystemOneScore, Tag("score")]
            | Annotated[Box, Tag("box")],
            _by_type(),
        ],
    ] = Field(min_length=1, max_length=MOST_QUESTIONS)
    assets: Annotated[
        dict[str, Any] | None, BeforeValidator(lambda value: _refuse_images(value) if value else None)
    ] = None
    x_options: dict[str, Options] | None = None

    def asked(self) -> Asked:
        questions = [_question_of_typesafe(one) for one in self.questions.values()]
        names = list(self.questions)
        return Asked(shown(self.state), names, questions, _options_of(names, self.x_options), None)


def _question_of_typesafe(question: Any) -> Question:
    text = shown(question.instructions)
    if isinstance(question, Noul):
        criteria = question.criteria or Criteria()
        return Question(Kind.YES_NO, text, (Option("yes", shown(criteria.true)), Option("no", shown(criteria.false))))
    if isinstance(question, SystemOneScore):
        return Question(Kind.SCORE, text, tuple(Option(shown(level)) for level in question.criteria))
    return Question(Kind.CHOICE, text, tuple(Option(name, shown(more)) for name, more in question.criteria.items()))


# ---- both


def shown(value: Any) -> str:
    """A text as it is, nothing as nothing, and other values as compact JSON."""
    return "" if value is None else value if isinstance(value, str) else orjson.dumps(value).decode()


def _options_of(keys: Sequence[str], given: dict[str, Options] | None) -> list[Options]:
    if others := (given or {}).keys() - set(keys):
        problem = {
            "loc": ("x_options", sorted(others)[0]),
            "msg": "no question has this name",
            "type": "unknown_question",
        }
        raise BodyError([problem])
    return [(given or {}).get(key, Options()) for key in keys]


_DECISIONS, _SYSTEM_ONE = TypeAdapter(DecisionsBody), TypeAdapter(SystemOneBody)


def read_decisions(body: Any) -> tuple[DecisionsBody, Asked]:
    """Raises BodyError."""
    found = valid(_DECISIONS.validate_python, body)
    return found, found.asked()


def read_system_one(body: Any) -> tuple[SystemOneBody, Asked]:
    """Raises BodyError."""
    found = valid(_SYSTEM_ONE.validate_python, body)
    return found, found.asked()


def valid(validate: Callable[[Any], Any], body: Any) -> Any:
    if isinstance(body, Unread):
        raise BodyError([{"loc": (), "msg": body.problem, "type": body.kind}])
    try:
        return validate(body)
    except ValidationError as error:
        raise BodyError(error.errors(include_url=False)) from error


# What pydantic adds to a place for the type that it took.
PART_TAGS = ("input_text", "input_json", "input_image", "output_text", "refusal")
ITEM_TAGS = ("message", "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output")
TAGGED = ("input", "content", "instructions", "output")  # fields of a text or a list
TAGS = frozenset({"text", "parts", "items", "predicate", "choice", "score", *PART_TAGS, *ITEM_TAGS})


def path_of(place: Sequence[str | int]) -> str:
    """The place of an error as a client writes it: questions[2].choices."""
    found = ""
    for index, part in enumerate(place):
        if isinstance(part, int):
            found += f"[{part}]"
        elif part not in TAGS or not (index and (isinstance(place[index - 1], int) or place[index - 1] in TAGGED)):
            found += f".{part}" if found else part
    return found or "the request body"


def details_of(errors: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """FastAPI's list of validation errors."""
    found = []
    for one in errors[:MOST_ERRORS]:
        value = one.get("input")
        is_short = isinstance(value, str | int | float | bool) and len(str(value)) <= LONGEST_INPUT
        is_short = is_short and not (isinstance(value, float) and not math.isfinite(value))
        shown_value = {"input": value} if is_short else {}
        found.append({"loc": ["body", *one["loc"]], "msg": one["msg"], "type": one["type"], **shown_value})
    return found
