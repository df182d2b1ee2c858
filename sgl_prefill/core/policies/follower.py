"""The policy of every rank but the first: what rank 0 has decided. No two clocks are compared, and no order can differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from sgl_prefill.core.job import Job
from sgl_prefill.core.policy import Decision, Policy, PolicySettings


class Told(NamedTuple):
    """What a rank hears of rank 0."""

    decision: Decision  # of its own jobs
    output_share: float | None  # `Policy.output_share`


class Follower(Policy):
    """Knows who waits, as quotas and the advisor of the KV side do, and decides nothing."""

    def __init__(self, settings: PolicySettings, listen: Callable[[], Told]) -> None:
        """listen: is called for each decision, where somebody waits."""
        super().__init__(settings)
        self._listen = listen
        self._output_share: float | None = None

    def decide(self, now_s: float) -> Decision:
        """Returns what rank 0 says; its jobs of this rank."""
        if not self.waiting:
            return Decision([], {})
        decision, self._output_share = self._listen()
        for job in decision.refuse:
            self.remove(job)
        return decision

    def choose(self, now_s: float) -> list[Job]:
        raise AssertionError("rank 0 chooses")

    @property
    def output_share(self) -> float | None:
        return self._output_share
