"""How the page `/dashboard` learns of a scheduler process: SGLang's question for its internal state, asked under a name of ours.

The scheduler answers it in its own turn between two steps, as it answers /server_info; while nobody asks, steps and requests are
written down as they end, and nothing is computed.
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
from sgl_prefill.port import background, client, reply_facts
from sgl_prefill.port.arrival import arrival_s
from sgl_prefill.port.radix_cache import RadixTree, WatchedRadixCache
from sgl_prefill.scheduling.recent import Answered

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import GetInternalStateReq, GetInternalStateReqOutput
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler import Scheduler

    from sgl_prefill.port.scheduler import SchedulerPort

NAME = "sgl_prefill:dashboard"  # of the question, and of the answer in its dictionary


class Watch:
    """What is kept of a scheduler process for those who look."""

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
    """Hook: a question of the dashboard's gets a snapshot, every other one SGLang's answer."""
    if recv_req.rid != NAME:
        return original(scheduler, recv_req)
    from sglang.srt.managers.io_struct import GetInternalStateReqOutput

    return GetInternalStateReqOutput(internal_state={NAME: taken(state, scheduler).decode()})


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
    counted = snapshot.Cache(
        kv_tokens=scheduler.max_total_num_tokens,
        in_use_tokens=int(cache.protected_size()),
        cached_tokens=int(cache.evictable_size()),
        background_tokens=0 if cache.of_background is None else cache.of_background.n_tokens,
        removed_tokens=cache.n_removed_tokens,
        wanted_removals=0 if calibration is None else calibration.n_wanted_removals,
        wanted_removed_tokens=0 if calibration is None else calibration.n_wanted_removed_tokens,
    )
    view = None if watch.survey is None else watch.survey.view
    return snapshot.of_cache(counted, view, None if port is None else port.ceiling, now_s, state.config.show_prompts)


def write_down(port: SchedulerPort, done: Sequence[Req]) -> None:
    """Notes what a step has come to. done: whom it answered."""
    live = port.live
    begin_s = done[0].time_stats.forward_entry_time
    end_s = max(req.time_stats.prefill_finished_time for req in done)
    answered = [_answered(req, begin_s, end_s) for req in done]
    facts = [reply_facts.read(req.time_stats) for req in done]
    port.recent.add(
        begin_s=begin_s,
        end_s=end_s,
        predicted_ms=live.last_predicted_ms,
        policy_s=live.last_step_s,
        is_waited_for=bool(live.policy.waiting),
        requests=answered,
    )
    known = [(one["kept_tokens"], one["evicted_tokens"]) for one in facts if "kept_tokens" in one]
    port.recent.count(answered, known, sum(map(background.is_background, done)))


def _answered(req: Req, begin_s: float, end_s: float) -> Answered:
    came_s = arrival_s(req)
    return Answered(
        end_s, client.of(req), len(req.origin_input_ids), req.cached_tokens, max(begin_s - came_s, 0.0), end_s - came_s
    )
