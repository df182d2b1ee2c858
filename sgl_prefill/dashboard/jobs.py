"""Batch jobs that tell a running server how far they are, for its page."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from sgl_prefill.errors import BadRequestError

PATH = "/dashboard/jobs"
MOST_JOBS = 20
SILENT_S = 60.0  # after so long without a word a job is no longer shown
LONGEST_NAME = 40  # characters
COUNTS = ("rows", "done", "failed", "groups")


class JobReport(NamedTuple):
    """How far a job is, in its own words. A share is one of tokens, or of bytes where the job has no tokenizer."""

    name: str
    rows: int
    done: int  # of the rows, answered or failed
    failed: int
    groups: int  # of rows that share a prefix, each of which one server takes
    saved_share: float  # of what is done, what the prefix cache held
    most_saved_share: float  # what the plan saves at most
    left_s: float | None = None  # nothing is known yet


class Jobs:
    """The last word of each job, of so many at most: the one that has been silent longest goes first."""

    def __init__(self, clock_s: Callable[[], float]) -> None:
        self._clock_s = clock_s
        self._said: dict[str, tuple[float, JobReport]] = {}

    def tell(self, run: str, report: JobReport) -> None:
        """Notes a word. run: tells this run of the job from others."""
        self._said.pop(run, None)
        self._said[run] = (self._clock_s(), report)
        while len(self._said) > MOST_JOBS:
            del self._said[next(iter(self._said))]

    def shown(self) -> list[dict[str, Any]]:
        """Returns the jobs that still speak, the one that began to first."""
        now_s = self._clock_s()
        self._said = {run: said for run, said in self._said.items() if now_s - said[0] < SILENT_S}
        return [report._asdict() for _, report in sorted(self._said.values(), key=lambda said: said[1].name)]


def report_of(body: Any) -> tuple[str, JobReport]:
    """Reads what a job sends: its run and its report. Raises BadRequestError, which names the field."""
    if not isinstance(body, Mapping):
        raise BadRequestError("a job's report is a JSON object")
    given = dict(body)
    run = given.pop("run", None)
    if unknown := set(given) - set(JobReport._fields):
        raise BadRequestError(f"a job's report has no field {sorted(unknown)[0][:LONGEST_NAME]!r}")
    for name, value in (("run", run), ("name", given.get("name"))):
        if not isinstance(value, str) or not 0 < len(value) <= LONGEST_NAME:
            raise BadRequestError(f"{name} must be a text of 1 to {LONGEST_NAME} characters")
    for name in JobReport._fields[1:]:
        _check_number(name, given.get(name, JobReport._field_defaults.get(name, "missing")))
    return str(run), JobReport(**given)


def _check_number(name: str, value: Any) -> None:
    if value is None and name in JobReport._field_defaults:
        return
    is_count = name in COUNTS
    kinds = (int,) if is_count else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not 0 <= value < math.inf:
        what = "a whole number" if is_count else "a number"
        raise BadRequestError(f"{name} is {str(value)[:LONGEST_NAME]}: it must be {what} of at least 0")
