"""What a GPU would meet on its way through a forward pass, as far as objects without a device can show it."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.attention.flashinfer_backend import FlashInferAttnBackend
from sglang.srt.layers.attention.hybrid_attn_backend import HybridAttnBackend
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.model_executor.runner_backend_utils.tc_piecewise_cuda_graph import get_tc_piecewise_forward_context
from torch._subclasses.fake_tensor import FakeTensorMode

from sgl_prefill.config import PrefillConfig
from sgl_prefill.entry.hooks import hooks_for
from sgl_prefill.errors import UntraceableModelError
from sgl_prefill.port.runner import forward
from sgl_prefill.port.runner import logits as logits_port
from sgl_prefill.startup.arguments import DEVICE_MAX_REQUESTS
from sgl_prefill.startup.record import StartRecord

HIDDEN, VOCABULARY = 8, 32
pytestmark = pytest.mark.usefixtures("published")


def without_device(kind: type, **attributes: Any) -> Any:
    """An object of SGLang's class as its __init__ would leave it, with these attributes alone."""
    made: Any = object.__new__(kind)
    vars(made).update(attributes)
    return made


def test_flashinfers_backend_is_one_backend() -> None:
    """Its `prefill_backend` names a kernel, \"fa2\": the start took that text for a backend, and ended."""
    backend = without_device(FlashInferAttnBackend, prefill_backend="fa2", decode_backend="fa2")
    assert forward.prefill_backend(backend) is backend


def test_of_two_backends_the_one_for_prefills_is_found() -> None:
    """As with --prefill-attention-backend."""
    inner = without_device(FlashInferAttnBackend, prefill_backend="fa2", decode_backend="fa2")
    assert forward.prefill_backend(without_device(HybridAttnBackend, prefill_backend=inner)) is inner


def test_opaque_products_find_how_weights_are_quantized() -> None:
    """AWQ-Marlin's operation reads it from SGLang's context, while a body is recorded and in each hybrid pass."""
    quant_config = SimpleNamespace(quant_type="uint4")
    runner: Any = SimpleNamespace(model=SimpleNamespace(quant_config=quant_config))
    assert forward.quant_config_of(runner) is quant_config
    batch: Any = None
    with forward.sglang_traces(batch, quant_config=quant_config):
        assert get_tc_piecewise_forward_context().quant_config is quant_config
    body = torch.nn.Module()
    body.layers = torch.nn.ModuleList()
    with forward.ExpertContext(body, quant_config).of(None):
        assert get_tc_piecewise_forward_context().quant_config is quant_config


class FlashAttentionBackend:
    """SGLang's module of this name loads a device's kernels."""

    fa_skip_kv_cache = has_local_attention = False


def loaded(backend: Any, kv_dtype: torch.dtype, dtype: torch.dtype = torch.bfloat16) -> Any:
    """A model runner whose KV pool holds numbers of this type."""
    model = torch.nn.Module()
    model.model = torch.nn.Module()
    model.model.layers = torch.nn.ModuleList()
    return SimpleNamespace(
        is_multimodal=False,
        token_to_kv_pool=without_device(MHATokenToKVPool, dtype=kv_dtype),
        attn_backend=backend,
        dtype=dtype,
        model=model,
    )


@pytest.mark.parametrize("kind", [FlashInferAttnBackend, TritonAttnBackend])
def test_an_fp8_cache_is_served_on_the_plain_path(kind: type) -> None:
    """A checkpoint may ask for one. A hybrid pass has K and V in the cache alone, and these backends would get rows of 8 bits
    beside queries of 16. The log says so."""
    with pytest.raises(
        UntraceableModelError,
        match=rf"float8_e4m3fn, and {kind.__name__} wants .* in the cache alone .--attention-backend fa3",
    ):
        forward.body_of(loaded(without_device(kind, prefill_backend="fa2"), torch.float8_e4m3fn))
    assert forward.body_of(loaded(without_device(kind, prefill_backend="fa2"), torch.bfloat16)) is not None


def test_fa3_prefills_an_fp8_cache_in_a_hybrid_way() -> None:
    """It reads all K and V from the cache, with their scales; also where another backend decodes."""
    fa3 = FlashAttentionBackend()
    for backend in (fa3, without_device(HybridAttnBackend, prefill_backend=fa3)):
        assert forward.body_of(loaded(backend, torch.float8_e4m3fn)) is not None


def test_triton_finds_the_rows_of_the_longest_inputs() -> None:
    """A request whose queries begin at the number 2^31, which is 524,288 tokens of 32 heads of 128, gets its own attention: where
    a request begins is told in 64 bits, and all offsets are computed from that. With 32 bits the same child ends by a signal."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    child = [sys.executable, "-m", "tests.cpu.far_rows_child"]
    ended = subprocess.run(child, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert ended.stdout.strip().endswith("compared 3"), ended.stderr[-3000:]


def test_triton_is_told_in_64_bits_where_requests_begin() -> None:
    """By SGLang's backend, which makes the indices once."""
    source = inspect.getsource(TritonAttnBackend.__init__)
    assert re.search(
        r"self\.qo_indptr = torch\.zeros\(\s*\(max_bs \+ 1,\),\s*dtype=torch\.int32 if dllm_fa4 else torch\.int64",
        source,
    )


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
        logits = logits_port.around_compute_lm_head(StartRecord(PrefillConfig()), sglangs, None, hidden, lm_head)
    assert logits.dtype == dtype
    assert logits.shape == (n_rows, VOCABULARY)


@pytest.mark.parametrize(("logits_dtype", "are_ours"), [("float32", True), ("model", False)])
def test_the_option_decides_on_a_gpu_too(monkeypatch: pytest.MonkeyPatch, logits_dtype: str, are_ours: bool) -> None:
    monkeypatch.setattr("sgl_prefill.startup.device.has_accelerator", lambda: True)
    functions = [hook.function for hook in hooks_for(PrefillConfig(logits_dtype=logits_dtype), "scheduler")]
    assert (logits_port.around_compute_lm_head in functions) is are_ours
