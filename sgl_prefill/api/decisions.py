"""GET /decisions: who ran in the last steps, and why. The lines are those of `--decision-log` (`planner/DECISIONS.md`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from fastapi.responses import Response

from sgl_prefill.config import PrefillConfig
from sgl_prefill.errors import BadRequestError, NotFoundError
from sgl_prefill.port import decisions
from sgl_prefill.scheduling.decisions import KEPT_DECISIONS

if TYPE_CHECKING:
    from sgl_prefill.api.tokenizer_manager import PrefillTokenizerManager

PATH = "/decisions"
USUAL_DECISIONS = 200
MOST_DIGITS = 20  # Python reads no number of thousands of them
JSON_LINES = "application/x-ndjson"


def add_routes(app: FastAPI, config: PrefillConfig, manager: Callable[[], PrefillTokenizerManager]) -> None:
    """manager: is called when a request has come."""

    @app.get(PATH)
    async def show_decisions(last: str = str(USUAL_DECISIONS)) -> Any:
        n_last = count_of(last)
        if not config.has_policy:
            raise NotFoundError(
                "this server runs with --scheduling stock: SGLang's own scheduler decides, and says nothing of it; start it with"
                " another --scheduling"
            )
        return Response(await decisions.ask(manager(), n_last), media_type=JSON_LINES)


def count_of(last: str) -> int:
    """Returns how many decisions are asked for. Raises BadRequestError."""
    is_number = last.isascii() and last.isdigit() and len(last) < MOST_DIGITS
    if not is_number or not 1 <= int(last) <= KEPT_DECISIONS:
        raise BadRequestError(
            f"last is {last[:20]!r}: it must be a number from 1 to {KEPT_DECISIONS}, which is how many decisions a server keeps;"
            " for all of them start it with --decision-log FILE"
        )
    return int(last)
