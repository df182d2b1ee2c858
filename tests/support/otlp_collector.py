"""An OpenTelemetry collector in this process: keeps the spans that are sent to it over HTTP."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

TIMEOUT_S = 60.0


class Span(NamedTuple):
    """What a test asks of a span."""

    name: str
    trace_id: bytes
    attributes: dict[str, Any]
    events: dict[str, dict[str, Any]]  # their attributes, by name


class Collector:
    """Spans as they come, whoever sends them."""

    def __init__(self) -> None:
        self.url = ""
        self._spans: list[Span] = []
        self._came = threading.Condition()

    def take(self, body: bytes) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        request = ExportTraceServiceRequest.FromString(body)
        spans = [
            Span(one.name, one.trace_id, _plain(one.attributes), {e.name: _plain(e.attributes) for e in one.events})
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for one in scope.spans
        ]
        with self._came:
            self._spans += spans
            self._came.notify_all()

    def wait_for(self, is_meant: Callable[[Span], bool]) -> Span:
        """Returns the first span that is meant, once it has come."""

        def found() -> Span | None:
            return next(filter(is_meant, self._spans), None)

        with self._came:
            span = self._came.wait_for(found, TIMEOUT_S)
        assert span is not None, f"no such span, but {[one.name for one in self._spans]}"
        return span


def _plain(attributes: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes}


@contextmanager
def collector() -> Iterator[Collector]:
    """Listens on a free port."""
    kept = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            kept.take(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *arguments: Any) -> None:
            """Prints nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    kept.url = f"http://127.0.0.1:{server.server_port}/v1/traces"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield kept
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
