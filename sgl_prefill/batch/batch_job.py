"""One job from its file to its answers: checks all rows, plans them, answers them in order, and writes answers as they come."""

from __future__ import annotations

import asyncio
import re
import time
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np

from sgl_prefill.batch import answer_file
from sgl_prefill.batch.answer_file import AnswerFile
from sgl_prefill.batch.backends import Backend
from sgl_prefill.batch.job_folder import JobFolder, hash_of
from sgl_prefill.batch.options import JobOptions
from sgl_prefill.batch.planned import Planned
from sgl_prefill.batch.progress import Progress
from sgl_prefill.batch.prompts import BadRow, Prompts, prepare
from sgl_prefill.batch.rows import RequestFile, id_hash
from sgl_prefill.batch.tables import write_answers, write_requests
from sgl_prefill.core.batch import batch_plan
from sgl_prefill.core.batch.token_rows import IntArray
from sgl_prefill.errors import BatchJobError

ALL_ANSWERED, SOME_NOT = 0, 2
BAD_ROWS_SHOWN = 20
# An answer is on disk at most this long after it came.
FLUSH_EVERY_S = 0.5
LABEL_MASS = re.compile(rb'"label_mass":\s*([0-9.eE+-]+)')
LOW_MASS = 0.01  # mean of a job


class Job:
    """A job with open input, output and folder. Raises BatchJobError where one cannot be opened.

    Args:
        engine: everything of the engine that changes its answers: a job continues only with the same.
        opened: the input, where it is open already.
    """

    def __init__(self, options: JobOptions, engine: dict[str, Any], opened: RequestFile | None = None) -> None:
        self.options = options
        self._input = (
            RequestFile(options.input) if opened is None else opened
        )  # of a table: the table, which must not change either
        self.folder = JobFolder(options.output, overwrite=options.overwrite)
        try:
            self._open(engine)
        except BaseException:
            self.folder.close()
            raise

    def _open(self, engine: dict[str, Any]) -> None:
        options, folder = self.options, self.folder
        manifest = {"input": hash_of(options.input), "options": options.meaning(), "engine": engine}
        goes_on = folder.check_manifest(manifest)
        self.is_finished = goes_on and folder.is_finished() and options.output.exists()
        if not goes_on and options.output.exists() and options.output.stat().st_size:
            folder.discard()
            raise BatchJobError(
                f"{options.output} exists, and is not of this job: name another output, or discard it with --overwrite"
            )
        self.requests = self._input
        if options.is_table:
            path = folder.path / "requests.jsonl"
            if not path.exists():
                write_requests(options, path)
            self.requests = RequestFile(path)
        # Such an output is written once all answers exist; any other, as answers come.
        self._is_made_at_end = options.is_table or options.output_order == "input"
        self.answers = AnswerFile(folder.answers_file if self._is_made_at_end else options.output)
        self.errors = AnswerFile(options.error_file)

    def plan(self, backend: Backend) -> Planned:
        """Checks all rows, and plans the rows left. Raises BatchJobError naming rows that cannot be answered."""
        began_s = time.monotonic()
        prompts = prepare(self.requests, backend.find_prompts, self.folder.path)
        self.bad = prompts.bad
        self.errors.rewrite([self._refusal(bad) for bad in self.bad])
        if self.bad and not self.options.skip_bad_rows:
            raise BatchJobError(self._all_bad())
        rows = self._rows_of_shard(prompts)
        is_done = self._is_answered(prompts.id_hashes)[rows]
        planned = Planned(prompts.subset(rows[~is_done]), rows, int(is_done.sum()))
        planned.plan_s = time.monotonic() - began_s
        return planned

    def answer(self, backend: Backend, planned: Planned) -> int:
        """Answers the rows left. Returns the exit status."""
        n_failed = len(self.bad)
        answer_s = 0.0
        if len(planned.order):
            progress = Progress(
                planned.n_rows,
                planned.n_before,
                planned.n_tokens,
                planned.order.saved_tokens,
                backend.unit,
            )
            if self.options.metrics_port is not None:
                progress.serve_metrics(self.options.metrics_port)
            with progress.bar:
                asyncio.run(self._answer_all(backend, planned, progress))
                progress.end()
            n_failed += progress.n_failed
            answer_s = progress.elapsed_s
        if self._is_made_at_end:
            self._make_output()
        self.folder.finish(
            {
                "rows": planned.n_rows,
                "rows_answered_before": planned.n_before,
                "rows_failed": n_failed,
                "prompt_tokens": backend.n_prompt_tokens,
                "cached_tokens": backend.n_cached_tokens,
                f"{backend.unit}_planned": planned.n_tokens,
                f"{backend.unit}_saved_at_most": planned.order.saved_tokens,
                "plan_s": round(planned.plan_s, 3),
                "answer_s": round(answer_s, 3),
            }
        )
        return SOME_NOT if n_failed else ALL_ANSWERED

    async def _answer_all(self, backend: Backend, planned: Planned, progress: Progress) -> None:
        good: list[bytes] = []
        bad: list[bytes] = []
        masses = array("d")

        def request_of(row: int) -> tuple[str, dict[str, Any]]:
            request = self.requests.request(row)
            return request.url, request.body

        def flush() -> None:
            self._check_input()
            self.answers.append(good)
            self.errors.append(bad)
            progress.add(len(good), len(bad), backend.n_prompt_tokens, backend.n_cached_tokens)
            good.clear()
            bad.clear()

        flushed_s = time.monotonic()
        async for answered in backend.answers(planned.order, planned.prompts, request_of, self.options.max_inflight):
            for row, answer in answered:
                custom_id = self.requests.request(row).custom_id
                if answer.is_ok:
                    masses.extend(map(float, LABEL_MASS.findall(answer.body)))
                    good.append(answer_file.answered(custom_id, answer.status, answer.body))
                else:
                    message = answer_file.message_of(answer.body)
                    line = self.requests.line_number(row)
                    bad.append(answer_file.refused(custom_id, line, message, status=answer.status))
            if time.monotonic() - flushed_s >= FLUSH_EVERY_S:
                flush()
                flushed_s = time.monotonic()
        flush()
        if masses and (mass := sum(masses) / len(masses)) < LOW_MASS:
            progress.bar.say(
                f"the labels hold {mass:.2%} of the probability, mean of {len(masses):,} answers: the model would say something"
                " else. Do labels begin as the answer does (with a blank, say), and does the prompt end where it should?",
            )

    def _check_input(self) -> None:
        if self._input.has_changed():
            raise BatchJobError(
                f"{self._input.path} has changed since the job began. What was answered until then is kept, and belongs to the"
                " file as it was: put it back and start again, or begin a new job with another output"
            )

    def _rows_of_shard(self, prompts: Prompts) -> IntArray:
        """This shard's rows, ascending. All shards of a job compute the same cuts."""
        which, of = self.options.shard
        rows = np.unique(prompts.row)
        if of == 1:
            return rows
        order = batch_plan.depth_first(prompts.tokens)
        begin, end = batch_plan.shard(order, prompts.tokens.lengths, which, of)
        place_of_row = order.places()[np.searchsorted(prompts.row, rows)]
        mine: IntArray = rows[(place_of_row >= begin) & (place_of_row < end)]
        return mine

    def _is_answered(self, id_hashes: IntArray) -> IntArray:
        lines = self.answers.lines()
        known = np.fromiter((id_hash(answer_file.custom_id_of(line)) for line in lines), dtype=np.uint64)
        found: IntArray = np.isin(id_hashes, known)
        return found

    def _make_output(self) -> None:
        """Writes the output once all rows are answered."""
        without_id = {bad.row for bad in self.bad if bad.custom_id is None}
        place_of = {
            answer_file.custom_id_of(self.requests.line(row)): row
            for row in range(len(self.requests))
            if row not in without_id
        }
        answers = self.answers.in_order(lambda line: place_of[answer_file.custom_id_of(line)])
        if self.options.is_table:
            write_answers(self.options, answers, self.errors.lines())
            return
        new = self.options.output.with_name(self.options.output.name + ".new")
        with new.open("wb") as file:
            file.writelines(line + b"\n" for line in answers)
        new.replace(self.options.output)

    def _refusal(self, bad: BadRow) -> bytes:
        return answer_file.refused(bad.custom_id, self.requests.line_number(bad.row), bad.message)

    def _all_bad(self) -> str:
        bad: Sequence[BadRow] = self.bad
        shown = [
            f"  line {self.requests.line_number(one.row)}{f' ({one.custom_id})' if one.custom_id else ''}: {one.message}"
            for one in bad[:BAD_ROWS_SHOWN]
        ]
        if len(bad) > BAD_ROWS_SHOWN:
            shown.append(f"  and {len(bad) - BAD_ROWS_SHOWN:,} more")
        return "\n".join(
            (
                f"{len(bad):,} of {len(self.requests):,} rows cannot be answered:",
                *shown,
                f"all of them are in {self.options.error_file}. Nothing was run: mend them, or leave them out with"
                " --skip-bad-rows",
            )
        )

    def close(self) -> None:
        for opened in (self.answers, self.errors, self.folder):
            opened.close()
