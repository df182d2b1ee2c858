"""The folder beside a job's output: its manifest, and a lock for one process at a time."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from sgl_prefill.errors import BatchJobError

HASH_AT_ONCE = 1 << 20


class JobFolder:
    """`OUTPUT.job`: lock, manifest and scratch files of the job.

    Raises BatchJobError where another process holds the lock (the message names it), or where the folder cannot be made.
    """

    def __init__(self, output: Path, *, overwrite: bool = False) -> None:
        self.path = output.with_name(output.name + ".job")
        try:
            self.path.mkdir(exist_ok=True)
            self._lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise BatchJobError(f"{self.path} cannot be made: {error.strerror}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            pid = os.pread(self._lock, 32, 0).decode() or "unknown"
            raise BatchJobError(
                f"another process (pid {pid}) writes {output}: it holds {self.path / 'lock'}. Wait for it, or name another"
                " output"
            ) from error
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, str(os.getpid()).encode(), 0)
        if overwrite:
            for file in self.path.iterdir():
                if file.name != "lock":
                    file.unlink()
            output.unlink(missing_ok=True)

    @property
    def manifest_file(self) -> Path:
        return self.path / "manifest.json"

    def check_manifest(self, manifest: dict[str, Any]) -> bool:
        """Writes the manifest of a new job, or compares it with the existing one. Returns whether an earlier job continues.

        Raises BatchJobError with all differences.
        """
        if not self.manifest_file.exists():
            new = self.manifest_file.with_suffix(".new")
            new.write_text(json.dumps(manifest, indent=1, sort_keys=True) + "\n")
            new.replace(self.manifest_file)
            return False
        before = json.loads(self.manifest_file.read_text())
        differences = [
            f"  {name}: was {json.dumps(before.get(name))}, is {json.dumps(manifest.get(name))}"
            for name in sorted({*before, *manifest})
            if before.get(name) != manifest.get(name)
        ]
        if differences:
            raise BatchJobError(
                "\n".join(
                    (
                        f"{self.path} is of another job, and its answers would be mixed with this one's:",
                        *differences,
                        "name another output, start it as it was, or discard what it has answered with --overwrite",
                    )
                )
            )
        return True

    def discard(self) -> None:
        """Forgets a new job."""
        self.manifest_file.unlink()

    @property
    def answers_file(self) -> Path:
        """Answers that are not in the output yet."""
        return self.path / "answers.jsonl"

    def is_finished(self) -> bool:
        """Whether an earlier run has answered all rows."""
        return self._summary_file.exists() and json.loads(self._summary_file.read_text())["rows_failed"] == 0

    def finish(self, summary: dict[str, Any]) -> None:
        """Deletes scratch files, and writes `summary.json`: what this run did."""
        needed = {"lock", self.manifest_file.name, *([self.answers_file.name] if summary["rows_failed"] else [])}
        for file in self.path.iterdir():
            if file.name not in needed:
                file.unlink()
        self._summary_file.write_text(json.dumps(summary, indent=1) + "\n")

    @property
    def _summary_file(self) -> Path:
        return self.path / "summary.json"

    def close(self) -> None:
        os.close(self._lock)


def hash_of(file: Path) -> str:
    """SHA-256 of the content."""
    digest = hashlib.sha256()
    with file.open("rb") as opened:
        while part := opened.read(HASH_AT_ONCE):
            digest.update(part)
    return digest.hexdigest()
