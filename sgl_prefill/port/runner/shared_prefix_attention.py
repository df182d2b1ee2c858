"""Shared-prefix attention (BatchLLM, section 5) in SGLang's attention backends: two calls of the backend's kernel and a merge.

Each subclass makes SGLang's plan of a step and one in two parts (`gpu.two_parts`); every layer uses the one that serves it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS, register_attention_backend
from sglang.srt.layers.attention.flashinfer_backend import FlashInferAttnBackend
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc, MHATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sgl_prefill.core import shared_groups
from sgl_prefill.gpu import plans, two_parts
from sgl_prefill.port.runner.shared_prefixes import Counts, stays_apart

if TYPE_CHECKING:
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

Switch: TypeAlias = str  # shared_prefix_attention: auto, on or off

# One block of flashinfer's merge kernel has all heads of a token. For more heads SGLang uses a merge of natural logarithms, and
# flashinfer's log-sum-exp has base 2.
FLASHINFER_MERGE_THREADS = 1_024

_stock: dict[str, Callable[[ModelRunner], AttentionBackend]] = {}


class Planned(NamedTuple):
    plan: Any  # the backend's plan, of `gpu.plans`
    queries: slice  # rows that the shared part computes
    n_queries: int  # all rows of the step

    def is_of(self, query: torch.Tensor) -> bool:
        """Whether a layer's queries are those of the plan."""
        return len(query) == self.n_queries


class Sharing:
    """Decides which steps run in two parts, and counts them."""

    def __init__(self, runner: ModelRunner, switch: Switch) -> None:
        self.page_tokens: int = runner.page_size
        self._table: torch.Tensor = runner.req_to_token_pool.req_to_token
        self.counts = Counts()
        self._layer = layer_bytes(runner)
        self._is_auto = switch == "auto"
        self._min_shared_tokens = two_parts.MIN_SHARED_TOKENS if self._is_auto else shared_groups.MIN_SHARED_TOKENS

    def plan(self, batch: ForwardBatch, make: Callable[[plans.SlotTable, two_parts.TwoParts], Any]) -> Planned | None:
        """Plans a step in two parts; None where that is impossible or saves nothing."""
        if not _is_plain_extend(batch):
            return None
        cached, new = list(batch.extend_prefix_lens_cpu), list(batch.extend_seq_lens_cpu)
        piece = two_parts.piece_tokens(self.page_tokens)
        most = sorted(cached)[-2:]
        if len(most) < 2 or most[0] < max(piece, self._min_shared_tokens):
            return None
        table = plans.SlotTable(self._table, batch.req_pool_indices[: len(new)])
        slots = plans.last_slots(table, most[1], piece)
        parts = two_parts.divide(two_parts.groups_by_pieces(slots, cached, piece, self._min_shared_tokens), cached, new)
        if parts is None or parts.n_shared_queries > two_parts.MOST_SHARED_QUERY_TOKENS:
            return None
        if parts.saved_positions == 0 or (self._is_auto and not two_parts.are_worth_it(parts, self._layer)):
            return None
        self.counts.steps += 1
        self.counts.requests += sum(n_shared > 0 for n_shared in parts.own.first_positions)
        self.counts.saved_tokens += parts.saved_positions
        return Planned(make(table, parts), parts.shared_queries, sum(new))


def layer_bytes(runner: ModelRunner) -> two_parts.LayerBytes:
    """Bytes that attention of one layer moves on this rank. Needs a pool without `problem`."""
    from sglang.srt.runtime_context import get_parallel

    pool, config = runner.token_to_kv_pool, runner.model_config
    n_heads = config.num_attention_heads // get_parallel().attn_tp_size
    return two_parts.LayerBytes(
        kv_position=pool.head_num * (pool.head_dim + pool.v_head_dim) * pool.dtype.itemsize,
        output_token=n_heads * pool.v_head_dim * pool.dtype.itemsize,
    )


def _is_plain_extend(batch: ForwardBatch) -> bool:
    """Whether a batch consists of prompts behind cached prefixes, with their lengths on the host."""
    return (
        batch.forward_mode == ForwardMode.EXTEND
        and batch.extend_prefix_lens_cpu is not None
        and batch.extend_seq_lens_cpu is not None
        and batch.spec_info is None
        and batch.encoder_lens is None
        and batch.multi_item_delimiter_indices is None
        and batch.cross_attention_custom_mask is None
        and batch.global_num_tokens_cpu is None  # data-parallel attention pads the batch
    )


def serves_layer(layer: RadixAttention, options: dict[str, Any]) -> bool:
    """Whether the two parts compute this layer: causal attention without a window, K and V of the same width.

    options: further arguments of the model's attention (sinks, scales, modified scores).
    """
    return (
        layer.attn_type == AttentionType.DECODER
        and not layer.is_cross_attention
        and (layer.sliding_window_size is None or layer.sliding_window_size < 0)
        and layer.qk_head_dim == layer.v_head_dim
        and layer.k_scale is None
        and layer.xai_temperature_len <= 0
        and (not layer.logit_cap or layer.logit_capping_method == "tanh")
        and not layer.use_irope
        and all(value is None for value in options.values())
    )


def problem(runner: ModelRunner) -> str | None:
    """Returns why all layers of this model keep SGLang's attention; None where they need not."""
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.runtime_context import get_parallel

    args, pool = resolving_view(runner.server_args), runner.token_to_kv_pool
    if runner.use_mla_backend:
        return "it has multi-head latent attention"
    # SGLang's own subclasses have another layout or quantized values.
    is_plain = isinstance(pool, MHATokenToKVPool) and (
        type(pool) is MHATokenToKVPool or not type(pool).__module__.startswith("sglang.")
    )
    if not is_plain or isinstance(pool, SWAKVPool):
        return f"its KV cache is SGLang's {type(pool).__name__}"
    if pool.dtype != runner.dtype:
        return f"its KV cache holds {pool.dtype}, and its queries are {runner.dtype}"
    if getattr(runner.token_to_kv_pool_allocator, "translate_kv_loc", None) is not None:
        return "its KV slots are virtual (--enable-unified-memory)"
    if runner.model_config.is_encoder_decoder:
        return "it has cross attention"
    if runner.model_config.is_local_attention_model:
        return "it attends in windows of its own (local attention)"
    if runner.is_draft_worker or not runner.spec_algorithm.is_none():
        return "it decodes speculatively"
    if args.enable_deterministic_inference:
        return "--enable-deterministic-inference needs sums whose order does not depend on the step"
    if args.enable_two_batch_overlap:
        return "its steps are divided in two (--enable-two-batch-overlap)"
    if args.dcp_size > 1 or get_parallel().attn_cp_size > 1:
        return "its context is spread over ranks"
    return None


def register(switch: Switch) -> None:
    """Registers the subclasses under the names of SGLang's backends, for `--attention-backend`; `off` restores SGLang's."""
    makers: dict[str, Callable[[ModelRunner, Switch], AttentionBackend]] = {
        "flashinfer": SharedPrefixFlashInfer,
        "fa3": _make_flash_attention,
        "triton": SharedPrefixTriton,
    }
    for name, make in makers.items():
        stock = _stock.setdefault(name, ATTENTION_BACKENDS[name])
        register_attention_backend(name)(stock if switch == "off" else functools.partial(_make, stock, make, switch))


def _make(
    stock: Callable[[ModelRunner], AttentionBackend],
    make: Callable[[ModelRunner, Switch], AttentionBackend],
    switch: Switch,
    runner: ModelRunner,
) -> AttentionBackend:
    if why := problem(runner):
        stays_apart(switch, why)
        return stock(runner)
    return make(runner, switch)


def _make_flash_attention(runner: ModelRunner, switch: Switch) -> AttentionBackend:
    from sglang.srt.utils import get_device_capability

    major, _ = get_device_capability()
    if major not in (8, 9):
        return _stock["fa3"](runner)  # which raises SGLang's own error
    from sgl_prefill.port.runner.shared_prefix_fa3 import SharedPrefixFlashAttention

    return SharedPrefixFlashAttention(runner, switch)


def store(backend: Any, layer: RadixAttention, batch: ForwardBatch, key: torch.Tensor, value: torch.Tensor) -> None:
    """Writes K and V of the new tokens to the pool, from which the requests' own part reads them."""
    backend.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc(batch.out_cache_loc, None), key, value)


class SharedPrefixFlashInfer(FlashInferAttnBackend):  # type: ignore[misc]
    """Two paged calls: one row per group over its shared prefix, not causal; and one causal row per request over the rest.

    SGLang's ragged kernel would need a third call, for the cached tokens between the shared prefix and the new tokens. So K and V
    are written to the pool first, and both calls read from it.
    """

    def __init__(self, runner: ModelRunner, switch: Switch) -> None:
        super().__init__(runner, init_new_workspace=runner.init_new_workspace)
        self.sharing = Sharing(runner, switch)
        self._planned: Planned | None = None
        if why := self._problem:
            stays_apart(switch, why)
        self._shared_kernel, self._own_kernel = self._paged_kernel(), self._paged_kernel()

    def _paged_kernel(self) -> Any:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        return BatchPrefillWithPagedKVCacheWrapper(self.workspace_buffer, "NHD", backend=self.prefill_backend)

    @property
    def _problem(self) -> str | None:
        if self.num_wrappers > 1:
            return "its layers have windows"
        if self.enable_mis:
            return "its prompts have several items (--enable-mis)"
        numbers = self.indices_updater_prefill
        vector = max(16 // numbers.q_data_type.itemsize, numbers.head_dim // 32)
        n_most = FLASHINFER_MERGE_THREADS // (numbers.head_dim // vector)
        if numbers.num_qo_heads > n_most:
            return f"flashinfer merges {n_most} heads of {numbers.head_dim} at most, and it has {numbers.num_qo_heads}"
        return None

    def init_forward_metadata_out_graph(self, forward_batch: ForwardBatch, in_capture: bool = False) -> None:
        self._planned = None
        super().init_forward_metadata_out_graph(forward_batch, in_capture)

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        super().init_forward_metadata(forward_batch)
        self._planned = self.sharing.plan(forward_batch, plans.flashinfer_plan) if self._problem is None else None
        if self._planned is None:
            return
        numbers = self.indices_updater_prefill
        for kernel, rows in zip((self._shared_kernel, self._own_kernel), self._planned.plan, strict=True):
            kernel.begin_forward(
                *rows,
                numbers.num_qo_heads,
                numbers.num_kv_heads,
                numbers.head_dim,
                1,  # slots a page
                q_data_type=numbers.q_data_type,
                kv_data_type=numbers.data_type,
                non_blocking=True,
            )

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **options: Any,
    ) -> torch.Tensor:
        from flashinfer.cascade import merge_state_in_place

        # SGLang compiles no soft cap into this kernel.
        planned = self._planned
        if planned is None or k is None or not planned.is_of(q) or layer.logit_cap or not serves_layer(layer, options):
            found: torch.Tensor = super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache, **options)
            return found
        if save_kv_cache:
            store(self, layer, forward_batch, k, v)
        queries = q.contiguous().view(-1, layer.tp_q_head_num, layer.head_dim)
        pool = self.token_to_kv_pool.get_kv_buffer(layer.layer_id)
        output: torch.Tensor
        output, lse = self._own_kernel.forward_return_lse(queries, pool, causal=True, sm_scale=layer.scaling)
        span = planned.queries
        shared, shared_lse = self._shared_kernel.forward_return_lse(
            queries[span], pool, causal=False, sm_scale=layer.scaling
        )
        merge_state_in_place(output[span], lse[span], shared, shared_lse)
        return output.view(-1, layer.tp_q_head_num * layer.v_head_dim)


class SharedPrefixTriton(TritonAttnBackend):  # type: ignore[misc]
    """Two calls of SGLang's kernel: over each group's shared prefix, and over the rest of the prefix with the new tokens."""

    def __init__(self, runner: ModelRunner, switch: Switch) -> None:
        from sglang.kernels.ops.attention.merge_state import merge_state_triton

        super().__init__(runner)
        self._merge = merge_state_triton
        self.sharing = Sharing(runner, switch)
        self._planned: Planned | None = None

    def init_forward_metadata_out_graph(self, forward_batch: ForwardBatch, in_capture: bool = False) -> None:
        self._planned = None
        super().init_forward_metadata_out_graph(forward_batch, in_capture)

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        super().init_forward_metadata(forward_batch)
        self._planned = self.sharing.plan(forward_batch, plans.triton_plan)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **options: Any,
    ) -> torch.Tensor:
        planned = self._planned
        if planned is None or k is None or not planned.is_of(q) or not serves_layer(layer, options):
            found: torch.Tensor = super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache, **options)
            return found
        if save_kv_cache:
            store(self, layer, forward_batch, k, v)
        written = getattr(forward_batch, "_attn_output", None)
        whole = torch.empty_like(q) if written is None else written
        queries, output = (x.view(-1, layer.tp_q_head_num, layer.head_dim) for x in (q, whole))
        span, plan = planned.queries, planned.plan
        lse = self._attend(queries, k.contiguous(), v.contiguous(), output, layer, plan.own)
        shared = torch.empty_like(output[span])
        shared_lse = self._attend(queries[span], k[:0], v[:0], shared, layer, plan.shared, skip_extend=True)
        if plan.unshared is not None:
            shared.index_fill_(0, plan.unshared, 0)
        self._merge(shared, shared_lse, output[span], lse[span], output[span], lse[span])
        return whole

    def _attend(
        self,
        queries: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
        layer: RadixAttention,
        rows: plans.ExtendRows,
        *,
        skip_extend: bool = False,
    ) -> torch.Tensor:
        """Writes `output` and returns the natural log-sum-exp, [tokens, heads]."""
        lse = torch.empty(queries.shape[:2], dtype=torch.float32, device=queries.device)
        self.extend_attention_fwd(
            queries,
            key,
            value,
            output,
            self.token_to_kv_pool.get_key_buffer(layer.layer_id),
            self.token_to_kv_pool.get_value_buffer(layer.layer_id),
            rows.qo_indptr,
            rows.kv_indptr,
            rows.kv_indices,
            None,  # custom mask
            not skip_extend,  # causal
            None,
            rows.most_queries,
            1.0,  # scale of K
            1.0,  # scale of V
            layer.scaling,
            logit_cap=layer.logit_cap,
            lse_extend=lse,
            skip_extend=skip_extend,
            page_size=self.page_size,
        )
        return lse
