"""SGLang's attention-backend interface over `cpu.attention`: which rows of the KV pool belong to which request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from sgl_prefill.core.shared_groups import groups_of_one, shared_groups
from sgl_prefill.cpu.attention import KVRows, Run, attend, runs_of
from sgl_prefill.cpu.native.calls import Kernels, StepRequests
from sgl_prefill.cpu.native.library import native
from sgl_prefill.errors import UnsupportedModelError

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


# Of a memory profile's queries so many are computed: a native kernel takes the same memory for any number.
PROFILED_QUERIES = 64


class RequestRows(NamedTuple):
    """Where one request of a batch lives, fixed for the whole forward."""

    queries: slice  # its rows of the batch's query tensor: its last positions
    pool_row: int  # of the table of KV slots
    n_kv: int  # positions, new ones included


class CpuFlashAttentionBackend(AttentionBackend):  # type: ignore[misc]
    """Attention of a whole step in one native call, K and V being read from the pool by slot.

    Where the native kernels do not serve (`cpu.native.library`), or a layer is not for them, PyTorch's CPU flash kernel runs
    one request after another. Supports grouped query heads, sliding windows, soft caps, encoder-only layers, and decode.
    """

    # Memory profiles set this: see `attend`.
    only_last_block = False

    def __init__(self, model_runner: ModelRunner) -> None:
        super().__init__()
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.kernels = native().kernels
        self.shares_prefixes = True  # shared_prefix_attention=off: each request is a group of its own
        self._step: StepRequests | None = None  # of this forward, made when a layer first asks
        self._last_rows_step: StepRequests | None = None
        self._runs: list[list[Run]] | None = None
        self._requests: list[RequestRows] = []
        self._cached_tokens: list[int] = []
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
        """Note where every request's queries and KV slots are; all layers of the forward use it."""
        self._step = self._last_rows_step = self._runs = None
        self._requests, self._cached_tokens = [], []
        mode = forward_batch.forward_mode
        if mode.is_idle():
            return
        kv_lens = forward_batch.seq_lens_cpu.tolist()
        query_lens = [1] * len(kv_lens) if mode.is_decode() else list(forward_batch.extend_seq_lens_cpu)
        pool_rows = forward_batch.req_pool_indices.tolist()
        start = 0
        for pool_row, n_q, n_kv in zip(pool_rows, query_lens, kv_lens, strict=True):
            self._requests.append(RequestRows(slice(start, start + n_q), pool_row, n_kv))
            self._cached_tokens.append(n_kv - n_q)
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
        """Returns [tokens, query heads * head_dim] for the batch's new tokens, whose K, V are written to the pool first."""
        _refuse_what_is_not_computed(layer, extra)
        if save_kv_cache and k is not None and v is not None:
            self.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc, None), k, v)
        output = torch.empty(q.shape, dtype=q.dtype)
        self.attend_into(output, q, layer)
        return output.view(-1, layer.tp_q_head_num * layer.v_head_dim)

    def attend_into(
        self, output: torch.Tensor, q: torch.Tensor, layer: RadixAttention, *, only_last_rows: bool = False
    ) -> None:
        """Computes the attention of the current batch, K and V being in the pool; `output` may be `q`.

        q, output: [tokens, query heads * head_dim]. only_last_rows: one row a request, its last position.
        """
        key_pool = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        value_pool = self.token_to_kv_pool.get_value_buffer(layer.layer_id)
        query, into = (x.view(-1, layer.tp_q_head_num, layer.qk_head_dim) for x in (q, output))
        causal = layer.attn_type != AttentionType.ENCODER_ONLY
        options: dict[str, Any] = {
            "scale": layer.scaling,
            "causal": causal,
            "window_tokens": layer.sliding_window_size if causal and layer.sliding_window_size > -1 else None,
            "soft_cap": layer.logit_cap or 0.0,
        }
        if self.kernels is not None and self.is_native(layer, q.dtype, key_pool.dtype, value_pool.dtype):
            requests = self._last_rows_requests() if only_last_rows else self._step_requests()
            self.kernels.attention(requests, query, key_pool, value_pool, into, **options)
            return
        if self._runs is None:
            table = self.req_to_token_pool.req_to_token
            self._runs = [runs_of(table[request.pool_row, : request.n_kv]) for request in self._requests]
        for index, (request, runs) in enumerate(zip(self._requests, self._runs, strict=True)):
            queries = slice(index, index + 1) if only_last_rows else request.queries
            rows = KVRows(key_pool, value_pool, runs)
            attend(query[queries], rows, into[queries], only_last_block=self.only_last_block, **options)

    def pytorch_layers(self, model: torch.nn.Module, dtype: torch.dtype) -> list[int]:
        """Returns the layers that the native kernels, where there are any, do not compute."""
        if self.kernels is None:
            return []
        layers = [module for module in model.modules() if isinstance(module, RadixAttention)]
        return sorted({layer.layer_id for layer in layers if not self.is_native(layer, dtype)})

    @staticmethod
    def is_native(layer: RadixAttention, *dtypes: torch.dtype) -> bool:
        """Tells whether the native kernels, where there are any, compute this layer."""
        return Kernels.fits_attention(
            layer.tp_q_head_num, layer.tp_k_head_num, layer.qk_head_dim, layer.v_head_dim, *dtypes
        )

    def _step_requests(self) -> StepRequests:
        if self._step is None:
            first_tokens = [0, *(request.queries.stop for request in self._requests)]
            if self.only_last_block and len(self._requests) == 1:
                first_tokens[0] = max(first_tokens[1] - PROFILED_QUERIES, 0)
            self._step = self._native_requests(first_tokens)
        return self._step

    def _last_rows_requests(self) -> StepRequests:
        if self._last_rows_step is None:
            self._last_rows_step = self._native_requests(range(len(self._requests) + 1))
        return self._last_rows_step

    def _native_requests(self, first_tokens: Sequence[int]) -> StepRequests:
        table = self.req_to_token_pool.req_to_token
        numbers, pool_rows = table.numpy(), [request.pool_row for request in self._requests]
        if self.shares_prefixes:
            groups = shared_groups(
                lambda request, position: int(numbers[pool_rows[request], position]), self._cached_tokens
            )
        else:
            groups = groups_of_one(range(len(pool_rows)))
        return StepRequests(table, pool_rows, first_tokens, [request.n_kv for request in self._requests], groups)

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
