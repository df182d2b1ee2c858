"""What hangs on a request of SGLang's, which owns its life: one attribute with one type."""

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
    """What we know of one request in the scheduler process."""

    job: Job | None = None  # while it waits under a policy of ours
    writing: Job | None = None  # while it runs on after its prefill under such a policy
    kv_plan: KVPlan | None = None  # the plan that it runs under: None before its forward pass and after it


def of(req: Req) -> RequestState:
    """Returns a request's state, made where it is asked for first."""
    state: RequestState | None = getattr(req, ATTRIBUTE, None)
    if state is None:
        state = RequestState()
        anything: Any = req
        anything.sgl_prefill = state
    return state
