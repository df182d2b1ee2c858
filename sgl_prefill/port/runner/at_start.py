"""Hooks that run this package's part of the start (`startup.prepare`) inside SGLang's, and report the memory plan's limits."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from sgl_prefill.core.gpu_memory import model_name
from sgl_prefill.core.ranks import smallest
from sgl_prefill.errors import MemoryPlanError
from sgl_prefill.port.runner import branch_rows, forward, model_faults, shared_prefixes
from sgl_prefill.port.runner.forward import SUM_OVER_RANKS
from sgl_prefill.port.runner.rank_group import these_ranks
from sgl_prefill.port.runner.runner_state import RunnerState
from sgl_prefill.port.runner.sglang_model import SglangModel, weights_bytes
from sgl_prefill.startup import examine
from sgl_prefill.startup.device import device_of
from sgl_prefill.startup.disk_cache import measuring_in_turn
from sgl_prefill.startup.prepare import ANSWER_MARGIN_TOKENS, prepare
from sgl_prefill.startup.quiet import unlogged
from sgl_prefill.startup.record import ANSWERS_KEY, PACKS_WEIGHTS_KEY, RECORD_KEY, StartRecord

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.tp_worker import TpModelWorker
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
    from sglang.srt.model_executor.model_runner import ModelRunner


def around_profile_available_bytes(
    record: StartRecord, original: Callable[..., int], configurator: KVCacheConfigurator, pre_model_load_memory: float
) -> int:
    """Hook: on a host `--memory-budget-gb` sets the bytes for KV and activations. SGLang takes a share of the free memory."""
    from sglang.srt.runtime_context import get_schedule

    budget_gb, ranks = record.config.memory_budget_gb, these_ranks()
    if budget_gb is None and ranks.count > 1:  # on a host, all ranks share this machine
        budget_gb = round(get_schedule().mem_fraction_static * pre_model_load_memory, 2)
    if not device_of(configurator.device).is_host or budget_gb is None:
        n_bytes = _sglangs_bytes(original, configurator, pre_model_load_memory)
    else:
        weights = weights_bytes(configurator.model)
        n_bytes = int(budget_gb * 2**30) // ranks.count - weights
        if n_bytes <= 0:
            for_ranks, each = ("", "") if ranks.count == 1 else (f" for {ranks.count} ranks", " of each")
            raise MemoryPlanError(
                f"--memory-budget-gb is {budget_gb}{for_ranks}, and the weights alone take"
                f" {weights / 2**30:.2f} GiB{each}: raise it"
            )
        if configurator.mambaish_config is not None:  # states come first, as in SGLang
            n_bytes = int(configurator._handle_max_mamba_cache(n_bytes / 2**30) * 2**30)
    (n_bytes,) = smallest(ranks, [n_bytes])
    record.memory_beyond_weights_bytes = n_bytes
    return n_bytes


def _sglangs_bytes(
    original: Callable[..., int], configurator: KVCacheConfigurator, pre_model_load_memory: float
) -> int:
    from sglang.srt.runtime_context import get_schedule

    try:
        return original(configurator, pre_model_load_memory)
    except ValueError as error:
        device = device_of(configurator.device)
        if device.is_host:
            raise
        name = model_name(configurator.model_config.model_path)
        weights, fraction = weights_bytes(configurator.model), get_schedule().mem_fraction_static
        raise MemoryPlanError(examine.no_room_for_kv(device, name, weights, device.free_bytes(), fraction)) from error


def around_init_attention_backends(state: RunnerState, original: Callable[..., None], runner: ModelRunner) -> None:
    """Hook: mends the model, records its body, and checks shared_prefix_attention. Raises UntraceableModelError or
    ConfigurationError where an option is `on` and impossible.
    """
    model_faults.mend(state, runner)
    original(runner)
    if state.record.config.hybrid_prefill != "off":
        forward.trace_model(state, runner)
    shared_prefixes.set_up(state.record.config.shared_prefix_attention, runner)


def around_get_worker_info(
    state: RunnerState, original: Callable[..., tuple[Any, ...]], worker: TpModelWorker
) -> tuple[Any, ...]:
    """Hook: runs `prepare` once model, pools and CUDA graphs exist, and reports the memory plan's longest input as the limit.

    Raises MemoryPlanError, ParityError.
    """
    record = state.record
    if record.memory_plan is None:
        model = SglangModel(state, worker.model_runner)
        try:
            with measuring_in_turn(model.ranks):
                prepare(record, model)
        except BaseException:
            model.close()
            raise
    record.no_branches = branch_rows.problem(state, worker.model_runner)
    assert record.memory_plan is not None
    longest = record.memory_plan.max_input_tokens
    # It warns that an input may be longer than the KV cache, which is served here.
    with unlogged("sglang.srt.managers.tp_worker") if state.record.config.evicts_suffix_kv else nullcontext():
        max_total, max_prefill, max_running, max_queued, max_req, _, *rest = original(worker)
    # A step of several requests must fit the scratch and activations of the longest input.
    max_prefill = min(max_prefill, longest)
    max_req = max(max_req, longest + ANSWER_MARGIN_TOKENS - 1)
    # SGLang refuses inputs from its limit on.
    return (max_total, max_prefill, max_running, max_queued, max_req, longest + 1, *rest)


def around_init_req_max_new_tokens(original: Callable[..., None], scheduler: Scheduler, req: Req) -> None:
    """Hook: keeps max_new_tokens of 0 or 1, which need no further slot. Refuses a larger one that SGLang would lower silently."""
    asked: int | None = req.sampling_params.max_new_tokens
    original(scheduler, req)
    if asked is not None and asked <= 1:
        req.sampling_params.max_new_tokens = asked
        return
    left: int = req.sampling_params.max_new_tokens
    if left > 1 and asked in (None, left):
        return
    n_input, n_new = len(req.origin_input_ids), 2 if asked is None else asked
    req.set_finish_with_abort(
        f"a request that generates keeps all of its KV: {n_input} input tokens and max_new_tokens"
        f" {'unlimited' if asked is None else asked} need {n_input + n_new + 2 * scheduler.page_size} durable slots and"
        f" as many positions, and this server has {scheduler.max_total_num_tokens} and"
        f" {scheduler.model_config.context_len}: ask for fewer tokens, or start it with more memory or a smaller"
        " --max-input-length"
    )


def with_record(state: RunnerState, info: dict[str, Any]) -> dict[str, Any]:
    """Adds the record of the start, for /server_info, to what SGLang's scheduler tells the HTTP process."""
    state.record.ranks = _ranks(state)
    return {
        **info,
        RECORD_KEY: state.record.shown(),
        PACKS_WEIGHTS_KEY: state.record.packed_weights is not None,
        ANSWERS_KEY: state.record.no_branches,
    }


def _ranks(state: RunnerState) -> dict[str, int] | None:
    """Returns the number of ranks, and of their collective operations in a pass over one chunk; None for one rank."""
    ranks, hybrid = these_ranks(), state.hybrid
    if ranks.count == 1:
        return None
    if hybrid is None:
        return {"count": ranks.count}
    split = hybrid.split
    sums, gathers = split.count_of(SUM_OVER_RANKS), split.n_reads(hybrid.shared)
    return {"count": ranks.count, "sums_a_chunk": sums, "gathers_a_chunk": gathers}
