"""The requests of a job: lines of a memory-mapped file."""

from __future__ import annotations

import hashlib
import mmap
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson

from sgl_prefill.core.batch.token_rows import IntArray
from sgl_prefill.errors import BadRequestError, BatchJobError

URLS = (
    *("/v1/completions", "/v1/chat/completions", "/generate", "/v1/score", "/v1/rerank", "/v2/rerank"),
    *("/v1/decisions", "/v1/systemone", "/v1/embeddings"),
)
SCAN_AT_ONCE = 1 << 26
MOST_ID_CHARACTERS = 512


class Request(NamedTuple):
    """One line of a batch file, in the format of OpenAI and vLLM."""

    custom_id: str
    url: str
    body: dict[str, Any]


class RequestFile:
    """A file of JSON lines; empty lines are skipped. Memory: 16 bytes a line.

    Raises BatchJobError where it cannot be read, or is empty.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self.stamp = _stamp(path)
                if self.stamp[0] == 0:
                    raise BatchJobError(f"{path} is empty: there is nothing to answer")
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except IsADirectoryError as error:
            raise BatchJobError(f"{path} is a directory: name a file of requests") from error
        except OSError as error:
            raise BatchJobError(f"{path} cannot be read: {error.strerror}") from error
        ends = _line_ends(self._map)
        begins = np.concatenate([[0], ends[:-1] + 1])
        self._line_numbers = np.flatnonzero(ends > begins)
        self._begins, self._ends = begins[self._line_numbers], ends[self._line_numbers]

    def __len__(self) -> int:
        return len(self._begins)

    def line_number(self, row: int) -> int:
        """Line number of a row, from 1."""
        return int(self._line_numbers[row]) + 1

    def line(self, row: int) -> bytes:
        return self._map[self._begins[row] : self._ends[row]]

    def request(self, row: int) -> Request:
        """Raises BadRequestError for a request that no server can answer."""
        return parse(self.line(row))

    def has_changed(self) -> bool:
        """Whether the file was written to since it was opened."""
        try:
            return _stamp(self.path) != self.stamp
        except OSError:
            return True


def parse(line: bytes) -> Request:
    """Raises BadRequestError."""
    try:
        fields = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise BadRequestError(f"not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise BadRequestError("a line must be a JSON object with custom_id, method, url and body")
    custom_id = fields.get("custom_id")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MOST_ID_CHARACTERS:
        raise BadRequestError(
            f"custom_id is {_shown(custom_id)}: it must be a string of 1 to {MOST_ID_CHARACTERS} characters"
        )
    method, url, body = fields.get("method", "POST"), fields.get("url"), fields.get("body")
    if method != "POST":
        raise BadRequestError(f"method is {_shown(method)}: it must be POST")
    if url not in URLS:
        raise BadRequestError(f"url is {_shown(url)}: it must be one of {', '.join(URLS)}")
    if not isinstance(body, dict):
        raise BadRequestError(f"body is {_shown(body)}: it must be an object")
    if body.get("stream"):
        raise BadRequestError("stream is true, and the answers of a batch job do not stream: leave it out")
    return Request(custom_id, url, body)


def id_hash(custom_id: str) -> int:
    """64-bit hash of an id: a million ids of any length take 8 MB."""
    return int.from_bytes(hashlib.blake2b(custom_id.encode(), digest_size=8).digest(), "little")


def _shown(value: Any) -> str:
    text = orjson.dumps(value).decode()
    return text if len(text) <= 60 else text[:57] + "..."


def _stamp(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_size, found.st_mtime_ns


def _line_ends(text: mmap.mmap) -> IntArray:
    """Offset of each line's newline, or the end of the file."""
    found = []
    for start in range(0, len(text), SCAN_AT_ONCE):
        part = np.frombuffer(text[start : start + SCAN_AT_ONCE], np.uint8)
        found.append(np.flatnonzero(part == ord("\n")) + start)
    ends: IntArray = np.concatenate(found)
    if len(ends) == 0 or ends[-1] != len(text) - 1:
        ends = np.append(ends, len(text))
    return ends
