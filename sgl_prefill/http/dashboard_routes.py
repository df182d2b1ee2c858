"""Routes of `/dashboard`: the page, and the stream of snapshots that it shows.

All open pages share one request to the schedulers at a time; while no page is open none is sent.
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
from typing import TYPE_CHECKING, NamedTuple

import orjson
from fastapi import FastAPI
from fastapi.responses import Response, StreamingResponse
from sglang.srt.managers.io_struct import GetInternalStateReq

from sgl_prefill import dashboard as dashboard_files
from sgl_prefill.config import PrefillConfig
from sgl_prefill.errors import BadRequestError
from sgl_prefill.http.shutdown import Ending
from sgl_prefill.port.dashboard.watch import NAME

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from sgl_prefill.http.tokenizer_manager import PrefillTokenizerManager

PATH, EVENTS_PATH = "/dashboard", "/dashboard/events"
MOST_PER_S = 5
PART_OF_TIME = 0.005  # largest share of the scheduler's time for snapshots
LONGEST_PAUSE_S = 5.0  # between two snapshots, however long one takes
LOOK_S = 1.0  # between two looks whether the server is shutting down
FILES = Path(dashboard_files.__file__).parent
SCRIPTS = ("vendor/uPlot.iife.min.js", "vendor/d3-hierarchy.min.js", "page.js")
STYLES = ("vendor/uPlot.min.css", "page.css")


class Page(NamedTuple):
    """The page with its styles and scripts in one file."""

    html: bytes
    policy: str  # Content-Security-Policy: these scripts and styles run, no other, and no other host is asked


@functools.cache
def page() -> Page:
    scripts, styles = "\n".join(map(_text, SCRIPTS)), "\n".join(map(_text, STYLES))
    assert "</script" not in scripts, "a script would end there"
    html = _text("page.html").replace("/*STYLES*/", styles).replace("/*SCRIPTS*/", scripts)
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
    """Snapshots for all open pages. manager: returns SGLang's tokenizer manager, which is made after this."""

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
        self._is_asking = False  # an answer is awaited; else nothing until the next question
        self._asking: asyncio.Task[None] | None = None

    async def events(self, per_s: int) -> AsyncGenerator[bytes, None]:
        """Yields snapshots as server-sent events until the server ends."""
        period_s = 1 / per_s
        self._periods_s.append(period_s)
        try:
            if self._asking is None or self._asking.done():
                self._latest = b""
                self._asking = asyncio.create_task(self._ask_on())
            elif self._latest:
                yield b"data: " + self._latest + b"\n\n"  # the next may be seconds away
            while self._ending.reason is None:
                if await self._comes(self._new):
                    sent_s = time.monotonic()
                    yield b"data: " + self._latest + b"\n\n"
                    await asyncio.sleep(0.9 * period_s - (time.monotonic() - sent_s))
                elif self._asking.done():
                    self._asking.result()  # raises what it has failed at
                else:
                    yield b": a step computes\n\n" if self._is_asking else b": the next snapshot is not due\n\n"
        finally:
            self._periods_s.remove(period_s)

    @staticmethod
    async def _comes(new: asyncio.Event) -> bool:
        try:
            await asyncio.wait_for(new.wait(), LOOK_S)
        except TimeoutError:
            return False
        return True

    async def _ask_on(self) -> None:
        """Asks while a page is open. Must not be cancelled: SGLang would give its next request the answer of this one."""
        while self._periods_s and self._ending.reason is None:
            began_s = time.monotonic()
            self._is_asking = True
            took_ms = await self._ask()
            self._is_asking = False
            rest_s = min(took_ms / 1000 / PART_OF_TIME, LONGEST_PAUSE_S)
            pause_s = max(min(self._periods_s, default=0.0), rest_s)
            await asyncio.sleep(pause_s - (time.monotonic() - began_s))

    async def _ask(self) -> float:
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


def add_routes(app: FastAPI, feed: Feed) -> None:
    @app.get(PATH, include_in_schema=False)
    async def show_page() -> Response:
        return _page_response(HTTPStatus.OK)

    @app.get(EVENTS_PATH, include_in_schema=False)
    async def stream_snapshots(per_second: int = 1) -> StreamingResponse:
        if not 1 <= per_second <= MOST_PER_S:
            raise BadRequestError(f"per_second is {per_second}: it must be from 1 to {MOST_PER_S}")
        headers = {"cache-control": "no-store"}
        return StreamingResponse(feed.events(per_second), media_type="text/event-stream", headers=headers)


def _page_response(status: HTTPStatus) -> Response:
    made = page()
    headers = {
        "content-security-policy": made.policy,
        "cache-control": "no-store",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
    }
    return Response(made.html, int(status), headers, media_type="text/html")


class AskForKey:
    """ASGI middleware around SGLang's check of API keys: a 401 for the page gets the page as its body, which asks for the key.

    A browser cannot send a key with an address. The page holds nothing about this server. All other requests pass.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "GET" or _path(scope) != PATH:
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
            await _page_response(HTTPStatus.UNAUTHORIZED)(scope, receive, send)


def _path(scope: Scope) -> str:
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))
