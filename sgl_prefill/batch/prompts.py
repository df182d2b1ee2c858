"""What all rows of a job make the model read: token ids on disk, made by all cores before anything runs.

Rows that can never be answered are found here too, all of them, before a model is loaded.
"""

from __future__ import annotations

import asyncio
import functools
import mmap
import multiprocessing
import os
import shutil
from collections.abc import Awaitable, Callable, Sequence
from multiprocessing import connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sgl_prefill.batch.rows import RequestFile, id_hash
from sgl_prefill.core.batch.token_rows import IntArray, TokenRows
from sgl_prefill.errors import BadRequestError, BatchJobError
from sgl_prefill.startup.progress_bar import TERMINAL_EVERY_S, ProgressBar

ROWS_AT_ONCE = 256
COPY_AT_ONCE = 1 << 24
UNLIMITED = -1

FoundPrompt = tuple[Sequence[int] | IntArray, int]  # tokens, and output limit in tokens
FindPrompts = Callable[[str, dict[str, Any]], Awaitable[list[FoundPrompt]]]  # of url and body; raises BadRequestError


class BadRow(NamedTuple):
    """A row that no engine can answer."""

    row: int
    custom_id: str | None  # None: missing
    message: str


class Prompts(NamedTuple):
    """The prompts of all rows in the order of the rows. Arrays of one length, except the last two fields."""

    tokens: TokenRows
    row: IntArray  # of each prompt
    max_new_tokens: IntArray  # UNLIMITED: until the model ends
    id_hashes: IntArray  # of each row; 0 for bad ones
    bad: list[BadRow]  # in the order of the rows

    def subset(self, rows: IntArray) -> Prompts:
        """The prompts of some rows; rows keep their numbers."""
        is_one = np.zeros(len(self.id_hashes), bool)
        is_one[rows] = True
        which = np.flatnonzero(is_one[self.row])
        return self._replace(
            tokens=self.tokens.subset(which), row=self.row[which], max_new_tokens=self.max_new_tokens[which]
        )


def prepare(requests: RequestFile, find_prompts: FindPrompts, folder: Path) -> Prompts:
    """Finds the prompts of all rows in one process a core, and writes them to `folder`. A folder that already has them is read.

    Raises BatchJobError where a process ended.
    """
    marker = folder / "prompts.npz"
    if not marker.exists():
        n_workers = max(1, min(len(os.sched_getaffinity(0)), len(requests) // ROWS_AT_ONCE))
        bounds = np.linspace(0, len(requests), n_workers + 1).astype(int).tolist()
        parts = [
            _Part(requests, find_prompts, folder, number, *bounds[number : number + 2]) for number in range(n_workers)
        ]
        _run_all(parts, len(requests))
        _join(parts, folder / "tokens.bin", marker)
    found = np.load(marker)
    tokens = _mapped(folder / "tokens.bin") if found["lengths"].sum() else np.empty(0, np.int32)
    bad = [
        BadRow(int(row), str(custom_id) or None, str(message))
        for row, custom_id, message in zip(found["bad_rows"], found["bad_ids"], found["bad_messages"], strict=True)
    ]
    rows = TokenRows.one_after_the_other(tokens, found["lengths"])
    prompts = Prompts(rows, found["row"], found["max_new_tokens"], found["id_hashes"], bad)
    doubled = _doubled(requests, prompts.id_hashes)
    if doubled:
        hashes = prompts.id_hashes.copy()
        hashes[[one.row for one in doubled]] = 0
        prompts = prompts._replace(id_hashes=hashes, bad=sorted([*bad, *doubled])).subset(np.flatnonzero(hashes))
    return prompts


def _mapped(path: Path) -> IntArray:
    """Maps a file of tokens without read-ahead. Rows are read in the order of their prefixes, and read-ahead (megabytes on some
    machines) would evict pages that are needed next."""
    with path.open("rb") as file:
        pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    if hasattr(mmap, "MADV_RANDOM"):  # not everywhere
        pages.madvise(mmap.MADV_RANDOM)
    return np.frombuffer(pages, np.int32)


class _Part(NamedTuple):
    """The rows of one process."""

    requests: RequestFile
    find_prompts: FindPrompts
    folder: Path
    number: int
    first: int  # row
    end: int

    @property
    def tokens_file(self) -> Path:
        return self.folder / f"tokens.{self.number}"

    @property
    def table_file(self) -> Path:
        return self.folder / f"prompts.{self.number}.npz"

    def run(self, on_row: Callable[[int], None]) -> None:
        """on_row: is called with the number of rows so far."""
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one process a core
        asyncio.run(self._find_all(on_row))

    async def _find_all(self, on_row: Callable[[int], None]) -> None:
        lengths: list[int] = []
        rows: list[int] = []
        most_new: list[int] = []
        bad: list[BadRow] = []
        hashes = np.zeros(self.end - self.first, np.uint64)
        with self.tokens_file.open("wb") as file:
            for row in range(self.first, self.end):
                on_row(row - self.first)
                custom_id = None
                try:
                    request = self.requests.request(row)
                    custom_id = request.custom_id
                    prompts = await self.find_prompts(request.url, request.body)
                except BadRequestError as error:
                    bad.append(BadRow(row, custom_id, str(error)))
                    continue
                hashes[row - self.first] = id_hash(custom_id)
                for tokens, max_new_tokens in prompts:
                    file.write(np.asarray(tokens, np.int32).tobytes())
                    lengths.append(len(tokens))
                    rows.append(row)
                    most_new.append(max_new_tokens)
        np.savez(
            self.table_file,
            lengths=np.array(lengths, np.int64),
            row=np.array(rows, np.int64),
            max_new_tokens=np.array(most_new, np.int64),
            id_hashes=hashes,
            bad_rows=np.array([one.row for one in bad], np.int64),
            bad_ids=np.array([one.custom_id or "" for one in bad], np.str_),
            bad_messages=np.array([one.message for one in bad], np.str_),
        )


def _run_all(parts: Sequence[_Part], n_rows: int) -> None:
    with ProgressBar(n_rows) as bar:

        def show(n_read: int) -> None:
            bar.show(n_read, f"{n_read:,} of {n_rows:,} rows read")

        if len(parts) == 1:
            parts[0].run(show)
            return
        n_read = multiprocessing.RawArray("q", len(parts))
        context = multiprocessing.get_context("fork")  # shares imported modules and the loaded tokenizer
        processes = [
            context.Process(target=part.run, args=(functools.partial(n_read.__setitem__, part.number),))
            for part in parts
        ]
        for process in processes:
            process.start()
        while running := [process.sentinel for process in processes if process.exitcode is None]:
            connection.wait(running, TERMINAL_EVERY_S)
            show(sum(n_read))
    if any(process.exitcode for process in processes):
        raise BatchJobError("a process that tokenises ended, for the reason above")


def _join(parts: Sequence[_Part], tokens_file: Path, marker: Path) -> None:
    parts[0].tokens_file.replace(tokens_file)
    with tokens_file.open("ab") as joined:
        for part in parts[1:]:
            with part.tokens_file.open("rb") as file:
                shutil.copyfileobj(file, joined, COPY_AT_ONCE)
            part.tokens_file.unlink()
    tables = [np.load(part.table_file) for part in parts]
    new = marker.with_name("prompts.new.npz")
    np.savez(new, **{name: np.concatenate([table[name] for table in tables]) for name in tables[0].files})
    new.replace(marker)
    for part in parts:
        part.table_file.unlink()


def _doubled(requests: RequestFile, hashes: IntArray) -> list[BadRow]:
    """Rows whose id an earlier row has."""
    places = np.argsort(hashes, kind="stable")
    is_again = np.concatenate([[False], hashes[places][1:] == hashes[places][:-1]]) & (hashes[places] != 0)
    if not is_again.any():
        return []
    first_of: dict[str, int] = {}
    bad = []
    suspects = np.isin(hashes, hashes[places[is_again]])
    for row in np.flatnonzero(suspects).tolist():
        custom_id = requests.request(row).custom_id
        first = first_of.setdefault(custom_id, row)
        if first != row:
            line = requests.line_number(first)
            bad.append(
                BadRow(row, custom_id, f"custom_id {custom_id!r} is that of line {line} too: each must be another")
            )
    return bad
