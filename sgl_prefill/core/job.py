"""One request as policies, plans and forecasts see it. Whether SGLang's scheduler, a trace or a batch holds it, they do not
know."""

from __future__ import annotations

import dataclasses
import math
from array import array
from collections.abc import Hashable

from sgl_prefill.core.batch.planned_row import PlannedRow

# Of requests that fill what all others leave: no user gives it.
BACKGROUND = math.inf


@dataclasses.dataclass(eq=False, slots=True)
class Job:
    """A request that waits. Jobs are compared by identity.

    What the prefix cache holds of it changes while it waits: `calibration` writes those fields, all others read them.
    """

    tokens: array[int]  # the whole prompt
    arrival_s: float  # on one clock for all jobs
    most_cached_tokens: int  # so many may be reused at most: at least the last one is always computed
    namespace: str | None = None  # jobs of two namespaces share no prefix
    rank: float = 0.0  # priority class: a smaller rank always goes first; 0 where priorities are off, or BACKGROUND
    planned: PlannedRow | None = None  # where it is a row of a job that is known ahead
    most_output_tokens: int = 1  # that it may write; beyond one it goes on after its prefill, and keeps all of its KV
    n_answer_tokens: int = 0  # that are computed with it and kept by nobody (`core.answer_tree`)
    deadline_ms: float | None = None  # counted from the arrival; a later answer is worth nothing
    client: str = ""  # who asks; those whom nobody names are one client
    rid: str = ""  # what the engine calls the request; for records

    n_cached_tokens: int = 0  # longest prefix that the cache holds now, as far as this job may use it
    next_page: Hashable | None = (
        None  # the first page beyond the match: jobs with the same one share it; None: there is none
    )
    is_follower: bool = False  # another job, which came first, waits for the same page
    n_sharers: int = 0  # of the job that others follow: their number
    n_shared_tokens: int = 0  # of a job in a group: how long the prefix is that it shares

    @property
    def is_background(self) -> bool:
        return self.rank == BACKGROUND

    @property
    def n_input_tokens(self) -> int:
        return len(self.tokens) + self.n_answer_tokens

    @property
    def n_miss_tokens(self) -> int:
        """Returns the tokens that a step computes for this job, were it to run now."""
        return self.n_input_tokens - self.n_cached_tokens
