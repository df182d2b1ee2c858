"""What a request may ask of a label answer besides the labels: a calibration, raw scores, what else the model wanted to say."""

from __future__ import annotations

from typing import Any, NamedTuple

from sgl_prefill.calibrations import StoredCalibration
from sgl_prefill.errors import BadRequestError

MOST_ALTERNATIVES = 100
FIELDS = ("calibration", "raw_scores", "top_alternatives")  # of a body


class ReplyOptions(NamedTuple):
    """None of them changes what is computed for the labels."""

    calibration: StoredCalibration | None = None
    raw_scores: bool = False
    top_alternatives: int = 0  # the likeliest tokens of the whole vocabulary


PLAIN = ReplyOptions()


def given(request: Any) -> str:
    """Names those of these fields that a body gives, for a message; nothing where it gives none."""
    values = {name: getattr(request, name) for name in FIELDS}
    return ", ".join(name for name, value in values.items() if value is not None and value is not False)


def check(request: Any, has_answers: bool) -> None:
    """Raises BadRequestError where these fields of a body mean nothing; has_answers: the body allows some."""
    if request.top_alternatives is not None:
        check_alternatives(request.top_alternatives)
    if (names := given(request)) and not has_answers:
        raise BadRequestError(
            f"{names} without allowed answers: they say something about labels, so give allowed_tokens or the like,"
            " or leave them out"
        )


def check_alternatives(n: int) -> None:
    """Raises BadRequestError for a number of alternatives that is not served."""
    if not 1 <= n <= MOST_ALTERNATIVES:
        raise BadRequestError(
            f"top_alternatives is {n}: ask for 1 to {MOST_ALTERNATIVES} tokens, or leave it out for none"
        )
