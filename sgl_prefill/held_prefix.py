"""A client of prefix handles, with Python's library only: the prefix travels once, and again when the server has forgotten it.

prefix = HeldPrefix("http://127.0.0.1:30000", text=policy)
reply = prefix.post("/v1/completions", {"prompt": message, "allowed_tokens": [" yes", " no"]})
"""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from http import HTTPStatus
from typing import Any

TIMEOUT_S = 600.0


class HeldPrefix:
    """For any thread. Errors of the server are urllib.error.HTTPError, whose body names the fault."""

    def __init__(self, url: str, *, api_key: str | None = None, **content: Any) -> None:
        """content: `text`, `messages` or `input_ids`; and `ttl_s`, seconds that the server must not forget it, if wanted."""
        self._url, self._content = url.rstrip("/"), content
        self._headers = {"Content-Type": "application/json"} | (
            {"Authorization": f"Bearer {api_key}"} if api_key else {}
        )
        self._lock = threading.Lock()
        self._id: str | None = None

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """Asks with the prefix in front of the body's prompts. Returns the reply."""
        known = self._id or self._send(None)
        try:
            return self._ask(path, {**body, "prefix": known})
        except urllib.error.HTTPError as error:
            if error.code != HTTPStatus.CONFLICT:
                raise
        return self._ask(path, {**body, "prefix": self._send(known)})

    def _send(self, forgotten: str | None) -> str:
        with self._lock:
            if self._id is None or self._id == forgotten:
                self._id = str(self._ask("/v1/prefixes", self._content)["id"])
            return self._id

    def _ask(self, path: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(self._url + path, json.dumps(body).encode(), self._headers)
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as reply:
            return json.load(reply)
