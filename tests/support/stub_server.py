"""A server that answers label requests at once, and keeps a small prefix cache of characters in the place of tokens."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MOST_CHARACTERS = 4000
REFUSED = "refuse me"


class StubServer:
    """Remembers what it was asked. Its cache forgets the prompts that came first."""

    def __init__(self, most_characters: int = MOST_CHARACTERS) -> None:
        self.url = ""
        self.asked: list[str] = []
        self._most_characters = most_characters
        self._lock = threading.Lock()

    def answer(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        prompt = body["prompt"]
        with self._lock:
            n_cached = max((_n_common(one, prompt) for one in self._remembered()), default=0)
            self.asked.append(prompt)
        if REFUSED in prompt:
            return 400, {"error": {"message": "this prompt is refused"}}
        labels = [
            {"label": label, "probability": 1 / len(body["allowed_answers"])} for label in body["allowed_answers"]
        ]
        usage = {
            "prompt_tokens": len(prompt),
            "prompt_tokens_details": {"cached_tokens": min(n_cached, len(prompt) - 1)},
        }
        return 200, {"choices": [{"label_scores": {"labels": labels, "label_mass": 0.5}}], "usage": usage}

    def _remembered(self) -> Iterator[str]:
        n_left = self._most_characters
        for prompt in reversed(self.asked):
            n_left -= len(prompt)
            if n_left < 0:
                return
            yield prompt


def _n_common(one: str, other: str) -> int:
    return len(os.path.commonprefix([one, other]))


@contextmanager
def running(**options: Any) -> Iterator[StubServer]:
    stub = StubServer(**options)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1  # head and body leave together: apart, the second waits 40 ms for the client's kernel

        def do_POST(self) -> None:
            status, answer = stub.answer(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            content = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *arguments: Any) -> None:
            """Says nothing."""

    class Server(ThreadingHTTPServer):
        request_queue_size = 256  # connections that nobody has accepted yet: with five, others wait for seconds
        daemon_threads = True

    server = Server(("127.0.0.1", 0), Handler)
    stub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield stub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
