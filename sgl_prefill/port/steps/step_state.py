"""What the hooks on SGLang's scheduler share, and the interface by which a feature follows each step."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from sgl_prefill.core.job import Job
from sgl_prefill.core.policy import ScoreParts
from sgl_prefill.startup.record import StartRecord

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

    from sgl_prefill.port.dashboard.watch import Watch
    from sgl_prefill.port.launched import Pipeline
    from sgl_prefill.port.steps.jobs import SchedulerPort


class StartedStep(NamedTuple):
    """A step that SGLang has admitted and is about to run. Times are on `time.perf_counter`."""

    number: int  # of the decision
    decided_s: float
    predicted_ms: float | None  # None without a predictor
    started: Sequence[tuple[Job, Req]]  # the policy's choice first


class Answered(NamedTuple):
    """One request that has run."""

    rid: str
    end_s: float
    client: str
    n_input_tokens: int
    n_cached_tokens: int
    wait_s: float
    latency_s: float


class EndedStep(NamedTuple):
    """A forward pass that has ended."""

    number: int
    begin_s: float
    end_s: float
    predicted_ms: float | None
    policy_s: float  # time of the policy, before and after the pass
    score: ScoreParts | None  # of the first request; None for policies without scores
    is_waited_for: bool  # requests wait as it ends
    reqs: Sequence[Req]  # requests that succeeded
    answered: Sequence[Answered]  # the same requests


class StepListener:
    """Base of the features in `SchedulerPort.listeners`, which are called in each step."""

    def on_step_start(self, step: StartedStep) -> None:
        return

    def on_step_end(self, step: EndedStep) -> None:
        return


@dataclasses.dataclass
class StepState:
    """Shared by the hooks on SGLang's scheduler."""

    record: StartRecord
    scheduling: SchedulerPort | None = None  # None with --scheduling stock
    pipeline: Pipeline | None = None  # None: a result is read before the next step is chosen
    watch: Watch | None = None  # None until the dashboard is opened
    memory_released_at_step: int = 0
