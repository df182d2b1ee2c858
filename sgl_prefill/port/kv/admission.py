"""Suffix-KV eviction inside SGLang (PrefillOnly, section 5): builds the pool and its allocator, admits requests that are longer
than the durable slots, and allocates each request's KV by its plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from sgl_prefill.core.kv_plan import KVPlan, ceil_to, floor_to, plan_kv
from sgl_prefill.core.ranks import smallest
from sgl_prefill.errors import UnsupportedModelError
from sgl_prefill.port.kv.allocator import SuffixKVAllocator
from sgl_prefill.port.kv.pool import SuffixKVPool, SuffixLatentPool
from sgl_prefill.port.runner.rank_group import these_ranks
from sgl_prefill.port.steps import custom_params, request_state, time_stats
from sgl_prefill.startup.arguments import DEVICE_MEMORY_FRACTION
from sgl_prefill.startup.device import device_of, this_device
from sgl_prefill.startup.record import StartRecord
from sgl_prefill.startup.techniques import EVICT, POLICY, StepBack

if TYPE_CHECKING:
    import torch
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
    from sglang.srt.mem_cache.memory_pool import KVCache
    from sglang.srt.server_args import ServerArgs

    from sgl_prefill.port.kv.radix_cache import WatchedRadixCache


def use_live_inputs() -> None:
    """Makes SGLang use a batch's tensors directly. By default it copies them into static buffers as long as the KV pool, for CUDA
    graphs and the overlap loop.
    """
    from sglang.srt.environ import envs

    envs.SGLANG_EAGER_INPUT_NO_COPY.set(True)


def around_build_pool(
    record: StartRecord,
    original: Callable[..., KVCache],
    configurator: KVCacheConfigurator,
    *,
    sizes: Any,
    **_: Any,
) -> KVCache:
    """Hook: builds a pool with scratch instead of SGLang's. Raises UnsupportedModelError for kinds of pools that have none."""
    from sglang.srt.runtime_context import get_exec, get_parallel

    _refuse_other_pools(configurator)
    model, layers = configurator.model_config, configurator.layer_info
    rows: dict[str, Any]
    if configurator.use_mla_backend:
        pool, rows = SuffixLatentPool, {"kv_lora_rank": model.kv_lora_rank, "qk_rope_head_dim": model.qk_rope_head_dim}
    else:
        pool = SuffixKVPool
        rows = {
            "head_num": model.get_num_kv_heads(get_parallel().attn_tp_size),
            "head_dim": model.head_dim,
            "v_head_dim": model.v_head_dim,
        }
    options = {"dtype": configurator.kv_cache_dtype, **rows}
    per_token = sum(pool.rows_of(options)) * layers.num_effective_layers
    return pool(
        durable_tokens=_most_durable_tokens(configurator, sizes.max_total_num_tokens, per_token),
        # An upper limit: memory is committed on use, or by the memory plan.
        scratch_tokens=ceil_to(record.config.max_input_length or model.context_len, configurator.pool_page_size),
        page_size=configurator.pool_page_size,
        layer_num=layers.num_effective_layers,
        device=configurator.device,
        enable_memory_saver=get_exec().features.enable_memory_saver,
        start_layer=layers.start_layer,
        end_layer=layers.end_layer,
        **options,
    )


def _most_durable_tokens(configurator: KVCacheConfigurator, sglangs_tokens: int, per_token: int) -> int:
    """Returns SGLang's number on a host, or where the user has limited KV. Else as many as the free device memory holds: the
    memory plan commits only part of them (see `arguments.DEVICE_MEMORY_FRACTION`). per_token: bytes of all layers.
    """
    from sglang.srt.runtime_context import get_schedule

    device, schedule = device_of(configurator.device), get_schedule()
    is_set = schedule.max_total_tokens is not None or schedule.mem_fraction_static < DEVICE_MEMORY_FRACTION
    if device.backs_on_use or is_set:
        return sglangs_tokens
    (free_bytes,) = smallest(these_ranks(), [device.free_bytes()])
    return max(floor_to(free_bytes // per_token, configurator.pool_page_size), sglangs_tokens)


def unsupported_with(server_args: ServerArgs) -> list[StepBack]:
    """Returns the techniques that the model does not allow with these arguments."""
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.configs.model_config import ModelConfig

    view = resolving_view(server_args)
    # The one that `server_args` keeps is made before the platform's defaults, and may name another pool.
    found = unsupported(ModelConfig.from_server_args(server_args), looks_prefixes_up=not view.disable_radix_cache)
    if view.radix_eviction_policy == "tlru":
        found.append(StepBack((POLICY, EVICT), "--radix-eviction-policy is tlru (it needs SGLang's unified tree)"))
    return found


def unsupported(model: ModelConfig, *, looks_prefixes_up: bool = True) -> list[StepBack]:
    """Returns the techniques that the model does not allow."""
    from sglang.srt.configs.hybrid_arch import mambaish_config
    from sglang.srt.configs.model_config import AttentionArch, is_deepseek_dsa, is_deepseek_v4, is_minimax_sparse

    is_mla = model.attention_arch == AttentionArch.MLA
    needs_two_pools = model.is_hybrid_swa_compress or is_deepseek_v4(model.hf_config)
    kinds = {
        # The pool for it is not tested on an accelerator.
        "multi-head latent attention (MLA)": (is_mla and not this_device().is_host, (EVICT,)),
        "an index for sparse attention (DSA)": (is_deepseek_dsa(model.hf_config), (EVICT,)),
        "a separate sliding-window pool": (model.is_hybrid_swa or needs_two_pools, (POLICY, EVICT)),
        # A hit needs a snapshot of it.
        "linear-attention or Mamba state": (
            mambaish_config(model) is not None,
            (POLICY, EVICT) if looks_prefixes_up else (EVICT,),
        ),
        "sparse attention with an index": (is_minimax_sparse(model.hf_config), (EVICT,)),
        "an encoder whose output every layer reads": (model.is_encoder_decoder, (POLICY, EVICT)),
    }
    return [StepBack(without, f"this model has {kind}") for kind, (has_it, without) in kinds.items() if has_it]


def _refuse_other_pools(configurator: KVCacheConfigurator) -> None:
    """For a kind of pool that `startup.techniques` did not see before the start."""
    found = [one.reason for one in unsupported(configurator.model_config) if EVICT in one.techniques]
    if found:
        raise UnsupportedModelError(f"--suffix-kv evict: {', '.join(found)}: start with --suffix-kv keep")


def around_build_allocator(
    original: Callable[..., Any], configurator: KVCacheConfigurator, *arguments: Any, **options: Any
) -> Any:
    """Hook: builds SuffixKVPool's allocator, without durable slots until the memory plan is applied."""
    pool = options["token_to_kv_pool"]
    return SuffixKVAllocator(
        first_scratch_slot=pool.first_scratch_slot,
        scratch_tokens=pool.scratch_tokens,
        size=0,
        page_size=pool.page_size,
        dtype=configurator.kv_cache_dtype,
        device=configurator.device,
        kvcache=pool,
        need_sort=False,
    )


def decodes(req: Req) -> bool:
    """Whether the request generates after its prefill, and so needs all of its KV."""
    return bool(req.sampling_params.max_new_tokens > 1)


def around_add_one_req(original: Callable[..., Any], adder: Any, req: Req, *arguments: Any, **options: Any) -> Any:
    """Hook: lets followers follow their leaders."""
    allocator, budget = adder.token_to_kv_pool_allocator, adder.memory_budget
    # Beside a request that needs all of its KV the others count whole: they might lock the slots that it was admitted for.
    budget.counts_scratch = not any(map(decodes, (req, *adder.can_run_list)))
    n_more = _follow(adder, allocator, req)
    adder.rem_input_tokens += n_more
    try:
        return original(adder, req, *arguments, **options)
    finally:
        adder.rem_input_tokens -= n_more


def _follow(adder: Any, allocator: SuffixKVAllocator, req: Req) -> int:
    """Makes what the request's leader computes a part of its cached prefix. `_copy_slots` writes the slots later.

    Returns how many tokens a step of followers may compute beyond SGLang's limit: the longest input has that room.
    """
    state = request_state.of(req)
    state.leader, job = None, state.job
    if job is None or job.leader is None:
        return 0
    leader = next((one for one in adder.can_run_list if request_state.of(one).job is job.leader), None)
    n_more = job.n_led_tokens - req.prefix_len
    # SGLang may have left the leader out, or divided it.
    if leader is None or leader.extend_end < job.n_led_tokens or n_more <= 0:
        return 0
    state.leader = leader
    req.prefix_len += n_more
    n_computed = sum(one.extend_len for one in adder.can_run_list)
    return max(int(allocator.scratch_tokens - n_computed - adder.rem_input_tokens), 0)


def _copy_slots(batch: ScheduleBatch, plans: Sequence[KVPlan]) -> None:
    """Writes the slots of leaders into the rows of their followers."""
    table = batch.req_to_token_pool.req_to_token
    for req, plan in zip(batch.reqs, plans, strict=True):
        if (leader := request_state.of(req).leader) is None:
            continue
        table[req.kv.req_pool_idx, plan.n_cached : plan.n_led] = table[
            leader.kv.req_pool_idx, plan.n_cached : plan.n_led
        ]


def _room_for_background(cache: WatchedRadixCache, reqs: list[Req]) -> int | None:
    """Returns how many tokens a step of background jobs may evict; None for a step of other requests, or of generations."""
    if cache.of_background is None or not all(custom_params.is_background(req) and not decodes(req) for req in reqs):
        return None
    return cache.evictable_background_tokens() + cache.of_background.n_tokens_more


def around_alloc_for_extend(
    original: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]], batch: ScheduleBatch
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hook: plans each request's KV, evicts for the durable part, and lets SGLang allocate the planned slots."""
    cache: WatchedRadixCache = batch.tree_cache
    allocator = cache.token_to_kv_pool_allocator
    plans: list[KVPlan] = []
    n_promised = 0
    n_for_background = _room_for_background(cache, batch.reqs)
    for req in batch.reqs:
        state = request_state.of(req)
        n_input, n_reused = req.extend_end, req.prefix_len
        n_cached = n_reused if state.leader is None else req.kv.cache_protected_len
        n_free = allocator.available_size() - n_promised
        if cache.advisor is None or state.job is None or decodes(req):
            n_available = n_free + cache.evictable_size()
        else:
            n_missing = ceil_to(n_input - n_reused, allocator.page_size)
            n_available = cache.advisor.room_for(state.job, n_reused, n_missing, n_free)
        if n_for_background is not None:
            n_available = min(n_available, max(n_free + n_for_background, 0))
        plan = plan_kv(
            n_input=n_input,
            n_cached=n_cached,
            n_available=n_available,
            page_size=allocator.page_size,
            all_durable=decodes(req),
            leader=None if state.leader is None else plans[batch.reqs.index(state.leader)],
            n_led=0 if state.leader is None else n_reused,
        )
        n_promised += ceil_to(plan.n_new_durable, allocator.page_size)
        plans.append(plan)
    cache.evict_tokens(n_promised - allocator.available_size(), for_background=n_for_background is not None)
    with allocator.serving(plans):
        allocated = original(batch)
    _copy_slots(batch, plans)
    for req, plan in zip(batch.reqs, plans, strict=True):
        cache.lend_scratch(req, plan)
        time_stats.add_facts(req.time_stats, kept_tokens=plan.n_durable, evicted_tokens=plan.n_input - plan.n_durable)
    return allocated
