"""What SGLang's traces (`--enable-trace`) say of our decisions: an event in a request's prefill span, and facts on its root span.

SGLang opens, ends and exports the spans. Where it traces nothing, a request costs one look at a flag of its own.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sgl_prefill.core.job import Job
from sgl_prefill.port import reply_facts

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

EVENT = "sgl_prefill.picked"
FACTS = ("kept_tokens", "evicted_tokens", "predicted_jct_ms")  # of the reply's meta_info
LEVEL = 1  # of SGLANG_TRACE_LEVEL, as the span that the event is in


def add_picked(started: Sequence[tuple[Job, Req]], now_s: float, predicted_ms: float | None, step: int) -> None:
    """Adds to the span of each request that is about to run why and with whom. To be called once SGLang has begun the span.

    Args:
        started: those of one step, the first one first.
        now_s: when the policy decided.
        step: number of the decision, as /scheduler/decisions shows it.
    """
    for job, req in started:
        if req.time_stats.trace_ctx.tracing_enable:
            _add_event(req, _attributes(job, now_s, predicted_ms, step, started))


def _add_event(req: Req, attributes: dict[str, Any]) -> None:
    from sglang.srt.observability.req_time_stats import convert_time_to_realtime_ns

    # On the clock of the span, outside of which SGLang would put no event into it.
    req.time_stats.trace_ctx.trace_event(EVENT, LEVEL, convert_time_to_realtime_ns(time.perf_counter()), attributes)


def _attributes(
    job: Job, now_s: float, predicted_ms: float | None, step: int, started: Sequence[tuple[Job, Req]]
) -> dict[str, Any]:
    found = {
        "step": step,
        "step_requests": len(started),
        "picked_first": started[0][1].rid,
        "wait_ms": round(1000 * max(now_s - job.arrival_s, 0.0), 3),
        "predicted_ms": None if predicted_ms is None else round(predicted_ms, 3),
        "input_tokens": job.n_input_tokens,
        "cached_tokens": job.n_cached_tokens,
    }
    return {f"sgl_prefill.{name}": value for name, value in found.items() if value is not None}


def of_answered(time_stats: Any) -> dict[str, Any]:
    """Returns what a request's root span says of it once it is answered, in the HTTP process."""
    facts = reply_facts.read(time_stats)
    return {f"sgl_prefill.{name}": facts[name] for name in FACTS if name in facts}
