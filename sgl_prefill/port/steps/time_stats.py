"""Facts that travel between the processes with SGLang's time stats of a request.

To the scheduler: the time at which the HTTP process dispatches the request. SGLang's scheduler stamps a request when it reads it
from its socket, between two steps: the wait of a request that arrives during a step of 6 s would count neither for fairness nor
in `queue_ms`. SGLang's message has an unused field for this time, on one clock for all ranks.

The times are those of `time.perf_counter`, which the processes of a machine share. SGLang converts them by the wall clock; after
a step of that clock a request would have waited for an hour, or its reply would lack times.

From the scheduler: `kept_tokens`, `evicted_tokens`, `predicted_jct_ms` and others, for the reply's `meta_info`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

DISPATCH_TIME = "api_server_dispatch_time"
OFFSET = "diff_realtime_monotonic"  # SGLang adds the sender's to each time, and subtracts the receiver's
FACTS = "sgl_prefill_facts"


class SameClock(float):
    """An offset that leaves a time as it is, whatever the receiver subtracts."""

    def __radd__(self, time_s: float) -> float:
        return _Kept(time_s)


class _Kept(float):
    def __sub__(self, offset: float) -> float:
        return float(self)


def after_getstate_in_http(result: dict[str, Any], time_stats: Any) -> dict[str, Any]:
    """Hook: sends the time of dispatch with a request."""
    return {**result, DISPATCH_TIME: getattr(time_stats, DISPATCH_TIME), OFFSET: SameClock()}


def arrival_s(req: Req) -> float:
    """Returns the time of arrival on the scheduler's `time.perf_counter`; without a time of dispatch, that of queueing."""
    stats = req.time_stats
    return float(getattr(stats, DISPATCH_TIME) or stats.wait_queue_entry_time)


def add_facts(time_stats: Any, **facts: Any) -> None:
    time_stats.__dict__.setdefault(FACTS, {}).update(facts)


def facts_of(time_stats: Any) -> dict[str, Any]:
    facts: dict[str, Any] = time_stats.__dict__.get(FACTS, {})
    return facts


def after_getstate(result: dict[str, Any], time_stats: Any) -> dict[str, Any]:
    """Hook: sends the facts on, from the scheduler and from the detokenizer."""
    return {**result, FACTS: facts_of(time_stats), OFFSET: SameClock()}


def after_convert_to_output_meta_info(result: dict[str, Any], time_stats: Any) -> dict[str, Any]:
    """Hook: puts the facts into the reply's `meta_info`, in the HTTP process."""
    return {**result, **facts_of(time_stats)}
