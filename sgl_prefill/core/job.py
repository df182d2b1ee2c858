"""One request as policies, plans and forecasts see it: from SGLang's scheduler, a trace or a batch job."""

from __future__ import annotations

import dataclasses
import math
from array import array
from collections.abc import Hashable
from typing import NamedTuple

# Rank of background jobs: they use the capacity that live requests leave. Clients cannot set it.
BACKGROUND = math.inf


class PlannedRow(NamedTuple):
    """Place of a batch row in its job's plan. Token counts are from the beginning of its prompt."""

    place: int  # in the order of the plan
    n_reused_tokens: int  # computed by an earlier row
    n_shared_tokens: int  # reused by a later row
    end: int  # rows from place + 1 to before this one reuse more than this row does: they wait for it


@dataclasses.dataclass(eq=False, slots=True)
class Job:
    """A request that waits. Jobs are compared by identity.

    What the prefix cache holds of it changes while it waits: `calibration` writes those fields, all others read them.
    """

    tokens: array[int]  # the whole prompt
    arrival_s: float  # on one clock for all jobs
    most_cached_tokens: int  # upper bound of reuse: at least the last token is always computed
    namespace: str | None = None  # jobs of two namespaces share no prefix
    rank: float = 0.0  # priority class: a smaller rank always goes first; 0 where priorities are off, or BACKGROUND
    planned: PlannedRow | None = None  # for a row of a batch job
    most_output_tokens: int = 1  # above 1 it decodes after its prefill, and all of its KV is kept
    n_branch_tokens: int = 0  # computed behind the prompt; their KV is not kept (`core.branches`)
    n_branches: int = 0
    n_sampling_tokens: int = 0  # choosing its first token at random takes as long as computing so many
    deadline_ms: float | None = None  # counted from the arrival; a later answer is worth nothing
    client: str = ""  # requests without a client's name form one client
    rid: str = ""  # request id of the engine
    runs_alone: bool = False  # shares no step: it was in one that ran out of memory, or asks for much of each token

    n_cached_tokens: int = 0  # longest prefix that the cache holds now, as far as this job may use it
    next_page: Hashable | None = (
        None  # the first page beyond the match: jobs with the same one share it; None: there is none
    )
    is_follower: bool = False  # another job, which came first, waits for the same page
    n_sharers: int = 0  # jobs that follow this one
    n_shared_tokens: int = 0  # length of the prefix that a job in a group shares
    # Set where the job is picked for a step (`packing`): the job of that step that computes the beginning of this one's prompt,
    # and the length of that beginning.
    leader: Job | None = dataclasses.field(default=None, repr=False)
    n_led_tokens: int = 0

    @property
    def is_background(self) -> bool:
        return self.rank == BACKGROUND

    @property
    def decodes(self) -> bool:
        return self.most_output_tokens > 1

    @property
    def n_input_tokens(self) -> int:
        return len(self.tokens) + self.n_branch_tokens

    @property
    def n_priced_tokens(self) -> int:
        """What its time is predicted from: with `n_cached_tokens` or `n_reused_tokens` beside it."""
        return self.n_input_tokens + self.n_sampling_tokens

    @property
    def n_miss_tokens(self) -> int:
        """Tokens that a step computes for this job if it runs now, without a leader."""
        return self.n_input_tokens - self.n_cached_tokens

    @property
    def n_reused_tokens(self) -> int:
        """Tokens of it that its step does not compute for it."""
        return max(self.n_cached_tokens, self.n_led_tokens)
