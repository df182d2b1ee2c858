"""The file of answers, which survives a kill at any moment, and its lines in the format of OpenAI's batch files."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import orjson

from sgl_prefill.errors import BatchJobError

READ_AT_ONCE = 1 << 20


class AnswerFile:
    """Appends whole lines; opening removes a last line that a kill left incomplete. One process writes at a time (`JobFolder`).

    Raises BatchJobError where the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            self._size_bytes = _end_of_last_line(self._file)
            os.ftruncate(self._file, self._size_bytes)
        except OSError as error:
            raise BatchJobError(f"{path} cannot be written: {error.strerror}") from error

    def append(self, lines: Sequence[bytes]) -> None:
        """Writes lines, given without line ends, to disk: all of them, or none where that fails."""
        if not lines:
            return
        text = b"".join(line + b"\n" for line in lines)
        try:
            written = 0
            while written < len(text):
                written += os.pwrite(self._file, text[written:], self._size_bytes + written)
            os.fdatasync(self._file)
        except OSError as error:
            os.ftruncate(self._file, self._size_bytes)
            raise BatchJobError(
                f"{self.path}: {error.strerror}. The {len(lines)} answers that could not be written will be computed again:"
                " make room and start the same command once more"
            ) from error
        self._size_bytes += len(text)

    def rewrite(self, lines: Sequence[bytes]) -> None:
        """Replaces the content."""
        os.ftruncate(self._file, 0)
        self._size_bytes = 0
        self.append(lines)

    def lines(self) -> Iterator[bytes]:
        """Yields the lines on disk, without line ends."""
        with self.path.open("rb") as file:
            for line in file:
                yield line.rstrip(b"\n")

    def in_order(self, key: Callable[[bytes], int]) -> Iterator[bytes]:
        """Yields the lines sorted by a number. Memory: about 100 bytes a line."""
        begins = []
        with self.path.open("rb") as file:
            begin = 0
            for line in file:
                begins.append((key(line), begin))
                begin += len(line)
            for _, begin in sorted(begins):
                file.seek(begin)
                yield file.readline().rstrip(b"\n")

    def close(self) -> None:
        os.close(self._file)


def _end_of_last_line(file: int) -> int:
    """Offset after the last complete line; the rest was being written when its process died."""
    end = os.fstat(file).st_size
    while end > 0:
        start = max(end - READ_AT_ONCE, 0)
        place = os.pread(file, end - start, start).rfind(b"\n")
        if place >= 0:
            return start + place + 1
        end = start
    return 0


def answered(custom_id: str, status: int, body: bytes) -> bytes:
    """Makes the line of an answered row. body: JSON, which is not parsed."""
    return (
        b'{"id":"batch_req_%s","custom_id":%s,"response":{"status_code":%d,"request_id":"%s","body":%s},"error":null}'
        % (
            uuid.uuid4().hex.encode(),
            orjson.dumps(custom_id),
            status,
            uuid.uuid4().hex.encode(),
            body,
        )
    )


def refused(custom_id: str | None, line_number: int, message: str, *, status: int | None = None) -> bytes:
    """Makes the line of a row without an answer. status: the server's; None: the row was never sent."""
    response = None if status is None else {"status_code": status, "request_id": uuid.uuid4().hex, "body": None}
    code = "invalid_request" if status is None or status < 500 else "server_error"
    return orjson.dumps(
        {
            "id": f"batch_req_{uuid.uuid4().hex}",
            "custom_id": custom_id,
            "line": line_number,
            "response": response,
            "error": {"code": code, "message": message},
        }
    )


def custom_id_of(line: bytes) -> str:
    return str(orjson.loads(line)["custom_id"])


def message_of(body: bytes) -> str:
    """The message of an error's body."""
    try:
        fields = orjson.loads(body)
        if isinstance(problems := fields.get("detail"), list):  # of /v1/systemone
            return "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in problems)
        holder = fields if "message" in fields else fields.get("detail") or fields["error"]
        return str(holder["message"])
    except (orjson.JSONDecodeError, TypeError, KeyError, AttributeError):
        return body[:200].decode(errors="replace")
