"""SGLang's waiting requests as jobs of the policy, which is built here and called by `port.loop` in each step."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from sgl_prefill.core import policies
from sgl_prefill.core.deadlines import Refusal
from sgl_prefill.core.job import BACKGROUND, Job, PlannedRow
from sgl_prefill.core.packing import LEAST_LED_TOKENS, LEAST_LED_TOKENS_ON_DEVICE, StepSize
from sgl_prefill.core.policies.follower import Broadcast, Follower
from sgl_prefill.core.policy import Decision, Policy, PolicySettings, Writing
from sgl_prefill.core.ranks import ALONE, Ranks
from sgl_prefill.errors import SeamError
from sgl_prefill.port.kv.radix_cache import RadixTree, WatchedRadixCache
from sgl_prefill.port.launched import pipeline_of
from sgl_prefill.port.runner import branch_rows
from sgl_prefill.port.runner.rank_group import these_ranks
from sgl_prefill.port.steps import clients, custom_params, request_state, silent_metrics, time_stats
from sgl_prefill.port.steps.live import LiveScheduling
from sgl_prefill.port.steps.metrics import PolicyMetrics
from sgl_prefill.port.steps.recent import Recent
from sgl_prefill.port.steps.request_log import RequestLog
from sgl_prefill.port.steps.step_state import StepListener, StepState
from sgl_prefill.port.steps.traces import Traces
from sgl_prefill.port.steps.waiting_list import WaitingList
from sgl_prefill.startup.device import this_device
from sgl_prefill.startup.techniques import EVICT

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.sampling.sampling_params import SamplingParams


# Measured on a host of two cores: softmax, noise and maximum, or what top_k, top_p and min_p take.
SAMPLING_MS_PER_LOGIT, SORTING_MS_PER_LOGIT = 2.2e-5, 6.6e-5
MANY_LOGPROBS = 5_000  # of one prompt: the HTTP process writes those of a step before it reads other answers


class Followed(NamedTuple):
    waiting: WaitingList[Req]
    refused: dict[Req, Refusal]  # removed from it: beyond the waiting limits


class _Run(NamedTuple):
    """What rank 0 says of a request of the next step."""

    rid: str
    n_cached_tokens: int
    leader: str | None  # id of the request that it follows
    n_led_tokens: int


class SchedulerPort:
    """SGLang's waiting requests as jobs of the policy, and the features that follow each step."""

    def __init__(
        self, live: LiveScheduling, priority_sign: int, ranks: Ranks = ALONE, logits_per_token_ms: float = 0.0
    ) -> None:
        self.live = live
        self._logits_per_token_ms = logits_per_token_ms
        self._ranks = ranks
        self._priority_sign = priority_sign  # 1: low values first, -1: high values first, 0: priorities are off
        self._reqs: dict[Job, Req] = {}
        self._jobs: dict[str, Job] = {}  # by request id
        self.planned: dict[str, PlannedRow] = {}  # by request id: what the plan of a whole job knows of later requests
        self._messages: list[Any] = []
        self.recent = Recent()
        self.listeners: list[StepListener] = [Traces(), self.recent]

    @property
    def is_first_rank(self) -> bool:
        """Rank 0 decides, the other ranks follow."""
        return self._ranks.index == 0

    def follow(self, waiting: list[Req]) -> Followed:
        """Updates the policy from SGLang's list, which SGLang may have changed or replaced."""
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
            if (
                not req.output_ids
                and not request_state.of(req).runs_alone
                and (refusal := self.live.policy.refusal(job)) is not None
            ):
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

    def keep_messages(self, messages: list[Any]) -> None:
        """Keeps messages that arrived during a step for SGLang's next `recv_requests` (`loop.take_in`)."""
        self._messages = messages

    def take_messages(self) -> list[Any]:
        messages, self._messages = self._messages, []
        return messages

    def named(self, rid: str) -> Req | None:
        job = self._jobs.get(rid)
        return None if job is None else self._reqs[job]

    def decide(self, now_s: float, running: Iterable[Req]) -> Decision:
        """Returns the next step, the same on all ranks: rank 0 decides at `now_s` and broadcasts."""
        is_broadcast = self._ranks.count > 1 and self._ranks.index == 0 and bool(self.live.policy.waiting)
        decision = self.live.decide(now_s, self.writing(running))
        if is_broadcast:
            run = [
                _Run(job.rid, job.n_cached_tokens, None if job.leader is None else job.leader.rid, job.n_led_tokens)
                for job in decision.run
            ]
            refuse = {self._reqs[job].rid: why for job, why in decision.refuse.items()}
            self._ranks.of_first((run, refuse, self.live.policy.output_share))
        return decision

    def receive_decision(self) -> Broadcast:
        """Returns rank 0's decision on another rank. Raises SeamError where the prefix caches of the two differ."""
        nothing: tuple[list[_Run], dict[str, Refusal], float | None] = ([], {}, None)
        first_run, first_refuse, output_share = self._ranks.of_first(nothing)
        run = [self._jobs[one.rid] for one in first_run]
        for job, of_first in zip(run, first_run, strict=True):
            job.leader = None if of_first.leader is None else self._jobs[of_first.leader]
            job.n_led_tokens = of_first.n_led_tokens
            if job.n_cached_tokens != of_first.n_cached_tokens:
                raise SeamError(
                    f"the ranks differ: rank 0 has {of_first.n_cached_tokens} tokens of request {of_first.rid} in its prefix"
                    " cache, and"
                    f" rank {self._ranks.index} has {job.n_cached_tokens}. Their answers would be wrong: start the server again,"
                    " and please report it"
                )
        return Broadcast(Decision(run, {self._jobs[rid]: why for rid, why in first_refuse.items()}), output_share)

    def reqs_of(self, jobs: Iterable[Job]) -> list[Req]:
        return [self._reqs[job] for job in jobs]

    def forget(self, jobs: Iterable[Job]) -> None:
        for job in jobs:
            req = self._reqs.pop(job)
            self._jobs.pop(req.rid, None)
            request_state.of(req).job = None

    def started(self, job: Job) -> None:
        req = self._reqs[job]
        self.forget([job])
        if job.decodes:
            request_state.of(req).writing = job

    def writing(self, running: Iterable[Req]) -> list[Writing]:
        """Returns the running requests that generate after their prefill."""
        found = [(request_state.of(req).writing, req) for req in running if not req.finished()]
        return [Writing(job, len(req.output_ids)) for job, req in found if job is not None]

    def ended(self, reqs: Iterable[Req]) -> None:
        """Reports to the policy which of these requests have finished generating."""
        for req in reqs:
            state = request_state.of(req)
            if state.writing is not None and req.finished():
                self.live.policy.ended(state.writing, len(req.output_ids))
                state.writing = None

    def _job_of(self, req: Req) -> Job:
        request_state.of(req).writing = None
        # A preempted generation has output tokens too; the sum copies the whole prompt.
        branches = branch_rows.size_of(req.sampling_params)
        tokens: array[int] = req.origin_input_ids + req.output_ids if req.output_ids else req.origin_input_ids
        return Job(
            tokens,
            time_stats.arrival_s(req),
            # SGLang always computes the last token, and more where the request wants log-probabilities of its input.
            most_cached_tokens=req._compute_max_prefix_len(len(tokens)),
            namespace=req.extra_key,
            rank=BACKGROUND if custom_params.is_background(req) else self._rank_of(req),
            planned=self.planned.pop(req.rid, None),
            most_output_tokens=(req.sampling_params.max_new_tokens or 0) - len(req.output_ids),
            n_branch_tokens=branches.tokens,
            n_branches=branches.branches,
            n_sampling_tokens=_sampling_tokens(req.sampling_params, self._logits_per_token_ms),
            deadline_ms=custom_params.of(req, custom_params.DEADLINE),
            client=clients.of(req),
            runs_alone=request_state.of(req).runs_alone or _n_logprobs(req, len(tokens)) > MANY_LOGPROBS,
            rid=req.rid,
        )

    def _rank_of(self, req: Req) -> float:
        return req.priority * self._priority_sign if self._priority_sign else 0


def _n_logprobs(req: Req, n_tokens: int) -> int:
    """Log-probabilities that the HTTP process writes for the tokens of a prompt."""
    if not req.return_logprob or req.logprob_start_len < 0:
        return 0
    n_each: int = req.logprob.top_logprobs_num + len(req.logprob.token_ids_logprob or ())
    return n_each * (n_tokens - int(req.logprob_start_len))


def after_init_schedule_policy(state: StepState, result: None, scheduler: Scheduler) -> None:
    """Hook: builds the policy once the prefix cache exists. Raises SeamError where the policy cannot read that cache."""
    cache = scheduler.tree_cache
    if not isinstance(cache, WatchedRadixCache):
        raise SeamError(
            f"this model's prefix cache is SGLang's {type(cache).__name__}, and --scheduling"
            f" {state.record.config.scheduling} reads RadixCache only: start with --scheduling stock"
        )
    sign = (1 if scheduler.schedule_low_priority_values_first else -1) if scheduler.enable_priority_scheduling else 0
    config = state.record.config
    state.record.step_size = _step_size(state, scheduler)
    settings = PolicySettings.of(
        state.record.step_size,
        jct_ms=state.record.jct_ms if config.jct_model == "fitted" else None,
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
    state.scheduling = SchedulerPort(live, sign, ranks, _logits_per_token_ms(state, scheduler))
    state.pipeline = pipeline_of(has_predictor=settings.predictor is not None, n_ranks=ranks.count)
    if config.request_log is not None and ranks.index == 0:
        state.scheduling.listeners.append(RequestLog(config.request_log))
    scheduler.waiting_queue = WaitingList(scheduler.waiting_queue)


def _logits_per_token_ms(state: StepState, scheduler: Scheduler) -> float:
    """The logits of a row by the milliseconds that a host takes for a computed token; 0 on a device, which samples fast."""
    jct_ms = state.record.jct_ms
    if not this_device().is_host or jct_ms is None or jct_ms.miss_token_ms == 0:
        return 0.0
    return float(scheduler.model_config.vocab_size / jct_ms.miss_token_ms)


def _sampling_tokens(params: SamplingParams, logits_per_token_ms: float) -> int:
    """Returns how many computed tokens take as long as choosing one; 0 for the likeliest, or where none is chosen."""
    from sglang.srt.sampling.sampling_params import TOP_K_ALL

    if params.max_new_tokens == 0 or params.top_k == 1:
        return 0
    sorts = params.top_k != TOP_K_ALL or params.top_p != 1 or params.min_p != 0
    return math.ceil((SORTING_MS_PER_LOGIT if sorts else SAMPLING_MS_PER_LOGIT) * logits_per_token_ms)


def of(state: StepState) -> SchedulerPort:
    assert state.scheduling is not None
    return state.scheduling


def follow(state: StepState, scheduler: Scheduler) -> WaitingList[Req]:
    """Updates the policy from the waiting requests, and refuses those beyond the waiting limits."""
    port = of(state)
    with port.live.cost:
        waiting, refused = port.follow(scheduler.waiting_queue)
    scheduler.waiting_queue = waiting
    for req, refusal in refused.items():
        refuse(scheduler, req, refusal)
    return waiting


def refuse(scheduler: Scheduler, req: Req, refusal: Refusal) -> None:
    """Answers a request as SGLang does where its queue is full. The caller removes it from the queue."""
    from sglang.srt.managers.io_struct import AbortReq

    facts = {"reason": refusal.reason, "retry_after_s": refusal.retry_after_s}
    reason = {"type": "abort", "status_code": refusal.status, "message": refusal.message, **facts}
    req.time_stats.trace_ctx.abort(abort_info=reason)
    scheduler.ipc_channels.send_to_tokenizer.send_output(AbortReq(finished_reason=reason, rid=req.rid), req)


def _step_size(state: StepState, scheduler: Scheduler) -> StepSize:
    pack_tokens = state.record.config.pack_step_tokens
    page_size = scheduler.tree_cache.page_size
    if pack_tokens == 0:
        return StepSize(page_size=page_size)
    follows = state.record.no_branches is None and EVICT.is_on(state.record.config)
    from sglang.srt.runtime_context import get_schedule

    is_host, pair_tokens = this_device().is_host, 0.0
    least_led = LEAST_LED_TOKENS if is_host else LEAST_LED_TOKENS_ON_DEVICE
    if pack_tokens is None:
        jct_ms = state.record.jct_ms
        assert jct_ms is not None
        pack_tokens = jct_ms.full_price_tokens()
        if not is_host and jct_ms.miss_token_ms > 0:  # a host attends a shared prefix once
            pair_tokens = jct_ms.pair_ms / jct_ms.miss_token_ms
    # SGLang's limit of a step of several requests is the memory that the plan has reserved.
    most = scheduler.max_prefill_tokens
    max_requests = get_schedule().prefill_max_requests or scheduler.max_running_requests
    return StepSize(
        most if pack_tokens is None else min(pack_tokens, most),
        max_requests,
        page_size,
        least_led if follows else 0,
        pair_tokens,
    )
