"""A body of SGLang's own layers, lowered to native kernels and packed weights, against the same body as it is recorded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from sglang.srt.layers.activation import GeluAndMul, SiluAndMul
from sglang.srt.layers.layernorm import GemmaRMSNorm, RMSNorm
from sglang.srt.layers.rotary_embedding import get_rope
from sglang.srt.runtime_context import get_context

from sgl_prefill.cpu import fused
from sgl_prefill.cpu.fused import Linear, lower, pack, packed_bytes, recorded_as_operations
from sgl_prefill.cpu.native.calls import Kernels
from sgl_prefill.hybrid.split import split_body
from sgl_prefill.hybrid.trace import TracedBody, op_name
from tests.cpu.conftest import skip_where_not_packed
from tests.cpu.test_hybrid import HIDDEN, VOCABULARY, run, trace

HEADS, KV_HEADS, DIM, WIDE = 6, 2, 4, 40
INPUT_IDS = torch.randint(0, VOCABULARY, (61,), generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def _published() -> Iterator[None]:
    """SGLang's layers ask for its configuration when they are made."""
    with get_context().override_server_args():
        yield


class Layer(torch.nn.Module):
    """Llama's, or Gemma's with other norms, gates and neighbours rotated."""

    def __init__(self, layer_id: int, *, is_gemma: bool) -> None:
        super().__init__()
        self.layer_id = layer_id
        norm = GemmaRMSNorm if is_gemma else RMSNorm
        self.input_norm, self.post_norm = norm(HIDDEN, eps=1e-5), norm(HIDDEN, eps=1e-5)
        self.activation = GeluAndMul() if is_gemma else SiluAndMul()
        self.rotary = get_rope(DIM, 2 if is_gemma else DIM, 128, 10000, is_neox_style=not is_gemma)
        self.qkv = torch.nn.Linear(HIDDEN, (HEADS + 2 * KV_HEADS) * DIM)
        self.out = torch.nn.Linear(HEADS * DIM, HIDDEN, bias=False)
        self.gate_up = torch.nn.Linear(HIDDEN, 2 * WIDE, bias=False)
        self.down = torch.nn.Linear(WIDE, HIDDEN, bias=False)
        for each in (self.input_norm, self.post_norm):
            torch.nn.init.normal_(each.weight, 0.0 if is_gemma else 1.0, 0.3)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if residual is None:
            residual, x = x, self.input_norm(x)
        else:
            x, residual = self.input_norm(x, residual)
        x, residual = self.attention(x, positions), residual
        x, residual = self.post_norm(x, residual)
        return self.down(self.activation(self.gate_up(x))), residual

    def attention(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(x).split([HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM], dim=-1)
        query, key = self.rotary(positions, query, key)
        output = torch.empty_like(query)
        heads = (-1, KV_HEADS, DIM)
        torch.ops.sgl_prefill_hybrid.attention(query, key.view(heads), value.view(heads), output, True, self.layer_id)
        result: torch.Tensor = self.out(output)
        return result


class Body(torch.nn.Module):
    layer: type[Layer] = Layer

    def __init__(self, *, is_gemma: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = torch.nn.ModuleList(self.layer(i, is_gemma=is_gemma) for i in range(3))
        self.norm = (GemmaRMSNorm if is_gemma else RMSNorm)(HIDDEN, eps=1e-5)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, forward_batch: Any) -> torch.Tensor:
        x, residual = self.embedding(input_ids), None
        for layer in self.layers:
            x, residual = layer(x, residual, positions)
        result: torch.Tensor = self.norm(x, residual)[0]
        return result


class ReadsTheResidualAgain(Layer):
    """The residual as it was before the norm added to it is wanted once more."""

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, before = super().forward(x, residual, positions)
        normed, after = self.post_norm(x, before)
        return normed + before, after


class ReadsAViewOfTheResidual(Layer):
    """As above, but the norm gets a view: the node that it reads has no other reader, and its memory has."""

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, before = super().forward(x, residual, positions)
        normed, after = self.post_norm(x, before.view(-1, HIDDEN))
        return normed + before, after


class ReadsTheQueryBeforeItIsRotated(Layer):
    def attention(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        rows = self.qkv(x)
        query, key, value = rows.split([HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM], dim=-1)
        rotated, key = self.rotary(positions, query, key)
        output = torch.empty_like(query)
        heads = (-1, KV_HEADS, DIM)
        torch.ops.sgl_prefill_hybrid.attention(rotated, key.view(heads), value.view(heads), output, True, self.layer_id)
        result: torch.Tensor = self.out(output + query + rows[:, : HEADS * DIM])
        return result


def body_of(layer: type[Layer], *, is_gemma: bool = False) -> Body:
    class Made(Body):
        pass

    Made.layer = layer
    return Made(is_gemma=is_gemma)


def lowered(body: Body, kernels: Kernels) -> tuple[TracedBody, list[Linear]]:
    with recorded_as_operations(body, torch.float32):
        traced = trace(body)
    return traced, lower(traced, kernels)


def values(traced: TracedBody, chunk_tokens: int = 1000) -> torch.Tensor:
    return run(split_body(traced, attention_in_place=True), chunk_tokens, INPUT_IDS)


def in_place(traced: TracedBody, kind: type[Any]) -> list[bool]:
    return [module.is_in_place for module in traced.module.modules() if isinstance(module, kind)]


BODIES = [Layer, ReadsTheResidualAgain, ReadsAViewOfTheResidual, ReadsTheQueryBeforeItIsRotated]


@pytest.mark.parametrize("is_gemma", [False, True])
@pytest.mark.parametrize("layer", BODIES)
def test_a_lowered_body_gives_the_values_of_the_recorded_one(
    kernels: Kernels, layer: type[Layer], is_gemma: bool
) -> None:
    """Whole, in chunks, and again: whoever else reads a value that a kernel could overwrite still finds it."""
    body = body_of(layer, is_gemma=is_gemma)
    expected = values(trace(body))
    assert expected.isfinite().all()
    traced, products = lowered(body, kernels)
    operations = {op_name(node) for node in traced.module.graph.nodes if node.op == "call_function"}
    assert not any(name.startswith(fused.NAMESPACE) for name in operations)
    assert len(products) == 3 * 4
    for chunk_tokens in (1000, 7, 1000):
        torch.testing.assert_close(values(traced, chunk_tokens), expected, rtol=0, atol=1e-5)


def test_kernels_work_in_place_where_nobody_else_reads_the_value(kernels: Kernels) -> None:
    """All residuals but the embedding's rows, and every rotated query and key."""
    traced, _ = lowered(body_of(Layer), kernels)
    assert in_place(traced, fused._AddRmsNorm) == [False] + 5 * [True]
    assert in_place(traced, fused._Rotate) == 3 * [True]
    traced, _ = lowered(body_of(ReadsTheQueryBeforeItIsRotated), kernels)
    assert not any(in_place(traced, fused._Rotate))


class ReadsGateAndUpAgain(Layer):
    """In the first layer only."""

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        result, after = super().forward(x, residual, positions)
        if self.layer_id == 0:
            gate_up = self.gate_up(result)
            result = self.down(self.activation(gate_up)) + gate_up[:, :HIDDEN]
        return result, after


def test_products_apply_the_gate_that_alone_reads_them(kernels: Kernels) -> None:
    """Where all products with these weights can: they are packed for it, once."""
    _, products = lowered(body_of(Layer), kernels)
    assert [product.activation for product in products] == 3 * [None, None, "silu", None]
    body = body_of(ReadsGateAndUpAgain)
    expected = values(trace(body))
    traced, products = lowered(body, kernels)
    first_layer = [None, None, None, None, None, None]
    assert [product.activation for product in products] == first_layer + 2 * [None, None, "silu", None]
    assert pack(products) is None
    torch.testing.assert_close(values(traced), expected, rtol=0, atol=1e-5)


def test_rows_whose_numbers_are_apart_are_read_as_they_are(kernels: Kernels) -> None:
    """A transposed matrix has rows of the right shape, and kernels read a row's numbers side by side."""
    apart = torch.randn(64, 20).to(torch.bfloat16).T
    assert apart.stride(1) != 1
    norm = fused._RmsNorm(kernels, torch.ones(64, dtype=torch.bfloat16), 1e-5, 0.0)
    assert torch.equal(norm(apart), norm(apart.contiguous()))
    product = Linear(torch.randn(32, 64).to(torch.bfloat16), None, kernels)
    pack([product])
    assert torch.equal(product(apart), product(apart.contiguous()))
    assert torch.equal(product(apart.view(4, 5, 64)), product(apart.contiguous()).view(4, 5, 32))


def test_layers_are_as_they_were_after_recording() -> None:
    """Also where recording fails; and within it only those stand for an operation that a kernel computes just so."""
    plain, other = RMSNorm(HIDDEN), RMSNorm(HIDDEN, cast_x_before_out_mul=True)
    body = torch.nn.ModuleList([plain, other])
    before = plain._forward_method, other._forward_method

    def record_and_fail() -> None:
        with recorded_as_operations(body, torch.float32):
            assert plain._forward_method != before[0]
            assert other._forward_method == before[1]
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        record_and_fail()
    assert (plain._forward_method, other._forward_method) == before
    with recorded_as_operations(body, torch.float16):
        assert plain._forward_method == before[0]


def test_packing_keeps_the_values_and_empties_the_parameters(kernels: Kernels) -> None:
    body = body_of(Layer)
    expected = values(trace(body))
    traced, products = lowered(body, kernels)
    weights = {name: weight.nbytes for name, weight in body.named_parameters() if "norm" not in name}
    assert pack(products) is None
    for chunk_tokens in (1000, 7):
        torch.testing.assert_close(values(traced, chunk_tokens), expected, rtol=0, atol=1e-5)
    for name, weight in body.named_parameters():
        is_packed = name.rpartition(".")[0].endswith((".qkv", ".out", ".gate_up", ".down")) and name.endswith("weight")
        assert (weight.numel() == 0) == is_packed, name
    n_packed_bytes = sum(size for name, size in weights.items() if name.startswith("layers.") and "bias" not in name)
    assert n_packed_bytes <= packed_bytes(products) <= 4 * n_packed_bytes
    assert pack(products) is None, "a second time changes nothing"


@pytest.mark.parametrize("error", [RuntimeError("could not create a primitive\nand more"), MemoryError("none left")])
def test_where_packing_fails_the_rest_is_used_as_it_is(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """The reason is named, and packed and other products give the same values as before."""
    body = body_of(Layer)
    expected = values(trace(body))
    traced, products = lowered(body, kernels)
    reorder, calls = torch.ops.mkldnn._reorder_linear_weight, []

    def fails_at_the_third(weight: torch.Tensor, *arguments: Any) -> torch.Tensor:
        calls.append(weight.shape)
        if len(calls) == 3:
            raise error
        packed: torch.Tensor = reorder(weight, *arguments)
        return packed

    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", fails_at_the_third)
    reason = pack(products)
    assert reason == f"packing weights stopped ({str(error).splitlines()[0]}): the others are used as they are"
    assert [product.packed is not None for product in products] == 2 * [True] + 10 * [False]
    assert [product.source is None for product in products] == 2 * [True] + 10 * [False]
    torch.testing.assert_close(values(traced), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_shared_weight_is_packed_and_counted_once(
    kernels: Kernels, dtype: torch.dtype, activation: str | None
) -> None:
    """Two products with one parameter, of which one has a bias; for a native kernel or oneDNN."""
    skip_where_not_packed(dtype)
    weight = torch.nn.Parameter(torch.randn(96, 64).to(dtype), requires_grad=False)
    bias, x = torch.randn(96).to(dtype), torch.randn(20, 64).to(dtype)
    first, second = Linear(weight, None, kernels), Linear(weight, bias, kernels)
    first.activation = second.activation = activation
    is_native = kernels.fits_product(weight)
    expected = first(x).float(), second(x).float()
    assert packed_bytes([first, second]) == 0
    assert pack([first, second]) is None
    assert first.packed is second.packed
    assert first.packed is not None
    assert first.packed.is_mkldnn != is_native
    assert packed_bytes([first, second]) == packed_bytes([first]) >= weight.element_size() * 96 * 64
    # A gate that oneDNN's product is read by is rounded before it is multiplied.
    rtol, atol = (1e-4, 1e-4) if dtype == torch.float32 else (2**-6, 0.1)
    for product, wanted in zip((first, second), expected, strict=True):
        torch.testing.assert_close(product(x).float(), wanted, rtol=rtol, atol=atol)
