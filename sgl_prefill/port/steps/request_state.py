"""This package's state of a request in the scheduler, as one attribute of SGLang's `Req`."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from sgl_prefill.core.job import Job
from sgl_prefill.core.kv_plan import KVPlan

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

ATTRIBUTE = "sgl_prefill"


@dataclasses.dataclass(slots=True)
class RequestState:
    job: Job | None = None  # while the request waits under this package's policy
    writing: Job | None = None  # while it generates after its prefill under such a policy
    kv_plan: KVPlan | None = None  # None before and after the forward pass
    runs_alone: bool = False  # it was in a step that ran out of memory
    leader: Req | None = None  # of the same step: computes the beginning of this request's prompt
    n_published: int = 0  # tokens of it that are in the prefix cache since its step
    is_published: bool = False  # since its launch (`port.launched`): it holds nothing but its row of the slot table


def of(req: Req) -> RequestState:
    """Returns the state, which the first call makes."""
    state: RequestState | None = getattr(req, ATTRIBUTE, None)
    if state is None:
        state = RequestState()
        anything: Any = req
        anything.sgl_prefill = state
    return state
