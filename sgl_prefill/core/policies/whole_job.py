"""The rows of a job that is known ahead, by groups that share a prefix (BatchLLM, section 4.3.1).

Rows run in the order of their plan. A step takes the earliest rows whose prefix the cache holds, and is filled with the first
rows of later groups, which compute prefixes: so a step is full while a prefix is computed, which a group alone could not make
it. A group is begun only while all prefixes in use fit the cache; each is in use until the last row that shares it has run.

Rows that write more than one token keep their KV meanwhile: they begin while the cache has room for all that they will hold,
however many they are (section 4.3.3, memory-centric token batching). The paper mixes their tokens with chunks of prompts in one
step. Here a prompt is read in one step of its own, so it waits until such a step is worth it, while others write.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterator

from sgl_prefill.core.job import Job, PlannedRow
from sgl_prefill.core.policy import Policy, PolicySettings

# While rows write, others are read in steps that are full to this part at least, or that bring this part of those who write.
FULL_ENOUGH, MANY_ENOUGH = 0.5, 0.25
# A row is first expected to write all that it may. So many rows outweigh that.
BELIEVED_ROWS = 4


class OutputLength:
    """Share of their output limits that rows use, learned from rows that have ended: outputs of one task have similar lengths
    (section 4.3.2)."""

    def __init__(self) -> None:
        self._n_written = self._n_allowed = self._n_believed = 0.0

    def observe(self, n_written: int, n_allowed: int) -> None:
        if not self._n_allowed:
            self._n_believed = float(BELIEVED_ROWS * n_allowed)
        self._n_written += n_written
        self._n_allowed += n_allowed

    @property
    def share(self) -> float:
        """Expected share; 1 before any row has ended."""
        n_allowed = self._n_allowed + self._n_believed
        return (self._n_written + self._n_believed) / n_allowed if n_allowed else 1.0


class _PrefixInUse:
    """A prefix that has been computed, or is at present, for rows that wait."""

    __slots__ = ("first", "n_left", "n_tokens", "planned_end")

    def __init__(self, row: PlannedRow, n_tokens: int) -> None:
        self.first, self.planned_end, self.n_tokens = row.place, row.end, n_tokens
        self.n_left = row.end - row.place - 1  # rows that have not used it yet

    def serves(self, place: int) -> bool:
        return self.first < place < self.planned_end


class WholeJob(Policy):
    """Requests without a plan, which other users have sent, go first, in the order of their arrival."""

    def __init__(self, settings: PolicySettings) -> None:
        super().__init__(settings)
        self._unplanned: dict[Job, None] = {}
        self._places: list[int] = []  # of the rows that wait, in order
        self._job_at: dict[int, Job] = {}
        self._in_use: list[_PrefixInUse] = []
        self._output_length = OutputLength()

    def add(self, job: Job) -> None:
        super().add(job)
        if job.planned is None:
            self._unplanned[job] = None
            return
        bisect.insort(self._places, job.planned.place)
        self._job_at[job.planned.place] = job

    def remove(self, job: Job) -> None:
        super().remove(job)
        row = job.planned
        if row is None:
            self._unplanned.pop(job, None)
        elif self._job_at.pop(row.place, None) is not None:
            del self._places[bisect.bisect_left(self._places, row.place)]
            for prefix in self._in_use:
                prefix.n_left -= prefix.serves(row.place)
            self._in_use = [prefix for prefix in self._in_use if prefix.n_left > 0]
            if n_tokens := self._new_prefix_tokens(row, job.n_reused_tokens):
                self._in_use.append(_PrefixInUse(row, n_tokens))

    def ended(self, job: Job, n_output_tokens: int) -> None:
        self._output_length.observe(n_output_tokens, job.most_output_tokens)

    @property
    def output_share(self) -> float:
        return self._output_length.share

    def choose(self, now_s: float) -> list[Job]:
        run = self.fill_step(itertools.chain(self._unplanned, self._ready()))
        return [] if self.writing and self._can_wait(run) else run

    def _can_wait(self, run: list[Job]) -> bool:
        """Says whether a step of these would stop those who write for little: it is nearly empty, they are few, and more will
        join them once some of those have ended."""
        step = self.settings.step
        if step.is_one or len(run) == len(self.waiting) or any(job in self._unplanned for job in run):
            return False
        are_many = len(run) >= min(MANY_ENOUGH * len(self.writing), step.max_requests)
        n_tokens = sum(step.price(job.n_priced_tokens, job.n_cached_tokens) for job in run)
        return not are_many and n_tokens < FULL_ENOUGH * step.max_tokens

    def _expected_tokens(self, job: Job) -> int:
        """Returns how many tokens a row will write."""
        return math.ceil(self._output_length.share * job.most_output_tokens) if job.decodes else 0

    def _held_by_those_who_write(self) -> int:
        """Counts the KV that they hold, or will, without prefixes in use."""
        n_in_use = {prefix.first: prefix.n_tokens for prefix in self._in_use}
        n_held = 0
        for job, n_output_tokens in self.writing:
            row = job.planned
            n_shared = 0 if row is None else row.n_reused_tokens + n_in_use.get(row.place, 0)
            n_held += job.n_input_tokens - n_shared + max(self._expected_tokens(job), n_output_tokens + 1)
        return n_held

    def _ready(self) -> Iterator[Job]:
        """Yields rows that need not wait for another, or follow it in its step; the first in any case."""
        room = math.inf if self.settings.kv_tokens is None else self.settings.kv_tokens
        room -= sum(prefix.n_tokens for prefix in self._in_use) + self._held_by_those_who_write()
        some_run = bool(self.writing)
        index = led_end = 0
        while index < len(self._places):
            place = self._places[index]
            job = self._job_at[place]
            row = job.planned
            assert row is not None
            n_tokens = self._new_prefix_tokens(
                row, max(job.n_cached_tokens, row.n_reused_tokens) if place < led_end else job.n_cached_tokens
            )
            follows = self.settings.step.least_led_tokens > 0 and not job.decodes
            # A row that only reads leaves an unshared tail, which is evicted as soon as others need the room.
            n_needed = job.n_miss_tokens + self._expected_tokens(job) if job.decodes else n_tokens
            if some_run and job.decodes and n_needed > room:
                return
            # Who shares the prefix must be here already: nothing else tells the cache that it is wanted.
            if index == 0 or n_tokens == 0 or (n_needed <= room and place + 1 in self._job_at):
                room -= n_needed
                some_run = True
                yield job
                if follows:
                    led_end = max(led_end, row.end)
            index = index + 1 if n_tokens == 0 or place < led_end else bisect.bisect_left(self._places, row.end)

    def _new_prefix_tokens(self, row: PlannedRow, n_reused: int) -> int:
        """Counts the tokens that a row computes for others, beyond the `n_reused` that are there before. Of a prefix that is
        longer than the cache only the beginning is kept."""
        kept = (
            row.n_shared_tokens
            if self.settings.kv_tokens is None
            else min(row.n_shared_tokens, self.settings.kv_tokens)
        )
        return max(kept - n_reused, 0)
