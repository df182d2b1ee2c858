"""The start between loading the model and the first request: reference answers, packed weights, chunk size, memory plan, parity
gate, JCT model.
"""

from __future__ import annotations

import logging

from sgl_prefill.config import PrefillConfig
from sgl_prefill.core import gpu_memory, memory_plan
from sgl_prefill.core.kv_plan import ceil_to
from sgl_prefill.core.memory_plan import MemoryPlan
from sgl_prefill.core.ranks import smallest
from sgl_prefill.errors import MemoryPlanError, UnsupportedModelError
from sgl_prefill.startup import jct_profile, memory_profile, parity_gate
from sgl_prefill.startup.chunk_size import choose_chunk_tokens
from sgl_prefill.startup.loaded_model import LoadedModel
from sgl_prefill.startup.record import StartRecord
from sgl_prefill.startup.techniques import EVICT

logger = logging.getLogger(__name__)

ANSWER_MARGIN_TOKENS = 7  # tokens of the context length that SGLang reserves for the answer and a margin
MIN_DURABLE_TOKENS = 64  # with fewer durable slots not even a short request could be cached


def prepare(record: StartRecord, model: LoadedModel) -> None:
    """Raises MemoryPlanError, ParityError, UnsupportedModelError."""
    config = record.config
    references = None
    logger.info("measures what the longest input takes, divides the memory, and checks all paths against each other")
    if config.skip_parity_gate:
        logger.warning(
            "--set skip_parity_gate=true: it was not checked that all paths of this engine give the same answers"
        )
    elif model.hybrid is not None or model.is_evicting:  # else SGLang's layers and KV pool serve: there is one path
        longest = _longest_possible(model, config)
        references = parity_gate.reference(model, min(longest, model.alike_tokens or longest))
    record.cpu_kernel, record.packed_weights = model.pack_weights()
    if model.hybrid is not None:
        choose_chunk_tokens(model, config.hybrid_chunk_tokens)
    record.passes = {
        "chunk_tokens": None if model.hybrid is None else model.hybrid.chunk_tokens,
        "plain_tokens": None if model.hybrid is None else model.hybrid.plain_tokens,
        "graphed_tokens": model.graphed_tokens,
    }
    if config.stable_answers != "off":
        _make_stable(record, model)
    parity_gate.share_rows(model)
    assert record.memory_beyond_weights_bytes is not None
    with model.without_graphs():  # a replay uses the graph's memory, which is allocated already
        plan = _agreed(_plan(model, config, record.memory_beyond_weights_bytes), model)
    model.apply(plan)
    if references is not None:
        record.parity_differences = parity_gate.run(model, references, plan.max_input_tokens)
    if config.has_policy and (config.jct_model == "fitted" or config.pack_step_tokens is None):
        record.jct_ms = jct_profile.fitted_model(model, plan.max_input_tokens)
    record.memory_plan = plan
    logger.info("memory plan, %s", memory_plan.as_text(plan))


def _make_stable(record: StartRecord, model: LoadedModel) -> None:
    try:
        record.stable_answers = model.make_stable()
    except UnsupportedModelError as error:
        if record.config.stable_answers == "on":
            raise UnsupportedModelError(
                f"--stable-answers on cannot hold here: {error}. Start with --stable-answers auto"
            ) from error
        record.unstable_answers = str(error)
        logger.info("an answer may differ in its last digits with what runs beside it and what is cached: %s", error)


def _longest_possible(model: LoadedModel, config: PrefillConfig) -> int:
    """Returns the longest input that options and KV pool allow, equal on all ranks. The memory plan may allow less."""
    slots = model.scratch_tokens if model.is_evicting else model.most_durable_tokens
    limit = input_limit(model.context_tokens)
    (longest,) = smallest(model.ranks, [min(config.max_input_length or limit, limit, slots)])
    return longest


def _plan(model: LoadedModel, config: PrefillConfig, kv_bytes: int) -> MemoryPlan:
    """kv_bytes: memory besides the weights, for KV; on a host for activations too."""
    if not model.is_evicting and not model.device.budget_holds_activations:
        return _sglangs_plan(model, config, kv_bytes)
    limit = input_limit(model.context_tokens)
    if config.max_input_length is not None and config.max_input_length > limit:
        raise MemoryPlanError(
            f"--max-input-length is {config.max_input_length}, and this model's context length of"
            f" {model.context_tokens} tokens allows {limit}: lower it, or raise --context-length"
        )
    scratch = model.scratch_tokens if model.is_evicting else model.most_durable_tokens
    (wanted,) = smallest(model.ranks, [min(config.max_input_length or limit, scratch)])
    measured = memory_profile.measure_activations(model, config, wanted, kv_bytes)
    use = memory_profile.memory_use(model, measured, _room(model, kv_bytes))
    try:
        plan = memory_plan.plan_memory(
            use,
            config.max_input_length,
            input_limit_tokens=min(limit, measured.longest_tokens),
            min_durable_tokens=ceil_to(MIN_DURABLE_TOKENS, model.page_size),
            page_size=model.page_size,
        )
    except memory_plan.InputDoesNotFitError as error:
        raise MemoryPlanError(_does_not_fit(model, error, use)) from error
    plan = plan._replace(
        largest_input_tokens=min(plan.largest_input_tokens, measured.longest_tokens),
        durable_tokens=min(plan.durable_tokens, _most_durable_tokens(model, plan, kv_bytes)),
    )
    return plan if model.is_evicting else _all_kept(plan, config)


def _all_kept(plan: MemoryPlan, config: PrefillConfig) -> MemoryPlan:
    """Limits the input to what the KV pool holds whole."""
    limit = plan.durable_tokens - ANSWER_MARGIN_TOKENS
    if config.max_input_length is not None and config.max_input_length > limit:
        raise MemoryPlanError(_longer_than_the_pool(config, limit))
    return plan._replace(
        max_input_tokens=min(plan.max_input_tokens, limit), largest_input_tokens=min(plan.largest_input_tokens, limit)
    )


def _longer_than_the_pool(config: PrefillConfig, limit: int) -> str:
    remedy = "" if EVICT.name in config.stepped_back else ", or start with --suffix-kv evict"
    return (
        f"--max-input-length is {config.max_input_length}, and the longest input that this KV pool and context length serve"
        f" whole has {limit} tokens: lower it{remedy}"
    )


def _room(model: LoadedModel, kv_bytes: int) -> int:
    (room_bytes,) = smallest(model.ranks, [model.room_bytes(kv_bytes)])
    return room_bytes


def _does_not_fit(model: LoadedModel, error: memory_plan.InputDoesNotFitError, use: memory_plan.MemoryUse) -> str:
    if not error.largest_tokens and not model.device.is_host:
        return gpu_memory.too_small(
            model.name, model.device.model(), model.device.total_bytes(), use.weights_bytes, error.missing_bytes
        )
    shorter = "lower --max-input-length, or " if error.largest_tokens else ""
    remedy = f"{shorter}raise {model.device.budget_flag}"
    return f"{error}. {remedy[0].upper()}{remedy[1:]}"


def _most_durable_tokens(model: LoadedModel, plan: MemoryPlan, kv_bytes: int) -> int:
    """Limit of durable slots by the pool's addresses, and by the user's limit on KV less scratch."""
    most = model.most_durable_tokens
    if (kv_limit_bytes := model.kv_limit_bytes(kv_bytes)) is None:
        return most
    scratch_bytes = plan.max_input_tokens * plan.use.scratch_bytes_per_token
    for_kv = max(kv_limit_bytes - scratch_bytes, 0) // plan.use.durable_bytes_per_token
    most = min(most, for_kv // model.page_size * model.page_size)
    if most < MIN_DURABLE_TOKENS:
        raise MemoryPlanError(
            f"of the {kv_limit_bytes / 2**20:.0f} MiB that {model.device.budget_flag} leaves for KV, suffix scratch for inputs of"
            f" {plan.max_input_tokens} tokens takes {scratch_bytes / 2**20:.0f} MiB, and {most} durable KV slots are left:"
            f" raise {model.device.budget_flag}, or lower --max-input-length"
        )
    return most


def _sglangs_plan(model: LoadedModel, config: PrefillConfig, kv_bytes: int) -> MemoryPlan:
    """On a device without suffix-KV eviction: SGLang's division of the memory."""
    limit = min(input_limit(model.context_tokens), model.most_durable_tokens - ANSWER_MARGIN_TOKENS)
    wanted = config.max_input_length or limit
    if wanted > limit:
        raise MemoryPlanError(_longer_than_the_pool(config, limit))
    use = memory_profile.memory_use(model, memory_profile.Activations(0, 0.0), kv_bytes)
    return MemoryPlan(use, wanted, limit, model.most_durable_tokens)


def _agreed(plan: MemoryPlan, model: LoadedModel) -> MemoryPlan:
    """Returns the smallest of each number over all ranks."""
    longest, largest, durable = smallest(
        model.ranks, [plan.max_input_tokens, plan.largest_input_tokens, plan.durable_tokens]
    )
    return plan._replace(max_input_tokens=longest, largest_input_tokens=largest, durable_tokens=durable)


def input_limit(context_length: int) -> int:
    return int(context_length) - ANSWER_MARGIN_TOKENS
