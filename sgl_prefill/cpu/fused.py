"""A traced model body on a CPU: native kernels for norms, gates and rotary embeddings, packed weights for matrix products.

During tracing each layer that a kernel supports becomes one operation of the graph (`recorded_as_operations`). Afterwards
modules that call the kernels replace these operations and the matrix products (`lower`). SGLang's own layers do not change.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

from sgl_prefill.cpu.native.calls import DTYPES, Kernels
from sgl_prefill.hybrid.trace import TracedBody, op_name

NAMESPACE = "sgl_prefill_fused"
PACKED_FOR_ROWS = 256  # passed to oneDNN, whose packed layout is the same from 16 rows on

_product: Any = torch.ops.mkldnn._linear_pointwise.default


@functools.cache
def define_operations() -> object:
    """Defines the operations of a traced graph, once. They have no kernel, and `lower` replaces them."""
    library: Any = torch.library.Library(NAMESPACE, "DEF")  # type: ignore[no-untyped-call]
    library.define("rms_norm(Tensor x, Tensor weight, float eps, float offset) -> Tensor")
    library.define("add_rms_norm(Tensor x, Tensor residual, Tensor w, float eps, float offset) -> (Tensor, Tensor)")
    library.define("gated(Tensor gate_up, str activation) -> Tensor")
    library.define(
        "rotate(Tensor positions, Tensor query, Tensor key, Tensor cos_sin, int head_size, bool is_neox) -> (Tensor, Tensor)"
    )
    library.impl("rms_norm", lambda x, *_: torch.empty_like(x), "Meta")
    library.impl("add_rms_norm", lambda x, *_: (torch.empty_like(x), torch.empty_like(x)), "Meta")
    library.impl("gated", lambda x, _: x.new_empty((x.shape[0], x.shape[1] // 2)), "Meta")
    library.impl("rotate", lambda _, query, key, *__: (torch.empty_like(query), torch.empty_like(key)), "Meta")
    return library  # the operations exist as long as it does


@contextmanager
def recorded_as_operations(
    body: torch.nn.Module, dtype: torch.dtype, longest_tokens: int | None = None
) -> Iterator[None]:
    """Runs each layer of `body` that a kernel supports as one operation.

    longest_tokens: of any request; None: at most the length of the rotary tables. With a shorter table SGLang's own rotary
    layer runs: unlike the kernel it checks positions.
    """
    from sglang.kernels.fused_op import get_fused_op_backend

    define_operations()
    get_fused_op_backend()  # read from the environment now, and not while a graph is recorded
    replaced: list[tuple[Any, Any]] = []
    layers: list[Any] = list(body.modules())
    for module in layers:
        if (stand_in := _stand_in(module, dtype, longest_tokens or 0)) is not None:
            replaced.append((module, module._forward_method))
            module._forward_method = stand_in
    try:
        yield
    finally:
        for module, original in replaced:
            module._forward_method = original


def _stand_in(module: Any, dtype: torch.dtype, longest_tokens: int) -> Callable[..., Any] | None:
    """Returns what runs instead of a layer during tracing; None if no kernel computes exactly the same."""
    from sglang.srt.layers.activation import GeluAndMul, SiluAndMul
    from sglang.srt.layers.layernorm import GemmaRMSNorm, RMSNorm
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding

    if dtype not in DTYPES:
        return None
    if type(module) is SiluAndMul:
        return _gated_stand_in(module, "silu")
    if type(module) is GeluAndMul and module.approximate == "tanh":
        return _gated_stand_in(module, "gelu_tanh")
    if type(module) is RMSNorm:
        is_plain = (
            module.override_orig_dtype is None
            and not module.fp32_residual
            and module.variance_size_override is None
            and not module.cast_x_before_out_mul
            and module.weight.dtype == dtype
        )
        return _norm_stand_in(module, 0.0) if is_plain else None
    if type(module) is GemmaRMSNorm and module.weight.dtype == dtype:
        return _norm_stand_in(module, 1.0)
    is_rotary = isinstance(module, RotaryEmbedding) and type(module).forward_native is RotaryEmbedding.forward_native
    if is_rotary and not hasattr(module, "sin_cos_cache"):
        table = module.cos_sin_cache
        return _rotary_stand_in(module) if table.dtype in DTYPES and table.shape[0] >= longest_tokens else None
    return None


def _gated_stand_in(gate: Any, activation: str) -> Callable[..., Any]:
    native: Callable[..., Any] = gate.forward_native

    def forward(x: torch.Tensor) -> Any:
        return torch.ops.sgl_prefill_fused.gated(x, activation) if x.dim() == 2 else native(x)

    return forward


def _norm_stand_in(norm: Any, offset: float) -> Callable[..., Any]:
    native: Callable[..., Any] = norm.forward_native

    def forward(
        x: torch.Tensor,
        residual: torch.Tensor | None = None,
        post_residual_addition: torch.Tensor | None = None,
        quant_linear: Any = None,
    ) -> Any:
        is_stacked = residual is not None and x.dim() != 2
        if post_residual_addition is not None or x.shape[-1] != norm.weight.shape[0] or is_stacked:
            return native(x, residual, post_residual_addition)
        eps = norm.variance_epsilon
        if residual is not None:
            return torch.ops.sgl_prefill_fused.add_rms_norm(x, residual, norm.weight, eps, offset)
        return torch.ops.sgl_prefill_fused.rms_norm(x, norm.weight, eps, offset)

    return forward


def _rotary_stand_in(rotary: Any) -> Callable[..., Any]:
    native: Callable[..., Any] = rotary.forward_native

    def forward(
        positions: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        offsets: torch.Tensor | None = None,
        fused_set_kv_buffer_arg: Any = None,
    ) -> Any:
        if offsets is not None or fused_set_kv_buffer_arg is not None or query.dim() != 2 or positions.dim() != 1:
            return native(positions, query, key, offsets, fused_set_kv_buffer_arg)
        arguments = rotary.cos_sin_cache, rotary.head_size, bool(rotary.is_neox_style)
        return torch.ops.sgl_prefill_fused.rotate(positions, query, key, *arguments)

    return forward


def _rows(x: torch.Tensor) -> torch.Tensor:
    """Views [..., columns] as [rows, columns] with contiguous rows, as the kernels need."""
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


class Linear(torch.nn.Module):
    """x @ weight.T + bias, or activation(gate) * up of it. `pack` packs the weight for a native kernel or oneDNN."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, kernels: Kernels | None = None) -> None:
        super().__init__()
        self.source: torch.Tensor | None = weight  # the model's parameter; emptied and None after packing
        self.packed: torch.Tensor | None = None
        self.activation: str | None = None
        self.row_counts: Sequence[
            int
        ] = ()  # of `--stable-answers`, ascending: the only row counts of a product (`cpu.stable`)
        self._kernels, self._bias = kernels, bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._in_fixed_counts(x) if self.row_counts else self.at_once(x)

    def _in_fixed_counts(self, x: torch.Tensor) -> torch.Tensor:
        """Computes the rows in pieces of the largest count; zero rows pad the last piece to the next count."""
        rows, most = _rows(x).contiguous(), self.row_counts[-1]
        pieces = []
        for start in range(0, max(len(rows), 1), most):
            piece = rows[start : start + most]
            n_rows = len(piece)
            n_added = next(count for count in self.row_counts if count >= n_rows) - n_rows
            if n_added:
                piece = torch.cat([piece, piece.new_zeros((n_added, piece.shape[1]))])
            pieces.append(self.at_once(piece)[:n_rows])
        product = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        return product.view(*x.shape[:-1], product.shape[-1])

    def at_once(self, x: torch.Tensor) -> torch.Tensor:
        """Computes all rows in one call."""
        if self.packed is None:
            assert self.source is not None
            result = torch.nn.functional.linear(x, self.source, self._bias)
        elif self.packed.is_mkldnn:
            result = _product(x, self.packed, self._bias, "none", [], "")
        else:
            assert self._kernels is not None
            product = self._kernels.product(_rows(x), self.packed, self._bias, self.activation)
            return product.view(*x.shape[:-1], product.shape[-1])
        if self.activation is None:
            return result
        assert self._kernels is not None
        return self._kernels.gated(result, self.activation)

    def packed_weight(self, source: torch.Tensor) -> torch.Tensor:
        if self._kernels is not None and self._kernels.fits_product(source):
            return self._kernels.pack_product(source, has_gate=self.activation is not None)
        result: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(source, PACKED_FOR_ROWS)
        return result


class _RmsNorm(torch.nn.Module):
    def __init__(self, kernels: Kernels, weight: torch.Tensor, eps: float, offset: float) -> None:
        super().__init__()
        self._kernels, self._weight, self._eps, self._offset = kernels, weight.detach(), eps, offset

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._kernels.rms_norm(_rows(x), self._weight, self._eps, None, self._offset).view(x.shape)


class _AddRmsNorm(_RmsNorm):
    is_in_place = False  # True: only this module reads the residual input

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        total = residual if self.is_in_place and residual.is_contiguous() else residual.clone()
        return self._kernels.rms_norm(_rows(x), self._weight, self._eps, total, self._offset), total


class _Gated(torch.nn.Module):
    def __init__(self, kernels: Kernels, activation: str) -> None:
        super().__init__()
        self._kernels, self.activation = kernels, activation

    def forward(self, gate_up: torch.Tensor) -> torch.Tensor:
        return self._kernels.gated(gate_up.contiguous(), self.activation)


class _Rotate(torch.nn.Module):
    is_in_place = False

    def __init__(self, kernels: Kernels, cos_sin: torch.Tensor, head_size: int, is_neox: bool) -> None:
        super().__init__()
        self._kernels, self._cos_sin, self._head_size, self._is_neox = kernels, cos_sin, head_size, is_neox

    def forward(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_in_place:
            query, key = query.clone(), key.clone()
        for rows in _side_by_side(query, key):
            heads = rows.view(rows.shape[0], -1, self._head_size)
            self._kernels.rotate(heads, positions, self._cos_sin, is_neox=self._is_neox)
        return query, key


def _side_by_side(query: torch.Tensor, key: torch.Tensor) -> Sequence[torch.Tensor]:
    """Returns query and key as one tensor if they are neighbouring columns of one, as in a fused product of both."""
    width = query.shape[1]
    is_one = (
        query.stride() == key.stride()
        and query.stride(0) >= width + key.shape[1]
        and key.data_ptr() == query.data_ptr() + width * query.element_size()
    )
    if not is_one:
        return query, key
    return (query.as_strided((query.shape[0], width + key.shape[1]), query.stride()),)


def lower(traced: TracedBody, kernels: Kernels) -> list[Linear]:
    """Replaces, in place, traced operations and matrix products with model weights by modules that call kernels.

    Returns the products; `pack` packs their weights.
    """
    graph, inputs = traced.module.graph, traced.inputs
    tables: dict[int, torch.Tensor] = {}  # rotary tables in float32, one for all layers
    products: dict[fx.Node, Linear] = {}

    def constant(node: Any) -> Any:
        return inputs[node].constant if isinstance(node, fx.Node) and node in inputs else None

    for number, node in enumerate(list(graph.nodes)):
        if node.op != "call_function":
            continue
        module: torch.nn.Module | None = None
        arguments: tuple[Any, ...] = ()
        name = op_name(node)
        if name == f"{NAMESPACE}.rms_norm":
            x, weight, eps, offset = node.args
            module, arguments = _RmsNorm(kernels, constant(weight), eps, offset), (x,)
        elif name == f"{NAMESPACE}.add_rms_norm":
            x, residual, weight, eps, offset = node.args
            module, arguments = _AddRmsNorm(kernels, constant(weight), eps, offset), (x, residual)
            module.is_in_place = _is_only_read_by(node, residual)
        elif name == f"{NAMESPACE}.gated":
            module, arguments = _Gated(kernels, node.args[1]), (node.args[0],)
        elif name == f"{NAMESPACE}.rotate":
            positions, query, key, cos_sin, head_size, is_neox = node.args
            table = constant(cos_sin)
            in_float32 = tables.setdefault(id(table), table.float().contiguous())
            module, arguments = _Rotate(kernels, in_float32, head_size, is_neox), (positions, query, key)
            module.is_in_place = _is_only_read_by(node, query) and _is_only_read_by(node, key)
        elif node.target is torch._C._nn.linear:
            x, weight, bias = (*node.args, None)[:3]
            weight_rows = constant(weight)
            has_constants = isinstance(weight_rows, torch.Tensor) and (bias is None or constant(bias) is not None)
            if has_constants and weight_rows.dtype in DTYPES and weight_rows.dim() == 2:
                bias_rows = None if bias is None else constant(bias).detach()
                module, arguments = Linear(weight_rows, bias_rows, kernels), (x,)
                products[node] = module
        if module is None:
            continue
        target = f"sgl_prefill_{number}"
        traced.module.add_submodule(target, module)
        node.op, node.target, node.args, node.kwargs = "call_module", target, arguments, {}
    _join_gates(traced.module, products)
    for node in list(graph.find_nodes(op="placeholder")):
        if not node.users and isinstance(inputs[node].constant, torch.Tensor):
            graph.erase_node(node)
            del inputs[node]
    return list(products.values())


def _join_gates(module: fx.GraphModule, products: dict[fx.Node, Linear]) -> None:
    """Moves gates into the products that they alone read, if that holds for all products with the same weights."""
    readers = {
        gate.args[0]: (gate, gated)
        for gate in module.graph.find_nodes(op="call_module")
        if isinstance(gated := module.get_submodule(str(gate.target)), _Gated) and _is_only_read_by(gate, gate.args[0])
    }
    sources_without = {id(product.source) for node, product in products.items() if node not in readers}
    for node, product in products.items():
        if id(product.source) not in sources_without:
            gate, gated = readers[node]
            product.activation = gated.activation
            gate.replace_all_uses_with(node)
            module.graph.erase_node(gate)


def _is_only_read_by(node: fx.Node, x: Any) -> bool:
    """Whether `node` may overwrite `x`: a kernel or product computed it, maybe as a part of a split, and no other node reads
    it.
    """
    if not isinstance(x, fx.Node) or list(x.users) != [node]:
        return False
    maker: Any = x
    if x.target is operator.getitem and isinstance(x.args[0], fx.Node):
        maker = x.args[0]
        if maker.op == "call_method" and maker.target == "split":
            split, maker = maker, maker.args[0]
            if not isinstance(maker, fx.Node) or list(maker.users) != [split]:
                return False
    return bool(maker.op == "call_module")


def pack(linears: Sequence[Linear]) -> str | None:
    """Packs the weights one by one, and empties the model's parameters: memory does not grow.

    Returns why packing stopped early, or None.
    """
    by_source: dict[int, torch.Tensor] = {}
    for linear in linears:
        source = linear.source
        if source is None:
            continue
        try:
            packed = by_source.get(id(source))
            if packed is None:
                packed = linear.packed_weight(source.detach())
        except (RuntimeError, MemoryError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            return f"packing weights stopped ({reason}): the others are used as they are"
        by_source[id(source)] = linear.packed = packed
        linear.source = None
        source.data = torch.empty((0, *source.shape[1:]), dtype=source.dtype)
    return None


def packed_bytes(linears: Sequence[Linear]) -> int:
    """Memory of the packed weights, which are no longer parameters of the model."""
    kept = {id(linear.packed): linear.packed for linear in linears if linear.packed is not None}
    return sum(int(torch.ops.mkldnn._nbytes(packed)) if packed.is_mkldnn else packed.nbytes for packed in kept.values())
