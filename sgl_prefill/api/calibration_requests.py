"""The body of POST /v1/calibrations, and what is wrong with it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, StrictBool, StrictInt
from sglang.srt.entrypoints.openai.protocol import ChatCompletionMessageParam

from sgl_prefill.api.calibration_store import check_name, shown
from sgl_prefill.api.protocol import allowed_answers
from sgl_prefill.core.label_calibration import FROM_EXAMPLES, METHODS
from sgl_prefill.errors import BadRequestError

FEWEST_EXAMPLES = 20
FEWEST_OF_A_LABEL = 2  # for `vector`, which has parameters of each label


class Prompt(BaseModel):
    """One of the two, as on the route that will be asked."""

    model_config = ConfigDict(extra="forbid")

    prompt: str | list[StrictInt] | None = None
    messages: list[ChatCompletionMessageParam] | None = None


class Example(Prompt):
    label: str


class CalibrationRequest(BaseModel):
    """POST /v1/calibrations."""

    model_config = ConfigDict(extra="forbid")

    name: str
    method: str
    model: str = "default"  # names an adapter, as on the other routes
    allowed_tokens: list[str] | None = None
    allowed_token_ids: list[StrictInt] | None = None
    allowed_answers: Any = None
    answer_end: Any = None
    normalise: Any = None
    baseline_prompt: Any = None
    examples: list[Example] | None = None
    content_free: list[str | Prompt] | None = None
    evaluate_on: list[Example] | None = None
    replace: StrictBool = False
    chat_template_kwargs: dict[str, Any] | None = None
    # Which every body may hold: see `port.client`.
    user: str | None = None
    cache_salt: str | None = None
    extra_key: str | None = None
    prefill_background: bool | None = None


def check_request(request: CalibrationRequest) -> None:
    """Raises BadRequestError for what can be seen before the tokenizer or the model is asked."""
    check_name(request.name)
    if request.method not in METHODS:
        raise BadRequestError(f"method is {request.method!r}: it must be one of {', '.join(METHODS)}")
    if allowed_answers(request) is None:
        raise BadRequestError(
            "the labels are missing: give allowed_tokens or the like, as in the requests that will come"
        )
    if (request.examples is None) == (request.content_free is None):
        both = "are both given" if request.examples is not None else "are both missing"
        raise BadRequestError(
            f"examples and content_free {both}: give examples for {' and '.join(FROM_EXAMPLES)}, content_free for contextual"
        )
    needed = "examples" if request.method in FROM_EXAMPLES else "content_free"
    if getattr(request, needed) is None:
        other = "content_free" if needed == "examples" else "examples"
        raise BadRequestError(
            f"method {request.method} is made from {needed}, and {other} is given: give {needed}, or another method"
        )
    if request.content_free == []:
        raise BadRequestError('content_free is empty: give at least one prompt, such as the usual one with "N/A" in it')
    if request.evaluate_on == []:
        raise BadRequestError("evaluate_on is empty: give labelled examples, or leave it out")
    if request.examples is not None and (n := len(request.examples)) < FEWEST_EXAMPLES:
        raise BadRequestError(
            f"examples holds {n}, and a calibration needs at least {FEWEST_EXAMPLES}: give more, or use the method contextual"
        )
    for field in ("examples", "content_free", "evaluate_on"):
        for index, one in enumerate(getattr(request, field) or []):
            if not isinstance(one, str) and (one.prompt is None) == (one.messages is None):
                raise BadRequestError(f"{field}[{index}] must hold a prompt or messages, and not both")


def check_labels(request: CalibrationRequest, labels: Sequence[str]) -> None:
    """Raises BadRequestError where labels and examples do not fit each other."""
    if len(labels) < 2:
        raise BadRequestError(f"there is one label, {labels[0]!r}, which is always certain: give at least two")
    if doubled := [label for label, n in Counter(labels).items() if n > 1]:
        raise BadRequestError(
            f"several labels read {doubled[0]!r}, and a calibration knows labels by their text: leave all but one out"
        )
    for field in ("examples", "evaluate_on"):
        for index, example in enumerate(getattr(request, field) or []):
            if example.label not in labels:
                raise BadRequestError(
                    f"{field}[{index}] has the label {example.label!r}, which is none of {shown(labels)}"
                )
    if request.examples is None:
        return
    n_of = Counter(example.label for example in request.examples)
    if len(n_of) < 2:
        raise BadRequestError(
            f"all {len(request.examples)} examples have the label {next(iter(n_of))!r}: give examples of at least two labels"
        )
    fewest = min(labels, key=lambda label: n_of[label])
    if request.method == "vector" and n_of[fewest] < FEWEST_OF_A_LABEL:
        raise BadRequestError(
            f"examples holds {n_of[fewest]} with the label {fewest!r}, and the method vector needs at least"
            f" {FEWEST_OF_A_LABEL} of each: give more, or use the method temperature"
        )
