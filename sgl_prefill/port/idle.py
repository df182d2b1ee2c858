"""What a scheduler does when nobody waits: after many steps of many sizes it gives back the memory that they left in pieces."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sgl_prefill.device import this_device
from sgl_prefill.engine_state import EngineState

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler

EVERY_STEPS = 1000  # it takes some 20 ms, in which a request may come


def after_on_idle(state: EngineState, result: None, scheduler: Scheduler) -> None:
    """Hook: SGLang calls this whenever no step runs."""
    if scheduler.forward_ct - state.n_steps_when_memory_was_released >= EVERY_STEPS and scheduler.is_fully_idle():
        this_device().release_unused()
        state.n_steps_when_memory_was_released = scheduler.forward_ct
