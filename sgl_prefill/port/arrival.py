"""When a request arrived: the moment at which the HTTP process hands it to the scheduler.

SGLang's scheduler stamps a request when it takes it off its socket, which it does between two forwards only. Everything
that arrives during a step of 6 seconds would look new, and its wait would count neither for fairness nor in `queue_ms`.
SGLang leaves a place in its message for the true time, unused; the hook fills it in. The time crosses on one clock
(SGLang converts between the processes' clocks), so it is the same for every rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

FIELD = "api_server_dispatch_time"


def after_getstate(result: dict[str, Any], time_stats: Any) -> dict[str, Any]:
    """Hook: what the HTTP process sends along with a request. The field's name ends in `time`: SGLang converts those."""
    return {**result, FIELD: getattr(time_stats, FIELD)}


def arrival_s(req: Req) -> float:
    """Says when a request came, on the scheduler's `time.perf_counter` clock. Requests that came by another way count from
    the queue's door.
    """
    stats = req.time_stats
    return float(getattr(stats, FIELD) or stats.wait_queue_entry_time)
