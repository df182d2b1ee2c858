"""The traffic of a log of decisions: as it ran, and as jobs for a simulated engine that decides otherwise.

Prompts do not stand in a log. Each job says with which earlier one its prompt began alike, and how far: tokens with the same
beginnings take their place.
"""

from __future__ import annotations

import itertools
import sys
from array import array
from collections.abc import Iterable
from typing import Any, NamedTuple

from sgl_prefill.config import PrefillConfig
from sgl_prefill.core.jct import FittedJct
from sgl_prefill.core.job import Job
from sgl_prefill.core.packing import StepSize
from sgl_prefill.core.policy import PolicySettings
from sgl_prefill.planner.decisions import Began, Decided, Unusable
from sgl_prefill.planner.summary import Served
from sgl_prefill.planner.workloads import Arrival
from sgl_prefill.scheduling.decision_record import Start, job_of

PAGES_OF_A_PROMPT, MOST_PAGE_TOKENS = 100, 50


class Traffic(NamedTuple):
    """What came to one start of a server."""

    start: Start
    jobs: dict[int, dict[str, Any]]  # what the log says of each, by its number
    served: list[Served]  # in the order in which their steps began


def last_start(log: Iterable[Began | Decided | Unusable]) -> Traffic | None:
    """Returns the traffic of the last start that decided anything; None where none did. Clocks of two starts are not the same."""
    found: Traffic | None = None
    begun: Traffic | None = None
    for one in log:
        if isinstance(one, Began):
            begun = Traffic(one.start, {}, [])
        elif isinstance(one, Decided):
            assert begun is not None  # `read` sees to it
            found = begun
            _take_down(begun, one.record)
    return found


def _take_down(traffic: Traffic, record: dict[str, Any]) -> None:
    for kind, *what in record["told"]:
        if kind in ("add", "refuse"):
            traffic.jobs[what[0]["job"]] = what[0]
    if record["first"] is None or record["actual_ms"] is None:
        return
    for one in (record["first"], *record["riders"]):
        if one["found_tokens"] is not None:  # it was admitted, and has ended
            start_s, arrival_s = record["time_s"], traffic.jobs[one["job"]]["arrival_s"]
            finish_s = start_s + record["actual_ms"] / 1000
            traffic.served.append(Served(arrival_s, start_s, finish_s, one["input_tokens"], one["found_tokens"]))


def arrivals_of(traffic: Traffic) -> list[Arrival]:
    """Returns who came, in time order. The number of a job stands in the place of its prefix."""
    came = sorted(traffic.jobs.values(), key=lambda job: float(job["arrival_s"]))
    return [
        Arrival(
            job["arrival_s"],
            str(job["job"]),
            0,
            job["prompt_tokens"] + job.get("answer_tokens", 0),
            job.get("client") or "nobody",
        )
        for job in came
    ]


def page_tokens_of(traffic: Traffic) -> int:
    """Returns how many tokens a simulation of this traffic counts as one: few where prompts are short, whose prefixes would fill
    no page."""
    lengths: list[int] = [job["prompt_tokens"] for job in traffic.jobs.values()]
    return min(max(sum(lengths) // len(lengths) // PAGES_OF_A_PROMPT, 1), MOST_PAGE_TOKENS)


class LoggedJobs:
    """Makes the jobs of a log again, their tokens pages."""

    def __init__(self, traffic: Traffic, page_tokens: int) -> None:
        self._jobs = traffic.jobs
        self._page_tokens = page_tokens
        self._numbers = itertools.count()
        self._is_needed = {job["begins_like"][0] for job in traffic.jobs.values() if "begins_like" in job}
        self._pages: dict[int, array[int]] = {}  # of jobs that later ones begin like

    def job_of(self, arrival: Arrival) -> Job:
        fields = self._jobs[int(arrival.prefix_id)]
        pages = self._pages_of(fields)
        return job_of(
            {
                "id": fields["id"],
                "prompt_tokens": len(pages),
                "arrival_s": fields["arrival_s"],
                "most_cached_tokens": len(pages) - 1,
                **{name: fields[name] for name in ("client", "rank", "deadline_ms") if name in fields},
            },
            pages,
        )

    def _pages_of(self, fields: dict[str, Any]) -> array[int]:
        if (known := self._pages.get(fields["job"])) is not None:
            return known
        n_pages = max(-(-(fields["prompt_tokens"] + fields.get("answer_tokens", 0)) // self._page_tokens), 1)
        other, n_tokens = fields.get("begins_like", (None, 0))
        pages = array("q")
        if other in self._jobs:  # and not of a line that was lost
            pages = self._pages_of(self._jobs[other])[: min(n_tokens // self._page_tokens, n_pages)]
        pages = pages + array("q", itertools.islice(self._numbers, n_pages - len(pages)))
        if fields["job"] in self._is_needed:
            self._pages[fields["job"]] = pages
        return pages


def simulated_settings(
    start: Start, config: PrefillConfig, jct_ms: FittedJct, page_tokens: int, pack_step_tokens: int | None
) -> PolicySettings:
    """Makes the settings of a policy whose jobs count pages, on the server of a log.

    Args:
        config: the options.
        pack_step_tokens: of a step; None: as on the server.
    """
    size = start.step_size
    if pack_step_tokens is not None:
        size = StepSize(pack_step_tokens, size.max_requests if size.max_requests > 1 else sys.maxsize)
    pages = StepSize() if size.is_one else StepSize(max(size.max_tokens // page_tokens, 1), size.max_requests)
    return PolicySettings.of(
        pages,
        jct_ms=jct_ms if config.jct_model == "fitted" else None,
        fairness_lambda=config.fairness_lambda,
        max_queue_s=config.max_queue_s,
        counts_sharers=config.sharers == "count",
        unit_tokens=page_tokens,
    )
