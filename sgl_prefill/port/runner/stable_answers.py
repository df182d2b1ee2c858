"""`--stable-answers`: finds parts of a model whose results depend on the other requests of a step; fixes the row counts of the
matrix products of a model without such parts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from sgl_prefill.cpu import stable
from sgl_prefill.cpu.native.library import native
from sgl_prefill.errors import UnsupportedModelError
from sgl_prefill.port.runner.forward import body_of
from sgl_prefill.startup.arguments import unstable

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

    from sgl_prefill.port.runner.runner_state import RunnerState


def make_stable(state: RunnerState, runner: ModelRunner) -> dict[str, Any]:
    """Implements `LoadedModel.make_stable`."""
    if problems := _problems(state, runner):
        raise UnsupportedModelError("; ".join(problems))
    assert state.hybrid is not None
    n_counts = stable.fix_row_counts(state.hybrid.products, state.hybrid.chunk_tokens)
    return {"products": len(state.hybrid.products), "row_counts": n_counts, "most_rows": state.hybrid.chunk_tokens}


def _problems(state: RunnerState, runner: ModelRunner) -> list[str]:
    from sglang.srt.arg_groups.overrides import resolving_view

    problems = unstable(resolving_view(runner.server_args))
    if state.record.config.logits_dtype != "float32":
        problems.append("--logits-dtype is model: close labels tie or not with the size of a step")
    if problems:
        return problems
    kernels, hybrid = native().kernels, state.hybrid
    if kernels is None or hybrid is None or not hybrid.serves_short:
        return ["its layers do not run in the native kernels (the log says why)"]
    if (kernel := stable.kernel_problem(kernels, runner.dtype)) is not None:
        problems.append(
            f"the kernel {kernel} of build {kernels.build} rounds a row differently beside other rows, please report it"
        )
    if state.record.cpu_kernel is not None and (layers := state.record.cpu_kernel["pytorch_layers"]):
        problems.append(f"PyTorch computes the attention of layers {', '.join(map(str, layers))}")
    if state.record.packed_weights is not None and (packing := state.record.packed_weights["problem"]) is not None:
        problems.append(packing)
    if any(product.packed is None for product in hybrid.products):
        problems.append("PyTorch computes some of its matrix products")
    if operations := stable.unknown_operations(piece.module.graph for piece in hybrid.split.pieces):
        problems.append(f"PyTorch computes {', '.join(operations)} in its layers")
    return problems + _lm_head_problems(kernels, runner)


def _lm_head_problems(kernels: Any, runner: ModelRunner) -> list[str]:
    """Returns why the kernel for label logits cannot serve this model's LM head; empty for a model without one."""
    from sglang.srt.layers.logits_processor import should_apply_lm_head_quant_method

    if not runner.is_generation:
        return []
    # Some model families use their embedding as LM head.
    lm_head: Any = getattr(runner.model, "lm_head", None) or getattr(body_of(runner), "embed_tokens", None)
    weight = getattr(lm_head, "weight", None)
    if not isinstance(weight, torch.Tensor) or should_apply_lm_head_quant_method(
        lm_head, getattr(lm_head, "quant_method", None)
    ):
        return ["its LM head is not one plain weight"]
    hidden = torch.empty((1, weight.shape[1]), dtype=runner.dtype)
    if not kernels.fits_logits(hidden, weight):
        return [f"its LM head of {weight.shape[1]} columns in {weight.dtype} is not for the native kernel"]
    return ["its LM head has a bias"] if getattr(lm_head, "bias", None) is not None else []
