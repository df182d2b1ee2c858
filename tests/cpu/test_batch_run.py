"""The rows of a job through an engine that is stepped by its caller."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sgl_prefill.answer import Answer
from sgl_prefill.batch import run
from sgl_prefill.core.batch.batch_plan import depth_first
from sgl_prefill.core.batch.token_rows import TokenRows

N_ROWS = 4


class Stepped:
    """Answers one row a step, each a few turns of the event loop later than the one before it."""

    def __init__(self, fails: int | None = None) -> None:
        self._fails = fails

    async def answer(self, url: str, body: dict[str, Any], planned: Any) -> Answer:
        for _ in range(5 * body["row"]):
            await asyncio.sleep(0)
        if body["row"] == self._fails:
            raise RuntimeError("this engine is broken")
        return Answer(200, b"{}")

    async def step(self) -> bool:
        return True


async def answered_by(engine: Any, turns: int) -> list[int]:
    """The rows that a caller is told of who lets so many turns of the event loop pass before it asks for more."""
    order = depth_first(TokenRows.of([[row, 9] for row in range(N_ROWS)]))
    found = []
    async for some in run.answers(engine, order, np.arange(N_ROWS), lambda row: ("/generate", {"row": row}), N_ROWS):
        found += [one.row for one in some]
        for _ in range(turns):
            await asyncio.sleep(0)
    return found


@pytest.mark.parametrize("turns", [0, 1, 3, 7, 100])
def test_rows_that_end_while_the_caller_is_busy_are_not_lost(turns: int) -> None:
    """`batch.score` lost the last step's rows: they ended before it asked for more, and then nothing was running."""
    assert sorted(asyncio.run(answered_by(Stepped(), turns))) == list(range(N_ROWS))


@pytest.mark.parametrize("turns", [0, 100])
def test_a_failure_while_the_caller_is_busy_is_told(turns: int) -> None:
    with pytest.raises(RuntimeError, match="broken"):
        asyncio.run(answered_by(Stepped(fails=N_ROWS - 1), turns))


@pytest.mark.parametrize(
    ("name", "text", "flags", "told"),
    [
        ("none.jsonl", None, [], "cannot be read: No such file"),
        ("in.jsonl", "text,label\n", [], "in.jsonl, line 1: not JSON"),
        (
            "in.csv",
            "text,label\na,b\n",
            [],
            "in.csv is a table: say what the prompt is, with --prompt-column or --template",
        ),
        ("in.csv", "text\na\n", ["--prompt-column", "body", "--labels", " a"], "has no column body: it has text"),
        ("in.csv", "text\na\n", ["--output-order", "sideways"], "argument --output-order: invalid choice: 'sideways'"),
    ],
)
def test_what_cannot_begin_says_so_before_sglang_is_imported(
    tmp_path: Path, name: str, text: str | None, flags: list[str], told: str
) -> None:
    """Its import takes most of a minute. One or two lines, without usage."""
    if text is not None:
        (tmp_path / name).write_text(text)
    argv = ["-i", str(tmp_path / name), "-o", str(tmp_path / "out.jsonl"), *flags]
    code = f"import sys; from sgl_prefill.batch.__main__ import main; print(main({argv}), 'sglang' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "2 False\n"
    assert told in done.stderr
    assert len(done.stderr.splitlines()) <= 2
