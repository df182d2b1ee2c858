"""The policy's decisions in SGLang's traces (`--enable-trace`): an event in a request's prefill span, facts on its root span.
SGLang opens, ends and exports the spans.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from sgl_prefill.core.job import Job
from sgl_prefill.port.steps.step_state import StartedStep, StepListener
from sgl_prefill.port.steps.time_stats import facts_of

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

EVENT = "sgl_prefill.picked"
FACTS = ("kept_tokens", "evicted_tokens", "predicted_jct_ms")  # of the reply's meta_info
LEVEL = 1  # SGLANG_TRACE_LEVEL of the prefill span


class Traces(StepListener):
    """Adds an event to the prefill span of each request that starts: its step, prediction and wait."""

    def on_step_start(self, step: StartedStep) -> None:
        for job, req in step.started:
            if req.time_stats.trace_ctx.tracing_enable:
                _add_event(req, _attributes(job, step))


def _add_event(req: Req, attributes: dict[str, Any]) -> None:
    from sglang.srt.observability.req_time_stats import convert_time_to_realtime_ns

    # SGLang drops events that are outside their span on the span's clock.
    req.time_stats.trace_ctx.trace_event(EVENT, LEVEL, convert_time_to_realtime_ns(time.perf_counter()), attributes)


def _attributes(job: Job, step: StartedStep) -> dict[str, Any]:
    found = {
        "step": step.number,
        "step_requests": len(step.started),
        "picked_first": step.started[0][1].rid,
        "wait_ms": round(1000 * max(step.decided_s - job.arrival_s, 0.0), 3),
        "predicted_ms": None if step.predicted_ms is None else round(step.predicted_ms, 3),
        "input_tokens": job.n_input_tokens,
        "cached_tokens": job.n_cached_tokens,
    }
    return {f"sgl_prefill.{name}": value for name, value in found.items() if value is not None}


def of_answered(time_stats: Any) -> dict[str, Any]:
    """Returns attributes of an answered request's root span, in the HTTP process."""
    facts = facts_of(time_stats)
    return {f"sgl_prefill.{name}": facts[name] for name in FACTS if name in facts}
