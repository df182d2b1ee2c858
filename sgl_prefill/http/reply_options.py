"""Options of label answers, on every route that scores labels: a calibration, raw scores, and the likeliest tokens."""

from __future__ import annotations

from typing import Any, NamedTuple

from pydantic import BaseModel, StrictBool, StrictInt

from sgl_prefill.errors import BadRequestError
from sgl_prefill.startup.calibrations import StoredCalibration

MOST_ALTERNATIVES = 100


class ReplyFields(BaseModel):
    """Fields of request bodies."""

    calibration: str | None = None
    raw_scores: StrictBool = False
    top_alternatives: StrictInt | None = None


class ReplyOptions(NamedTuple):
    """The checked options. None of them changes the log-probabilities of the labels."""

    calibration: StoredCalibration | None = None
    raw_scores: bool = False
    top_alternatives: int = 0  # how many of the likeliest tokens of the whole vocabulary


PLAIN = ReplyOptions()


def given(request: Any) -> str:
    """Names the fields that a body sets, for an error message; "" if it sets none."""
    values = {name: getattr(request, name) for name in ReplyFields.model_fields}
    return ", ".join(name for name, value in values.items() if value is not None and value is not False)


def check(request: Any, has_answers: bool) -> None:
    """Raises BadRequestError for these fields without allowed answers, and for values outside their range."""
    if request.top_alternatives is not None:
        check_alternatives(request.top_alternatives)
    if (names := given(request)) and not has_answers:
        raise BadRequestError(
            f"{names} without allowed answers: they say something about labels, so give allowed_tokens or the like,"
            " or leave them out"
        )


def check_alternatives(n: int) -> None:
    if not 1 <= n <= MOST_ALTERNATIVES:
        raise BadRequestError(
            f"top_alternatives is {n}: ask for 1 to {MOST_ALTERNATIVES} tokens, or leave it out for none"
        )
