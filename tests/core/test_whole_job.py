"""The rows of a job that is known ahead, by groups (BatchLLM, section 4.3.1)."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from sgl_prefill.core.batch.batch_plan import depth_first
from sgl_prefill.core.batch.token_rows import TokenRows
from sgl_prefill.core.job import Job
from sgl_prefill.core.packing import StepSize
from sgl_prefill.core.policies.whole_job import WholeJob
from sgl_prefill.core.policy import PolicySettings, Writing
from tests.core.jobs import job

PREFIX_TOKENS = 10
# Three groups of three: the first token is the group's name, the last the row's.
ROWS = [[group] * PREFIX_TOKENS + [100 + row] for row in range(3) for group in (1, 2, 3)]


class Run:
    """A policy under which rows of a job wait, and a cache that forgets nothing."""

    def __init__(
        self,
        rows: Sequence[Sequence[int]],
        *,
        kv_tokens: int | None = None,
        most_tokens: int = 1000,
        most_output_tokens: int = 1,
    ) -> None:
        self.policy = WholeJob(PolicySettings(StepSize(most_tokens, 100), kv_tokens=kv_tokens))
        self.cached: list[list[int]] = []
        whole = depth_first(TokenRows.of(rows))
        self.jobs = []
        for place, row in enumerate(whole.rows.tolist()):
            tokens = list(rows[row])
            self.jobs.append(
                Job(
                    array("q", tokens),
                    0.0,
                    len(tokens) - 1,
                    planned=whole.row(place),
                    most_output_tokens=most_output_tokens,
                )
            )
            self.policy.add(self.jobs[-1])

    def step(self) -> list[tuple[int, int]]:
        """Runs one step; each row as its group and its number in it."""
        run = self.policy.decide(0.0).run
        for one in run:
            self.policy.remove(one)
            if one.most_output_tokens > 1:
                self.policy.writing = [*self.policy.writing, Writing(one, 1)]
        self.cached += [one.tokens.tolist() for one in run]
        for one in self.policy.waiting:
            one.n_cached_tokens = max(self._shared(one, other) for other in self.cached)
        return [(one.tokens[0], one.tokens[-1] - 100) for one in run]

    def ends(self, place: int) -> None:
        """Lets a row that writes end."""
        self.policy.writing = [one for one in self.policy.writing if one.job is not self.jobs[place]]

    @staticmethod
    def _shared(one: Job, other: Sequence[int]) -> int:
        n_shared = 0
        while n_shared < min(one.most_cached_tokens, len(other)) and one.tokens[n_shared] == other[n_shared]:
            n_shared += 1
        return n_shared


def test_a_step_computes_the_prefixes_of_several_groups_and_the_next_all_others() -> None:
    run = Run(ROWS)
    assert run.step() == [(1, 0), (2, 0), (3, 0)]
    assert run.step() == [(group, row) for group in (1, 2, 3) for row in (1, 2)]
    assert run.step() == []


def test_no_group_begins_whose_prefix_the_cache_could_not_keep() -> None:
    """There is room for two prefixes: the third group begins when the rows of the first have run."""
    run = Run(ROWS, kv_tokens=2 * PREFIX_TOKENS + 5)
    assert run.step() == [(1, 0), (2, 0)]
    assert run.step() == [(1, 1), (1, 2), (2, 1), (2, 2)]
    assert run.step() == [(3, 0)]
    assert run.step() == [(3, 1), (3, 2)]


def test_riders_of_a_group_and_the_first_row_of_the_next_share_a_step() -> None:
    """A step of 13 tokens: two riders of one token each, and a prefix with its row."""
    run = Run(ROWS, most_tokens=13)
    assert run.step() == [(1, 0)]
    assert run.step() == [(1, 1), (1, 2), (2, 0)]
    assert run.step() == [(2, 1), (2, 2), (3, 0)]
    assert run.step() == [(3, 1), (3, 2)]


def test_a_prefix_longer_than_the_cache_is_computed_all_the_same() -> None:
    run = Run(ROWS, kv_tokens=4)
    seen = []
    while some := run.step():
        seen += some
    assert sorted(seen) == [(group, row) for group in (1, 2, 3) for row in (0, 1, 2)]


def test_what_is_not_of_the_job_goes_first() -> None:
    run = Run(ROWS, most_tokens=20)
    live = job(15)
    run.policy.add(live)
    assert run.policy.decide(0.0).run == [live]


def test_prefixes_of_prefixes_are_computed_level_by_level() -> None:
    """All share an instruction, pairs share a document: the first row computes both, then one row a document."""
    rows = [[7] * 5 + [document] * 5 + [100 + row] for document in (1, 2, 3) for row in range(2)]
    run = Run(rows)
    assert len(run.step()) == 1
    assert len(run.step()) == 3  # the other row of the first document, and the first of each other
    assert len(run.step()) == 2


def test_rows_that_write_begin_while_the_cache_has_room_for_all_that_they_will_hold() -> None:
    """Six rows of one group: 10 tokens of prefix, and for each 1 token of its own and 8 that it may write."""
    run = Run([[1] * PREFIX_TOKENS + [100 + row] for row in range(6)], kv_tokens=10 + 3 * 9 + 5, most_output_tokens=8)
    assert run.step() == [(1, 0)]
    assert run.step() == [(1, 1), (1, 2)]
    assert run.step() == []
    for _ in range(40):  # rows turn out to write one token in eight
        run.policy.ended(run.jobs[0], 1)
    assert run.step() == [(1, 3), (1, 4), (1, 5)]


def test_those_who_write_are_not_stopped_for_a_row_or_two() -> None:
    """Twelve rows of one group, of which the cache has room for eight."""
    run = Run([[1] * PREFIX_TOKENS + [100 + row] for row in range(12)], kv_tokens=10 + 8 * 5, most_output_tokens=4)
    assert run.step() == [(1, 0)]
    assert len(run.step()) == 7
    run.ends(0)
    assert run.step() == []
    run.ends(1)
    assert run.step() == [(1, 8), (1, 9)]  # a quarter of those who write
    for place in range(2, 10):
        run.ends(place)
    assert run.step() == [(1, 10), (1, 11)]
