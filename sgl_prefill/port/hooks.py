"""Every place where this engine touches SGLang's insides, in lists: hooks, overridden methods, attributes that we set, switches,
routes, and what we rely on. `activation` applies and verifies the hooks; the source of all of it is fingerprinted.

Besides these, SGLang's own parameters carry our parts: `launch_server(init_tokenizer_manager_func,
run_scheduler_process_func, run_detokenizer_process_func, execute_warmup_func)`, the platform and the attention-backend
registries.
"""

from __future__ import annotations

from sgl_prefill.api import conversations
from sgl_prefill.config import PrefillConfig
from sgl_prefill.cpu import experts, lm_head, ranks
from sgl_prefill.device import this_device
from sgl_prefill.gpu import two_parts
from sgl_prefill.port import (
    answer_trees,
    arrival,
    between_steps,
    dashboard,
    device_logits,
    hybrid,
    idle,
    kv,
    label_logprobs,
    loopback,
    namespaces,
    out_of_memory,
    processes,
    replays,
    reply_facts,
    scheduler,
    shared_prefixes,
    startup,
    uncompiled,
)
from sgl_prefill.port.declare import Hook, Override, Poke, Relied, Route, Switch

FLASH_ATTENTION = "flashattention_backend.FlashAttentionBackend"  # not to be imported without a CUDA device
RESULTS = "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"

HOOKS: tuple[Hook, ...] = (
    Hook(
        target="sglang.srt.entrypoints.engine._set_envs_and_config",
        kind="after",
        process="http",
        feature="always",
        reason="fork scheduler and detokenizer from a process that has imported SGLang meanwhile, instead of spawning them; and"
        " end with a message and a status where one of them fails, not with SIGKILL",
        function=processes.after_set_envs_and_config,
        takes_state=True,
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
        target="sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat._process_messages",
        kind="around",
        process="http",
        feature="always",
        reason="a client's template is a program that runs as long as it likes, and an empty conversation is a 500; long ones are"
        " filled beside the event loop",
        function=conversations.around_process_messages,
    ),
    Hook(
        target="sglang.srt.managers.scheduler.Scheduler.__init__",
        kind="around",
        process="scheduler",
        feature="always",
        reason="what cannot start says so in one message, and not in a traceback of SGLang's",
        function=processes.around_scheduler_init,
        takes_state=True,
    ),
    Hook(
        target="sglang.srt.distributed.bootstrap._resolve_dist_init_method",
        kind="around",
        process="scheduler",
        feature="always",
        reason="the ranks' store would listen on every interface of the machine, whatever --host says",
        function=loopback.around_resolve_dist_init_method,
    ),
    Hook(
        target="sglang.srt.distributed.parallel_state.init_model_parallel_group",
        kind="around",
        process="scheduler",
        feature="no-accelerator",
        reason="several ranks on a host end in a communicator of NCCL",
        function=ranks.around_init_model_parallel_group,
    ),
    Hook(
        target="sglang.srt.distributed.parallel_state.GroupCoordinator.all_reduce",
        kind="around",
        process="scheduler",
        feature="no-accelerator",
        reason="a recorded body would hold a collective operation in parts, and not the one that is known to be token-wise",
        function=ranks.around_all_reduce,
    ),
    Hook(
        target="sglang.srt.distributed.bootstrap._init_cpu_threads_env",
        kind="around",
        process="scheduler",
        feature="no-accelerator",
        reason="ranks on a host would all compute on the same cores",
        function=ranks.around_init_cpu_threads,
    ),
    Hook(
        target="sglang.srt.managers.scheduler.Scheduler.init_schedule_policy",
        kind="after",
        process="scheduler",
        feature="scheduling",
        reason="build the policy, and refuse a prefix cache that it cannot read",
        function=scheduler.after_init_schedule_policy,
        takes_state=True,
    ),
    Hook(
        target="sglang.srt.managers.scheduler.Scheduler.get_new_batch_prefill",
        kind="around",
        process="scheduler",
        feature="scheduling",
        reason="show SGLang's prefill admission only what the policy picked for this step",
        function=scheduler.around_get_new_batch_prefill,
        takes_state=True,
    ),
    Hook(
        target="sglang.srt.managers.scheduler.Scheduler.abort_request",
        kind="around",
        process="scheduler",
        feature="scheduling",
        reason="a client that leaves with ten thousand requests would have each compared with all that wait",
        function=scheduler.around_abort_request,
        takes_state=True,
    ),
    Hook(
        target="sglang.srt.managers.scheduler_components.request_receiver.SchedulerRequestReceiver.recv_requests",
        kind="around",
        process="scheduler",
        feature="scheduling",
        reason="messages that are no requests have waited for SGLang's own turn",
        function=between_steps.around_recv_requests,
        takes_state=True,
    ),
    Hook(
        target="sglang.srt.managers.scheduler.Scheduler.process_batch_result",
        kind="around",
        process="scheduler",
        feature="scheduling",
        reason="a device would stand still while new requests are received, matched and ordered; and predicted times are compared"
        " with what steps have taken",
        function=between_steps.around_process_batch_result,
        takes_state=True,
    ),
    Hook(
        target="sglang.srt.managers.scheduler.Scheduler.publish_load_snapshot",
        kind="around",
        process="scheduler",
        feature="scheduling",
        reason="with ten thousand requests waiting, adding their lengths up takes 13 ms a step",
        function=scheduler.around_publish_load_snapshot,
        takes_state=True,
    ),
    Hook(
        target="sglang.srt.managers.schedule_batch.Req.__init__",
        kind="after",
        process="scheduler",
        feature="always",
        reason="prefixes are a tenant's own, on the routes too that know no salts (embeddings, scores, reranking)",
        function=namespaces.after_req_init,
    ),
    Hook(
        target="sglang.srt.model_executor.model_runner.ModelRunner.init_attention_backends",
        kind="after",
        process="scheduler",
        feature="hybrid-prefill",
        reason="trace the model's body and run long extends through it, all but attention chunk by chunk",
        function=hybrid.after_init_attention_backends,
        takes_state=True,
    ),
    Hook(
        target="sglang.srt.managers.schedule_batch.ScheduleBatch.init_new",
        kind="around",
        process="scheduler",
        feature="neighbours",
        reason="on a GPU only neighbours read a shared prefix together",
        function=shared_prefixes.around_init_new,
    ),
    Hook(
        target="sglang.srt.managers.scheduler.Scheduler.get_internal_state",
        kind="after",
        process="scheduler",
        feature="neighbours",
        reason="how many steps read a prefix together stands in /server_info",
        function=shared_prefixes.after_get_internal_state,
    ),
    Hook(
        target="sglang.srt.model_executor.model_runner.ModelRunner.init_attention_backends",
        kind="after",
        process="scheduler",
        feature="shared-prefixes-asked",
        reason="the CPU kernel is told to read no prefix for several, and what is asked for in vain is refused",
        function=shared_prefixes.after_init_attention_backends,
        takes_state=True,
    ),
    Hook(
        target="sglang.srt.model_executor.runner.prefill_cuda_graph_runner.PrefillCudaGraphRunner.can_run_graph",
        kind="around",
        process="scheduler",
        feature="accelerator",
        reason="a replay knows nothing of answers of several tokens, and the start compares paths without it",
        function=replays.around_can_run_graph,
        takes_state=True,
    ),
    Hook(
        target="sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._profile_available_bytes",
        kind="around",
        process="scheduler",
        feature="always",
        reason="on a host, --memory-budget-gb is an amount: what is free at one moment must not change the KV pool",
        function=startup.around_profile_available_bytes,
        takes_state=True,
    ),
    Hook(
        target="sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._build_token_to_kv_pool",
        kind="around",
        process="scheduler",
        feature="suffix-kv",
        reason="KV buffers whose tails all layers share",
        function=kv.around_build_pool,
        takes_state=True,
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
        takes_state=True,
    ),
    Hook(
        target="sglang.srt.managers.scheduler.Scheduler.init_req_max_new_tokens",
        kind="around",
        process="scheduler",
        feature="suffix-kv",
        reason="SGLang would cut the one token of a request that is longer than the durable slots",
        function=startup.around_init_req_max_new_tokens,
        takes_state=True,
    ),
    Hook(
        target="sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._build_req_to_token_pool",
        kind="around",
        process="scheduler",
        feature="always",
        reason="rows in which the tokens of answers name the KV slots that they see",
        function=answer_trees.around_build_table,
        takes_state=True,
    ),
    Hook(
        target="sglang.srt.managers.tp_worker.TpModelWorker.forward_batch_generation",
        kind="around",
        process="scheduler",
        feature="always",
        reason="answers of several tokens get their slots, and their requests what was found",
        function=answer_trees.around_forward_batch_generation,
        takes_state=True,
    ),
    Hook(
        target="sglang.srt.model_executor.model_runner.ModelRunner.forward",
        kind="around",
        process="scheduler",
        feature="always",
        reason="compute answers of several tokens in the pass of their prompt",
        function=answer_trees.around_forward,
        takes_state=True,
    ),
    Hook(
        target="sglang.srt.layers.logits_processor.LogitsProcessor.forward",
        kind="around",
        process="scheduler",
        feature="always",
        reason="of an answer's tokens a few log-probabilities are wanted, and no row of logits",
        function=answer_trees.around_logits,
        takes_state=True,
    ),
    Hook(
        target="sglang.srt.layers.logprob_processor.get_token_ids_logprobs_batch_optimized",
        kind="around",
        process="scheduler",
        feature="always",
        reason="each step of label requests would be waited for before the next requests are looked at",
        function=label_logprobs.around_gather,
    ),
    Hook(
        target=f"{RESULTS}.move_logprobs_to_cpu",
        kind="around",
        process="scheduler",
        feature="always",
        reason="what was found for answers of several tokens is read with the rest of a step's result; and as below",
        function=answer_trees.around_move_logprobs,
        takes_state=True,
    ),
    Hook(
        target=f"{RESULTS}._normalize_decode_outputs",
        kind="around",
        process="scheduler",
        feature="always",
        reason="a step with labels for one request and none for another would end the scheduler; each request's labels"
        " would be read from a device by themselves",
        function=label_logprobs.around_lists_of_logprobs,
    ),
    Hook(
        target="sglang.srt.managers.scheduler.Scheduler.on_idle",
        kind="after",
        process="scheduler",
        feature="no-accelerator",
        reason="the process would keep what steps of many sizes leave of its memory",
        function=idle.after_on_idle,
        takes_state=True,
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
        takes_state=True,
    ),
    Hook(
        target="sglang.srt.layers.logits_processor.LogitsProcessor._compute_lm_head",
        kind="around",
        process="scheduler",
        feature="device-logits",
        reason="the same on a GPU",
        function=device_logits.around_compute_lm_head,
    ),
    Hook(
        target="sglang.srt.sampling.penaltylib.repetition_penalty.apply_scaling_penalties",
        kind="around",
        process="scheduler",
        feature="always",
        reason="its first call compiles for 15 seconds, in which nobody is answered",
        function=uncompiled.around_compiled,
    ),
    Hook(
        target="sglang.srt.layers.sampler.multinomial_with_seed",
        kind="around",
        process="scheduler",
        feature="always",
        reason="its first call compiles for seconds, in which nobody is answered",
        function=uncompiled.around_compiled,
    ),
    Hook(
        target="sglang.kernels.ops.activation.softcap.softcap_inplace_logits",
        kind="around",
        process="scheduler",
        feature="no-accelerator",
        reason="soft-capped logits (Gemma 2) would end in a Triton kernel without a driver",
        function=lm_head.around_softcap_logits,
    ),
    Hook(
        target="sglang.kernels.ops.elementwise.elementwise.fused_gate_sigmoid_mul_add",
        kind="around",
        process="scheduler",
        feature="no-accelerator",
        reason="a gated shared expert (Qwen2-MoE) would end in a Triton kernel without a driver",
        function=experts.around_gate_sigmoid_mul_add,
    ),
    Hook(
        target="sglang.srt.managers.scheduler.Scheduler.get_internal_state",
        kind="around",
        process="scheduler",
        feature="always",
        reason="/dashboard and /scheduler/decisions ask by the same message what the scheduler does",
        function=dashboard.around_get_internal_state,
        takes_state=True,
    ),
    Hook(
        target="sglang.srt.managers.scheduler.Scheduler.get_init_info",
        kind="after",
        process="scheduler",
        feature="always",
        reason="carry the activation record to /server_info, so that nobody measures an engine that is not there",
        function=startup.after_get_init_info,
        takes_state=True,
    ),
)

ROUTES: tuple[Route, ...] = (
    Route(
        method="POST",
        path="/v1/completions",
        stock_endpoint="sglang.srt.entrypoints.http_server.openai_v1_completions",
        reason="allowed_tokens, allowed_token_ids, prompt_parts; max_tokens 1 by default",
    ),
    Route(
        method="POST",
        path="/v1/chat/completions",
        stock_endpoint="sglang.srt.entrypoints.http_server.openai_v1_chat_completions",
        reason="allowed_tokens, allowed_token_ids, keep; max_tokens 1 by default",
    ),
    *(
        Route(
            method="POST",
            path=path,
            stock_endpoint="sglang.srt.entrypoints.http_server.openai_v1_detokenize",
            reason="an id outside the vocabulary ends in a 500",
        )
        for path in ("/detokenize", "/v1/detokenize")
    ),
    *(
        Route(
            method="POST",
            path=path,
            stock_endpoint="sglang.srt.entrypoints.http_server.openai_v1_tokenize",
            reason="long texts would stop all others",
        )
        for path in ("/tokenize", "/v1/tokenize")
    ),
    Route(
        method="POST",
        path="/generate",
        stock_endpoint="sglang.srt.entrypoints.http_server.generate_request",
        reason="allowed_tokens, allowed_token_ids, prompt_parts",
    ),
    Route(
        method="POST",
        path="/v1/rerank",
        stock_endpoint="sglang.srt.entrypoints.http_server.v1_rerank_request",
        reason="rerank with any causal language model, not only with a reranker's chat template",
    ),
    Route(
        method="POST",
        path="/v1/score",
        stock_endpoint="sglang.srt.entrypoints.http_server.v1_score_request",
        reason="calibration, raw_scores, top_alternatives",
    ),
)

MANAGER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
RADIX_CACHE = "sglang.srt.mem_cache.radix_cache.RadixCache"
KV_POOL = "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool"
ALLOCATOR = "sglang.srt.mem_cache.allocator.paged.PagedTokenToKVPoolAllocator"

DETOKENIZER = "sglang.srt.managers.detokenizer_manager.DetokenizerManager"

OVERRIDES: tuple[Override, ...] = (
    *(
        Override(f"sglang.srt.mem_cache.radix_cache.RadixKey.{method}", "SharingKey", "its first tokens are nobody's")
        for method in ("__init__", "__getitem__")
    ),
    *(
        Override(f"{RADIX_CACHE}.{method}", "WatchedRadixCache", "some prefixes are shared by all tenants")
        for method in ("match_prefix", "insert")
    ),
    *(
        Override(f"{RADIX_CACHE}.{method}", "WatchedRadixCache", "the policy hears of every change of the tree")
        for method in ("reset", "_split_node", "_insert_helper", "_delete_leaf")
    ),
    *(
        Override(f"{RADIX_CACHE}.{method}", "WatchedRadixCache", "a scratch slot never reaches the tree")
        for method in ("cache_finished_req", "cache_unfinished_req")
    ),
    *(
        Override(f"{KV_POOL}.{method}", "SuffixKVPool", "all layers share the memory of scratch")
        for method in ("__init__", "_create_buffers_normal", "get_kv_size_bytes")
    ),
    Override(f"{KV_POOL}._create_buffers_normal", "LazyZeroKVPool", "the kernel commits zero pages on first use"),
    *(
        Override(f"{ALLOCATOR}.{method}", "SuffixKVAllocator", "slots are handed out by the KV plans of a step")
        for method in ("__init__", "available_size", "alloc", "alloc_extend", "clear")
    ),
    *(
        Override(f"{MANAGER}.{method}", "PrefillTokenizerManager", reason)
        for method, reason in (
            ("__init__", "it knows our configuration"),
            ("generate_request", "what can never be answered gets a 400 before SGLang sees it"),
            ("_validate_one_request", "the input limit, and token ids outside the vocabulary"),
            ("_handle_abort_finish_reason", "429 and 504 for deadlines"),
            ("abort_request", "a client names its own request and no other"),
            ("auto_create_handle_loop", "signals end the server in our way"),
            (
                "handle_loop",
                "where it fails, clients hear of it at once; in one process, answers are handed over like it",
            ),
            ("_tokenize_texts", "long texts would stop all others"),
            ("_wait_one_response", "an answer may come before the last prompt of its request was sent"),
            ("_process_single_item_scoring_results", "a score that was aborted has no log-probabilities"),
            ("resolved_config_dict", "/server_info shows no keys"),
            ("get_internal_state", "/server_info shows no keys"),
            ("convert_to_span_attrs", "a trace says what was kept and predicted"),
            ("sigterm_watchdog", "no new requests while those that wait are answered, and a status of 0"),
            ("update_weights_from_disk", "packed weights cannot be replaced"),
            ("update_weights_from_tensor", "packed weights cannot be replaced"),
            ("update_weights_from_distributed", "packed weights cannot be replaced"),
            ("update_weights_from_ipc", "packed weights cannot be replaced"),
        )
    ),
    *(
        Override(f"sglang.srt.layers.attention.{stock}.{method}", ours, reason)
        for stock, ours in (
            ("flashinfer_backend.FlashInferAttnBackend", "SharedPrefixFlashInfer"),
            ("triton_backend.TritonAttnBackend", "SharedPrefixTriton"),
            (FLASH_ATTENTION, "SharedPrefixFlashAttention"),
        )
        for method, reason in (
            ("__init__", "it knows the switch"),
            ("init_forward_metadata", "a step is planned in two parts too"),
            ("init_forward_metadata_out_graph", "a step of a whole graph is not"),
            ("forward_extend", "prefixes that requests share are read once"),
        )
    ),
    *(
        Override(f"{MANAGER}.{method}", "SteppedTokenizerManager", reason)
        for method, reason in (
            ("__init__", "it has no sockets"),
            ("init_ipc_channels", "it has no sockets"),
            ("auto_create_handle_loop", "its owner hands the answers over"),
            ("_dispatch_to_scheduler", "the scheduler is in the same thread"),
            ("_send_one_request", "takes down the plan of a prompt, or the prompt alone"),
            ("_send_batch_request", "takes down the plan of a prompt, or the prompt alone"),
            ("_wait_one_response", "ends where the prompts alone are asked for"),
        )
    ),
    Override(f"{DETOKENIZER}.init_ipc_channels", "SteppedDetokenizer", "it has no sockets"),
    Override("sglang.srt.entrypoints.engine.Engine.__init__", "Engine", "options of ours, and our process functions"),
)

POKES: tuple[Poke, ...] = (
    Poke(
        "sglang.srt.managers.scheduler.Scheduler", "waiting_queue", "during admission it holds what the policy picked"
    ),
    Poke(
        "sglang.srt.managers.scheduler_components.new_token_ratio_tracker.NewTokenRatioTracker",
        "current",
        "how long outputs will be, learned from those that are written",
    ),
    *(
        Poke("sglang.srt.managers.schedule_policy.PrefillAdder", attribute, "scratch counts as room")
        for attribute in ("rem_total_token_offset", "cur_rem_token_offset")
    ),
    Poke("sglang.srt.managers.schedule_batch.Req", "sgl_prefill", "what we know of a request"),
    Poke(
        "sglang.srt.managers.io_struct.GenerateReqInput", "sgl_prefill_parts", "what was cut, for the reply to show it"
    ),
    Poke("sglang.srt.entrypoints.openai.protocol.MessageProcessingResult", "prompt_ids", "what is left of a chat"),
    Poke(
        "sglang.srt.layers.logits_processor.LogitsProcessorOutput",
        "next_token_token_ids_logprobs_val",
        "of requests that ask for no tokens it holds lists among tensors",
    ),
    Poke("sglang.srt.managers.schedule_batch.Req", "extra_key", "whose prefixes a request may find"),
    Poke("sglang.srt.managers.schedule_batch.Req", "finished_reason", "a forward pass that ran out of memory"),
    *(
        Poke("sglang.srt.managers.schedule_batch.Req", attribute, "a request of the start that nobody sent")
        for attribute in ("full_untruncated_fill_ids", "prefix_indices", "logprob_start_len")
    ),
    Poke("sglang.srt.managers.schedule_batch.ScheduleBatch", "input_ids", "on the device, for such a request"),
    Poke("sglang.srt.sampling.sampling_params.SamplingParams", "max_new_tokens", "one token needs no slot of its own"),
    Poke("sglang.srt.mem_cache.allocator.paged.PagedTokenToKVPoolAllocator", "size", "the plan's durable slots"),
    Poke("sglang.srt.mem_cache.allocator.paged.PagedTokenToKVPoolAllocator", "num_pages", "the plan's durable slots"),
    Poke("sglang.srt.model_executor.model_runner.ModelRunner", "max_total_num_tokens", "the plan's durable slots"),
    Poke("sglang.srt.mem_cache.radix_cache.RadixCache", "eviction_strategy", "what waiting jobs will use goes last"),
    Poke("sglang.srt.model_executor.forward_batch_info.ForwardBatch", "_attn_output", "FlashAttention writes there"),
    Poke(
        "sglang.srt.observability.req_time_stats.SchedulerReqTimeStats",
        reply_facts.FIELD,
        "what the reply shows: they alone travel from the scheduler to the HTTP process with every request",
    ),
    Poke("torch.nn.Module", "forward", "the model's body runs chunk by chunk"),
    Poke(
        "sglang.srt.layers.utils.multi_platform.MultiPlatformOp",
        "_forward_method",
        "while a body is recorded on a host, layers that a native kernel computes are one operation each",
    ),
    Poke(
        "sglang.srt.layers.moe.fused_moe_triton.layer.FusedMoE",
        "sgl_prefill_products",
        "packed weights of the experts: SGLang's opaque operation for experts hands over the layer alone",
    ),
    Poke("torch.Tensor", "data", "weights that were packed are dropped"),
    Poke(
        "sglang.srt.managers.scheduler_components.metrics_reporter.PrefillStats", "num_pending_tokens", "all that wait"
    ),
    Poke("sglang.srt.managers.tokenizer_manager.TokenizerManager", "gracefully_exit", "a server that ends is not well"),
    Poke(
        "sglang.srt.server_args.ServerArgs",
        "api_key",
        "keys are not shown; so are the other fields of sgl_prefill.secret",
    ),
    *(
        Poke("uvicorn.Server", attribute, "the server ends once everyone is answered")
        for attribute in ("should_exit", "force_exit")
    ),
    Poke("uvicorn.Config", "timeout_graceful_shutdown", "a stream to a page has no end of its own"),
    *(
        Poke("sglang.srt.mem_cache.memory_pool.ReqToTokenPool", attribute, "SGLang's requests get no row of ours")
        for attribute in ("size", "_alloc_size")
    ),
    *(
        Poke("sglang.srt.model_executor.forward_batch_info.ForwardBatch", attribute, "a pass that computes answers too")
        for attribute in (
            *("batch_size", "input_ids", "positions", "req_pool_indices", "seq_lens", "seq_lens_cpu", "orig_seq_lens"),
            *("seq_lens_sum", "out_cache_loc", "extend_num_tokens", "extend_seq_lens", "extend_prefix_lens"),
            *("extend_start_loc", "extend_seq_lens_cpu", "extend_prefix_lens_cpu", "extend_logprob_start_lens_cpu"),
            *("rids", "lora_ids", "num_token_non_padded_cpu", "num_token_non_padded"),
        )
    ),
    Poke("fastapi.FastAPI", "build_middleware_stack", "what SGLang adds later stands behind our limits too"),
    Poke("starlette.routing.Router", "default", "a path that no route serves gets a sentence"),
    Poke("sglang.srt.managers.tokenizer_manager.TokenizerManager", "server_status", "healthy after our own warm-up"),
    Poke(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager", "max_req_input_len", "of a scheduler in this process"
    ),
    *(
        Poke(
            "sglang.srt.managers.scheduler.Scheduler", attribute, "a scheduler in this process is stepped by its owner"
        )
        for attribute in ("running_batch", "last_batch")
    ),
    Poke(
        "sglang.srt.managers.scheduler_components.output_sender.SenderWrapper",
        "socket",
        "a scheduler in this process leaves its answers with its owner",
    ),
    Poke(
        "sglang.srt.model_executor.runner_backend_utils.tc_piecewise_cuda_graph.context_manager.logger",
        "disabled",
        "its hint on CUDA graphs would send a reader of our own message astray",
    ),
)

SWITCHES: tuple[Switch, ...] = (
    Switch("SGLANG_EAGER_INPUT_NO_COPY", "static input buffers would be as long as the KV pool"),
    Switch("SGLANG_ENABLE_LOGPROB_CHUNK", "log-probabilities of a long tail would take a gigabyte of logits"),
    Switch("SGLANG_LOGPROB_CHUNK_SIZE", "so many rows of logits at a time"),
)

RELIED_UPON: tuple[Relied, ...] = (
    Relied(
        "sglang.srt.managers.scheduler.run_scheduler_process", "our process function activates hooks, then calls it"
    ),
    Relied(
        "sglang.srt.managers.scheduler.Scheduler._get_new_batch_prefill_raw", "reads self.waiting_queue once a step"
    ),
    Relied("sglang.srt.layers.logits_processor.LogitsProcessor._get_logits", "computes the logits of answers' tokens"),
    Relied("sglang.srt.managers.schedule_batch.Req._compute_max_prefix_len", "the policy counts cached tokens like it"),
    Relied("sglang.srt.mem_cache.radix_cache.RadixCache._match_prefix_helper", "the read-only probe walks like it"),
    Relied("sglang.srt.mem_cache.radix_cache.RadixKey.raw_token_ids", "the read-only probe compares these tokens"),
    Relied("sglang.srt.mem_cache.radix_cache.RadixKey.child_key", "jobs are filed under it"),
    Relied("sglang.srt.mem_cache.radix_cache.RadixCache.evict", "takes leaves in the order of `eviction_strategy`"),
    Relied("sglang.srt.managers.schedule_policy.PrefillAdder.rem_total_tokens.fget", "reads what we set"),
    Relied("sglang.srt.managers.schedule_policy.PrefillAdder.cur_rem_tokens.fget", "reads what we set"),
    Relied("sglang.srt.managers.io_struct.GenerateReqInput.regenerate_rid", "appends to a request's id"),
    Relied("sglang.srt.managers.scheduler.configure_scheduler_process", "ends a scheduler with its launcher"),
    Relied("sglang.srt.entrypoints.engine._wait_for_scheduler_ready", "says that a scheduler has ended"),
    Relied("sglang.srt.entrypoints.engine._scheduler_died_error", "says that a scheduler has ended"),
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
    Relied(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager.score_request",
        "label scores of /v1/score are of the prompts that it makes of a query and its items",
    ),
    Relied(
        "sglang.srt.entrypoints.openai.serving_score.OpenAIServingScore._handle_non_streaming_request",
        "and stand beside what it makes of them",
    ),
    Relied(
        "sglang.srt.entrypoints.openai.protocol.ResponsesRequest.to_sampling_params",
        "takes two tokens off what is asked for, which ours puts back",
    ),
    Relied(
        "sglang.srt.observability.trace.TraceReqContext.trace_event",
        "puts our event into the span that runs, or the next that it is in the time of",
    ),
    Relied(
        "sglang.srt.observability.req_time_stats.SchedulerReqTimeStats.set_forward_entry_time",
        "begins that span while SGLang admits a request",
    ),
    Relied("sglang.srt.observability.req_time_stats.convert_time_to_realtime_ns", "the clock of spans"),
    Relied("sglang.srt.entrypoints.http_server._execute_server_warmup", "our warm-up stands in for it"),
    Relied(
        "sglang.srt.layers.logits_processor.should_apply_lm_head_quant_method", "which LM heads have a plain weight"
    ),
    Relied(
        "sglang.srt.layers.attention.attention_registry.register_attention_backend",
        "--attention-backend flashinfer, fa3 and triton pick ours",
    ),
    Relied("sglang.srt.layers.attention.attention_registry.create_flashinfer_backend", "ours is made like it"),
    Relied("sglang.srt.layers.attention.attention_registry.create_flashattention_v3_backend", "ours is made like it"),
    Relied("sglang.srt.layers.attention.attention_registry.create_triton_backend", "ours is made like it"),
    Relied(
        "sglang.srt.layers.attention.flashinfer_backend.FlashInferIndicesUpdaterPrefill.call_begin_forward",
        "our plans are made like it, with other rows",
    ),
    Relied("sglang.kernels.ops.attention.extend_attention.extend_attention_fwd", "attends to each part with Triton"),
    Relied("sglang.kernels.ops.attention.merge_state.merge_state_triton", "merges the parts, in place"),
    Relied("sglang.srt.layers.attention.hybrid_attn_backend.HybridAttnBackend", "two names, one backend on CPU"),
    Relied("sglang.srt.mem_cache.memory_pool.MHATokenToKVPool.set_kv_buffer", "hybrid prefilling writes K, V with it"),
    Relied("sglang.srt.mem_cache.common.release_kv_cache", "gives a finished request's slots back"),
    Relied("sglang.srt.layers.radix_attention.RadixAttention.forward", "the traced graph is cut at its operation"),
    Relied(
        "sglang.srt.model_executor.runner_backend_utils.tc_piecewise_cuda_graph.set_tc_piecewise_forward_context",
        "opaque operations find their batch and their experts in it",
    ),
    Relied(
        "sglang.srt.model_executor.model_runner_components.layer_setup.compute_attention_and_moe_layers",
        "lists the layers that it holds",
    ),
    Relied(
        "sglang.srt.model_executor.model_runner.ModelRunner._forward_raw",
        "asks before each extend whether to replay it",
    ),
    Relied(
        "sglang.srt.model_executor.runner.prefill_cuda_graph_runner.PrefillCudaGraphRunner.load_batch",
        "a replay has no ids of requests, and its padding the slot that is nobody's",
    ),
    Relied(
        "sglang.srt.model_executor.runner.prefill_cuda_graph_runner.PrefillCudaGraphRunner._execute_body_capture",
        "logits are computed behind the graph, and our dispatcher is put back",
    ),
    Relied(
        "sglang.srt.model_executor.model_runner_components.cuda_graph_setup.capture_prefill_graph",
        "records what our dispatcher leaves to SGLang's layers",
    ),
    Relied("sglang.srt.server_args.ServerArgs._generate_prefill_cuda_graph_batch_sizes", "42 sizes up to 2,048 tokens"),
    Relied(
        "sglang.srt.layers.deep_gemm_wrapper.compile_utils.update_deep_gemm_config",
        "SGLANG_JIT_DEEPGEMM_FAST_WARMUP lets it compile typical sizes alone",
    ),
    Relied("sglang.srt.model_executor.runner.eager_runner.EagerRunner.load_batch", "copies inputs unless told not to"),
    Relied("sglang.srt.managers.schedule_batch.ScheduleBatch.prepare_for_extend", "the start runs batches of its own"),
    Relied(
        "sglang.srt.managers.scheduler.Scheduler.event_loop_normal", "a scheduler in this process is stepped like it"
    ),
    Relied(f"{DETOKENIZER}.event_loop", "answers are detokenized like it"),
    Relied("sglang.srt.managers.tokenizer_manager.TokenizerManager._handle_batch_request", "sends, then waits"),
    Relied(
        "sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin.get_internal_state",
        "the dashboard and /scheduler/decisions ask the scheduler like it",
    ),
    Relied("sglang.srt.managers.communicator.FanOutCommunicator.queueing_call", "and waits for every engine's answer"),
    Relied("sglang.srt.utils.auth.decide_request_auth", "a browser that brings no key gets the dashboard with a 401"),
    Relied("sglang.srt.managers.tokenizer_manager.TokenizerManager._remove_req_state", "forgets a refused request"),
    *(
        Relied(f"sglang.srt.layers.{layer}.forward_native", "native kernels compute the same in its place")
        for layer in (
            *("layernorm.RMSNorm", "layernorm.GemmaRMSNorm", "rotary_embedding.base.RotaryEmbedding"),
            *("activation.SiluAndMul", "activation.GeluAndMul"),
        )
    ),
)


def hooks_for(config: PrefillConfig, process: str) -> tuple[Hook, ...]:
    """Returns the hooks that these options ask for in this process, in application order."""
    wanted = {
        "always": True,
        "scheduling": config.has_policy,
        "hybrid-prefill": config.hybrid_prefill != "off",
        "suffix-kv": config.evicts_suffix_kv,
        "accelerator": not this_device().is_host,
        "no-accelerator": this_device().is_host,
        "neighbours": two_parts.asked_for(config.shared_prefix_attention) != "off" and not this_device().is_host,
        "shared-prefixes-asked": config.shared_prefix_attention
        in (("on", "off") if this_device().is_host else ("on",)),
        "logits-dtype": config.logits_dtype == "float32" and this_device().is_host,
        "device-logits": config.logits_dtype == "float32" and not this_device().is_host,
    }
    return tuple(hook for hook in HOOKS if hook.process == process and wanted[hook.feature])


def fingerprinted_targets() -> tuple[str, ...]:
    """Lists every dotted path whose source must be the one that we read."""
    targets = [
        *(hook.target for hook in HOOKS),
        *(override.target for override in OVERRIDES),
        *(route.stock_endpoint for route in ROUTES),
        *(relied.target for relied in RELIED_UPON),
    ]
    return tuple(dict.fromkeys(targets))
