"""SGLang's interfaces on a CPU: the attention backend, over native kernels or `cpu.attention`, and the KV pool."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc, MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from sgl_prefill.core.shared_groups import groups_of_one, shared_groups
from sgl_prefill.cpu.attention import KVRows, Run, attend, runs_of
from sgl_prefill.cpu.native.calls import Kernels, StepRequests
from sgl_prefill.cpu.native.library import native
from sgl_prefill.errors import UnsupportedModelError

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

# A memory profile computes this many queries: the memory of a native kernel does not depend on their number.
PROFILED_QUERIES = 64


class LazyZeroKVPool(MHATokenToKVPool):  # type: ignore[misc]
    """SGLang's KV pool in zero pages that the operating system commits on first use.

    `torch.zeros` writes every page at start, 1.5 s per GiB here.
    """

    def _create_buffers_normal(self) -> None:
        def zeros(shape: tuple[int, ...]) -> torch.Tensor:
            flat = np.zeros(math.prod(shape) * self.store_dtype.itemsize, dtype=np.uint8)
            return torch.from_numpy(flat).view(self.store_dtype).view(shape)

        k_shape, v_shape = self._kv_buffer_shapes()
        self.k_buffer = [zeros(k_shape) for _ in range(self.layer_num)]
        self.v_buffer = [zeros(v_shape) for _ in range(self.layer_num)]


class LatentKVPool(MLATokenToKVPool):  # type: ignore[misc]
    """SGLang's pool of latent rows (MLA), without the index of sparse attention."""

    def __init__(self, *arguments: Any, index_head_dim: int | None = None, **options: Any) -> None:
        if index_head_dim is not None:
            raise UnsupportedModelError("this model's sparse attention (DSA) needs an accelerator")
        super().__init__(*arguments, **options)


class RequestRows(NamedTuple):
    """One request of a batch; fixed for the whole forward."""

    queries: slice  # rows of the batch's query tensor: the request's last positions
    pool_row: int  # in SGLang's table of KV slots
    n_kv: int  # positions, new ones included


class CpuFlashAttentionBackend(AttentionBackend):  # type: ignore[misc]
    """Computes the attention of a whole step in one native call, which reads K and V from the pool by slot.

    Without native kernels (`cpu.native.library`), or in layers that they do not support, PyTorch's CPU flash kernel computes
    one request after another. Supports grouped query heads, sliding windows, soft caps, encoder-only layers, decode, and
    multi-head latent attention (MLA) in its absorbed form: all query heads read one latent row a token, whose first part is V.
    """

    only_last_block = False  # set by memory profiles: see `attend`

    def __init__(self, model_runner: ModelRunner) -> None:
        super().__init__()
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.kernels = native().kernels
        self.shares_prefixes = True  # False: each request is a group of its own (shared_prefix_attention=off)
        self._steps: dict[bool, StepRequests] = {}  # of this forward; True: only the last rows of each request
        self._runs: list[list[Run]] | None = None
        self._requests: list[RequestRows] = []
        self._cached_tokens: list[int] = []
        if isinstance(self.token_to_kv_pool, SWAKVPool):
            raise UnsupportedModelError(
                "the cpu_flash attention backend keeps sliding-window layers in the full KV pool, and SGLang built a"
                " separate sliding-window pool: start with --disable-hybrid-swa-memory"
            )

    def support_triton(self) -> bool:
        return False

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Stores where the queries and KV slots of each request are, for all layers of the forward."""
        self._steps, self._runs, self._requests, self._cached_tokens = {}, None, [], []
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
        """Writes K, V of the batch's new tokens to the pool, and returns their attention, [tokens, query heads * head_dim]."""
        _refuse_unsupported(layer, extra)
        if save_kv_cache and k is not None and v is not None:
            self.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc, None), k, v)
        output = torch.empty(q.shape, dtype=q.dtype)
        self.attend_into(output, q, layer)
        if layer.v_head_dim < layer.qk_head_dim:  # MLA: V is the beginning of K
            output = output.view(-1, layer.tp_q_head_num, layer.qk_head_dim)[..., : layer.v_head_dim]
        return output.reshape(-1, layer.tp_q_head_num * layer.v_head_dim)

    def attend_into(
        self, output: torch.Tensor, q: torch.Tensor, layer: RadixAttention, n_last: Sequence[int] | None = None
    ) -> None:
        """Computes the attention of the current batch, with K and V in the pool; `output` may be `q`.

        q, output: [tokens, query heads * head_dim]. n_last: q has only so many rows of each request, of its last positions.
        """
        key_pool = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        is_latent = isinstance(self.token_to_kv_pool, MLATokenToKVPool)
        value_pool = key_pool if is_latent else self.token_to_kv_pool.get_value_buffer(layer.layer_id)
        query, into = (x.view(-1, layer.tp_q_head_num, layer.qk_head_dim) for x in (q, output))
        causal = layer.attn_type != AttentionType.ENCODER_ONLY
        options: dict[str, Any] = {
            "scale": layer.scaling,
            "causal": causal,
            "window_tokens": layer.sliding_window_size if causal and layer.sliding_window_size > -1 else None,
            "soft_cap": layer.logit_cap or 0.0,
        }
        if self.kernels is not None and self.is_native(layer, q.dtype, key_pool.dtype, value_pool.dtype):
            step = self._step_requests(n_last)
            self.kernels.attention(step, query, key_pool, value_pool, into, **options)
            return
        if self._runs is None:
            table = self.req_to_token_pool.req_to_token
            self._runs = [runs_of(table[request.pool_row, : request.n_kv]) for request in self._requests]
        starts = [] if n_last is None else [0, *itertools.accumulate(n_last)]
        for index, (request, runs) in enumerate(zip(self._requests, self._runs, strict=True)):
            queries = slice(*starts[index : index + 2]) if starts else request.queries
            rows = KVRows(key_pool, value_pool, runs)
            attend(query[queries], rows, into[queries], only_last_block=self.only_last_block, **options)

    def pytorch_layers(self, model: torch.nn.Module, dtype: torch.dtype) -> list[int]:
        """Returns the layers that the native kernels do not support; none if there are no native kernels."""
        if self.kernels is None:
            return []
        layers = [module for module in model.modules() if isinstance(module, RadixAttention)]
        return sorted({layer.layer_id for layer in layers if not self.is_native(layer, dtype)})

    @staticmethod
    def is_native(layer: RadixAttention, *dtypes: torch.dtype) -> bool:
        """Whether the native kernels support this layer."""
        return Kernels.fits_attention(
            layer.tp_q_head_num, layer.tp_k_head_num, layer.qk_head_dim, layer.v_head_dim, *dtypes
        )

    def _step_requests(self, n_last: Sequence[int] | None) -> StepRequests:
        is_last = n_last is not None
        if is_last not in self._steps:
            ends = [one.queries.stop for one in self._requests] if n_last is None else [*itertools.accumulate(n_last)]
            is_profile = self.only_last_block and len(ends) == 1
            first_tokens = [max(ends[0] - PROFILED_QUERIES, 0) if is_profile else 0, *ends]
            self._steps[is_last] = self._native_requests(first_tokens)
        return self._steps[is_last]

    def _native_requests(self, first_tokens: Sequence[int]) -> StepRequests:
        table = self.req_to_token_pool.req_to_token
        slots, pool_rows = table.numpy(), [request.pool_row for request in self._requests]

        def slot(request: int, position: int) -> int:
            return int(slots[pool_rows[request], position])

        cached = self._cached_tokens
        groups = shared_groups(slot, cached) if self.shares_prefixes else groups_of_one(range(len(pool_rows)))
        return StepRequests(table, pool_rows, first_tokens, [request.n_kv for request in self._requests], groups)

    forward_decode = forward_extend  # with one token per request


def _refuse_unsupported(layer: RadixAttention, extra: dict[str, Any]) -> None:
    unknown = sorted(name for name, value in extra.items() if value is not None)
    if layer.is_cross_attention:
        unknown.append("cross attention")
    if layer.qk_head_dim != layer.v_head_dim and layer.tp_k_head_num > 1:
        unknown.append(f"K heads of {layer.qk_head_dim} and V heads of {layer.v_head_dim} dimensions")
    if unknown:
        raise UnsupportedModelError(
            f"this model needs {', '.join(unknown)} in layer {layer.layer_id}, which the cpu_flash attention backend"
            " does not support: start with --attention-backend torch_native"
        )
