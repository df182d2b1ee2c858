"""Shared-prefix attention with FlashAttention 3. A module of its own, since its imports need a CUDA device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.flashattention_backend import FlashAttentionBackend
from sglang.srt.layers.attention.merge_state import merge_state

from sgl_prefill.gpu import plans, two_parts
from sgl_prefill.port.runner.shared_prefix_attention import Planned, Sharing, Switch, serves_layer, store

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


class SharedPrefixFlashAttention(FlashAttentionBackend):  # type: ignore[misc]
    """Two paged calls: one row per group over its shared prefix, not causal; and one causal row per request over the rest."""

    def __init__(self, runner: ModelRunner, switch: Switch) -> None:
        super().__init__(runner)
        self.sharing = Sharing(runner, switch)
        self._planned: Planned | None = None

    def init_forward_metadata_out_graph(self, forward_batch: ForwardBatch, in_capture: bool = False) -> None:
        self._planned = None
        super().init_forward_metadata_out_graph(forward_batch, in_capture)

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        super().init_forward_metadata(forward_batch)
        # For embeddings without a prefix cache SGLang writes no K and V.
        self._planned = None if self.fa_skip_kv_cache else self.sharing.plan(forward_batch, self._plan)

    def _plan(self, table: plans.SlotTable, parts: two_parts.TwoParts) -> plans.FlashAttentionPlan:
        return plans.flash_attention_plan(table, parts, self.page_size)

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
        if planned is None or not planned.is_of(q) or not serves_layer(layer, options):
            found: torch.Tensor = super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache, **options)
            return found
        # A hybrid pass has written K and V already.
        if save_kv_cache and k is not None:
            store(self, layer, forward_batch, k, v)
        queries = q.contiguous().view(-1, layer.tp_q_head_num, layer.head_dim)
        written = getattr(forward_batch, "_attn_output", None)
        into = None if written is None else written.view(queries.shape)
        span, plan = planned.queries, planned.plan
        output, lse = self._attend(queries, layer, plan.own, causal=True, into=into)
        shared, shared_lse = self._attend(queries[span], layer, plan.shared, causal=False)
        merge_state(shared, shared_lse, output[span], lse[span], output[span], torch.empty_like(shared_lse))
        return output.view(-1, layer.tp_q_head_num * layer.v_head_dim)

    def _attend(
        self,
        queries: torch.Tensor,
        layer: RadixAttention,
        rows: plans.PageTable,
        *,
        causal: bool,
        into: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the output, and the natural log-sum-exp, [tokens, heads]."""
        key, value = (
            pool.view(-1, self.page_size, layer.tp_k_head_num, layer.head_dim)
            for pool in self.token_to_kv_pool.get_kv_buffer(layer.layer_id)
        )
        output, lse, *_ = self.flash_attn_with_kvcache(
            q=queries,
            k_cache=key,
            v_cache=value,
            page_table=rows.page_table,
            cache_seqlens=rows.cache_seqlens,
            cu_seqlens_q=rows.cu_seqlens_q,
            max_seqlen_q=rows.most_queries,
            softmax_scale=layer.scaling,
            causal=causal,
            softcap=layer.logit_cap,
            num_splits=self.num_splits,
            return_softmax_lse=True,
            out=into,
        )
        return output, lse.T.contiguous()
