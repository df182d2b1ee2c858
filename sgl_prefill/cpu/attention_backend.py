"""SGLang's attention-backend interface over `cpu.attention`: which rows of the KV pool belong to which request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from sgl_prefill.cpu.attention import KVRows, Run, attend, runs_of
from sgl_prefill.errors import UnsupportedModelError

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


class RequestRows(NamedTuple):
    """Where one request of a batch lives, fixed for the whole forward."""

    queries: slice  # its rows of the batch's query tensor
    runs: list[Run]  # its KV slots in position order


class CpuFlashAttentionBackend(AttentionBackend):  # type: ignore[misc]
    """Prefix x suffix and causal suffix attention with PyTorch's CPU flash kernel, one request after another.

    Reads the KV pool in place where a request's slots are consecutive, and otherwise copies one tile of its rows.
    Supports grouped query heads, sliding windows, soft caps, encoder-only layers, and decode.
    """

    # Memory profiles set this: see `attend`.
    only_last_block = False

    def __init__(self, model_runner: ModelRunner) -> None:
        super().__init__()
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self._requests: list[RequestRows] = []
        if isinstance(self.token_to_kv_pool, SWAKVPool):
            raise UnsupportedModelError(
                "the cpu_flash attention backend keeps sliding-window layers in the full KV pool, and SGLang built a"
                " separate sliding-window pool: start with --disable-hybrid-swa-memory"
            )
        if model_runner.use_mla_backend:
            raise UnsupportedModelError(
                "the cpu_flash attention backend has no multi-head latent attention (MLA):"
                " start with --attention-backend torch_native"
            )

    def support_triton(self) -> bool:
        return False

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Resolve every request's KV slots once; all layers of the forward use them."""
        mode = forward_batch.forward_mode
        if mode.is_idle():
            self._requests = []
            return
        kv_lens = forward_batch.seq_lens_cpu.tolist()
        query_lens = [1] * len(kv_lens) if mode.is_decode() else list(forward_batch.extend_seq_lens_cpu)
        pool_rows = forward_batch.req_pool_indices.tolist()
        self._requests, start = [], 0
        for pool_row, n_q, n_kv in zip(pool_rows, query_lens, kv_lens, strict=True):
            slots = self.req_to_token_pool.req_to_token[pool_row, :n_kv]
            self._requests.append(RequestRows(slice(start, start + n_q), runs_of(slots)))
            start += n_q

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **extra: Any,
    ) -> torch.Tensor:
        """[tokens, query heads * head_dim] for the batch's new tokens, whose K, V are written to the pool first."""
        _refuse_what_is_not_computed(layer, extra)
        if save_kv_cache and k is not None and v is not None:
            self.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc, None), k, v)
        output = torch.empty(q.shape, dtype=q.dtype)
        self.attend_into(output, q, layer)
        return output.view(-1, layer.tp_q_head_num * layer.v_head_dim)

    def attend_into(self, output: torch.Tensor, q: torch.Tensor, layer: RadixAttention) -> None:
        """Attention of the current batch, K and V being in the pool; `output` may be `q`.

        q, output: [tokens, query heads * head_dim].
        """
        key_pool = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        value_pool = self.token_to_kv_pool.get_value_buffer(layer.layer_id)
        query, into = (x.view(-1, layer.tp_q_head_num, layer.qk_head_dim) for x in (q, output))
        for request in self._requests:
            attend(
                query[request.queries],
                KVRows(key_pool, value_pool, request.runs),
                into[request.queries],
                scale=layer.scaling,
                causal=layer.attn_type != AttentionType.ENCODER_ONLY,
                window_tokens=layer.sliding_window_size if layer.sliding_window_size > -1 else None,
                soft_cap=layer.logit_cap or 0.0,
                only_last_block=self.only_last_block,
            )

    # A decode step is an extend of one token per request.
    forward_decode = forward_extend


def _refuse_what_is_not_computed(layer: RadixAttention, extra: dict[str, Any]) -> None:
    unknown = sorted(name for name, value in extra.items() if value is not None)
    if layer.is_cross_attention:
        unknown.append("cross attention")
    if layer.qk_head_dim != layer.v_head_dim:
        unknown.append(f"K heads of {layer.qk_head_dim} and V heads of {layer.v_head_dim} dimensions")
    if unknown:
        raise UnsupportedModelError(
            f"this model asks for {', '.join(unknown)} in layer {layer.layer_id}, which the cpu_flash attention backend"
            " does not compute: start with --attention-backend torch_native"
        )
