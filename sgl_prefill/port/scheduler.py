"""A policy of ours inside SGLang's own prefill admission.

SGLang builds a prefill batch by walking `scheduler.waiting_queue`. For the length of that call the queue holds only what the
policy picked, so SGLang matches, locks and allocates for that alone, and the prefix cache sees no access by requests that
merely wait. Afterwards the others are put back in their order of arrival.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from sgl_prefill.core import policies
from sgl_prefill.core.deadlines import Refusal
from sgl_prefill.core.job import BACKGROUND, Job, PlannedRow
from sgl_prefill.core.packing import StepSize
from sgl_prefill.core.policies.follower import Broadcast, Follower
from sgl_prefill.core.policy import Decision, Policy, PolicySettings, Writing
from sgl_prefill.core.ranks import ALONE, Ranks
from sgl_prefill.engine_state import EngineState
from sgl_prefill.errors import SeamError
from sgl_prefill.port import (
    answer_trees,
    background,
    client,
    dashboard,
    deadlines,
    reply_facts,
    request_state,
    silent_metrics,
    traces,
)
from sgl_prefill.port.arrival import arrival_s
from sgl_prefill.port.radix_cache import RadixTree, WatchedRadixCache
from sgl_prefill.port.ranks import these_ranks
from sgl_prefill.port.waiting_list import Counted, WaitingList
from sgl_prefill.scheduling.live import LiveScheduling
from sgl_prefill.scheduling.metrics import Facts, PolicyMetrics
from sgl_prefill.scheduling.recent import Recent
from sgl_prefill.scheduling.request_log import RequestLog

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import AbortReq
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.managers.scheduler import NextBatchPlan, Scheduler


class Followed(NamedTuple):
    """What has become of SGLang's list."""

    waiting: WaitingList[Req]  # to go on with
    refused: dict[Req, Refusal]  # taken out of it: there was no room for them


class SchedulerPort:
    """SGLang's waiting requests as jobs of ours."""

    def __init__(self, live: LiveScheduling, priority_sign: int, ranks: Ranks = ALONE) -> None:
        self.live = live
        self._ranks = ranks
        self._priority_sign = priority_sign  # 1: low values first, -1: high values first, 0: priorities are off
        self._reqs: dict[Job, Req] = {}
        self._jobs: dict[str, Job] = {}  # by request id
        self.planned: dict[str, PlannedRow] = {}  # by request id: what arrives next, where it is known ahead
        self._left: list[Any] = []
        self.recent = Recent()
        self.request_log: RequestLog | None = None

    @property
    def is_first_rank(self) -> bool:
        """Says whether this rank decides; the others follow."""
        return self._ranks.index == 0

    def follow(self, waiting: list[Req]) -> Followed:
        """Bring the policy up to date with SGLang's list, whatever SGLang did to it."""
        appended = waiting.take_changes() if isinstance(waiting, WaitingList) else None
        if appended is None:
            present = set(waiting)
            for job, req in list(self._reqs.items()):
                if req not in present:
                    self.live.leave(job)
                    self.forget([job])
            known = set(self._reqs.values())
            appended = [req for req in waiting if req not in known]
        refused: dict[Req, Refusal] = {}
        for req in appended:
            job = self._job_of(req)
            if not req.output_ids and (refusal := self.live.policy.refusal(job)) is not None:
                refused[req] = refusal
                continue
            self._reqs[job] = req
            self._jobs[req.rid] = job
            request_state.of(req).job = job
            self.live.arrive(job)
        if not isinstance(waiting, WaitingList):
            waiting = WaitingList(waiting)
            waiting.take_changes()
        waiting.take_out(refused)
        return Followed(waiting, refused)

    def leave(self, messages: list[Any]) -> None:
        """Keeps messages that came while a step computed, and are for SGLang's own turn (`between_steps`)."""
        self._left = messages

    def take_left(self) -> list[Any]:
        """Returns them, once."""
        left, self._left = self._left, []
        return left

    def named(self, rid: str) -> Req | None:
        """Returns the waiting request of exactly this id."""
        job = self._jobs.get(rid)
        return None if job is None else self._reqs[job]

    def decide(self, now_s: float, running: Iterable[Req]) -> Decision:
        """Says who runs next, the same on all ranks: `now_s` counts on rank 0 alone."""
        is_told = self._ranks.count > 1 and self._ranks.index == 0 and bool(self.live.policy.waiting)
        decision = self.live.decide(now_s, self.writing(running))
        if is_told:
            run = [(self._reqs[job].rid, job.n_cached_tokens) for job in decision.run]
            refuse = {self._reqs[job].rid: why for job, why in decision.refuse.items()}
            self._ranks.of_first((run, refuse, self.live.policy.output_share))
        return decision

    def receive_decision(self) -> Broadcast:
        """Returns what rank 0 has decided, on another rank. Raises SeamError where this one has another prefix cache."""
        nothing: tuple[list[tuple[str, int]], dict[str, Refusal], float | None] = ([], {}, None)
        told_run, told_refuse, output_share = self._ranks.of_first(nothing)
        run = [self._jobs[rid] for rid, _ in told_run]
        for job, (rid, n_cached_tokens) in zip(run, told_run, strict=True):
            if job.n_cached_tokens != n_cached_tokens:
                raise SeamError(
                    f"the ranks have come apart: rank 0 has {n_cached_tokens} tokens of request {rid} in its prefix cache, and"
                    f" rank {self._ranks.index} has {job.n_cached_tokens}. Their answers would be wrong: start the server again,"
                    " and please report it"
                )
        return Broadcast(Decision(run, {self._jobs[rid]: why for rid, why in told_refuse.items()}), output_share)

    def reqs_of(self, jobs: Iterable[Job]) -> list[Req]:
        return [self._reqs[job] for job in jobs]

    def forget(self, jobs: Iterable[Job]) -> None:
        """Takes out requests that wait no longer."""
        for job in jobs:
            req = self._reqs.pop(job)
            self._jobs.pop(req.rid, None)
            request_state.of(req).job = None

    def started(self, job: Job) -> None:
        """Takes out a request that runs now."""
        req = self._reqs[job]
        self.forget([job])
        if job.most_output_tokens > 1:
            request_state.of(req).writing = job

    def writing(self, running: Iterable[Req]) -> list[Writing]:
        """Returns those that run on after their prefill."""
        found = [(request_state.of(req).writing, req) for req in running if not req.finished()]
        return [Writing(job, len(req.output_ids)) for job, req in found if job is not None]

    def ended(self, reqs: Iterable[Req]) -> None:
        """Tells the policy of those among these that have written all."""
        for req in reqs:
            state = request_state.of(req)
            if state.writing is not None and req.finished():
                self.live.policy.ended(state.writing, len(req.output_ids))
                state.writing = None

    def _job_of(self, req: Req) -> Job:
        request_state.of(req).writing = None
        # A preempted generation has output tokens too; the sum copies the whole prompt.
        tokens: array[int] = req.origin_input_ids + req.output_ids if req.output_ids else req.origin_input_ids
        return Job(
            tokens,
            arrival_s(req),
            # SGLang always computes the last token, and more where log-probabilities are asked for.
            most_cached_tokens=req._compute_max_prefix_len(len(tokens)),
            namespace=req.extra_key,
            rank=BACKGROUND if background.is_background(req) else self._rank_of(req),
            planned=self.planned.pop(req.rid, None),
            most_output_tokens=(req.sampling_params.max_new_tokens or 0) - len(req.output_ids),
            n_answer_tokens=answer_trees.count_nodes(req.sampling_params),
            deadline_ms=deadlines.deadline_ms_of(req),
            client=client.of(req),
            rid=req.rid,
        )

    def _rank_of(self, req: Req) -> float:
        return req.priority * self._priority_sign if self._priority_sign else 0


def after_init_schedule_policy(state: EngineState, result: None, scheduler: Scheduler) -> None:
    """Hook: build the policy once the prefix cache exists. Raises SeamError where it cannot read that cache."""
    cache = scheduler.tree_cache
    if not isinstance(cache, WatchedRadixCache):
        raise SeamError(
            f"this model's prefix cache is SGLang's {type(cache).__name__}, and --scheduling {state.config.scheduling} reads"
            " RadixCache only (with sliding-window models --disable-hybrid-swa-memory may help):"
            " start with --scheduling stock"
        )
    sign = (1 if scheduler.schedule_low_priority_values_first else -1) if scheduler.enable_priority_scheduling else 0
    config = state.config
    state.step_size = _step_size(state, scheduler)
    settings = PolicySettings.of(
        state.step_size,
        jct_ms=state.jct_ms if config.jct_model == "fitted" else None,
        fairness_lambda=config.fairness_lambda,
        max_queue_s=config.max_queue_s,
        counts_sharers=config.sharers == "count",
    )._replace(
        kv_tokens=scheduler.max_total_num_tokens, background_step_ms=config.background_step_ms, quotas=config.quotas
    )
    collector = getattr(scheduler, "metrics_collector", None)
    metrics = None if collector is None or silent_metrics.are_silent(collector) else PolicyMetrics(collector.labels)
    ranks = these_ranks()
    policy: Policy
    if ranks.index == 0:
        policy = policies.make(config.scheduling, settings, is_fair=config.is_fair)
    else:
        policy = Follower(settings, lambda: of(state).receive_decision())
    live = LiveScheduling(RadixTree(cache), policy, metrics)
    cache.connect(live.listener, live.advisor, scheduler.max_total_num_tokens)
    state.scheduling = SchedulerPort(live, sign, ranks)
    if config.request_log is not None and ranks.index == 0:
        state.scheduling.request_log = RequestLog(config.request_log)
    scheduler.waiting_queue = WaitingList(scheduler.waiting_queue)


def of(state: EngineState) -> SchedulerPort:
    assert state.scheduling is not None
    return state.scheduling


def follow(state: EngineState, scheduler: Scheduler) -> WaitingList[Req]:
    """Brings the policy up to date with who waits, and refuses those for whom there is no room."""
    port = of(state)
    with port.live.cost:
        waiting, refused = port.follow(scheduler.waiting_queue)
    scheduler.waiting_queue = waiting
    for req, refusal in refused.items():
        deadlines.refuse(scheduler, req, refusal)
    return waiting


def _step_size(state: EngineState, scheduler: Scheduler) -> StepSize:
    pack_tokens = state.config.pack_step_tokens
    page_size = scheduler.tree_cache.page_size
    if pack_tokens == 0:
        return StepSize(page_size=page_size)
    from sglang.srt.runtime_context import get_schedule

    if pack_tokens is None:
        assert state.jct_ms is not None
        pack_tokens = state.jct_ms.full_price_tokens()
    # SGLang's own limit of a step of several requests is the memory that has been set aside for it.
    most = scheduler.max_prefill_tokens
    max_requests = get_schedule().prefill_max_requests or scheduler.max_running_requests
    return StepSize(most if pack_tokens is None else min(pack_tokens, most), max_requests, page_size)


def around_get_new_batch_prefill(
    state: EngineState, original: Callable[..., NextBatchPlan], scheduler: Scheduler, running_batch: ScheduleBatch
) -> NextBatchPlan:
    """Hook: let SGLang admit what the policy picked, and nothing else."""
    port = of(state)
    live = port.live
    now_s = time.perf_counter()
    waiting = follow(state, scheduler)
    with live.cost:
        run, refuse = port.decide(now_s, running_batch.reqs)
        picked, too_late = port.reqs_of(run), port.reqs_of(refuse)
        waiting.take_out(too_late)
        port.forget(refuse)
    for req, refusal in zip(too_late, refuse.values(), strict=True):
        deadlines.refuse(scheduler, req, refusal)
    if (share := live.policy.output_share) is not None:
        scheduler.new_token_ratio_tracker.current = share
    scheduler.waiting_queue = list(picked)
    try:
        plan = original(scheduler, running_batch)
    finally:
        left = dict.fromkeys(scheduler.waiting_queue)
        with live.cost:
            started = [(job, req) for job, req in zip(run, picked, strict=True) if req not in left]
            waiting.take_out([req for _, req in started])
            predicted_ms = live.start([job for job, _ in started], now_s)
            for job, _ in started:
                port.started(job)
        for _, req in started:
            if predicted_ms is not None:
                reply_facts.add(req.time_stats, predicted_jct_ms=round(predicted_ms, 3))
        traces.add_picked(started, now_s, predicted_ms, live.n_steps)
        # SGLang itself may queue requests during the call: a grammar that became ready, a preempted generation.
        for req in left:
            if req not in picked:
                waiting.append(req)
        scheduler.waiting_queue = waiting
    stats: Any = plan.batch_to_run.prefill_stats if plan.batch_to_run is not None else None
    if stats is not None:
        stats.num_pending_tokens = live.n_pending_tokens
    return plan


def around_abort_request(
    state: EngineState, original: Callable[..., None], scheduler: Scheduler, recv_req: AbortReq
) -> None:
    """Hook: show SGLang the one waiting request that is meant; it looks at the beginning of each one's id."""
    port = of(state)
    if recv_req.abort_all:
        original(scheduler, recv_req)
        return
    waiting = follow(state, scheduler)
    meant = port.named(recv_req.rid)
    scheduler.waiting_queue = [] if meant is None else [meant]
    try:
        original(scheduler, recv_req)
    finally:
        if meant is not None and meant not in scheduler.waiting_queue:
            job = request_state.of(meant).job
            assert job is not None
            with port.live.cost:
                port.live.leave(job)
                port.forget([job])
                waiting.take_out([meant])
        scheduler.waiting_queue = waiting


def around_publish_load_snapshot(
    state: EngineState, original: Callable[..., None], scheduler: Scheduler, *rest: Any, **options: Any
) -> None:
    """Hook: SGLang tells its HTTP process how much waits, after each step; it need not look at all who wait."""
    waiting = follow(state, scheduler)
    scheduler.waiting_queue = Counted(len(waiting), of(state).live.n_pending_tokens)
    try:
        original(scheduler, *rest, **options)
    finally:
        scheduler.waiting_queue = waiting


def learn(state: EngineState, batch: ScheduleBatch) -> None:
    """Corrects the JCT model by what a step has taken, and counts."""
    port = of(state)
    port.ended(batch.reqs)
    if not batch.forward_mode.is_extend():
        return
    done = [req for req in batch.reqs if req.time_stats.prefill_finished_time > 0]  # the others failed
    actual_ms = None
    if done:
        finished_s = max(req.time_stats.prefill_finished_time for req in done)
        actual_ms = 1000 * (finished_s - done[0].time_stats.forward_entry_time)
    port.live.observe(actual_ms, [_facts_of(req) for req in done])
    if done:
        dashboard.write_down(port, done)


def _facts_of(req: Req) -> Facts:
    facts: dict[str, Any] = reply_facts.read(req.time_stats)
    return Facts(req.cached_tokens, facts.get("kept_tokens"), facts.get("evicted_tokens"))
