"""What a long benchmark has measured so far, so that a run that was cut off goes on where it stopped."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


class Kept:
    """Measurements by name, one JSON line each in a `.partial` file beside the result; those of another commit are dropped."""

    def __init__(self, result: Path | None, commit: str) -> None:
        self._path = None if result is None else result.with_suffix(".partial")
        self._commit = commit
        self._measured: dict[str, Any] = {}
        if self._path is not None and self._path.exists():
            lines = [json.loads(line) for line in self._path.read_text().splitlines()]
            self._measured = {line["name"]: line["value"] for line in lines if line["commit"] == commit}

    def __contains__(self, name: str) -> bool:
        return name in self._measured

    def __getitem__(self, name: str) -> Any:
        return self._measured[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._measured[name] = value
        if self._path is not None:
            lines = [
                json.dumps({"commit": self._commit, "name": one, "value": what}) for one, what in self._measured.items()
            ]
            # A run that is killed while it writes must not lose what it had.
            whole = self._path.with_suffix(".partial.new")
            whole.write_text("\n".join(lines) + "\n")
            os.replace(whole, self._path)

    def forget(self) -> None:
        """The run is complete."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)
