"""Every place where this package touches SGLang's code, by feature. `activation` applies and verifies the hooks; the source of
all targets is fingerprinted.

Besides these, SGLang's own parameters carry our parts: `launch_server(init_tokenizer_manager_func, run_scheduler_process_func,
run_detokenizer_process_func, execute_warmup_func)`, the platform and the attention-backend registries, and uvicorn's table of
protocols (`http.heads`); and `http.routes.ROUTES` lists the replaced routes.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any, Literal, NamedTuple

from sgl_prefill.config import PrefillConfig
from sgl_prefill.cpu import experts, lm_head, rank_threads
from sgl_prefill.entry import processes
from sgl_prefill.entry.processes import ProcessState
from sgl_prefill.gpu import two_parts
from sgl_prefill.http import conversations
from sgl_prefill.http.routes import ROUTES
from sgl_prefill.port import loop
from sgl_prefill.port.dashboard import watch
from sgl_prefill.port.kv import admission, namespaces
from sgl_prefill.port.runner import (
    at_start,
    branch_rows,
    logits,
    out_of_memory,
    rank_group,
    replays,
    shared_prefixes,
)
from sgl_prefill.port.runner.runner_state import RunnerState
from sgl_prefill.port.steps import jobs, time_stats
from sgl_prefill.port.steps.step_state import StepState
from sgl_prefill.startup.device import this_device
from sgl_prefill.startup.record import StartRecord

Process = Literal["scheduler", "detokenizer", "http"]


class Hook(NamedTuple):
    """One change of SGLang's behaviour at run time."""

    target: str  # dotted path of the hooked function
    function: Callable[..., Any]  # `around_...` or `after_...`
    reason: str  # what would go wrong without it
    takes: type | None = None  # class of the function's first argument, an object of `activation.Parts`
    processes: tuple[Process, ...] = ("scheduler",)

    @property
    def kind(self) -> str:
        """As in SGLang's HookRegistry."""
        return self.function.__name__.partition("_")[0]


class Override(NamedTuple):
    """Methods of a class of SGLang's that a subclass of this package defines anew."""

    stock: str  # dotted path of SGLang's class
    by: str  # name of our class
    methods: tuple[str, ...]
    reason: str

    @property
    def targets(self) -> list[str]:
        return [f"{self.stock}.{method}" for method in self.methods]


class Patch(NamedTuple):
    """Attributes of objects of SGLang's that this package sets."""

    owner: str  # dotted path of the class or module
    attributes: tuple[str, ...]
    reason: str


class Relied(NamedTuple):
    """Functions of SGLang's that this package calls or mirrors without changing them; a new version of one may break it."""

    targets: tuple[str, ...]
    reason: str


class Feature(NamedTuple):
    name: str
    is_on: Callable[[PrefillConfig], bool]
    hooks: tuple[Hook, ...] = ()
    overrides: tuple[Override, ...] = ()
    patches: tuple[Patch, ...] = ()
    switches: tuple[str, ...] = ()  # SGLang's environment switches that this package sets
    relied: tuple[Relied, ...] = ()


def _always(config: PrefillConfig) -> bool:
    return True


def _on_host(config: PrefillConfig) -> bool:
    return this_device().is_host


def _on_device(config: PrefillConfig) -> bool:
    return not this_device().is_host


def _changes_attention(config: PrefillConfig) -> bool:
    switch = config.shared_prefix_attention
    return config.hybrid_prefill != "off" or switch == "on" or (switch == "off" and _on_host(config))


def _shares_prefixes_on_device(config: PrefillConfig) -> bool:
    return _on_device(config) and two_parts.asked_for(config.shared_prefix_attention) != "off"


SRT = "sglang.srt"
MANAGERS = f"{SRT}.managers"
SCHEDULER = f"{MANAGERS}.scheduler.Scheduler"
COMPONENTS = f"{MANAGERS}.scheduler_components"
REQ = f"{MANAGERS}.schedule_batch.Req"
TOKENIZER_MANAGER = f"{MANAGERS}.tokenizer_manager.TokenizerManager"
DETOKENIZER = f"{MANAGERS}.detokenizer_manager.DetokenizerManager"
ADDER = f"{MANAGERS}.schedule_policy.PrefillAdder"
RESULTS = f"{COMPONENTS}.batch_result_processor.SchedulerBatchResultProcessor"
STATS = f"{SRT}.observability.req_time_stats"
OPENAI = f"{SRT}.entrypoints.openai"
MEM_CACHE = f"{SRT}.mem_cache"
CONFIGURATOR = f"{MEM_CACHE}.kv_cache_configurator.KVCacheConfigurator"
RADIX_CACHE = f"{MEM_CACHE}.radix_cache.RadixCache"
RADIX_KEY = f"{MEM_CACHE}.radix_cache.RadixKey"
KV_POOL = f"{MEM_CACHE}.memory_pool.MHATokenToKVPool"
LATENT_POOL = f"{MEM_CACHE}.memory_pool.MLATokenToKVPool"
ALLOCATOR = f"{MEM_CACHE}.allocator.paged.PagedTokenToKVPoolAllocator"
EXECUTOR = f"{SRT}.model_executor"
RUNNER = f"{EXECUTOR}.model_runner.ModelRunner"
GRAPHS = f"{EXECUTOR}.runner.prefill_cuda_graph_runner.PrefillCudaGraphRunner"
LOGITS = f"{SRT}.layers.logits_processor"
ATTENTION = f"{SRT}.layers.attention"
FLASH_ATTENTION = f"{ATTENTION}.flashattention_backend.FlashAttentionBackend"  # its import needs a CUDA device
WEIGHTS = ("disk", "tensor", "distributed", "ipc")

FEATURES: tuple[Feature, ...] = (
    Feature(
        "processes",
        _always,
        hooks=(
            Hook(
                f"{SRT}.entrypoints.engine._set_envs_and_config",
                processes.after_set_envs_and_config,
                "Scheduler and detokenizer would import SGLang again instead of being forked, and a failed start would end by"
                " SIGKILL without a message.",
                ProcessState,
                ("http",),
            ),
            Hook(
                f"{SCHEDULER}.__init__",
                processes.around_scheduler_init,
                "An error of the start would be shown as a traceback of SGLang's.",
                ProcessState,
            ),
            Hook(
                f"{SRT}.distributed.bootstrap._resolve_dist_init_method",
                rank_group.around_resolve_dist_init_method,
                "The store of the ranks would listen on every interface of the machine, despite --host.",
            ),
        ),
        overrides=(
            Override(
                f"{SRT}.entrypoints.engine.Engine",
                "Engine",
                ("__init__",),
                "The offline engine takes this package's options and process functions.",
            ),
        ),
        patches=(
            Patch(
                f"{SRT}.server_args.ServerArgs",
                ("api_key",),
                "Keys are not shown in logs; the other fields of startup.secret likewise.",
            ),
        ),
        relied=(
            Relied(
                (f"{MANAGERS}.scheduler.run_scheduler_process", f"{SCHEDULER}.get_init_info"),
                "The process function of this package activates the hooks, calls it, and adds to what it sends.",
            ),
            Relied(
                (
                    f"{MANAGERS}.scheduler.configure_scheduler_process",
                    f"{SRT}.entrypoints.engine._wait_for_scheduler_ready",
                    f"{SRT}.entrypoints.engine._scheduler_died_error",
                ),
                "A scheduler ends with its launcher, and the launcher reports a scheduler that has ended.",
            ),
            Relied((f"{SRT}.entrypoints.http_server._execute_server_warmup",), "This package's warm-up replaces it."),
            Relied(
                (f"{MANAGERS}.schedule_batch.ScheduleBatch.prepare_for_extend", f"{MEM_CACHE}.common.release_kv_cache"),
                "The start runs batches of its own.",
            ),
        ),
    ),
    Feature(
        "requests in the HTTP process",
        _always,
        hooks=(
            Hook(
                f"{STATS}.APIServerReqTimeStats.__getstate__",
                time_stats.after_getstate_in_http,
                "The scheduler would stamp a request after the running step, and its wait would count neither for fairness nor"
                " in queue_ms.",
                processes=("http",),
            ),
            Hook(
                f"{OPENAI}.serving_chat.OpenAIServingChat._process_messages",
                conversations.around_process_messages,
                "A long conversation or a slow template of a client would stop the event loop, and an empty conversation would"
                " be a 500.",
                processes=("http",),
            ),
            Hook(
                f"{STATS}.SchedulerReqTimeStats.__getstate__",
                time_stats.after_getstate,
                "kept_tokens, evicted_tokens and predicted_jct_ms would not leave the scheduler, or the detokenizer would drop"
                " them.",
                processes=("scheduler", "detokenizer"),
            ),
            Hook(
                f"{STATS}.SchedulerReqTimeStats.convert_to_output_meta_info",
                time_stats.after_convert_to_output_meta_info,
                "The reply would not show these facts.",
                processes=("http",),
            ),
        ),
        overrides=(
            Override(
                TOKENIZER_MANAGER,
                "PrefillTokenizerManager",
                (
                    "__init__",
                    "generate_request",
                    "_validate_one_request",
                    "_handle_abort_finish_reason",
                ),
                "Requests that can never be answered get a 400, and late ones a 429 or 504, before SGLang computes anything.",
            ),
            Override(
                TOKENIZER_MANAGER,
                "PrefillTokenizerManager",
                (
                    *("abort_request", "_tokenize_texts", "_create_tokenized_object", "_wait_one_response"),
                    *("_tokenize_one_request", "_send_one_request", "_should_use_batch_tokenization"),
                    "_process_single_item_scoring_results",
                ),
                "A client cancels its own requests only; long texts and many prompts do not stop other clients; an answer may"
                " come before the last prompt of its request was sent; an aborted score has no log-probabilities.",
            ),
            Override(
                TOKENIZER_MANAGER,
                "PrefillTokenizerManager",
                ("resolved_config_dict", "get_internal_state", "convert_to_span_attrs"),
                "/server_info shows no keys, and a trace shows what was kept and predicted.",
            ),
            Override(
                TOKENIZER_MANAGER,
                "PrefillTokenizerManager",
                ("auto_create_handle_loop", "handle_loop", "sigterm_watchdog"),
                "The server shuts down gracefully: it answers the waiting requests, takes no new ones and ends with status 0.",
            ),
            Override(
                TOKENIZER_MANAGER,
                "PrefillTokenizerManager",
                tuple(f"update_weights_from_{source}" for source in WEIGHTS),
                "Packed weights cannot be replaced.",
            ),
        ),
        patches=(
            Patch(
                f"{MANAGERS}.io_struct.GenerateReqInput",
                ("sgl_prefill_parts",),
                "The reply shows which parts of a prompt were dropped.",
            ),
            Patch(
                f"{OPENAI}.protocol.MessageProcessingResult", ("prompt_ids",), "A chat may be cut to the input limit."
            ),
            Patch(
                f"{STATS}.SchedulerReqTimeStats",
                (time_stats.FACTS,),
                "Of all objects of a request, only this one travels from the scheduler to the HTTP process.",
            ),
            Patch(
                TOKENIZER_MANAGER,
                ("gracefully_exit", "server_status"),
                "A server is healthy after its warm-up, and unhealthy from the begin of a shutdown.",
            ),
            Patch(
                "uvicorn.Server",
                ("should_exit", "force_exit"),
                "The server ends once all waiting requests are answered.",
            ),
            Patch("uvicorn.Config", ("timeout_graceful_shutdown",), "A stream to the dashboard has no end of its own."),
            Patch(
                "fastapi.FastAPI",
                ("build_middleware_stack",),
                "The limits of this package stand before SGLang's middleware.",
            ),
        ),
        relied=(
            Relied((f"{MANAGERS}.io_struct.GenerateReqInput.regenerate_rid",), "It gives a sample an id of its own."),
            Relied((f"{TOKENIZER_MANAGER}._handle_batch_output",), "It puts label scores into meta_info."),
            Relied(
                (f"{STATS}.ReqTimeStatsBase.new_from_obj",),
                "It copies the arrival time into the scheduler's stats, on the scheduler's clock.",
            ),
            Relied(
                (
                    f"{OPENAI}.serving_completions.OpenAIServingCompletion._convert_to_internal_request",
                    f"{OPENAI}.serving_chat.OpenAIServingChat._convert_to_internal_request",
                    f"{TOKENIZER_MANAGER}.score_request",
                    f"{OPENAI}.serving_score.OpenAIServingScore._handle_non_streaming_request",
                ),
                "Label scoring renders completions, chats and scores with it.",
            ),
            Relied(
                (
                    f"{SRT}.entrypoints.systemone.serving.SystemOneServing._validate_request",
                    f"{SRT}.entrypoints.systemone.serving.SystemOneServing._handle_non_streaming_request",
                ),
                "Decision checkpoints answer through it.",
            ),
            Relied(
                (f"{OPENAI}.protocol.ResponsesRequest.to_sampling_params",),
                "It takes two tokens off the limit that a client gives.",
            ),
            Relied(
                (f"{SRT}.utils.auth.decide_request_auth",), "A browser without a key gets the dashboard with a 401."
            ),
        ),
    ),
    Feature(
        "tenants",
        _always,
        hooks=(
            Hook(
                f"{REQ}.__init__",
                namespaces.after_req_init,
                "Embeddings, scores and reranks would find prefixes of other tenants, since these routes know no salts; a long"
                " prompt would reuse KV with rotary factors of short ones.",
                RunnerState,
            ),
        ),
        overrides=(
            Override(
                RADIX_KEY,
                "SharingKey",
                ("__init__", "__getitem__"),
                "The first tokens of a prompt may be a prefix that all tenants share.",
            ),
            Override(
                RADIX_CACHE, "WatchedRadixCache", ("match_prefix", "insert"), "Some prefixes are shared by all tenants."
            ),
        ),
        patches=(Patch(REQ, ("extra_key", "cache_salt"), "They name the tenant whose prefixes a request may find."),),
    ),
    Feature(
        "loop",
        _always,
        hooks=(
            Hook(
                f"{SCHEDULER}.run_batch",
                out_of_memory.around_run_batch,
                "A forward pass that runs out of memory would end the server.",
            ),
            Hook(
                f"{SCHEDULER}.process_batch_result",
                loop.around_process_batch_result,
                "Requests that arrive during a step would be taken in after it, and the JCT model would not be corrected; the"
                " requests of a pass that ran out of memory have been answered already.",
                StepState,
            ),
        ),
        patches=(
            Patch(REQ, ("sgl_prefill",), "It holds what this package knows of a request in the scheduler."),
            Patch(REQ, ("finished_reason",), "A forward pass ran out of memory, or has been launched."),
        ),
    ),
    Feature(
        "scheduling",
        lambda config: config.has_policy,
        hooks=(
            Hook(
                f"{SCHEDULER}.init_schedule_policy",
                jobs.after_init_schedule_policy,
                "There would be no policy, and a prefix cache that it cannot read would go unnoticed.",
                StepState,
            ),
            Hook(
                f"{COMPONENTS}.request_receiver.SchedulerRequestReceiver.recv_requests",
                loop.around_recv_requests,
                "Messages that were kept during a step would be lost.",
                StepState,
            ),
            Hook(
                f"{SCHEDULER}.get_new_batch_prefill",
                loop.around_get_new_batch_prefill,
                "SGLang's admission would take requests in the order of their arrival.",
                StepState,
            ),
            Hook(
                f"{SCHEDULER}.abort_request",
                loop.around_abort_request,
                "A client that leaves with ten thousand requests would have each compared with all waiting ones.",
                StepState,
            ),
            Hook(
                f"{SCHEDULER}.publish_load_snapshot",
                loop.around_publish_load_snapshot,
                "The lengths of all waiting requests would be summed after each step.",
                StepState,
            ),
        ),
        overrides=(
            Override(
                RADIX_CACHE,
                "WatchedRadixCache",
                ("reset", "_split_node", "_insert_helper", "_delete_leaf"),
                "The policy follows every change of the tree.",
            ),
        ),
        patches=(
            Patch(SCHEDULER, ("waiting_queue",), "During admission it holds what the policy picked."),
            Patch(
                f"{COMPONENTS}.new_token_ratio_tracker.NewTokenRatioTracker",
                ("current",),
                "The expected length of outputs is learned from finished ones.",
            ),
            Patch(RADIX_CACHE, ("eviction_strategy",), "What waiting jobs will use is evicted last."),
            Patch(
                f"{COMPONENTS}.metrics_reporter.PrefillStats", ("num_pending_tokens",), "All waiting requests count."
            ),
        ),
        relied=(
            Relied((f"{SCHEDULER}._get_new_batch_prefill_raw",), "It reads self.waiting_queue once a step."),
            Relied((f"{REQ}._compute_max_prefix_len",), "The policy counts cached tokens as it does."),
            Relied(
                (f"{RADIX_CACHE}._match_prefix_helper", f"{RADIX_KEY}.raw_token_ids", f"{RADIX_KEY}.child_key"),
                "The read-only match index walks and compares as it does.",
            ),
            Relied((f"{RADIX_CACHE}.evict",), "It takes leaves in the order of eviction_strategy."),
            Relied(
                (
                    f"{SRT}.observability.trace.TraceReqContext.trace_event",
                    f"{STATS}.SchedulerReqTimeStats.set_forward_entry_time",
                    f"{STATS}.convert_time_to_realtime_ns",
                ),
                "The policy's event is put into the span that SGLang begins at admission.",
            ),
        ),
    ),
    Feature(
        "dashboard",
        _always,
        hooks=(
            Hook(
                f"{SCHEDULER}.get_internal_state",
                watch.around_get_internal_state,
                "/dashboard and /scheduler/decisions would not reach the scheduler, and /server_info would not count shared"
                " prefixes.",
                StepState,
            ),
        ),
        relied=(
            Relied(
                (
                    f"{MANAGERS}.tokenizer_control_mixin.TokenizerControlMixin.get_internal_state",
                    f"{MANAGERS}.communicator.FanOutCommunicator.queueing_call",
                ),
                "The dashboard and /scheduler/decisions ask the scheduler as it does, and wait for every engine's answer.",
            ),
        ),
    ),
    Feature(
        "suffix KV",
        lambda config: config.evicts_suffix_kv,
        hooks=(
            Hook(
                f"{CONFIGURATOR}._build_token_to_kv_pool",
                admission.around_build_pool,
                "The KV buffers of the layers would not share the memory of their scratch slots.",
                StartRecord,
            ),
            Hook(
                f"{CONFIGURATOR}._build_token_to_kv_pool_allocator",
                admission.around_build_allocator,
                "Durable slots and scratch slots would be handed out by the same rules.",
            ),
            Hook(
                f"{ADDER}.add_one_req",
                admission.around_add_one_req,
                "A request could not follow the one of its step that computes its prefix.",
            ),
            Hook(
                f"{MEM_CACHE}.allocation.alloc_for_extend",
                admission.around_alloc_for_extend,
                "All KV of a request would be allocated as durable.",
            ),
            Hook(
                f"{SCHEDULER}.init_req_max_new_tokens",
                at_start.around_init_req_max_new_tokens,
                "SGLang would cut the one token of a request that is longer than the durable slots.",
            ),
        ),
        overrides=(
            Override(
                RADIX_CACHE,
                "WatchedRadixCache",
                ("__init__", "checkpoint", "free_kv_row", "on_release"),
                "A scratch slot never reaches the tree.",
            ),
            Override(
                RADIX_CACHE,
                "WatchedRadixCache",
                ("supports_mamba",),
                "A model with a state runs under the policy where no prefix is cached.",
            ),
            Override(
                RADIX_CACHE,
                "WatchedRadixCache",
                ("prefix_device_indices",),
                "A follower's prefix is its leader's, too.",
            ),
            Override(
                f"{MEM_CACHE}.prefill_budget.PrefillBudget",
                "SuffixKVBudget",
                ("remaining_total", "remaining_current"),
                "Scratch counts as room.",
            ),
            Override(
                KV_POOL,
                "SuffixKVPool",
                ("__init__", "_create_buffers_normal", "get_kv_size_bytes"),
                "All layers share the memory of scratch.",
            ),
            Override(
                LATENT_POOL,
                "SuffixLatentPool",
                ("_create_buffers", "get_kv_size_bytes"),
                "All layers share the memory of scratch.",
            ),
            Override(
                ALLOCATOR,
                "SuffixKVAllocator",
                (
                    "__init__",
                    "available_size",
                    "alloc",
                    "alloc_extend",
                    "clear",
                    "_release_page_ids",
                    "create_prefill_budget",
                ),
                "Slots are handed out by the KV plans of a step, and given back without a copy of the list of free ones.",
            ),
        ),
        patches=(
            Patch(ADDER, ("rem_input_tokens",), "A step of followers may compute more than SGLang's limit."),
            Patch(
                REQ,
                ("prefix_len", "extend_end", "lock"),
                "A follower reuses slots of its leader; a launched request holds none.",
            ),
            Patch(
                f"{MANAGERS}.schedule_batch.ReqKvInfo",
                ("cache_protected_len",),
                "A leader's slots are not its follower's to free.",
            ),
            Patch(
                f"{SRT}.sampling.sampling_params.SamplingParams",
                ("max_new_tokens",),
                "One token needs no slot of its own.",
            ),
            Patch(ALLOCATOR, ("size", "num_pages"), "The memory plan sets the number of durable slots."),
        ),
        switches=("SGLANG_EAGER_INPUT_NO_COPY",),  # static input buffers would be as long as the KV pool
        relied=(
            Relied((f"{EXECUTOR}.runner.eager_runner.EagerRunner.load_batch",), "It copies inputs without the switch."),
        ),
    ),
    Feature(
        "memory plan",
        _always,
        hooks=(
            Hook(
                f"{CONFIGURATOR}._profile_available_bytes",
                at_start.around_profile_available_bytes,
                "On a host, the KV pool would depend on the memory that is free at the start, despite --memory-budget-gb.",
                StartRecord,
            ),
            Hook(
                f"{MANAGERS}.tp_worker.TpModelWorker.get_worker_info",
                at_start.around_get_worker_info,
                "Nothing would measure the longest input, divide the memory, compare the paths and report the limits.",
                RunnerState,
            ),
        ),
        patches=(
            Patch(RUNNER, ("max_total_num_tokens",), "The memory plan sets the number of durable slots."),
            Patch(
                REQ,
                ("full_untruncated_fill_ids", "logprob_start_len"),
                "The start runs requests of its own.",
            ),
            Patch(
                f"{MANAGERS}.schedule_batch.ScheduleBatch", ("input_ids",), "Tokens of such a request, on the device."
            ),
        ),
    ),
    Feature(
        "model faults",
        _always,
        hooks=(
            Hook(
                f"{RUNNER}.init_attention_backends",
                at_start.around_init_attention_backends,
                "Models whose sliding window, activation or rotary factors SGLang ignores would give wrong answers silently; the"
                " model's body would run whole instead of chunk by chunk between attentions, and shared_prefix_attention would"
                " not reach the attention backend.",
                RunnerState,
            ),
        ),
        patches=(
            Patch(
                f"{SRT}.layers.radix_attention.RadixAttention",
                ("sliding_window_size",),
                "Layers attend to the window that the model's configuration names.",
            ),
            Patch(
                f"{SRT}.layers.activation.GeluAndMul", ("approximate",), "Gemma's configuration names the activation."
            ),
            Patch(
                f"{SRT}.layers.rotary_embedding.rope_variant.Phi3LongRoPEScaledRotaryEmbedding",
                ("original_max_position_embeddings",),
                "Positions choose between long and short factors, sequence by sequence.",
            ),
            Patch(RUNNER, ("sliding_window_size",), "Attention backends read the window there."),
        ),
        relied=(
            Relied(
                (f"{SRT}.layers.rotary_embedding.rope_variant.Phi3LongRoPEScaledRotaryEmbedding.forward",),
                "It looks positions up in short factors followed by long ones.",
            ),
        ),
    ),
    Feature(
        "hybrid prefilling",
        _changes_attention,
        patches=(
            Patch("torch.nn.Module", ("forward",), "The model's body runs chunk by chunk."),
            Patch(
                f"{EXECUTOR}.forward_batch_info.ForwardBatch",
                ("_attn_output",),
                "FlashAttention writes its output there, without a copy.",
            ),
            Patch(
                "sglang.kernels.fused_op.BaseFusedOp",
                ("_forward_method",),
                "While a body is recorded on a host, a layer with a native kernel is one operation.",
            ),
            Patch(
                f"{SRT}.layers.moe.fused_moe_triton.layer.FusedMoE",
                ("sgl_prefill_products",),
                "SGLang's opaque operation for experts passes the layer only.",
            ),
            Patch("torch.Tensor", ("data",), "Weights that were packed are dropped."),
        ),
        switches=(
            "SGLANG_ENABLE_LOGPROB_CHUNK",  # log-probabilities of a long tail would take a gigabyte of logits
            "SGLANG_LOGPROB_CHUNK_SIZE",
        ),
        relied=(
            Relied(
                (f"{SRT}.layers.radix_attention.RadixAttention.forward",), "The traced graph is cut at its operation."
            ),
            Relied((f"{KV_POOL}.set_kv_buffer",), "The hybrid pass writes K and V with it."),
            Relied((f"{ATTENTION}.hybrid_attn_backend.HybridAttnBackend",), "It holds one backend under two names."),
            Relied(
                (
                    f"{EXECUTOR}.runner_backend_utils.tc_piecewise_cuda_graph.set_tc_piecewise_forward_context",
                    f"{EXECUTOR}.model_runner_components.layer_setup.compute_attention_and_moe_layers",
                ),
                "Opaque operations find their batch, layers and experts in this context.",
            ),
            Relied(
                tuple(
                    f"{SRT}.layers.{layer}.forward_native"
                    for layer in (
                        *("layernorm.RMSNorm", "layernorm.GemmaRMSNorm", "rotary_embedding.base.RotaryEmbedding"),
                        *("activation.SiluAndMul", "activation.GeluAndMul"),
                    )
                ),
                "Native kernels compute the same.",
            ),
        ),
    ),
    Feature(
        "replays",
        _on_device,
        hooks=(
            Hook(
                f"{GRAPHS}.can_run_graph",
                replays.around_can_run_graph,
                "A step with branches would be replayed without them, and the start would compare replays with"
                " themselves.",
                RunnerState,
            ),
        ),
        relied=(
            Relied((f"{RUNNER}._forward_raw",), "It asks before each extend whether to replay it."),
            Relied((f"{GRAPHS}.load_batch",), "A replay has no request ids, and slot 0 for its padding."),
            Relied(
                (f"{GRAPHS}._execute_body_capture",),
                "Logits are computed after the graph, with our dispatcher in place.",
            ),
            Relied(
                (f"{EXECUTOR}.model_runner_components.cuda_graph_setup.capture_prefill_graph",),
                "It records what our dispatcher leaves to SGLang's layers.",
            ),
            Relied(
                (f"{SRT}.layers.deep_gemm_wrapper.compile_utils.update_deep_gemm_config",),
                "With SGLANG_JIT_DEEPGEMM_FAST_WARMUP it compiles typical sizes only.",
            ),
        ),
    ),
    Feature(
        "shared prefixes on a device",
        _shares_prefixes_on_device,
        hooks=(
            Hook(
                f"{MANAGERS}.schedule_batch.ScheduleBatch.init_new",
                shared_prefixes.around_init_new,
                "Only neighbours in a step read a shared prefix together.",
            ),
        ),
        overrides=tuple(
            Override(
                stock,
                ours,
                ("__init__", "init_forward_metadata", "init_forward_metadata_out_graph", "forward_extend"),
                "A step is planned and attended in two parts: shared prefixes once, and each request's own tokens.",
            )
            for stock, ours in (
                (f"{ATTENTION}.flashinfer_backend.FlashInferAttnBackend", "SharedPrefixFlashInfer"),
                (f"{ATTENTION}.triton_backend.TritonAttnBackend", "SharedPrefixTriton"),
                (FLASH_ATTENTION, "SharedPrefixFlashAttention"),
            )
        ),
        relied=(
            Relied(
                (
                    f"{ATTENTION}.attention_registry.register_attention_backend",
                    *(
                        f"{ATTENTION}.attention_registry.create_{name}_backend"
                        for name in ("flashinfer", "flashattention_v3", "triton")
                    ),
                ),
                "--attention-backend flashinfer, fa3 and triton pick our backends, which are made as SGLang's are.",
            ),
            Relied(
                (f"{ATTENTION}.flashinfer_backend.FlashInferIndicesUpdaterPrefill.call_begin_forward",),
                "Our plans are made as it makes them, with other rows.",
            ),
            Relied(
                (
                    "sglang.kernels.ops.attention.extend_attention.extend_attention_fwd",
                    "sglang.kernels.ops.attention.merge_state.merge_state_triton",
                ),
                "They attend to each part and merge the parts in place.",
            ),
        ),
    ),
    Feature(
        "branches",
        _always,
        hooks=(
            Hook(
                f"{CONFIGURATOR}._build_req_to_token_pool",
                branch_rows.around_build_table,
                "Branches would have no rows that name the KV slots they see.",
                RunnerState,
            ),
            Hook(
                f"{MANAGERS}.tp_worker.TpModelWorker.forward_batch_generation",
                branch_rows.around_forward_batch_generation,
                "Branches would have no KV slots, and their results no request.",
                RunnerState,
            ),
            Hook(
                f"{RUNNER}.forward",
                branch_rows.around_forward,
                "Each token of a label, and each question, would cost a step of its own.",
                RunnerState,
            ),
            Hook(
                f"{LOGITS}.LogitsProcessor.forward",
                branch_rows.around_logits,
                "Each position that is asked would cost a whole row of logits.",
                RunnerState,
            ),
            Hook(
                f"{RESULTS}.move_logprobs_to_cpu",
                branch_rows.around_move_logprobs,
                "The results of branches would not be read with the rest of the step's.",
                RunnerState,
            ),
        ),
        patches=(
            Patch(
                f"{MEM_CACHE}.memory_pool.ReqToTokenPool", ("size", "_alloc_size"), "SGLang's requests get no such row."
            ),
        ),
        relied=(Relied((f"{LOGITS}.LogitsProcessor._get_logits",), "It computes the logits of branches."),),
    ),
    Feature(
        "label logits",
        lambda config: config.logits_dtype == "float32",
        hooks=(
            Hook(
                f"{LOGITS}.LogitsProcessor._compute_lm_head",
                logits.around_compute_lm_head,
                "Label logits rounded to bfloat16 tie, and P(label) is off by up to 0.02.",
                StartRecord,
            ),
        ),
        patches=(
            Patch(
                f"{LOGITS}.LogitsProcessorOutput",
                ("next_token_token_ids_logprobs_val",),
                "The labels of all requests of a step are read in one copy.",
            ),
        ),
        relied=(
            Relied((f"{LOGITS}.should_apply_lm_head_quant_method",), "It decides which LM heads have a plain weight."),
        ),
    ),
    Feature(
        "host",
        _on_host,
        hooks=(
            Hook(
                f"{SRT}.distributed.parallel_state.GroupCoordinator.all_reduce",
                rank_threads.around_all_reduce,
                "A recorded body would hold a sum over ranks in parts, not as the one operation that is known to be token-wise.",
            ),
            Hook(
                f"{SRT}.distributed.bootstrap._init_cpu_threads_env",
                rank_threads.around_init_cpu_threads,
                "All ranks of a host would compute on the same cores.",
            ),
            Hook(
                "sglang.kernels.ops.activation.softcap.softcap_inplace_logits",
                lm_head.around_softcap_logits,
                "Soft-capped logits (Gemma 2) would end in a Triton kernel without a driver.",
            ),
            Hook(
                "sglang.kernels.ops.elementwise.elementwise.fused_gate_sigmoid_mul_add",
                experts.around_gate_sigmoid_mul_add,
                "A gated shared expert (Qwen2-MoE) would end in a Triton kernel without a driver.",
            ),
        ),
        overrides=(
            Override(
                LATENT_POOL, "LatentKVPool", ("__init__",), "SGLang passes platforms of this kind one argument more."
            ),
            Override(
                KV_POOL, "LazyZeroKVPool", ("_create_buffers_normal",), "The kernel commits zero pages on first use."
            ),
        ),
    ),
    Feature(
        "engine in one process",
        _always,
        overrides=(
            Override(
                TOKENIZER_MANAGER,
                "SteppedTokenizerManager",
                ("__init__", "init_ipc_channels", "auto_create_handle_loop", "_dispatch_to_scheduler"),
                "The scheduler is in the same thread: there are no sockets, and the owner delivers the answers.",
            ),
            Override(
                TOKENIZER_MANAGER,
                "SteppedTokenizerManager",
                ("_send_one_request", "_send_batch_request", "_wait_one_response"),
                "They record a prompt or its plan, and end where only the prompts are needed.",
            ),
            Override(DETOKENIZER, "SteppedDetokenizer", ("init_ipc_channels",), "It has no sockets."),
        ),
        patches=(
            Patch(TOKENIZER_MANAGER, ("max_req_input_len",), "It comes from the scheduler in this process."),
            Patch(SCHEDULER, ("running_batch", "last_batch"), "The owner steps the scheduler."),
            Patch(
                f"{COMPONENTS}.output_sender.SenderWrapper",
                ("socket",),
                "The scheduler leaves its answers with the owner.",
            ),
        ),
        relied=(
            Relied((f"{SCHEDULER}.event_loop_normal",), "The owner steps the scheduler as it does."),
            Relied((f"{DETOKENIZER}.event_loop",), "Answers are detokenized as it does."),
        ),
    ),
)

HOOKS: tuple[Hook, ...] = tuple(chain.from_iterable(feature.hooks for feature in FEATURES))


def hooks_for(config: PrefillConfig, process: str) -> tuple[Hook, ...]:
    """Returns the hooks of the features that are on in this process, in application order."""
    on = (feature for feature in FEATURES if feature.is_on(config))
    return tuple(hook for feature in on for hook in feature.hooks if process in hook.processes)


def fingerprinted_targets() -> tuple[str, ...]:
    """Lists every dotted path whose source must be the one that this package was written against."""
    targets = [
        *(hook.target for hook in HOOKS),
        *(target for feature in FEATURES for override in feature.overrides for target in override.targets),
        *(route.stock_endpoint for route in ROUTES),
        *(target for feature in FEATURES for relied in feature.relied for target in relied.targets),
    ]
    return tuple(dict.fromkeys(targets))
