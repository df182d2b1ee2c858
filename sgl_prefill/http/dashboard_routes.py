"""Routes of `/dashboard` (the page, and its stream of snapshots), `/docs` and `/scheduler/decisions`.

All open pages share one request to the schedulers at a time. None is sent while no page is open.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import hashlib
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson
from fastapi import FastAPI
from fastapi.responses import Response, StreamingResponse
from sglang.srt.managers.io_struct import GetInternalStateReq

from sgl_prefill import dashboard as dashboard_files
from sgl_prefill.config import PrefillConfig
from sgl_prefill.errors import BadRequestError, NotFoundError
from sgl_prefill.http import api_docs
from sgl_prefill.http.shutdown import Ending
from sgl_prefill.port.dashboard.watch import DECISIONS_NAME, NAME
from sgl_prefill.port.steps.recent import N_STEPS

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from sgl_prefill.http.tokenizer_manager import PrefillTokenizerManager

PATH, EVENTS_PATH, DOCS_PATH, DECISIONS_PATH = "/dashboard", "/dashboard/events", "/docs", "/scheduler/decisions"
MOST_PER_S = 5  # snapshots
PART_OF_TIME = 0.005  # largest share of the scheduler's time for snapshots
LONGEST_PAUSE_S = 5.0  # between two snapshots
LOOK_S = 1.0  # between two checks for shutdown
FILES = Path(dashboard_files.__file__).parent
# By path: HTML, scripts and styles.
PAGES = {
    PATH: (
        "page.html",
        ("vendor/uPlot.iife.min.js", "vendor/d3-hierarchy.min.js", "page.js"),
        ("vendor/uPlot.min.css", "page.css"),
    ),
    DOCS_PATH: ("docs.html", ("docs.js",), ("page.css", "docs.css")),
}


class Page(NamedTuple):
    html: bytes  # with styles and scripts
    policy: str  # Content-Security-Policy: only these scripts and styles, no other host


@functools.cache
def page(path: str = PATH) -> Page:
    html_name, script_names, style_names = PAGES[path]
    scripts, styles = "\n".join(map(_text, script_names)), "\n".join(map(_text, style_names))
    assert "</script" not in scripts, "it would end the script element"
    html = _text(html_name).replace("/*STYLES*/", styles).replace("/*SCRIPTS*/", scripts)
    policy = (
        f"default-src 'none'; script-src {_hash(scripts)}; style-src {_hash(styles)}; connect-src 'self'; img-src data:;"
        " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return Page(html.encode(), policy)


def _text(name: str) -> str:
    return (FILES / name).read_text(encoding="utf-8")


def _hash(content: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


class Feed:
    """Snapshots for all open pages. manager: returns SGLang's tokenizer manager, which is created later."""

    def __init__(
        self,
        manager: Callable[[], PrefillTokenizerManager],
        config: PrefillConfig,
        ending: Ending,
        refused: Counter[str],
    ) -> None:
        self._manager, self._config, self._ending, self._refused = manager, config, ending, refused
        self._periods_s: list[float] = []  # of each open page
        self._latest = b""
        self._new = asyncio.Event()  # replaced with each snapshot
        self._is_waiting = False  # for a scheduler's answer
        self._polling: asyncio.Task[None] | None = None

    async def events(self, per_s: int) -> AsyncGenerator[bytes, None]:
        """Yields snapshots as server-sent events until the server ends."""
        period_s = 1 / per_s
        self._periods_s.append(period_s)
        try:
            if self._polling is None or self._polling.done():
                self._latest = b""
                self._polling = asyncio.create_task(self._poll())
            elif self._latest:
                yield b"data: " + self._latest + b"\n\n"  # the next may be seconds away
            while self._ending.reason is None:
                if await _is_set(self._new):
                    sent_s = time.monotonic()
                    yield b"data: " + self._latest + b"\n\n"
                    await asyncio.sleep(0.9 * period_s - (time.monotonic() - sent_s))
                elif self._polling.done():
                    self._polling.result()  # raises its error
                else:
                    yield b": a step computes\n\n" if self._is_waiting else b": the next snapshot is not due\n\n"
        finally:
            self._periods_s.remove(period_s)

    async def _poll(self) -> None:
        """Requests snapshots while a page is open. Must not be cancelled: SGLang's next request would get this one's answer."""
        while self._periods_s and self._ending.reason is None:
            began_s = time.monotonic()
            self._is_waiting = True
            took_ms = await self._snapshot()
            self._is_waiting = False
            rest_s = min(took_ms / 1000 / PART_OF_TIME, LONGEST_PAUSE_S)
            pause_s = max(min(self._periods_s, default=0.0), rest_s)
            await asyncio.sleep(pause_s - (time.monotonic() - began_s))

    async def _snapshot(self) -> float:
        """Makes one snapshot. Returns the milliseconds that the slowest scheduler spent on it."""
        manager = self._manager()
        manager.auto_create_handle_loop()
        answers = await manager.get_internal_state_communicator(GetInternalStateReq(rid=NAME))
        engines = [orjson.loads(one.internal_state[NAME]) for one in answers]
        of_http = {
            "refused": dict(self._refused),
            "in_flight": self._ending.n_in_flight,
            "named_by": self._config.fair_by,
        }
        self._latest = orjson.dumps({"http": of_http, "engines": engines})
        before, self._new = self._new, asyncio.Event()
        before.set()
        return max((float(engine["took_ms"]) for engine in engines), default=0.0)


async def _is_set(event: asyncio.Event) -> bool:
    """Waits at most LOOK_S."""
    try:
        await asyncio.wait_for(event.wait(), LOOK_S)
    except TimeoutError:
        return False
    return True


def add_routes(app: FastAPI, feed: Feed) -> None:
    for path in PAGES:
        show_page = functools.partial(_page_response, path, HTTPStatus.OK)
        app.get(path, include_in_schema=False)(show_page)

    @app.get(EVENTS_PATH, include_in_schema=False)
    async def stream_snapshots(per_second: int = 1) -> StreamingResponse:
        if not 1 <= per_second <= MOST_PER_S:
            raise BadRequestError(f"per_second is {per_second}: it must be from 1 to {MOST_PER_S}")
        headers = {"cache-control": "no-store"}
        return StreamingResponse(feed.events(per_second), media_type="text/event-stream", headers=headers)


def _page_response(path: str, status: HTTPStatus) -> Response:
    made = page(path)
    headers = {
        "content-security-policy": made.policy,
        "cache-control": "no-store",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
    }
    return Response(made.html, int(status), headers, media_type="text/html")


class AskForKey:
    """ASGI middleware around SGLang's check of API keys: the body of a 401 for a page is the page, which asks for the key.

    A browser cannot send a key with an address. The page itself holds no data of this server.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"].removeprefix(scope.get("root_path", "")) if scope["type"] == "http" else None
        if path not in PAGES or scope["method"] != "GET":
            await self._app(scope, receive, send)
            return
        is_refused = False

        async def send_or_ask(message: Message) -> None:
            nonlocal is_refused
            if message["type"] == "http.response.start" and message["status"] == HTTPStatus.UNAUTHORIZED:
                is_refused = True
            if not is_refused:
                await send(message)

        await self._app(scope, receive, send_or_ask)
        if is_refused:
            await _page_response(path, HTTPStatus.UNAUTHORIZED)(scope, receive, send)


def add_decisions_route(app: FastAPI, config: PrefillConfig, manager: Callable[[], PrefillTokenizerManager]) -> None:
    """The requests of the last steps, one JSON object a line. manager: called per request, since SGLang creates it later."""

    @app.get(DECISIONS_PATH, response_class=api_docs.JsonLines, **api_docs.of(DECISIONS_PATH))
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
        found = manager()
        found.auto_create_handle_loop()
        replies = await found.get_internal_state_communicator(GetInternalStateReq(rid=DECISIONS_NAME))
        lines = [line for reply in replies for line in reply.internal_state[DECISIONS_NAME].splitlines(keepends=True)]
        return api_docs.JsonLines("".join(lines[-int(last) :]))
