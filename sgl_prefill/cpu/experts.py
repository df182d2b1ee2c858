"""Mixture-of-experts layers on a CPU, where SGLang's code for unquantized experts calls Triton kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from sgl_prefill.cpu.fused import Linear, pack
from sgl_prefill.cpu.native.library import native
from sgl_prefill.errors import UnsupportedModelError

if TYPE_CHECKING:
    from sglang.srt.layers.moe.token_dispatcher import CombineInput, StandardDispatchOutput

_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
}


def _sum_over_experts(
    x: torch.Tensor, topk: Any, gate_up: Sequence[Linear], down: Sequence[Linear], config: Any
) -> torch.Tensor:
    """Sums weight * down(act(gate x) * up x) over the experts of each token, in float32.

    x: [tokens, hidden]; topk: weights and ids, [tokens, experts of a token]; gate_up, down: of each expert, the products with
    weights of [2 * intermediate, hidden] and [hidden, intermediate]; config: SGLang's `MoeRunnerConfig`.
    """
    output = torch.zeros(x.shape, dtype=torch.float32)
    act, weights_on_input = _ACTIVATIONS[config.activation], bool(config.apply_router_weight_on_input)
    flat_ids = topk.topk_ids.flatten()
    order = flat_ids.argsort(stable=True)
    rows_of_expert = torch.bincount(flat_ids[flat_ids >= 0], minlength=len(gate_up)).tolist()
    start = int((flat_ids < 0).sum())  # SGLang marks experts of other ranks and padding with -1
    for expert, n_rows in enumerate(rows_of_expert):
        if n_rows == 0:
            continue
        places = order[start : start + n_rows]
        start += n_rows
        tokens = places // topk.topk_ids.shape[1]
        weight = topk.topk_weights.flatten()[places].unsqueeze(-1)
        rows = x[tokens]
        if weights_on_input:
            rows = (rows * weight).to(x.dtype)
        gate, up = gate_up[expert](rows).chunk(2, dim=-1)
        result = down[expert](act(gate) * up).float()
        output.index_add_(0, tokens, result if weights_on_input else result * weight)
    return output.to(x.dtype)


def products_of(layer: Any) -> tuple[list[Linear], list[Linear]]:
    """Returns the products (gate and up, down) of each expert of a layer. Their weights can be packed."""
    if not hasattr(layer, "sgl_prefill_products"):
        weights = layer.w13_weight, layer.w2_weight
        kernels = native().kernels
        layer.sgl_prefill_products = [[Linear(one, None, kernels) for one in experts.detach()] for experts in weights]
    gate_up, down = layer.sgl_prefill_products
    return gate_up, down


def pack_experts(model: torch.nn.Module) -> tuple[list[Linear], str | None]:
    """Packs the weights of all unquantized expert layers, layer by layer.

    Returns the packed products, and why packing stopped early, or None.
    """
    from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod

    packed: list[Linear] = []
    layers: list[Any] = list(model.modules())
    for layer in layers:
        if not isinstance(getattr(layer, "quant_method", None), UnquantizedFusedMoEMethod):
            continue
        products = [product for group in products_of(layer) for product in group]
        if problem := pack(products):
            return packed, problem
        packed += products
        for weight in (layer.w13_weight, layer.w2_weight):
            weight.data = torch.empty((0, *weight.shape[1:]), dtype=weight.dtype)
    return packed, None


def forward_unquantized_experts(method: Any, layer: Any, dispatch_output: StandardDispatchOutput) -> CombineInput:
    """`UnquantizedFusedMoEMethod.forward` on our platform. Raises UnsupportedModelError."""
    from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput

    config = method.moe_runner_config
    _refuse_unsupported(method, config)
    x, topk = dispatch_output.hidden_states, dispatch_output.topk_output
    output = _sum_over_experts(x, topk, *products_of(layer), config)
    if config.routed_scaling_factor is not None:
        output = output * config.routed_scaling_factor
    return StandardCombineInput(hidden_states=output)


def around_gate_sigmoid_mul_add(
    original: Callable[..., Any],
    hidden_states: torch.Tensor,
    gate_weight: torch.Tensor,
    shared_output: torch.Tensor,
    final_hidden_states: torch.Tensor,
) -> Any:
    """Hook for Qwen2-MoE, instead of a Triton kernel: adds sigmoid(hidden_states @ gate_weight) * shared_output to
    `final_hidden_states`."""
    if hidden_states.device.type != "cpu":
        return original(hidden_states, gate_weight, shared_output, final_hidden_states)
    gate = torch.sigmoid(hidden_states.float() @ gate_weight.float()).unsqueeze(-1)
    final_hidden_states.copy_(final_hidden_states.float() + gate * shared_output.float())
    return None


def register_traced_experts() -> object:
    """Registers a CPU kernel for SGLang's operation of a traced expert layer, while the returned object lives."""
    from sglang.srt.layers.moe.fused_moe_triton import layer  # noqa: F401  (defines the operation)
    from sglang.srt.layers.moe.topk import StandardTopKOutput
    from sglang.srt.model_executor.runner_backend_utils.tc_piecewise_cuda_graph import get_tc_piecewise_forward_context

    def run(
        hidden_states: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        router_logits: torch.Tensor,
        layer_id: int,
    ) -> torch.Tensor:
        experts_layer = get_tc_piecewise_forward_context().moe_layers[layer_id]
        topk = StandardTopKOutput(topk_weights, topk_ids, router_logits)
        output: torch.Tensor = experts_layer.forward_impl(hidden_states, topk)
        return output

    library: Any = torch.library.Library("sglang", "FRAGMENT")  # type: ignore[no-untyped-call]
    library.impl("moe_forward_piecewise_cuda_graph_impl", run, "CPU")
    return library


def _refuse_unsupported(method: Any, config: Any) -> None:
    unknown = []
    if config.activation not in _ACTIVATIONS or not config.is_gated:
        unknown.append(f"{'gated ' if config.is_gated else 'ungated '}{config.activation}")
    if method.with_bias:
        unknown.append("biases")
    if config.gemm1_alpha is not None or config.gemm1_clamp_limit is not None:
        unknown.append("clamped gates")
    if unknown:
        raise UnsupportedModelError(
            f"this model's experts have {', '.join(unknown)}, which the CPU platform does not support: serve it on a GPU"
        )
