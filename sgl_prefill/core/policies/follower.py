"""The policy of ranks 1 and up: it repeats the decisions of rank 0. Clocks are never compared, and orders cannot differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from sgl_prefill.core.job import Job
from sgl_prefill.core.policy import Decision, Policy, PolicySettings


class Broadcast(NamedTuple):
    """What rank 0 sends to the other ranks for each step."""

    decision: Decision  # of its own jobs
    output_share: float | None  # `Policy.output_share`


class Follower(Policy):
    """Keeps the queue, as quotas and the KV advisor need it, and decides nothing itself."""

    def __init__(self, settings: PolicySettings, receive: Callable[[], Broadcast]) -> None:
        """receive: blocks for the decision of rank 0; called for each step while jobs wait."""
        super().__init__(settings)
        self._receive = receive
        self._output_share: float | None = None

    def decide(self, now_s: float) -> Decision:
        """Returns the decision of rank 0, in jobs of this rank."""
        if not self.waiting:
            return Decision([], {})
        decision, self._output_share = self._receive()
        for job in decision.refuse:
            self.remove(job)
        return decision

    def choose(self, now_s: float) -> list[Job]:
        raise AssertionError("rank 0 chooses")

    @property
    def output_share(self) -> float | None:
        return self._output_share
