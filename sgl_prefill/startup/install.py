"""The profile run, the memory plan and the parity gate inside SGLang's start, and the limits that follow from the plan."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from sgl_prefill.config import PrefillConfig
from sgl_prefill.core import memory_plan
from sgl_prefill.core.kv_plan import ceil_to
from sgl_prefill.core.memory_plan import MemoryPlan
from sgl_prefill.cpu import experts, fused
from sgl_prefill.cpu.native.library import native
from sgl_prefill.errors import MemoryPlanError
from sgl_prefill.hybrid.install import choose_chunk_tokens, hybrid_of, prefill_backend
from sgl_prefill.kv.allocator import SuffixKVAllocator
from sgl_prefill.seam import record
from sgl_prefill.startup import jct_profile, memory_profile, parity_gate

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.tp_worker import TpModelWorker
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)

# SGLang leaves so many tokens of the context length free for the answer and as a margin.
ANSWER_MARGIN_TOKENS = 7
# Without room for a page or two of durable KV, not even a short request could be cached.
MIN_DURABLE_TOKENS = 64


class Budget(NamedTuple):
    """Memory beyond the weights, in bytes."""

    kv_bytes: int  # for KV, and on a host for activations too
    slack_bytes: int  # beside it, for activations: what --mem-fraction-static leaves free on a device


def around_profile_available_bytes(
    original: Callable[..., int], configurator: KVCacheConfigurator, pre_model_load_memory: float
) -> int:
    """Hook: on a host the budget is an amount and not a share of what happens to be free, so that starts are alike."""
    config = record.config()
    if configurator.device != "cpu" or config.memory_budget_gb is None:
        n_bytes = original(configurator, pre_model_load_memory)
    else:
        weights = memory_profile.weights_bytes(configurator.model)
        n_bytes = int(config.memory_budget_gb * 2**30) - weights
        if n_bytes <= 0:
            raise MemoryPlanError(
                f"--memory-budget-gb is {config.memory_budget_gb}, and the weights alone take"
                f" {weights / 2**30:.2f} GiB: raise it"
            )
    record.add(memory_beyond_weights_bytes=n_bytes)
    return n_bytes


def around_get_worker_info(original: Callable[..., tuple[Any, ...]], worker: TpModelWorker) -> tuple[Any, ...]:
    """Hook: SGLang asks for the limits once model, pools and CUDA graphs are there: the moment to profile, divide the
    memory and check the paths. The longest input is the plan's, whatever the number of durable slots.

    Raises MemoryPlanError, ParityError.
    """
    runner = worker.model_runner
    if not hasattr(runner, "sgl_prefill_memory_plan"):
        _prepare(runner)
    plan: MemoryPlan = runner.sgl_prefill_memory_plan
    longest = plan.max_input_tokens
    max_total, max_prefill, max_running, max_queued, max_req, _, *rest = original(worker)
    # A step of several requests must not take more scratch and activations than the longest input.
    max_prefill = min(max_prefill, longest)
    max_req = max(max_req, longest + ANSWER_MARGIN_TOKENS - 1)
    # SGLang refuses an input of its own limit.
    return (max_total, max_prefill, max_running, max_queued, max_req, longest + 1, *rest)


def _prepare(runner: ModelRunner) -> None:
    config = record.config()
    reference = None
    if config.skip_parity_gate:
        logger.warning("--skip-parity-gate: nobody has checked that all paths of this engine give the same answers")
    else:
        reference = parity_gate.reference(runner)
    if runner.device == "cpu":
        record.add(cpu_kernel={**native().shown(), "pytorch_layers": _pytorch_layers(runner)})
        record.add(packed_weights=_pack_weights(runner))
    choose_chunk_tokens(runner)
    plan = _agreed(_plan(runner, config), runner)
    _apply(runner, plan)
    differences = None if reference is None else parity_gate.run(runner, reference)
    if config.scheduling == "calibrated-srjf" and (config.jct_model == "fitted" or config.pack_step_tokens is None):
        runner.sgl_prefill_jct = jct_profile.fitted_model(runner, plan.max_input_tokens)
        record.add(jct_model=runner.sgl_prefill_jct._asdict())
    runner.sgl_prefill_memory_plan = plan
    record.add(memory=_shown(plan), parity_gate=differences)


def _pytorch_layers(runner: ModelRunner) -> list[int]:
    """Layers whose attention PyTorch computes, one request after the other, in spite of native kernels."""
    find = getattr(prefill_backend(runner.attn_backend), "pytorch_layers", None)  # of our CPU backend
    layers: list[int] = [] if find is None else find(runner.model, runner.dtype)
    if layers:
        logger.warning(
            "PyTorch computes the attention of layers %s: their heads are not for the native kernels", layers
        )
    return layers


def _pack_weights(runner: ModelRunner) -> dict[str, Any] | None:
    """Lay the weights of matrix products out for this processor; what was done, None where the model runs in SGLang's layers."""
    hybrid = hybrid_of(runner)
    if hybrid is None or not hybrid.serves_short:
        return None
    problem = fused.pack(hybrid.products)
    of_experts, problem_of_experts = experts.pack_experts(runner.model)
    hybrid.products = [*hybrid.products, *of_experts]
    problem = problem or problem_of_experts
    if problem is not None:
        logger.warning("%s", problem)
    return {"bytes": fused.packed_bytes(hybrid.products), "problem": problem}


def _plan(runner: ModelRunner, config: PrefillConfig) -> MemoryPlan:
    is_evicting = isinstance(runner.token_to_kv_pool_allocator, SuffixKVAllocator)
    if not is_evicting and runner.device != "cpu":
        return _sglangs_own(runner, config)
    limit = input_limit(runner.model_config.context_len)
    if config.max_input_length is not None and config.max_input_length > limit:
        raise MemoryPlanError(
            f"--max-input-length is {config.max_input_length}, and this model's context length of"
            f" {runner.model_config.context_len} tokens allows {limit}: lower it, or raise --context-length"
        )
    budget = _budget(runner)
    wanted = config.max_input_length or limit
    scratch = runner.token_to_kv_pool_allocator.scratch_tokens if is_evicting else runner.max_total_num_tokens
    wanted = min(wanted, scratch)
    measured = memory_profile.measure_activations(runner, config, wanted, budget.kv_bytes + budget.slack_bytes)
    use = memory_profile.memory_use(runner, measured, budget.kv_bytes + budget.slack_bytes, is_evicting=is_evicting)
    page_size = runner.page_size
    try:
        plan = memory_plan.plan_memory(
            use,
            config.max_input_length,
            input_limit_tokens=limit,
            min_durable_tokens=ceil_to(MIN_DURABLE_TOKENS, page_size),
            page_size=page_size,
        )
    except ValueError as error:
        budget_flag = "--memory-budget-gb" if runner.device == "cpu" else "--mem-fraction-static"
        raise MemoryPlanError(f"{error}. Lower --max-input-length, or raise {budget_flag}") from error
    kv_bytes = budget.kv_bytes
    if is_evicting and runner.device != "cpu":
        # Scratch was made for the longest input that could be asked for; on a device all of it is there.
        kv_bytes -= runner.token_to_kv_pool.scratch_tokens * use.scratch_bytes_per_token
    most = max(kv_bytes, 0) // use.durable_bytes_per_token // page_size * page_size
    if most < MIN_DURABLE_TOKENS:
        raise MemoryPlanError(
            f"scratch for inputs of {scratch} tokens leaves {most} durable KV slots: name a shorter --max-input-length"
        )
    return plan._replace(durable_tokens=min(plan.durable_tokens, most, runner.max_total_num_tokens))


def _sglangs_own(runner: ModelRunner, config: PrefillConfig) -> MemoryPlan:
    """On a device whose pool keeps the whole KV, SGLang has divided the memory and backed the pool: that stays."""
    limit = min(input_limit(runner.model_config.context_len), runner.max_total_num_tokens - ANSWER_MARGIN_TOKENS)
    wanted = config.max_input_length or limit
    if wanted > limit:
        raise MemoryPlanError(
            f"--max-input-length is {wanted}, and the longest input that this KV pool and context length serve with"
            f" --suffix-kv keep has {limit} tokens: lower it, or start with --suffix-kv evict"
        )
    no_activations = memory_profile.Activations(0, 0.0)
    use = memory_profile.memory_use(
        runner, no_activations, record.get("memory_beyond_weights_bytes"), is_evicting=False
    )
    return MemoryPlan(use, wanted, limit, runner.max_total_num_tokens)


def _agreed(plan: MemoryPlan, runner: ModelRunner) -> MemoryPlan:
    """All ranks have measured for themselves, and must serve the same: the smallest of each number."""
    if runner.ps.tp_size == 1:
        return plan
    from sglang.srt.distributed.parallel_state import get_world_group

    numbers = torch.tensor([plan.max_input_tokens, plan.largest_input_tokens, plan.durable_tokens])
    group = get_world_group().cpu_group
    torch.distributed.all_reduce(numbers, op=torch.distributed.ReduceOp.MIN, group=group)
    longest, largest, durable = numbers.tolist()
    return plan._replace(max_input_tokens=longest, largest_input_tokens=largest, durable_tokens=durable)


def _budget(runner: ModelRunner) -> Budget:
    kv_bytes = record.get("memory_beyond_weights_bytes")
    if runner.device == "cpu":
        return Budget(kv_bytes, 0)
    from sglang.srt.runtime_context import get_schedule

    free_bytes = int(runner.pre_model_load_memory * 2**30)
    return Budget(kv_bytes, int(free_bytes * (1 - get_schedule().mem_fraction_static)))


def input_limit(context_length: int) -> int:
    """Longest input that the context length allows."""
    return int(context_length) - ANSWER_MARGIN_TOKENS


def _apply(runner: ModelRunner, plan: MemoryPlan) -> None:
    from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator

    allocator, pool = runner.token_to_kv_pool_allocator, runner.token_to_kv_pool
    if isinstance(allocator, SuffixKVAllocator):
        pool.commit(plan.durable_tokens)
        allocator.resize_durable(plan.durable_tokens)
    elif type(allocator) in (PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator):
        # Its own `resize` leaves the number of pages alone where a page is one token.
        allocator.size, allocator.num_pages = plan.durable_tokens, plan.durable_tokens // allocator.page_size
        allocator.clear()
    else:
        return  # a pool of several parts: SGLang has divided it, and the plan only limits the input
    runner.max_total_num_tokens = plan.durable_tokens


def _shown(plan: MemoryPlan) -> dict[str, Any]:
    """For /server_info, and as a table for the log."""
    rows = memory_plan.table(plan)
    lines = [
        f"  {what:<42} {mib:10.1f} MiB" + (f" {per_token:12.0f} bytes a token" if per_token is not None else "")
        for what, mib, per_token in rows
    ]
    logger.info(
        "memory plan, longest input %d tokens (this memory could serve %d):\n%s",
        plan.max_input_tokens,
        plan.largest_input_tokens,
        "\n".join(lines),
    )
    return {
        "max_input_tokens": plan.max_input_tokens,
        "largest_input_tokens": plan.largest_input_tokens,
        "durable_tokens": plan.durable_tokens,
        "rows": [{"what": what, "mib": round(mib, 2), "bytes_per_token": per} for what, mib, per in rows],
    }


def around_init_req_max_new_tokens(original: Callable[..., None], scheduler: Scheduler, req: Req) -> None:
    """Hook: one token needs no slot of its own, and more than one need all of the KV: SGLang would cut them silently."""
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
