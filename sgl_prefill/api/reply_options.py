"""What a request may ask of a label answer besides the labels: a calibration, raw scores, what else the model wanted to say."""

from __future__ import annotations

from typing import Any, NamedTuple

from sgl_prefill.api.calibration_store import StoredCalibration
from sgl_prefill.errors import BadRequestError

MOST_ALTERNATIVES = 100


class ReplyOptions(NamedTuple):
    """None of them changes what is computed for the labels."""

    calibration: StoredCalibration | None = None
    raw_scores: bool = False
    top_alternatives: int = 0  # the likeliest tokens of the whole vocabulary


def check(request: Any, has_answers: bool) -> None:
    """Raises BadRequestError where these fields of a body mean nothing; has_answers: the body allows some."""
    given = [name for name in ("calibration", "raw_scores", "top_alternatives") if getattr(request, name)]
    if request.top_alternatives is not None:
        check_alternatives(request.top_alternatives)
    if given and not has_answers:
        raise BadRequestError(
            f"{', '.join(given)} without allowed answers: they say something about labels, so give allowed_tokens or the like,"
            " or leave them out"
        )


def check_alternatives(n: int) -> None:
    """Raises BadRequestError for a number of alternatives that is not served."""
    if not 1 <= n <= MOST_ALTERNATIVES:
        raise BadRequestError(
            f"top_alternatives is {n}: ask for 1 to {MOST_ALTERNATIVES} tokens, or leave it out for none"
        )
