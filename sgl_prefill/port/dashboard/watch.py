"""Snapshots of the scheduler for `/dashboard`, and the last steps for `/scheduler/decisions`. The HTTP process asks for SGLang's
internal state with one of two reserved request ids, and the scheduler answers between two steps.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import orjson

from sgl_prefill.core import memory_plan
from sgl_prefill.port.dashboard import snapshot
from sgl_prefill.port.dashboard.prefixes import Survey
from sgl_prefill.port.kv.radix_cache import RadixTree, WatchedRadixCache
from sgl_prefill.port.runner import shared_prefixes
from sgl_prefill.port.steps.step_state import StepState

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import GetInternalStateReq, GetInternalStateReqOutput
    from sglang.srt.managers.scheduler import Scheduler


# Reserved request ids, and keys of the answers.
NAME = "sgl_prefill:dashboard"
DECISIONS_NAME = "sgl_prefill:decisions"


class Watch:
    """State between snapshots. The first snapshot makes it."""

    def __init__(self, cache: Any) -> None:
        self.start = secrets.token_hex(4)  # tells the page of a restart
        self.survey: Survey | None = None
        if isinstance(cache, WatchedRadixCache) and not cache.disable:
            self.survey = Survey(RadixTree(cache), secrets.token_bytes(16))


def around_get_internal_state(
    state: StepState,
    original: Callable[..., GetInternalStateReqOutput],
    scheduler: Scheduler,
    recv_req: GetInternalStateReq,
) -> GetInternalStateReqOutput:
    """Hook: answers the two reserved request ids, and adds shared-prefix counts to SGLang's answer to others."""
    if recv_req.rid not in (NAME, DECISIONS_NAME):
        output = original(scheduler, recv_req)
        if (counts := shared_prefixes.counts_of(scheduler.tp_worker.model_runner)) is not None:
            output.internal_state[shared_prefixes.COUNTS_KEY] = counts
        return output
    from sglang.srt.managers.io_struct import GetInternalStateReqOutput

    answer = taken(state, scheduler) if recv_req.rid == NAME else last_decisions(state)
    return GetInternalStateReqOutput(internal_state={recv_req.rid: answer.decode()})


def last_decisions(state: StepState) -> bytes:
    """Returns the last steps as JSON lines, the newest last."""
    if state.scheduling is None:
        return b""
    offset_s = time.time() - time.perf_counter()
    return b"".join(orjson.dumps(step.shown(offset_s)) + b"\n" for step in state.scheduling.recent.steps)


def taken(state: StepState, scheduler: Any) -> bytes:
    """Returns a snapshot as JSON."""
    from sglang.srt.runtime_context import get_serving

    began_s = time.perf_counter()
    if state.watch is None:
        state.watch = Watch(scheduler.tree_cache)
    watch, port = state.watch, state.scheduling
    if watch.survey is not None:
        watch.survey.go_on()
    found: dict[str, Any] = {
        "start": watch.start,
        "at_s": time.time(),
        "scheduling": state.record.config.scheduling,
        "model": get_serving().served_model_name,
        "memory": None if state.record.memory_plan is None else memory_plan.shown(state.record.memory_plan),
        "cache": _cache(state, scheduler, began_s),
    }
    if port is not None and port.is_first_rank:
        found |= snapshot.of_policy(port.live.policy, port.recent, began_s)
    found["took_ms"] = round(snapshot.age_of(began_s), 3)
    return orjson.dumps(found)


def _cache(state: StepState, scheduler: Any, now_s: float) -> dict[str, Any] | None:
    cache, watch, port = scheduler.tree_cache, state.watch, state.scheduling
    if not isinstance(cache, WatchedRadixCache) or watch is None:
        return None
    calibration = None if port is None else port.live.calibration
    view = None if watch.survey is None else watch.survey.view
    return {
        "kv_tokens": scheduler.max_total_num_tokens,
        "in_use_tokens": int(cache.protected_size()),
        "cached_tokens": int(cache.evictable_size()),
        "removed_tokens": cache.n_removed_tokens,
        "wanted_removals": 0 if calibration is None else calibration.n_wanted_removals,
        "wanted_removed_tokens": 0 if calibration is None else calibration.n_wanted_removed_tokens,
        "prefixes": None
        if view is None
        else {
            "age_s": max(now_s - view.at_s, 0.0),
            "count": view.n_prefixes,
            "tokens": view.n_tokens,
            "largest": view.largest,
            "most_hit": view.most_hit,
        },
    }
