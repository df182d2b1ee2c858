"""Snapshots of a scheduler process for `/dashboard`, by SGLang's request for its internal state under a request id of ours.

The scheduler answers between two steps, as it answers /server_info. Otherwise steps and requests are only recorded as they end.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import orjson

from sgl_prefill.core import memory_plan
from sgl_prefill.dashboard import snapshot
from sgl_prefill.dashboard.prefixes import Survey
from sgl_prefill.engine_state import EngineState
from sgl_prefill.port import client, reply_facts
from sgl_prefill.port.arrival import arrival_s
from sgl_prefill.port.radix_cache import RadixTree, WatchedRadixCache
from sgl_prefill.scheduling.recent import Answered, text
from sgl_prefill.scheduling.request_log import prefix_hashes

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import GetInternalStateReq, GetInternalStateReqOutput
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler import Scheduler

    from sgl_prefill.port.scheduler import SchedulerPort

# Request ids of the question for the internal state that ask for ours, and keys of the answer.
NAME = "sgl_prefill:dashboard"
DECISIONS_NAME = "sgl_prefill:decisions"


class Watch:
    """Kept between snapshots, from the first one on."""

    def __init__(self, cache: Any) -> None:
        self.start = secrets.token_hex(4)  # another one after a restart
        self.survey: Survey | None = None
        if isinstance(cache, WatchedRadixCache) and not cache.disable:
            self.survey = Survey(RadixTree(cache), secrets.token_bytes(16))


def around_get_internal_state(
    state: EngineState,
    original: Callable[..., GetInternalStateReqOutput],
    scheduler: Scheduler,
    recv_req: GetInternalStateReq,
) -> GetInternalStateReqOutput:
    """Hook: answers the dashboard with a snapshot and /scheduler/decisions with the last steps; all else is SGLang's."""
    if recv_req.rid not in (NAME, DECISIONS_NAME):
        return original(scheduler, recv_req)
    from sglang.srt.managers.io_struct import GetInternalStateReqOutput

    answer = taken(state, scheduler) if recv_req.rid == NAME else last_decisions(state)
    return GetInternalStateReqOutput(internal_state={recv_req.rid: answer.decode()})


def last_decisions(state: EngineState) -> bytes:
    """The last steps, the newest last, one JSON object a line."""
    if state.scheduling is None:
        return b""
    offset_s = time.time() - time.perf_counter()
    return b"".join(orjson.dumps(step.shown(offset_s)) + b"\n" for step in state.scheduling.recent.steps)


def taken(state: EngineState, scheduler: Any) -> bytes:
    """Makes a snapshot, as JSON."""
    began_s = time.perf_counter()
    if state.watch is None:
        state.watch = Watch(scheduler.tree_cache)
    watch, port = state.watch, state.scheduling
    if watch.survey is not None:
        watch.survey.go_on()
    found: dict[str, Any] = {
        "start": watch.start,
        "at_s": time.time(),
        "scheduling": state.config.scheduling,
        "model": scheduler.server_args.served_model_name,
        "memory": None if state.memory_plan is None else memory_plan.shown(state.memory_plan),
        "cache": _cache(state, scheduler, began_s),
    }
    if port is not None and port.is_first_rank:
        found |= snapshot.of_policy(port.live.policy, port.recent, began_s)
    found["took_ms"] = round(snapshot.age_of(began_s), 3)
    return orjson.dumps(found)


def _cache(state: EngineState, scheduler: Any, now_s: float) -> dict[str, Any] | None:
    cache, watch, port = scheduler.tree_cache, state.watch, state.scheduling
    if not isinstance(cache, WatchedRadixCache) or watch is None:
        return None
    calibration = None if port is None else port.live.calibration
    view = None if watch.survey is None else watch.survey.view
    return {
        "kv_tokens": scheduler.max_total_num_tokens,
        "in_use_tokens": int(cache.protected_size()),
        "cached_tokens": int(cache.evictable_size()),
        "removed_tokens": cache.n_removed_tokens,  # since the start
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


def write_down(port: SchedulerPort, done: Sequence[Req]) -> None:
    """Records a finished step for the dashboard, and its requests in the request log. done: its requests."""
    live = port.live
    begin_s = done[0].time_stats.forward_entry_time
    end_s = max(req.time_stats.prefill_finished_time for req in done)
    answered = [_answered(req, begin_s, end_s) for req in done]
    facts = [reply_facts.read(req.time_stats) for req in done]
    port.recent.add(
        number=live.n_steps,
        begin_s=begin_s,
        end_s=end_s,
        predicted_ms=live.last_predicted_ms,
        policy_s=live.last_step_s,
        score=live.last_score,
        is_waited_for=bool(live.policy.waiting),
        requests=answered,
    )
    known = [(one["kept_tokens"], one["evicted_tokens"]) for one in facts if "kept_tokens" in one]
    port.recent.count(answered, known)
    if port.request_log is not None:
        offset_s = time.time() - time.perf_counter()
        port.request_log.write(
            {
                "arrival_s": round(one.end_s - one.latency_s + offset_s, 6),
                "id": one.rid,
                "client": one.client,
                "input_tokens": one.n_input_tokens,
                "cached_tokens": one.n_cached_tokens,
                "wait_ms": round(1000 * one.wait_s, 3),
                "predicted_ms": live.last_predicted_ms,
                "actual_ms": round(1000 * (one.latency_s - one.wait_s), 3),
                "pages": prefix_hashes(req.origin_input_ids, req.extra_key),
            }
            for one, req in zip(answered, done, strict=True)
        )


def _answered(req: Req, begin_s: float, end_s: float) -> Answered:
    came_s = arrival_s(req)
    return Answered(
        text(req.rid),
        end_s,
        text(client.of(req)),
        len(req.origin_input_ids),
        req.cached_tokens,
        max(begin_s - came_s, 0.0),
        end_s - came_s,
    )
