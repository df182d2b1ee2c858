"""A connection whose client sends no whole request head in time is closed. Uvicorn itself waits for ever."""

from __future__ import annotations

import asyncio
from typing import Any

LATE = b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


def install(timeout_s: float) -> None:
    """Makes the server that is started next in this process do so; SGLang hands it no options of ours."""
    from uvicorn.protocols.http import auto

    base: Any = auto.AutoHTTPProtocol

    class TimedProtocol(base):  # type: ignore[misc]
        """Uvicorn's, with a timer from the first moment at which a request's head is waited for."""

        _timer: asyncio.TimerHandle | None = None
        _has_bytes = False

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            self._start()

        def data_received(self, data: bytes) -> None:
            before = self.cycle
            super().data_received(data)
            if self.cycle is not before:
                self._stop()
            elif self.cycle is None or self.cycle.response_complete:
                self._has_bytes = True
                self._start()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop()
            super().connection_lost(exc)

        def _start(self) -> None:
            if self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(timeout_s, self._close)

        def _stop(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
            self._timer, self._has_bytes = None, False

        def _close(self) -> None:
            if self._has_bytes and not self.transport.is_closing():
                self.transport.write(LATE)
            self.transport.close()

    auto.AutoHTTPProtocol = TimedProtocol
