"""How a server ends. Asked to (SIGTERM, Ctrl-C), it takes no more requests, answers those that wait, and refuses by name what is
not done in time; where one of its processes has died, everyone who waits hears of it at once.

SGLang, asked to end, takes new requests as long as there are old ones, and where a process has died lets clients wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import signal
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
    from sgl_prefill.api.tokenizer_manager import PrefillTokenizerManager

logger = logging.getLogger(__name__)

POLL_S = 0.02
FLUSH_S = 2.0  # for answers on their way to clients
CLOSE_S = 1  # for the HTTP server to close its connections
CHILDREN_END_S = 5.0  # for the other processes to let go of what they hold; then they are killed
ASKED = "this server is shutting down"
DIED = "a process of this server has ended, and the server with it"
INTERRUPTED = "this server was interrupted a second time"
FAILED = "this server has failed, which is in its log, and ends"


class Ending:
    """One server's: when and why it ends, and with which status."""

    def __init__(self, drain_s: float) -> None:
        self._drain_s = drain_s
        self.reason: str | None = None  # why no more requests are taken
        self.status = 0  # of the launcher
        self.n_in_flight = 0  # HTTP requests that compute, until the last byte of their answers
        self._begun = asyncio.Event()
        self._stop_listening: Callable[[], None] = lambda: None

    @property
    def retry_after_s(self) -> int:
        """For clients: by then this server is gone, and another may be in its place."""
        return math.ceil(self._drain_s)

    def watch(self, manager: PrefillTokenizerManager, loop: asyncio.AbstractEventLoop) -> None:
        """Takes the place of SGLang's signal handlers, which it has just set."""
        loop.add_signal_handler(signal.SIGTERM, self._begin, ASKED, 0, manager)
        loop.add_signal_handler(signal.SIGINT, self._interrupt, manager)
        loop.add_signal_handler(signal.SIGQUIT, self._begin, DIED, 1, manager)

    def remember_listener(self) -> None:
        """Finds the HTTP server: nobody but its signal handler knows it. To be called before SGLang sets another."""
        server: Any = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)

        def stop() -> None:
            if server is None:
                os._exit(self.status)
            server.config.timeout_graceful_shutdown = CLOSE_S
            server.should_exit, server.force_exit = True, self.status != 0

        self._stop_listening = stop

    def fail(self, manager: PrefillTokenizerManager) -> None:
        """Ends the server, since nobody hands out answers any more; SGLang's way waits up to 65 s before clients notice."""
        self._begin(FAILED, 1, manager)

    def _interrupt(self, manager: PrefillTokenizerManager) -> None:
        """Ends the server as SIGTERM does; the second time without waiting for answers."""
        if self.reason is None:
            self._begin(ASKED, 0, manager)
        else:
            self._begin(INTERRUPTED, 128 + signal.SIGINT, manager)

    def _begin(self, reason: str, status: int, manager: PrefillTokenizerManager) -> None:
        is_first = self.reason is None
        if is_first or status > self.status:
            self.reason = reason
        self.status = max(self.status, status)
        if is_first:
            logger.warning("%s: %d requests wait", self.reason, len(manager.rid_to_state))
            manager.gracefully_exit = True  # SGLang's health check says so
            self._begun.set()

    async def run(self, manager: PrefillTokenizerManager) -> None:
        """Waits until the server shall end, and ends it."""
        await self._begun.wait()
        await _until(lambda: not manager.rid_to_state or self.status != 0, self._drain_s)
        why = f"{self.reason}: send the request again, to another server or later"
        if self.status == 0:
            why = f"{self.reason}, and this request was not done within --drain-s {self._drain_s:g}: send it again"
        for rid in list(manager.rid_to_state):
            manager.refuse(rid, HTTPStatus.SERVICE_UNAVAILABLE, why)
        await _until(lambda: self.n_in_flight == 0, FLUSH_S)
        if manager._subprocess_watchdog is not None:
            manager._subprocess_watchdog.stop()  # what ends now is no failure
        if self.status == 0:
            manager.ask_scheduler_to_end()
            await _until(lambda: not _a_scheduler_is_left(), CHILDREN_END_S)
        self._stop_listening()


async def _until(is_so: Callable[[], bool], at_most_s: float) -> None:
    deadline = time.monotonic() + at_most_s
    while not is_so() and time.monotonic() < deadline:
        await asyncio.sleep(POLL_S)


def _a_scheduler_is_left() -> bool:
    from sglang.srt.utils.cudacore_pyspy_dump_utils import collect_scheduler_processes

    with contextlib.suppress(psutil.NoSuchProcess):  # it ended just now: another may be left
        return any(one.status() != psutil.STATUS_ZOMBIE for one in collect_scheduler_processes())
    return True
