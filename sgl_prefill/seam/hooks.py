"""Every place where this engine touches SGLang's insides, in one list. `seam.activation` applies and verifies it.

Besides these, SGLang's own parameters carry our parts: `launch_server(init_tokenizer_manager_func,
run_scheduler_process_func, execute_warmup_func)`, the platform and the attention-backend registries.
"""

from __future__ import annotations

from sgl_prefill import prefork
from sgl_prefill.config import PrefillConfig
from sgl_prefill.cpu import kernels, lm_head
from sgl_prefill.cpu.detect import has_accelerator
from sgl_prefill.hybrid import install as hybrid
from sgl_prefill.kv import install as kv
from sgl_prefill.scheduling import arrival, out_of_memory, reply_facts, step
from sgl_prefill.seam import record
from sgl_prefill.seam.declare import Hook, Relied, Route
from sgl_prefill.startup import install as startup

HOOKS: tuple[Hook, ...] = (
    Hook(
        target="sglang.srt.entrypoints.engine._set_envs_and_config",
        kind="after",
        process="http",
        feature="no-accelerator",
        reason="fork scheduler and detokenizer from a process that has imported SGLang meanwhile, instead of spawning them",
        function=prefork.after_set_envs_and_config,
    ),
    Hook(
        target="sglang.srt.observability.req_time_stats.APIServerReqTimeStats.__getstate__",
        kind="after",
        process="http",
        feature="always",
        reason="tell the scheduler when a request arrived: it is deaf during a forward and would stamp it afterwards",
        function=arrival.after_getstate,
    ),
    Hook(
        target="sglang.srt.managers.scheduler.Scheduler.init_schedule_policy",
        kind="after",
        process="scheduler",
        feature="scheduling",
        reason="build the calibrated SRJF policy, and refuse a prefix cache that its read-only probe does not know",
        function=step.after_init_schedule_policy,
    ),
    Hook(
        target="sglang.srt.managers.scheduler.Scheduler.get_new_batch_prefill",
        kind="around",
        process="scheduler",
        feature="scheduling",
        reason="show SGLang's prefill admission only the one request that the policy picked for this step",
        function=step.around_get_new_batch_prefill,
    ),
    Hook(
        target="sglang.srt.managers.scheduler.Scheduler.process_batch_result",
        kind="after",
        process="scheduler",
        feature="scheduling",
        reason="compare the predicted time of a request with what it took",
        function=step.after_process_batch_result,
    ),
    Hook(
        target="sglang.srt.model_executor.model_runner.ModelRunner.init_attention_backends",
        kind="after",
        process="scheduler",
        feature="hybrid-prefill",
        reason="trace the model's body and run long extends through it, all but attention chunk by chunk",
        function=hybrid.after_init_attention_backends,
    ),
    Hook(
        target="sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._profile_available_bytes",
        kind="around",
        process="scheduler",
        feature="always",
        reason="on a host, --memory-budget-gb is an amount: what is free at one moment must not change the KV pool",
        function=startup.around_profile_available_bytes,
    ),
    Hook(
        target="sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._build_token_to_kv_pool",
        kind="around",
        process="scheduler",
        feature="suffix-kv",
        reason="KV buffers whose tails all layers share",
        function=kv.around_build_pool,
    ),
    Hook(
        target="sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._build_token_to_kv_pool_allocator",
        kind="around",
        process="scheduler",
        feature="suffix-kv",
        reason="durable slots and scratch have different rules",
        function=kv.around_build_allocator,
    ),
    Hook(
        target="sglang.srt.managers.schedule_policy.PrefillAdder.add_one_req",
        kind="around",
        process="scheduler",
        feature="suffix-kv",
        reason="SGLang admits a request only if the whole of it fits the durable slots",
        function=kv.around_add_one_req,
    ),
    Hook(
        target="sglang.srt.mem_cache.allocation.alloc_for_extend",
        kind="around",
        process="scheduler",
        feature="suffix-kv",
        reason="plan which KV is kept before the forward, and allocate by that plan",
        function=kv.around_alloc_for_extend,
    ),
    Hook(
        target="sglang.srt.managers.tp_worker.TpModelWorker.get_worker_info",
        kind="around",
        process="scheduler",
        feature="always",
        reason="profile the longest input, divide the memory, check that all paths agree, and report the limits",
        function=startup.around_get_worker_info,
    ),
    Hook(
        target="sglang.srt.managers.scheduler.Scheduler.init_req_max_new_tokens",
        kind="around",
        process="scheduler",
        feature="suffix-kv",
        reason="SGLang would cut the one token of a request that is longer than the durable slots",
        function=startup.around_init_req_max_new_tokens,
    ),
    Hook(
        target="sglang.srt.managers.scheduler.Scheduler.run_batch",
        kind="around",
        process="scheduler",
        feature="always",
        reason="a forward pass that runs out of memory would end the server",
        function=out_of_memory.around_run_batch,
    ),
    Hook(
        target="sglang.srt.managers.scheduler.Scheduler.process_batch_result",
        kind="around",
        process="scheduler",
        feature="always",
        reason="the requests of such a pass have been answered already",
        function=out_of_memory.around_process_batch_result,
    ),
    Hook(
        target="sglang.srt.observability.req_time_stats.SchedulerReqTimeStats.__getstate__",
        kind="after",
        process="scheduler",
        feature="always",
        reason="carry kept_tokens, evicted_tokens and predicted_jct_ms to the HTTP process",
        function=reply_facts.after_getstate,
    ),
    Hook(
        target="sglang.srt.observability.req_time_stats.SchedulerReqTimeStats.__getstate__",
        kind="after",
        process="detokenizer",
        feature="always",
        reason="pass them on: the detokenizer stands between the two and writes each reply anew",
        function=reply_facts.after_getstate,
    ),
    Hook(
        target="sglang.srt.observability.req_time_stats.SchedulerReqTimeStats.convert_to_output_meta_info",
        kind="after",
        process="http",
        feature="always",
        reason="show them in the reply",
        function=reply_facts.after_convert_to_output_meta_info,
    ),
    Hook(
        target="sglang.srt.layers.logits_processor.LogitsProcessor._compute_lm_head",
        kind="around",
        process="scheduler",
        feature="logits-dtype",
        reason="label logits in float32: rounded to bfloat16 they tie, and P(label) is off by up to 0.02",
        function=lm_head.around_compute_lm_head,
    ),
    Hook(
        target="sglang.kernels.ops.activation.softcap.softcap_inplace_logits",
        kind="around",
        process="scheduler",
        feature="no-accelerator",
        reason="soft-capped logits (Gemma 2) would end in a Triton kernel without a driver",
        function=kernels.around_softcap_logits,
    ),
    Hook(
        target="sglang.kernels.ops.elementwise.elementwise.fused_gate_sigmoid_mul_add",
        kind="around",
        process="scheduler",
        feature="no-accelerator",
        reason="a gated shared expert (Qwen2-MoE) would end in a Triton kernel without a driver",
        function=kernels.around_gate_sigmoid_mul_add,
    ),
    Hook(
        target="sglang.srt.managers.scheduler.Scheduler.get_init_info",
        kind="after",
        process="scheduler",
        feature="always",
        reason="carry the activation record to /server_info, so that nobody measures an engine that is not there",
        function=record.after_get_init_info,
    ),
)

ROUTES: tuple[Route, ...] = (
    Route(
        method="POST",
        path="/v1/completions",
        stock_endpoint="sglang.srt.entrypoints.http_server.openai_v1_completions",
        reason="allowed_tokens, allowed_token_ids; max_tokens 1 by default",
    ),
    Route(
        method="POST",
        path="/v1/chat/completions",
        stock_endpoint="sglang.srt.entrypoints.http_server.openai_v1_chat_completions",
        reason="allowed_tokens, allowed_token_ids; max_tokens 1 by default",
    ),
    Route(
        method="POST",
        path="/generate",
        stock_endpoint="sglang.srt.entrypoints.http_server.generate_request",
        reason="allowed_tokens, allowed_token_ids",
    ),
    Route(
        method="POST",
        path="/v1/rerank",
        stock_endpoint="sglang.srt.entrypoints.http_server.v1_rerank_request",
        reason="rerank with any causal language model, not only with a reranker's chat template",
    ),
)

RELIED_UPON: tuple[Relied, ...] = (
    Relied(
        "sglang.srt.managers.scheduler.run_scheduler_process", "our process function activates hooks, then calls it"
    ),
    Relied(
        "sglang.srt.managers.scheduler.Scheduler._get_new_batch_prefill_raw", "reads self.waiting_queue once a step"
    ),
    Relied("sglang.srt.managers.schedule_batch.Req._compute_max_prefix_len", "the policy counts cached tokens like it"),
    Relied("sglang.srt.mem_cache.radix_cache.RadixCache._match_prefix_helper", "the read-only probe walks like it"),
    Relied("sglang.srt.managers.tokenizer_manager.TokenizerManager.generate_request", "overridden: checks come first"),
    Relied("sglang.srt.managers.tokenizer_manager.TokenizerManager._validate_one_request", "overridden: input limit"),
    Relied(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager._handle_abort_finish_reason",
        "overridden: 429 and 504 for deadlines",
    ),
    Relied("sglang.srt.managers.tokenizer_manager.TokenizerManager._handle_batch_output", "label scores in meta_info"),
    Relied(
        "sglang.srt.observability.req_time_stats.ReqTimeStatsBase.new_from_obj",
        "copies the arrival time into the scheduler's own stats, on the scheduler's clock",
    ),
    Relied(
        "sglang.srt.entrypoints.openai.serving_completions.OpenAIServingCompletion._convert_to_internal_request",
        "label scoring renders prompts with it",
    ),
    Relied(
        "sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat._convert_to_internal_request",
        "label scoring renders chats with it",
    ),
    Relied("sglang.srt.entrypoints.http_server._execute_server_warmup", "our warm-up stands in for it"),
    Relied(
        "sglang.srt.layers.logits_processor.should_apply_lm_head_quant_method", "which LM heads have a plain weight"
    ),
    Relied("sglang.srt.layers.attention.hybrid_attn_backend.HybridAttnBackend", "two names, one backend on CPU"),
    Relied("sglang.srt.mem_cache.memory_pool.MHATokenToKVPool._create_buffers_normal", "overridden"),
    Relied("sglang.srt.mem_cache.memory_pool.MHATokenToKVPool.set_kv_buffer", "hybrid prefilling writes K, V with it"),
    Relied("sglang.srt.mem_cache.radix_cache.RadixCache.cache_finished_req", "our cache cuts what reaches it"),
    Relied("sglang.srt.mem_cache.allocator.paged.PagedTokenToKVPoolAllocator", "our allocator extends it"),
    Relied("sglang.srt.mem_cache.common.release_kv_cache", "gives a finished request's slots back"),
    Relied("sglang.srt.layers.radix_attention.RadixAttention.forward", "the traced graph is cut at its operation"),
    Relied("sglang.srt.model_executor.runner.eager_runner.EagerRunner.load_batch", "copies inputs unless told not to"),
)


def hooks_for(config: PrefillConfig, process: str) -> tuple[Hook, ...]:
    """The hooks that these options ask for in this process, in application order."""
    wanted = {
        "always": True,
        "scheduling": config.scheduling == "calibrated-srjf",
        "hybrid-prefill": config.hybrid_prefill != "off",
        "suffix-kv": config.suffix_kv == "evict",
        "no-accelerator": not has_accelerator(),
        "logits-dtype": config.logits_dtype == "float32",
    }
    return tuple(hook for hook in HOOKS if hook.process == process and wanted[hook.feature])


def fingerprinted_targets() -> tuple[str, ...]:
    """Every dotted path whose source must be the one that we read."""
    targets = [
        *(hook.target for hook in HOOKS),
        *(route.stock_endpoint for route in ROUTES),
        *(relied.target for relied in RELIED_UPON),
    ]
    return tuple(dict.fromkeys(targets))
