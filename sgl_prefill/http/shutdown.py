"""Graceful shutdown of a server. At SIGTERM or Ctrl-C it refuses new requests, answers waiting ones for at most DRAIN_S, and
refuses the rest with 503. If one of its processes died, it refuses all waiting requests at once.

SGLang itself accepts new requests until the last old one is answered, and lets clients wait after a process died.
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
    from sgl_prefill.http.tokenizer_manager import PrefillTokenizerManager

logger = logging.getLogger(__name__)

DRAIN_S = 30.0
POLL_S = 0.02
FLUSH_S = 2.0  # for Uvicorn to write answers
CLOSE_S = 1  # for Uvicorn to close its connections
CHILDREN_END_S = 5.0  # for the other processes to end before they are killed
SHUTTING_DOWN = "this server is shutting down"
DIED = "a process of this server has ended, and the server with it"
INTERRUPTED = "this server was interrupted a second time"
FAILED = "this server has failed (see its log) and is shutting down"


class Ending:
    """The shutdown of one server: when and why it begins, and the exit status."""

    def __init__(self, drain_s: float = DRAIN_S) -> None:
        self._drain_s = drain_s
        self.reason: str | None = None  # None: the server accepts requests
        self.status = 0  # of the launcher
        self.n_in_flight = 0  # POST and PUT requests whose answers are not completely written
        self._begun = asyncio.Event()
        self._stop_listening: Callable[[], None] = lambda: None

    @property
    def retry_after_s(self) -> int:
        """By then this server has ended, and another may listen on its port."""
        return math.ceil(self._drain_s)

    def watch(self, manager: PrefillTokenizerManager, loop: asyncio.AbstractEventLoop) -> None:
        """Replaces SGLang's signal handlers. Call it after SGLang has set them."""
        loop.add_signal_handler(signal.SIGTERM, self._begin, SHUTTING_DOWN, 0, manager)
        loop.add_signal_handler(signal.SIGINT, self._interrupt, manager)
        loop.add_signal_handler(signal.SIGQUIT, self._begin, DIED, 1, manager)

    def remember_listener(self) -> None:
        """Finds Uvicorn's server through its signal handler. Call it before SGLang replaces this handler."""
        server: Any = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)

        def stop() -> None:
            if server is None:
                os._exit(self.status)
            server.config.timeout_graceful_shutdown = CLOSE_S
            server.should_exit, server.force_exit = True, self.status != 0

        self._stop_listening = stop

    def fail(self, manager: PrefillTokenizerManager) -> None:
        """Ends the server after `handle_loop` failed."""
        self._begin(FAILED, 1, manager)

    def _interrupt(self, manager: PrefillTokenizerManager) -> None:
        """Like SIGTERM the first time. A second Ctrl-C ends the server without waiting for answers."""
        if self.reason is None:
            self._begin(SHUTTING_DOWN, 0, manager)
        else:
            self._begin(INTERRUPTED, 128 + signal.SIGINT, manager)

    def _begin(self, reason: str, status: int, manager: PrefillTokenizerManager) -> None:
        is_first = self.reason is None
        if is_first or status > self.status:
            self.reason, self.status = reason, status
        if is_first:
            logger.warning("%s: %d requests wait", reason, len(manager.rid_to_state))
            manager.gracefully_exit = True  # makes SGLang's health check fail
            self._begun.set()

    async def run(self, manager: PrefillTokenizerManager) -> None:
        """Waits until the shutdown begins, and performs it."""
        await self._begun.wait()
        await _until(lambda: not manager.rid_to_state or self.status != 0, self._drain_s)
        why = f"{self.reason}: send the request again, to another server or later"
        if self.status == 0:
            why = f"{self.reason}, and this request was not done within {self._drain_s:g} s: send it again"
        for rid in list(manager.rid_to_state):
            manager.refuse(rid, HTTPStatus.SERVICE_UNAVAILABLE, why)
        await _until(lambda: self.n_in_flight == 0, FLUSH_S)
        if manager._subprocess_watchdog is not None:
            manager._subprocess_watchdog.stop()  # it would report the end of a process as a failure
        if self.status == 0:
            manager.ask_scheduler_to_end()
            await _until(lambda: not _is_a_scheduler_left(), CHILDREN_END_S)
        self._stop_listening()


async def _until(is_so: Callable[[], bool], at_most_s: float) -> None:
    deadline = time.monotonic() + at_most_s
    while not is_so() and time.monotonic() < deadline:
        await asyncio.sleep(POLL_S)


def _is_a_scheduler_left() -> bool:
    from sglang.srt.utils.cudacore_pyspy_dump_utils import collect_scheduler_processes

    with contextlib.suppress(psutil.NoSuchProcess):  # one has ended just now; others may be left
        return any(one.status() != psutil.STATUS_ZOMBIE for one in collect_scheduler_processes())
    return True
