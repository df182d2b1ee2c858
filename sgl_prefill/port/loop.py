"""The path of one step, from top to bottom: hooks on SGLang's loop (`Scheduler.event_loop_normal`) in the order of their calls.

    receive    around_recv_requests             messages that were kept during the last step come first
    decide     around_get_new_batch_prefill     the policy picks requests; SGLang's admission sees only those
    admit      kv.admission.around_add_one_req  scratch counts as room for a request that ends with its prefill
    plan KV    kv.admission.around_alloc_for_extend   how much KV of each request stays, and scratch for the rest
    forward    runner.out_of_memory.around_run_batch   runner.forward runs the model chunk by chunk; out of memory is a 503
    take in    around_process_batch_result      meanwhile requests arrive, are matched with the prefix cache and ordered
    publish    kv.radix_cache                   the durable part of each prefix enters the radix tree
    answer     SGLang's own                     to the detokenizer
    learn      around_process_batch_result      the JCT model is corrected, listeners get the step

SGLang builds a prefill batch by walking `scheduler.waiting_queue`. During that call the queue holds only the picked requests, so
that SGLang matches, locks and allocates for them alone; afterwards the others are put back in order of arrival. The choice
waits until the prefix of the running step is in the cache: on a host for its result, on a device for its launch
(`port.launched`). SGLang's overlap loop chooses before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from sgl_prefill.core.job import Job
from sgl_prefill.port.kv.admission import decodes
from sgl_prefill.port.runner import out_of_memory
from sgl_prefill.port.steps import clients, request_state, time_stats
from sgl_prefill.port.steps.jobs import SchedulerPort, follow, of, refuse
from sgl_prefill.port.steps.live import RunningStep
from sgl_prefill.port.steps.metrics import Facts
from sgl_prefill.port.steps.recent import text
from sgl_prefill.port.steps.step_state import Answered, EndedStep, StartedStep, StepState
from sgl_prefill.port.steps.waiting_list import Counted
from sgl_prefill.startup.device import this_device

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import AbortReq
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.managers.scheduler import NextBatchPlan, Scheduler
    from sglang.srt.managers.scheduler_components.request_receiver import SchedulerRequestReceiver

# Releasing memory takes some 20 ms, in which a request may come: an idle host does so after the first number of steps, a busy one
# after the second.
RELEASE_EVERY_STEPS, RELEASE_AT_LATEST_STEPS = 500, 2000


def around_recv_requests(
    state: StepState, original: Callable[..., list[Any]], receiver: SchedulerRequestReceiver, *rest: Any, **options: Any
) -> list[Any]:
    """Hook: receive."""
    messages = [*of(state).take_messages(), *original(receiver, *rest, **options)]
    if state.pipeline is not None and not all(map(_is_request, messages)):
        state.pipeline.finish()  # others may ask whether the engine is idle
    return messages


def around_get_new_batch_prefill(
    state: StepState, original: Callable[..., NextBatchPlan], scheduler: Scheduler, running_batch: ScheduleBatch
) -> NextBatchPlan:
    """Hook: decide, and let SGLang admit the picked requests."""
    port = of(state)
    live, pipeline = port.live, state.pipeline
    if pipeline is not None:
        pipeline.await_decision(lambda: take_in(state, scheduler))
    decided_s = time.perf_counter()
    waiting = follow(state, scheduler)
    with live.cost:
        run, refused = port.decide(decided_s, running_batch.reqs)
        picked, too_late = port.reqs_of(run), port.reqs_of(refused)
        waiting.take_out(too_late)
        port.forget(refused)
    for req, refusal in zip(too_late, refused.values(), strict=True):
        refuse(scheduler, req, refusal)
    if (share := live.policy.output_share) is not None:
        scheduler.new_token_ratio_tracker.current = share
    if pipeline is not None and len(picked) > scheduler.req_to_token_pool.available_size():
        pipeline.finish()  # its requests hold their rows until then
    scheduler.waiting_queue = list(picked)
    try:
        plan = original(scheduler, running_batch)
    finally:
        left = dict.fromkeys(scheduler.waiting_queue)
        started = [(job, req) for job, req in zip(run, picked, strict=True) if req not in left]
        with live.cost:
            waiting.take_out([req for _, req in started])
        _start(port, started, decided_s)
        # SGLang itself may queue requests during the call: a grammar that became ready, a preempted generation.
        for req in left:
            if req not in picked:
                waiting.append(req)
        scheduler.waiting_queue = waiting
    if pipeline is not None:
        pipeline.begin() if plan.batch_to_run is not None else pipeline.finish()
    _release_memory(state, scheduler, plan)
    if plan.batch_to_run is not None and plan.batch_to_run.prefill_stats is not None:
        plan.batch_to_run.prefill_stats.num_pending_tokens = live.n_pending_tokens
    return plan


def _start(port: SchedulerPort, started: Sequence[tuple[Job, Req]], decided_s: float) -> None:
    with port.live.cost:
        predicted_ms = port.live.start([job for job, _ in started], decided_s)
        for job, _ in started:
            port.started(job)
    if predicted_ms is not None:
        for _, req in started:
            time_stats.add_facts(req.time_stats, predicted_jct_ms=round(predicted_ms, 3))
    for listener in port.listeners:
        listener.on_step_start(StartedStep(port.live.n_steps, decided_s, predicted_ms, started))


def around_process_batch_result(
    state: StepState, original: Callable[..., None], scheduler: Scheduler, batch: ScheduleBatch, result: Any
) -> None:
    """Hook: takes in arrived requests before SGLang waits for the result of the launched step; learns from the result."""
    port, pipeline = state.scheduling, state.pipeline
    step = None if port is None else port.live.take_started()
    if port is not None and step is not None:
        if pipeline is not None and step.predicted_ms is not None and _ends_at_launch(scheduler, batch, result):
            _publish(scheduler, batch)
            take_in(state, scheduler)
            kept = batch.copy()  # SGLang takes ended requests out of the batch of the last step
            pipeline.launch(
                kept.reqs,
                step.predicted_ms,
                lambda: original(scheduler, kept, result),
                lambda ms: learn(port, kept, step, ms),
            )
            return
        if pipeline is not None:
            pipeline.finish()
        take_in(state, scheduler)
    if not isinstance(result, out_of_memory.FailedPass):  # its requests have been answered
        original(scheduler, batch, result)
    if port is not None and step is not None:
        learn(port, batch, step)


def _ends_at_launch(scheduler: Scheduler, batch: ScheduleBatch, result: Any) -> bool:
    """Whether no request of the step needs its result to go on (`port.launched`)."""
    return (
        not isinstance(result, out_of_memory.FailedPass)
        and scheduler.is_generation
        and batch.forward_mode.is_extend_without_speculative()
        and not batch.decoding_reqs
        and batch.chunked_req is None
        and not any(decodes(req) or req.grammar is not None or req.finished() for req in batch.reqs)
    )


def _publish(scheduler: Scheduler, batch: ScheduleBatch) -> None:
    """Puts the prefixes of a launched step into the prefix cache, gives its other slots back, and marks its requests as ended:
    SGLang would decode for them.
    """
    from sglang.srt.managers.schedule_batch import FINISH_LENGTH

    for req in batch.reqs:
        scheduler.tree_cache.publish(req)
        req.finished_reason = FINISH_LENGTH(0)


def take_in(state: StepState, scheduler: Scheduler) -> bool:
    """Passes requests to SGLang and to the policy, up to the first other message. Messages from there on (new weights, cache
    flushes, cancellations) wait for SGLang's next turn: it would take the engine for idle while the launched batch runs.

    Returns whether requests wait.
    """
    received = scheduler.request_receiver.recv_requests()
    n_requests = next((place for place, message in enumerate(received) if not _is_request(message)), len(received))
    of(state).keep_messages(received[n_requests:])
    for message in received[:n_requests]:
        answer = scheduler._request_dispatcher(message)
        assert answer is None, message
    if n_requests:
        follow(state, scheduler)
    return bool(of(state).live.policy.waiting)


def _is_request(message: Any) -> bool:
    """Whether the message is a request that only joins the queue. A health check reads whether the engine is idle, and a
    session's request needs the result of the previous one.
    """
    from sglang.srt.managers.io_struct import (
        BatchTokenizedEmbeddingReqInput,
        BatchTokenizedGenerateReqInput,
        TokenizedEmbeddingReqInput,
        TokenizedGenerateReqInput,
    )
    from sglang.srt.managers.scheduler import is_health_check_generate_req

    if isinstance(message, (BatchTokenizedGenerateReqInput, BatchTokenizedEmbeddingReqInput)):
        return all(map(_is_request, message.batch))
    if not isinstance(message, (TokenizedGenerateReqInput, TokenizedEmbeddingReqInput)):
        return False
    return getattr(message, "session_params", None) is None and not is_health_check_generate_req(message)


def learn(port: SchedulerPort, batch: ScheduleBatch, running: RunningStep, actual_ms: float | None = None) -> None:
    """Corrects the JCT model by the time that a step has taken, and passes the step to the listeners.

    actual_ms: on the device; None: until its result was read.
    """
    port.ended(batch.reqs)
    if not batch.forward_mode.is_extend():
        return
    live = port.live
    done = [req for req in batch.reqs if req.time_stats.prefill_finished_time > 0]  # the others failed
    if done:
        end_s = max(req.time_stats.prefill_finished_time for req in done)
        begin_s = done[0].time_stats.forward_entry_time if actual_ms is None else end_s - actual_ms / 1000
        actual_ms = 1000 * (end_s - begin_s)
    live.observe(running, actual_ms if done else None, [_facts_of(req) for req in done])
    if done:
        step = EndedStep(
            number=running.number,
            begin_s=begin_s,
            end_s=end_s,
            predicted_ms=running.predicted_ms,
            policy_s=live.last_step_s,
            score=running.score,
            is_waited_for=bool(live.policy.waiting),
            reqs=done,
            answered=[_answered(req, begin_s, end_s) for req in done],
        )
        for listener in port.listeners:
            listener.on_step_end(step)


def _facts_of(req: Req) -> Facts:
    facts = time_stats.facts_of(req.time_stats)
    return Facts(req.cached_tokens, facts.get("kept_tokens"), facts.get("evicted_tokens"))


def _answered(req: Req, begin_s: float, end_s: float) -> Answered:
    arrival_s = time_stats.arrival_s(req)
    return Answered(
        text(req.rid),
        end_s,
        text(clients.of(req)),
        len(req.origin_input_ids),
        req.cached_tokens,
        max(begin_s - arrival_s, 0.0),
        end_s - arrival_s,
    )


def around_abort_request(
    state: StepState, original: Callable[..., None], scheduler: Scheduler, recv_req: AbortReq
) -> None:
    """Hook: shows SGLang only the request to cancel, since it compares the ids of all waiting requests."""
    port = of(state)
    if recv_req.abort_all:
        original(scheduler, recv_req)
        return
    waiting = follow(state, scheduler)
    req = port.named(recv_req.rid)
    scheduler.waiting_queue = [] if req is None else [req]
    try:
        original(scheduler, recv_req)
    finally:
        if req is not None and req not in scheduler.waiting_queue:
            job = request_state.of(req).job
            assert job is not None
            with port.live.cost:
                port.live.leave(job)
                port.forget([job])
                waiting.take_out([req])
        scheduler.waiting_queue = waiting


def around_publish_load_snapshot(
    state: StepState, original: Callable[..., Any], scheduler: Scheduler, *rest: Any, **options: Any
) -> Any:
    """Hook: shows SGLang one item with the tokens of all waiting requests, since it sums their lengths after each step."""
    waiting = follow(state, scheduler)
    scheduler.waiting_queue = Counted(len(waiting), of(state).live.n_pending_tokens)
    try:
        return original(scheduler, *rest, **options)
    finally:
        scheduler.waiting_queue = waiting


def _release_memory(state: StepState, scheduler: Scheduler, plan: NextBatchPlan) -> None:
    """On a host, returns memory to the system that steps of many sizes have fragmented."""
    n_steps = scheduler.forward_ct - state.memory_released_at_step
    if n_steps < RELEASE_EVERY_STEPS or not this_device().is_host:
        return
    if n_steps >= RELEASE_AT_LATEST_STEPS or (plan.batch_to_run is None and scheduler.is_fully_idle()):
        this_device().release_unused()
        state.memory_released_at_step = scheduler.forward_ct
