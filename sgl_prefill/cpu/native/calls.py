"""The native kernels as functions of tensors. Nothing here imports SGLang.

Sizes and number types are the callers' to check (`fits`); a kernel that refuses its arguments all the same is a bug.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch

from sgl_prefill.core.shared_groups import Group

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
_POINTER, _INT32, _INT64, _FLOAT = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float

DTYPES = (torch.bfloat16, torch.float32)
# BLOCK_ROWS in attention.h: the query heads of one KV head and token must fit a block.
MAX_QUERY_HEADS_PER_KV_HEAD = 512
ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}
# Of products: what deeper ones need, sums that wait in memory, oneDNN does better.
MOST_DEPTH = 4096
_NO_MEMORY = 2


class _Attention(ctypes.Structure):
    """`Attention` of interface.h."""

    _fields_ = [
        ("query", _POINTER),
        ("query_token", _INT64),
        ("query_head", _INT64),
        ("out", _POINTER),
        ("out_token", _INT64),
        ("out_head", _INT64),
        ("lse", _POINTER),
        ("key_pool", _POINTER),
        ("key_slot", _INT64),
        ("key_head", _INT64),
        ("value_pool", _POINTER),
        ("value_slot", _INT64),
        ("value_head", _INT64),
        ("slots", _POINTER),
        ("slots_stride", _INT64),
        ("slot_row", _POINTER),
        ("first_token", _POINTER),
        ("kv_tokens", _POINTER),
        ("order", _POINTER),
        ("group_start", _POINTER),
        ("shared_tokens", _POINTER),
        ("requests", _INT32),
        ("groups", _INT32),
        ("heads", _INT32),
        ("kv_heads", _INT32),
        ("dim", _INT32),
        ("is_float32", _INT32),
        ("is_causal", _INT32),
        ("window_tokens", _INT32),
        ("scale", _FLOAT),
        ("soft_cap", _FLOAT),
        ("threads", _INT32),
    ]


class BuildTable(ctypes.Structure):
    """`Build` of interface.h: one build's functions."""

    _fields_ = [
        ("name", ctypes.c_char_p),
        ("attention", ctypes.CFUNCTYPE(_INT32, ctypes.POINTER(_Attention))),
        (
            "rms_norm",
            ctypes.CFUNCTYPE(
                *(
                    _INT32,
                    _POINTER,
                    _POINTER,
                    _INT64,
                    _POINTER,
                    _POINTER,
                    _FLOAT,
                    _FLOAT,
                    _INT64,
                    _INT64,
                    _INT32,
                    _INT32,
                )
            ),
        ),
        ("gated", ctypes.CFUNCTYPE(_INT32, _POINTER, _POINTER, _INT64, _INT64, _INT32, _INT32, _INT32)),
        (
            "rotate",
            ctypes.CFUNCTYPE(
                *(_INT32, _POINTER, _INT64, _INT64, _POINTER, _POINTER, _INT64, _INT32, _INT32, _INT32, _INT32, _INT32)
            ),
        ),
        (
            "store",
            ctypes.CFUNCTYPE(
                *(_INT32, _POINTER, _INT64, _POINTER, _INT64, _POINTER, _POINTER, _INT64, _POINTER, _INT64),
                *(_INT64, _INT64, _INT64, _INT32),
            ),
        ),
        ("logits", ctypes.CFUNCTYPE(_INT32, _POINTER, _POINTER, _POINTER, _INT64, _INT64, _INT64, _INT32, _INT32)),
        ("has_products", _INT32),
        ("pack_product", ctypes.CFUNCTYPE(_INT32, _POINTER, _POINTER, _INT64, _INT64, _INT32, _INT32)),
        (
            "product",
            ctypes.CFUNCTYPE(
                *(_INT32, _POINTER, _POINTER, _INT64, _POINTER, _POINTER, _INT64, _INT64, _INT64, _INT32, _INT32)
            ),
        ),
    ]


class StepRequests:
    """Where the requests of one step live; the same for all layers."""

    def __init__(
        self,
        slots: torch.Tensor,
        slot_rows: Sequence[int],
        first_tokens: Sequence[int],
        kv_tokens: Sequence[int],
        groups: Sequence[Group],
    ) -> None:
        """
        Args:
            slots: int32 [rows, positions], the KV slot of each position.
            slot_rows: the row of each request.
            first_tokens: requests + 1 rows of the query tensor: request r has [first_tokens[r], first_tokens[r + 1]), its last
                positions.
            kv_tokens: positions of each request, new ones included.
            groups: every request in one.
        """
        assert slots.dtype == torch.int32
        assert slots.stride(1) == 1
        self.n_requests, self.n_tokens = len(kv_tokens), first_tokens[-1]
        self._slots = slots
        self._slot_rows = np.asarray(slot_rows, dtype=np.int64)
        order = [request for group in groups for request in group.members]
        starts = np.cumsum([0, *(len(group.members) for group in groups)])
        shared = [group.shared_tokens for group in groups]
        assert len(order) == self.n_requests
        assert len(first_tokens) == self.n_requests + 1
        self._int32 = [np.asarray(x, dtype=np.int32) for x in (first_tokens, kv_tokens, order, starts, shared)]
        first, kv, order_at, group_start, shared_at = (array.ctypes.data for array in self._int32)
        self.fields: dict[str, Any] = {
            "slots": slots.data_ptr(),
            "slots_stride": slots.stride(0),
            "slot_row": self._slot_rows.ctypes.data,
            "first_token": first,
            "kv_tokens": kv,
            "order": order_at,
            "group_start": group_start,
            "shared_tokens": shared_at,
            "requests": self.n_requests,
            "groups": len(groups),
        }


def _recorded(kernel: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Tells PyTorch's profiler of a kernel, which is no operator of PyTorch's."""

    @functools.wraps(kernel)
    def call(*arguments: Parameters.args, **options: Parameters.kwargs) -> Result:
        if not torch._C._autograd._profiler_enabled():
            return kernel(*arguments, **options)
        with torch.profiler.record_function(f"sgl_prefill::{kernel.__name__}"):
            return kernel(*arguments, **options)

    return call


class Kernels:
    """One build's kernels. Threads are PyTorch's."""

    def __init__(self, table: BuildTable) -> None:
        self._table = table
        self.build = table.name.decode()

    @staticmethod
    def fits_attention(heads: int, kv_heads: int, head_dim: int, v_head_dim: int, *dtypes: torch.dtype) -> bool:
        """Tells whether `attention` computes a layer of these sizes."""
        return (
            head_dim == v_head_dim
            and head_dim % 2 == 0
            and heads % kv_heads == 0
            and heads // kv_heads <= MAX_QUERY_HEADS_PER_KV_HEAD
            and dtypes[0] in DTYPES
            and len(set(dtypes)) == 1
        )

    @_recorded
    def attention(
        self,
        requests: StepRequests,
        query: torch.Tensor,
        key_pool: torch.Tensor,
        value_pool: torch.Tensor,
        output: torch.Tensor,
        *,
        scale: float,
        causal: bool = True,
        window_tokens: int | None = None,
        soft_cap: float = 0.0,
        lse: torch.Tensor | None = None,
    ) -> None:
        """Computes the attention of all requests of a step, each over its own positions.

        Args:
            query, output: [tokens, heads, head_dim]; may be the same.
            key_pool, value_pool: [slots, kv heads, head_dim].
            scale, causal, window_tokens, soft_cap: as in `cpu.attention.attend`.
            lse: float32 [tokens, heads], written: natural logarithm of the softmax denominators, which are sums of
                bfloat16 numbers where the build multiplies those.

        Raises MemoryError.
        """
        assert requests.n_tokens <= query.shape[0] == output.shape[0], "these requests are of another step"
        assert query.stride(2) == output.stride(2) == key_pool.stride(2) == value_pool.stride(2) == 1
        arguments = _Attention(
            query=query.data_ptr(),
            query_token=query.stride(0),
            query_head=query.stride(1),
            out=output.data_ptr(),
            out_token=output.stride(0),
            out_head=output.stride(1),
            lse=None if lse is None else lse.data_ptr(),
            key_pool=key_pool.data_ptr(),
            key_slot=key_pool.stride(0),
            key_head=key_pool.stride(1),
            value_pool=value_pool.data_ptr(),
            value_slot=value_pool.stride(0),
            value_head=value_pool.stride(1),
            heads=query.shape[1],
            kv_heads=key_pool.shape[1],
            dim=query.shape[2],
            is_float32=query.dtype == torch.float32,
            is_causal=causal,
            window_tokens=-1 if window_tokens is None else window_tokens,
            scale=scale,
            soft_cap=soft_cap,
            threads=torch.get_num_threads(),
            **requests.fields,
        )
        _check(self._table.attention(ctypes.byref(arguments)))

    @_recorded
    def rms_norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        residual: torch.Tensor | None = None,
        weight_offset: float = 0.0,
    ) -> torch.Tensor:
        """Computes the RMSNorm of x + residual over the last dimension, times (weight_offset + weight); `residual` becomes
        the sum.

        x: [rows, columns] with rows of any stride; weight: [columns]; residual: as x, contiguous; all of one of DTYPES. Where
        the offset is not 0 (Gemma) the sum is rounded before it is normalized.
        """
        output = torch.empty(x.shape, dtype=x.dtype)
        rows, columns = x.shape
        _check(
            self._table.rms_norm(
                output.data_ptr(),
                x.data_ptr(),
                x.stride(0),
                None if residual is None else residual.data_ptr(),
                weight.data_ptr(),
                weight_offset,
                eps,
                rows,
                columns,
                x.dtype == torch.float32,
                torch.get_num_threads(),
            )
        )
        return output

    @_recorded
    def gated(self, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
        """Computes activation(gate) * up. gate_up: [rows, 2 * columns], contiguous; `activation` of ACTIVATIONS."""
        rows, columns = gate_up.shape[0], gate_up.shape[1] // 2
        output = torch.empty((rows, columns), dtype=gate_up.dtype)
        kind, is_float32 = ACTIVATIONS[activation], gate_up.dtype == torch.float32
        threads = torch.get_num_threads()
        _check(self._table.gated(output.data_ptr(), gate_up.data_ptr(), rows, columns, kind, is_float32, threads))
        return output

    @_recorded
    def rotate(self, x: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, *, is_neox: bool) -> None:
        """Applies the rotary embedding to the first dimensions of each head, in place.

        x: [rows, heads, head_dim], rows and heads of any stride; positions: int64 [rows]; cos_sin: float32 [positions,
        rotary dimensions], cosines first. is_neox: halves are rotated against each other, else neighbours.
        """
        rows, heads = x.shape[:2]
        _check(
            self._table.rotate(
                x.data_ptr(),
                x.stride(0),
                x.stride(1),
                positions.data_ptr(),
                cos_sin.data_ptr(),
                rows,
                heads,
                cos_sin.shape[1],
                is_neox,
                x.dtype == torch.float32,
                torch.get_num_threads(),
            )
        )

    @_recorded
    def store(
        self,
        key_pool: torch.Tensor,
        value_pool: torch.Tensor,
        slots: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> None:
        """Does `key_pool[slots] = key`, and so the values.

        Pools: [slots, ...]; slots: int64 [rows]; key, value: [rows, ...], what follows as in their pools and in one piece, rows
        of any stride; one number type.
        """
        size, rows = key.element_size(), key.shape[0]
        _check(
            self._table.store(
                key_pool.data_ptr(),
                key_pool.stride(0) * size,
                value_pool.data_ptr(),
                value_pool.stride(0) * size,
                slots.data_ptr(),
                key.data_ptr(),
                key.stride(0) * size,
                value.data_ptr(),
                value.stride(0) * size,
                rows,
                key.numel() // max(rows, 1) * size,
                value.numel() // max(rows, 1) * size,
                torch.get_num_threads(),
            )
        )

    @staticmethod
    def fits_logits(hidden: torch.Tensor, weight: torch.Tensor) -> bool:
        """Tells whether `logits` computes this product."""
        same_type = hidden.dtype == weight.dtype and hidden.dtype in DTYPES
        return same_type and weight.is_contiguous() and hidden.is_contiguous() and weight.shape[1] % 32 == 0

    @_recorded
    def logits(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Computes `hidden @ weight.T`, exact products added in float32. hidden: [rows, columns]; weight: [vocabulary,
        columns].
        """
        rows, columns = hidden.shape
        output = torch.empty((rows, weight.shape[0]))
        is_float32, threads = hidden.dtype == torch.float32, torch.get_num_threads()
        pointers = output.data_ptr(), hidden.data_ptr(), weight.data_ptr()
        _check(self._table.logits(*pointers, rows, weight.shape[0], columns, is_float32, threads))
        return output

    def fits_product(self, weight: torch.Tensor) -> bool:
        """Tells whether `product` serves these weights, [outputs, depth], at least as fast as oneDNN."""
        outputs, depth = weight.shape
        is_whole = outputs % 32 == depth % 32 == 0 and depth <= MOST_DEPTH
        return bool(self._table.has_products) and weight.dtype == torch.bfloat16 and weight.is_contiguous() and is_whole

    def pack_product(self, weight: torch.Tensor, *, has_gate: bool) -> torch.Tensor:
        """Weights as `product` reads them, of the same size. has_gate: the outputs are those of a gate and, behind them, of what
        it is multiplied with."""
        packed = torch.empty_like(weight)
        pointers, threads = (packed.data_ptr(), weight.data_ptr()), torch.get_num_threads()
        _check(self._table.pack_product(*pointers, *weight.shape, has_gate, threads))
        return packed

    @_recorded
    def product(
        self, x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, activation: str | None = None
    ) -> torch.Tensor:
        """Computes x @ weight.T + bias, or, of weights that were packed with a gate, activation(gate) * up of it, rounded once.

        x: [rows, depth], rows of any stride; packed: of [outputs, depth]; bias: [outputs]; all bfloat16.
        """
        rows, (outputs, depth) = x.shape[0], packed.shape
        output = torch.empty((rows, outputs if activation is None else outputs // 2), dtype=x.dtype)
        _check(
            self._table.product(
                output.data_ptr(),
                x.data_ptr(),
                x.stride(0),
                packed.data_ptr(),
                None if bias is None else bias.data_ptr(),
                rows,
                outputs,
                depth,
                -1 if activation is None else ACTIVATIONS[activation],
                torch.get_num_threads(),
            )
        )
        return output


def _check(status: int) -> None:
    if status == _NO_MEMORY:
        raise MemoryError("a native kernel found no memory for its scratch")
    assert status == 0, "a native kernel refused its arguments"
