"""The native kernels as functions of tensors. Imports nothing of SGLang.

Callers check sizes and number types first (`Kernels.fits_*`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch

from sgl_prefill.core.shared_groups import Group

_POINTER, _INT32, _INT64, _FLOAT = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float
_CODES = {"p": _POINTER, "i": _INT32, "l": _INT64, "f": _FLOAT}

DTYPES = (torch.bfloat16, torch.float32)
MAX_QUERY_HEADS_PER_KV_HEAD = 512  # BLOCK_ROWS in attention.h: the query heads of one KV head must fit in a block
ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}  # Activation in tokenwise.h
MOST_DEPTH = 4096  # of products: deeper ones would keep partial sums in memory, where oneDNN is faster
_NO_MEMORY = 2  # Status in interface.h


def _all(c_type: Any, *names: str) -> Iterable[tuple[str, Any]]:
    return ((name, c_type) for name in names)


def _function(codes: str) -> Any:
    """Type of a function that takes arguments of these _CODES and returns a Status."""
    return ctypes.CFUNCTYPE(_INT32, *(_CODES[code] for code in codes))


class _Attention(ctypes.Structure):
    """`Attention` of interface.h."""

    _fields_ = [
        *_all(_POINTER, "query"),
        *_all(_INT64, "query_token", "query_head"),
        *_all(_POINTER, "out"),
        *_all(_INT64, "out_token", "out_head"),
        *_all(_POINTER, "lse", "key_pool"),
        *_all(_INT64, "key_slot", "key_head"),
        *_all(_POINTER, "value_pool"),
        *_all(_INT64, "value_slot", "value_head"),
        *_all(_POINTER, "slots"),
        *_all(_INT64, "slots_stride"),
        *_all(_POINTER, "slot_row", "first_token", "kv_tokens", "order", "group_start", "shared_tokens"),
        *_all(_INT32, "requests", "groups", "heads", "kv_heads", "dim", "is_float32", "is_causal", "window_tokens"),
        *_all(_FLOAT, "scale", "soft_cap"),
        *_all(_INT32, "threads"),
    ]


class BuildTable(ctypes.Structure):
    """`Build` of interface.h: the functions of one build."""

    _fields_ = [
        ("name", ctypes.c_char_p),
        ("attention", _function("p")),
        ("rms_norm", _function("pplppffllii")),
        ("gated", _function("pplliii")),
        ("rotate", _function("pllppliiiii")),
        ("store", _function("plplpplplllli")),
        ("logits", _function("ppplllii")),
        ("has_products", _INT32),
        ("pack_product", _function("ppllii")),
        ("product", _function("pplpplllii")),
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
            first_tokens: [requests + 1] rows of the query tensor: request r has [first_tokens[r], first_tokens[r + 1]), its
                last positions.
            kv_tokens: positions of each request, new ones included.
            groups: each request is in exactly one.
        """
        assert slots.dtype == torch.int32
        assert slots.stride(1) == 1
        self.n_requests, self.n_tokens = len(kv_tokens), first_tokens[-1]
        order = [request for group in groups for request in group.members]
        assert len(order) == self.n_requests
        assert len(first_tokens) == self.n_requests + 1
        int32: dict[str, Any] = {
            "first_token": first_tokens,
            "kv_tokens": kv_tokens,
            "order": order,
            "group_start": np.cumsum([0, *(len(group.members) for group in groups)]),
            "shared_tokens": [group.shared_tokens for group in groups],
        }
        self._slots = slots
        self._arrays = {name: np.asarray(numbers, dtype=np.int32) for name, numbers in int32.items()}
        self._arrays["slot_row"] = np.asarray(slot_rows, dtype=np.int64)
        # Of `_Attention`; the pointers are valid while this object lives.
        self.fields: dict[str, Any] = {name: array.ctypes.data for name, array in self._arrays.items()}
        self.fields |= {"slots": slots.data_ptr(), "slots_stride": slots.stride(0)}
        self.fields |= {"requests": self.n_requests, "groups": len(groups)}


class Kernels:
    """The kernels of one build. They use as many threads as PyTorch."""

    def __init__(self, table: BuildTable) -> None:
        self._table = table
        self.build = table.name.decode()

    def _run(self, name: str, *arguments: Any) -> None:
        """Calls a kernel with its arguments as in interface.h, tensors as pointers. Raises MemoryError."""
        pointers = [x.data_ptr() if isinstance(x, torch.Tensor) else x for x in arguments]
        is_profiled = torch._C._autograd._profiler_enabled()  # PyTorch's profiler records only its own operators
        with torch.profiler.record_function(f"sgl_prefill::{name}") if is_profiled else nullcontext():
            status = getattr(self._table, name)(*pointers)
        if status == _NO_MEMORY:
            raise MemoryError("a native kernel found no memory for its scratch")
        assert status == 0, "a native kernel refused its arguments"

    @staticmethod
    def fits_attention(heads: int, kv_heads: int, head_dim: int, v_head_dim: int, *dtypes: torch.dtype) -> bool:
        """Whether `attention` computes a layer of these sizes."""
        return (
            head_dim == v_head_dim
            and head_dim % 2 == 0
            and heads % kv_heads == 0
            and heads // kv_heads <= MAX_QUERY_HEADS_PER_KV_HEAD
            and dtypes[0] in DTYPES
            and len(set(dtypes)) == 1
        )

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
            lse: float32 [tokens, heads], written: natural logarithm of the softmax denominators. A build that multiplies
                bfloat16 numbers sums those.

        Raises MemoryError.
        """
        assert requests.n_tokens <= query.shape[0] == output.shape[0], "these requests are of another step"
        assert query.stride(2) == output.stride(2) == key_pool.stride(2) == value_pool.stride(2) == 1
        arguments = _Attention(
            *(query.data_ptr(), *query.stride()[:2]),
            *(output.data_ptr(), *output.stride()[:2]),
            None if lse is None else lse.data_ptr(),
            *(key_pool.data_ptr(), *key_pool.stride()[:2]),
            *(value_pool.data_ptr(), *value_pool.stride()[:2]),
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
        self._run("attention", ctypes.byref(arguments))

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

        x: [rows, columns], rows of any stride; weight: [columns]; residual: as x, contiguous; all of one of DTYPES. If the
        offset is not 0 (Gemma), the sum is rounded before it is normalized.
        """
        output = torch.empty(x.shape, dtype=x.dtype)
        options = weight_offset, eps, *x.shape, x.dtype == torch.float32, torch.get_num_threads()
        self._run("rms_norm", output, x, x.stride(0), residual, weight, *options)
        return output

    def gated(self, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
        """Computes activation(gate) * up. gate_up: [rows, 2 * columns], contiguous; activation: one of ACTIVATIONS."""
        rows, columns = gate_up.shape[0], gate_up.shape[1] // 2
        output = torch.empty((rows, columns), dtype=gate_up.dtype)
        options = ACTIVATIONS[activation], gate_up.dtype == torch.float32, torch.get_num_threads()
        self._run("gated", output, gate_up, rows, columns, *options)
        return output

    def rotate(self, x: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, *, is_neox: bool) -> None:
        """Applies the rotary embedding to the first dimensions of each head, in place.

        x: [rows, heads, head_dim], rows and heads of any stride; positions: int64 [rows]; cos_sin: float32 [positions,
        rotary dimensions], cosines first. is_neox: rotates halves against each other, else neighbours.
        """
        rows, heads = x.shape[:2]
        options = rows, heads, cos_sin.shape[1], is_neox, x.dtype == torch.float32, torch.get_num_threads()
        self._run("rotate", x, x.stride(0), x.stride(1), positions, cos_sin, *options)

    def store(
        self,
        key_pool: torch.Tensor,
        value_pool: torch.Tensor,
        slots: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> None:
        """Computes `key_pool[slots] = key` and `value_pool[slots] = value`.

        Pools: [slots, ...]; slots: int64 [rows]; key, value: [rows, ...], rows of any stride, each contiguous and shaped as in
        its pool; one number type.
        """
        rows, size = key.shape[0], key.element_size()
        strides = [x.stride(0) * size for x in (key_pool, value_pool, key, value)]
        row_bytes = [x.numel() // max(rows, 1) * size for x in (key, value)]
        pools, new = (key_pool, strides[0], value_pool, strides[1]), (key, strides[2], value, strides[3])
        self._run("store", *pools, slots, *new, rows, *row_bytes, torch.get_num_threads())

    @staticmethod
    def fits_logits(hidden: torch.Tensor, weight: torch.Tensor) -> bool:
        """Whether `logits` computes this product."""
        same_type = hidden.dtype == weight.dtype and hidden.dtype in DTYPES
        return same_type and weight.is_contiguous() and hidden.is_contiguous() and weight.shape[1] % 32 == 0

    def logits(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Computes `hidden @ weight.T` with exact products, accumulated in float32. hidden: [rows, columns]; weight:
        [vocabulary, columns].
        """
        (rows, columns), vocabulary = hidden.shape, weight.shape[0]
        output = torch.empty((rows, vocabulary))
        options = hidden.dtype == torch.float32, torch.get_num_threads()
        self._run("logits", output, hidden, weight, rows, vocabulary, columns, *options)
        return output

    def fits_product(self, weight: torch.Tensor) -> bool:
        """Whether `product` serves these weights, [outputs, depth], at least as fast as oneDNN."""
        outputs, depth = weight.shape
        is_whole = outputs % 32 == depth % 32 == 0 and depth <= MOST_DEPTH
        return bool(self._table.has_products) and weight.dtype == torch.bfloat16 and weight.is_contiguous() and is_whole

    def pack_product(self, weight: torch.Tensor, *, has_gate: bool) -> torch.Tensor:
        """Returns the weights in the layout of `product`, of the same size. has_gate: the first half of the outputs is the
        gate of the second."""
        packed = torch.empty_like(weight)
        self._run("pack_product", packed, weight, *weight.shape, has_gate, torch.get_num_threads())
        return packed

    def product(
        self, x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, activation: str | None = None
    ) -> torch.Tensor:
        """Computes x @ weight.T + bias or, of weights packed with a gate, activation(gate) * up; rounded once.

        x: [rows, depth], rows of any stride; packed: of [outputs, depth]; bias: [outputs]; all bfloat16.
        """
        rows, (outputs, depth) = x.shape[0], packed.shape
        output = torch.empty((rows, outputs if activation is None else outputs // 2), dtype=x.dtype)
        options = -1 if activation is None else ACTIVATIONS[activation], torch.get_num_threads()
        self._run("product", output, x, x.stride(0), packed, bias, rows, outputs, depth, *options)
        return output
