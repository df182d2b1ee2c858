"""`--request-log FILE`: one JSON line per finished request, which `python -m sgl_prefill.plan --trace FILE` replays.

A line holds no tokens of a prompt, only a hash of the prompt up to the end of each page: requests with equal hashes share it.
"""

from __future__ import annotations

import fcntl
import logging
import os
import zlib
from array import array
from collections.abc import Iterable
from typing import Any

import numpy as np
import orjson

from sgl_prefill.errors import ConfigurationError

logger = logging.getLogger(__name__)

PAGE_TOKENS = 64
HASH_BITS = 52  # readers of JSON keep numbers up to 2^53 exact

_WEIGHTS = np.random.default_rng(0).integers(1, 2**63, PAGE_TOKENS, dtype=np.uint64) | np.uint64(1)
_MIX = np.uint64(0x9E3779B97F4A7C15)


def prefix_hashes(tokens: array[int], namespace: str | None) -> list[int]:
    """Hashes the prompt up to the end of each whole page, without the last token, which is always computed."""
    n_pages = (len(tokens) - 1) // PAGE_TOKENS
    if n_pages < 1:
        return []
    ids = np.frombuffer(tokens, tokens.typecode)[: n_pages * PAGE_TOKENS].astype(np.uint64)
    with np.errstate(over="ignore"):  # arithmetic modulo 2^64
        of_page = (ids.reshape(n_pages, PAGE_TOKENS) + np.uint64(1)) @ _WEIGHTS
        of_page = (of_page ^ (of_page >> np.uint64(29))) * _MIX
        places = np.arange(1, n_pages + 1, dtype=np.uint64) * _MIX | np.uint64(1)
        found = np.cumsum(of_page * places) + np.uint64(zlib.crc32((namespace or "").encode()))
    hashes: list[int] = (found * _MIX >> np.uint64(64 - HASH_BITS)).tolist()
    return hashes


class RequestLog:
    """Appends to a file that no other server may write. Raises ConfigurationError where that is impossible.

    A line that cannot be written (a full disk) is counted and reported once; requests are served as before.
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

    def write(self, lines: Iterable[dict[str, Any]]) -> None:
        content = b"".join(orjson.dumps(line) + b"\n" for line in lines)
        size = os.fstat(self._file).st_size
        try:
            n_written = os.write(self._file, content)
            if n_written < len(content):
                os.ftruncate(self._file, size)  # no torn line
                raise OSError(0, f"{n_written} of {len(content)} bytes were written")
        except OSError as error:
            if self.n_lost_lines == 0:
                logger.error(
                    "--request-log %s: requests are served, but not logged: %s", self._path, error.strerror or error
                )
            self.n_lost_lines += content.count(b"\n")

    def close(self) -> None:
        os.close(self._file)
