"""A file of lines that survives a kill at any moment: a line counts once it is on disk, and a torn last one is taken back."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from sgl_prefill.errors import BatchJobError

READ_AT_ONCE = 1 << 20


class AnswerFile:
    """Appends whole lines. One process at a time writes to it (`job_folder.Lock`).

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
        """Returns once all these lines, without their ends, are on disk. Where that fails, none of them is there."""
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
        """Puts these lines in the place of all."""
        os.ftruncate(self._file, 0)
        self._size_bytes = 0
        self.append(lines)

    def lines(self) -> Iterator[bytes]:
        """Yields the lines that are on disk, without their ends."""
        with self.path.open("rb") as file:
            for line in file:
                yield line.rstrip(b"\n")

    def in_order(self, key: Callable[[bytes], int]) -> Iterator[bytes]:
        """Yields the lines sorted by a number. Memory: some 100 bytes a line."""
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
    """Returns where the last whole line ends; what follows it was being written when its process died."""
    end = os.fstat(file).st_size
    while end > 0:
        start = max(end - READ_AT_ONCE, 0)
        place = os.pread(file, end - start, start).rfind(b"\n")
        if place >= 0:
            return start + place + 1
        end = start
    return 0
