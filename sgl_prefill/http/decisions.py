"""GET /scheduler/decisions: the requests of the last steps, one JSON object a line, and why the first one ran."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from fastapi.responses import Response
from sglang.srt.managers.io_struct import GetInternalStateReq

from sgl_prefill.config import PrefillConfig
from sgl_prefill.errors import BadRequestError, NotFoundError
from sgl_prefill.port.dashboard.watch import DECISIONS_NAME
from sgl_prefill.port.steps.recent import N_STEPS

if TYPE_CHECKING:
    from sgl_prefill.http.tokenizer_manager import PrefillTokenizerManager

PATH = "/scheduler/decisions"


def add_routes(app: FastAPI, config: PrefillConfig, manager: Callable[[], PrefillTokenizerManager]) -> None:
    """manager: called per request, since SGLang makes it after the routes."""

    @app.get(PATH)
    async def show_decisions(last: str = "200") -> Any:
        if not (last.isascii() and last.isdigit() and len(last) < 6 and 1 <= int(last) <= N_STEPS):
            raise BadRequestError(
                f"last is {last[:20]!r}: it must be a number from 1 to {N_STEPS}, the steps that a server keeps;"
                " --request-log FILE records all requests"
            )
        if not config.has_policy:
            raise NotFoundError(
                "this server runs with --scheduling stock, where SGLang's own scheduler decides: start it with another"
                " --scheduling"
            )
        asked = manager()
        asked.auto_create_handle_loop()
        replies = await asked.get_internal_state_communicator(GetInternalStateReq(rid=DECISIONS_NAME))
        lines = [line for reply in replies for line in reply.internal_state[DECISIONS_NAME].splitlines(keepends=True)]
        return Response("".join(lines[-int(last) :]), media_type="application/x-ndjson")
