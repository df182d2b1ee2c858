"""A limit for the line and the headers of a request, which uvicorn's fast parser would collect without one."""

from __future__ import annotations

from http import HTTPStatus

from uvicorn import config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from sgl_prefill.http.error_format import Refusal

MOST_HEAD_BYTES = 64 << 10


class LimitedHeads(HttpToolsProtocol):
    """Answers 431 and closes the connection once a head is longer. What has come with its end in one read is parsed already."""

    _head_bytes: int | None = None  # of a request whose head is not complete

    def data_received(self, data: bytes) -> None:
        if self._head_bytes is not None:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._head_bytes is not None and self._head_bytes > MOST_HEAD_BYTES and not self.transport.is_closing():
            self._refuse()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_bytes = 0

    def on_headers_complete(self) -> None:
        self._head_bytes = None
        super().on_headers_complete()

    def _refuse(self) -> None:
        status = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
        message = (
            f"the request line and the headers have more than {MOST_HEAD_BYTES} bytes: put what is long into the body"
        )
        headers, body = Refusal(status, status.phrase, message).headers_and_body("")
        lines = [name + b": " + value + b"\r\n" for name, value in [*headers, (b"connection", b"close")]]
        self.transport.write(b"".join([STATUS_LINE[status], *lines, b"\r\n", body]))
        self.transport.close()


def install() -> None:
    """Makes it the protocol of servers that are started with uvicorn's default, as SGLang starts its own."""
    config.HTTP_PROTOCOLS["auto"] = f"{__name__}:{LimitedHeads.__name__}"
