"""`--request-log FILE`: one JSON line per finished request, which `python -m sgl_prefill.plan --trace FILE` replays.

A line holds no tokens, only a hash of the prompt up to the end of each page. Requests with equal hashes share the prefix.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import secrets
import time
from array import array
from collections.abc import Iterable
from typing import Any

import orjson

from sgl_prefill.errors import ConfigurationError
from sgl_prefill.port.steps.step_state import EndedStep, StepListener

logger = logging.getLogger(__name__)

PAGE_TOKENS = 64

# One key per process: readers of the file cannot test a guessed prompt. Hashes of two starts are not comparable.
_KEY = secrets.token_bytes(16)


def prefix_hashes(tokens: array[int], namespace: str | None) -> list[int]:
    """Returns a 48-bit hash of the prompt up to each page's end, without the last token, which is always computed."""
    digest = hashlib.blake2b((namespace or "").encode("utf-8", "surrogatepass"), key=_KEY, digest_size=16).digest()
    found = []
    for end in range(PAGE_TOKENS, len(tokens), PAGE_TOKENS):
        digest = hashlib.blake2b(tokens[end - PAGE_TOKENS : end].tobytes(), key=digest, digest_size=16).digest()
        found.append(int.from_bytes(digest[:6], "big"))
    return found


class RequestLog(StepListener):
    """Appends to a file, locked against other servers. Raises ConfigurationError where it cannot be opened and locked.

    Lines that cannot be written later (a full disk) are counted, and logged once; requests are served nevertheless.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self.n_lost_lines = 0
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigurationError(
                f"--request-log {path} is written by another server: give each server its own file"
            ) from error
        except OSError as error:
            raise ConfigurationError(
                f"--request-log {path} cannot be written ({error.strerror}): give a file in a folder where you may write"
            ) from error

    def on_step_end(self, step: EndedStep) -> None:
        offset_s = time.time() - time.perf_counter()
        self.write(
            {
                "arrival_s": round(one.end_s - one.latency_s + offset_s, 6),
                "id": one.rid,
                "client": one.client,
                "input_tokens": one.n_input_tokens,
                "cached_tokens": one.n_cached_tokens,
                "wait_ms": round(1000 * one.wait_s, 3),
                "predicted_ms": step.predicted_ms,
                "actual_ms": round(1000 * (one.latency_s - one.wait_s), 3),
                "pages": prefix_hashes(req.origin_input_ids, req.extra_key),
            }
            for one, req in zip(step.answered, step.reqs, strict=True)
        )

    def write(self, lines: Iterable[dict[str, Any]]) -> None:
        content = b"".join(orjson.dumps(line) + b"\n" for line in lines)
        size = os.fstat(self._file).st_size
        try:
            n_written = os.write(self._file, content)
            if n_written < len(content):
                os.ftruncate(self._file, size)  # leaves no partial line
                raise OSError(0, f"{n_written} of {len(content)} bytes were written")
        except OSError as error:
            if self.n_lost_lines == 0:
                logger.error(
                    "--request-log %s: requests are served, but not logged: %s", self._path, error.strerror or error
                )
            self.n_lost_lines += content.count(b"\n")

    def close(self) -> None:
        os.close(self._file)
