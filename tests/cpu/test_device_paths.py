"""What a GPU would meet on its way through a forward pass, as far as objects without a device can show it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.attention.flashinfer_backend import FlashInferAttnBackend
from sglang.srt.layers.attention.hybrid_attn_backend import HybridAttnBackend
from sglang.srt.model_executor.runner_backend_utils.tc_piecewise_cuda_graph import get_tc_piecewise_forward_context
from torch._subclasses.fake_tensor import FakeTensorMode

from sgl_prefill import preflight
from sgl_prefill.config import PrefillConfig
from sgl_prefill.port import device_logits, hybrid
from sgl_prefill.port.hooks import hooks_for
from sgl_prefill.preflight import DEVICE_MAX_REQUESTS

HIDDEN, VOCABULARY = 8, 32


def without_device(kind: type, **attributes: Any) -> Any:
    """An object of SGLang's class as its __init__ would leave it, with these attributes alone."""
    made: Any = object.__new__(kind)
    vars(made).update(attributes)
    return made


def test_flashinfers_backend_is_one_backend() -> None:
    """Its `prefill_backend` names a kernel, \"fa2\": the start took that text for a backend, and ended."""
    backend = without_device(FlashInferAttnBackend, prefill_backend="fa2", decode_backend="fa2")
    assert hybrid.prefill_backend(backend) is backend


def test_of_two_backends_the_one_for_prefills_is_found() -> None:
    """As with --prefill-attention-backend."""
    inner = without_device(FlashInferAttnBackend, prefill_backend="fa2", decode_backend="fa2")
    assert hybrid.prefill_backend(without_device(HybridAttnBackend, prefill_backend=inner)) is inner


def test_opaque_products_find_how_weights_are_quantized() -> None:
    """AWQ-Marlin's operation reads it from SGLang's context, while a body is recorded and in each hybrid pass."""
    quant_config = SimpleNamespace(quant_type="uint4")
    runner: Any = SimpleNamespace(model=SimpleNamespace(quant_config=quant_config))
    assert hybrid.quant_config_of(runner) is quant_config
    batch: Any = None
    with hybrid.sglang_traces(batch, quant_config=quant_config):
        assert get_tc_piecewise_forward_context().quant_config is quant_config
    body = torch.nn.Module()
    body.layers = torch.nn.ModuleList()
    with hybrid.ExpertContext(body, quant_config).of(None):
        assert get_tc_piecewise_forward_context().quant_config is quant_config


@pytest.mark.parametrize(
    ("n_rows", "weight_dtype", "dtype"),
    [
        (1, torch.bfloat16, torch.float32),
        (DEVICE_MAX_REQUESTS, torch.float16, torch.float32),
        (DEVICE_MAX_REQUESTS + 1, torch.bfloat16, torch.bfloat16),
        (1, torch.float8_e4m3fn, torch.bfloat16),
    ],
)
def test_label_logits_on_a_gpu_are_float32(n_rows: int, weight_dtype: torch.dtype, dtype: torch.dtype) -> None:
    """Of as many rows as a step has; a long tail and quantized weights are SGLang's, rounded as ever. Tensors without memory
    stand for the device's."""

    def sglangs(_: Any, hidden: torch.Tensor, lm_head: Any, __: Any) -> torch.Tensor:
        return torch.empty(len(hidden), VOCABULARY, dtype=torch.bfloat16, device="cuda")

    with FakeTensorMode():
        hidden_dtype = weight_dtype if weight_dtype.itemsize == 2 else torch.bfloat16
        hidden = torch.empty(n_rows, HIDDEN, dtype=hidden_dtype, device="cuda")
        lm_head = SimpleNamespace(weight=torch.empty(VOCABULARY, HIDDEN, dtype=weight_dtype, device="cuda"))
        logits = device_logits.around_compute_lm_head(sglangs, None, hidden, lm_head)
    assert logits.dtype == dtype
    assert logits.shape == (n_rows, VOCABULARY)


@pytest.mark.parametrize(("logits_dtype", "are_ours"), [("float32", True), ("model", False)])
def test_the_option_decides_on_a_gpu_too(monkeypatch: pytest.MonkeyPatch, logits_dtype: str, are_ours: bool) -> None:
    """And the CPU's kernels stay on the CPU."""
    monkeypatch.setattr("sgl_prefill.device.has_accelerator", lambda: True)
    functions = [hook.function for hook in hooks_for(PrefillConfig(logits_dtype=logits_dtype), "scheduler")]
    assert (device_logits.around_compute_lm_head in functions) is are_ours
    assert not any(function.__module__ == "sgl_prefill.cpu.lm_head" for function in functions)


def test_prefills_that_pass_by_the_policy_are_refused_by_name() -> None:
    """--enable-pdmux wants what our launcher sets, and starts a loop of its own."""
    (problem,) = preflight.check_argv(PrefillConfig(), ["--enable-pdmux"], listens=False)
    assert problem.startswith("--enable-pdmux is True and must be False")
