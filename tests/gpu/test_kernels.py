"""The kernels of sglang-kernel and SGLang that a Llama or Qwen calls in each layer, against PyTorch in float32. They run
first on a card: a kit from which too much was left out shows here ("no kernel image").
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from tests.support import slow_attention

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

LIMIT = 0.02  # of the largest value: two roundings to bfloat16 and another order of sums
HEADS = [(128, 32, 8), (128, 40, 8), (128, 32, 1), (64, 9, 3), (64, 16, 16)]  # head size, heads, KV heads
STEPS = {"mixed": [(0, 257), (1000, 15), (333, 1), (64, 130)], "rows": [(3000, 1), (2000, 1)], "hit": [(14_000, 150)]}


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    found, expected = found.float().cpu(), expected.float().cpu()
    assert found.shape == expected.shape
    assert float((found - expected).abs().max()) <= LIMIT * float(expected.abs().max())


def values(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").bfloat16()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("page_tokens", [1, 64])
@pytest.mark.parametrize("step", list(STEPS))
@pytest.mark.parametrize(("dim", "heads", "kv_heads"), HEADS)
def test_flash_attention_3(dim: int, heads: int, kv_heads: int, step: str, page_tokens: int, causal: bool) -> None:
    """Over shuffled pages: steps of several requests, of one row each (as the last layer of a hybrid pass asks), of one hit."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("FlashAttention 3 is for Hopper")
    from sgl_kernel.flash_attn import flash_attn_with_kvcache  # type: ignore[import-untyped]

    torch.manual_seed(0)
    requests = STEPS[step]
    lengths = [n_cached + n_new for n_cached, n_new in requests]
    n_pages = [math.ceil(n / page_tokens) for n in lengths]
    pages = torch.split(torch.randperm(sum(n_pages)).int(), n_pages)
    table = torch.nn.utils.rnn.pad_sequence(list(pages), batch_first=True)
    query = values(sum(n for _, n in requests), heads, dim)
    keys, vectors = (values(sum(n_pages), page_tokens, kv_heads, dim) for _ in range(2))
    starts = torch.tensor([0, *itertools.accumulate(n for _, n in requests)], dtype=torch.int32)
    shape: dict[str, Any] = {
        "max_seqlen_q": max(n for _, n in requests),
        "softmax_scale": dim**-0.5,
        "causal": causal,
        "softcap": 0.0,
    }
    shape |= {"num_splits": 0, "return_softmax_lse": True, "out": None}
    kv_lens = torch.tensor(lengths, dtype=torch.int32)
    rows: dict[str, Any] = {"page_table": table, "cache_seqlens": kv_lens, "cu_seqlens_q": starts}
    q, k, v = (x.float().cpu() for x in (query, keys, vectors))
    expected, expected_lse = slow_attention.flash_attn_with_kvcache(q, k, v, **rows, **shape)
    rows = {name: x.cuda() for name, x in rows.items()}
    found, lse, *_ = flash_attn_with_kvcache(query, keys, vectors, **rows, **shape)
    assert_close(found, expected)
    assert_close(lse, expected_lse)


@pytest.mark.parametrize("hidden", [4096, 5120, 576])
def test_norms(hidden: int) -> None:
    import sgl_kernel  # type: ignore[import-untyped]

    x, residual, weight = values(333, hidden), values(333, hidden), 1 + values(hidden) / 8
    total = x.float() + residual.float()
    assert_close(
        sgl_kernel.rmsnorm(x, weight, 1e-5), torch.nn.functional.rms_norm(x.float(), (hidden,), weight.float(), 1e-5)
    )
    sgl_kernel.fused_add_rmsnorm(x, residual, weight, 1e-5)
    assert_close(x, torch.nn.functional.rms_norm(total, (hidden,), weight.float(), 1e-5))
    assert_close(residual, total)


def test_gates() -> None:
    """Of sglang-kernel, and the one that SGLang compiles."""
    import sgl_kernel
    from sglang.kernels.ops.activation.activation import silu_and_mul

    both = values(333, 2 * 14_336)
    gate, up = both.float().chunk(2, -1)
    expected, compiled = torch.nn.functional.silu(gate) * up, both.new_empty(333, 14_336)
    silu_and_mul(both, compiled)
    for found in (sgl_kernel.silu_and_mul(both), compiled):
        assert_close(found, expected)


def test_merging_of_two_attention_parts() -> None:
    from sglang.srt.layers.attention.merge_state import merge_state

    outputs, sums = [values(200, 32, 128) for _ in range(2)], [torch.randn(200, 32, device="cuda") for _ in range(2)]
    total = torch.logaddexp(*sums)
    parts = [out.float() * (one - total).exp()[..., None] for out, one in zip(outputs, sums, strict=True)]
    expected = parts[0] + parts[1]
    found, lse = torch.empty_like(outputs[0]), torch.empty_like(total)
    merge_state(outputs[0], sums[0], outputs[1], sums[1], found, lse)
    assert_close(found, expected)
    assert_close(lse, total)


@pytest.mark.parametrize(("dim", "heads", "kv_heads"), [(128, 32, 8), (64, 9, 3)])
def test_rotary_embedding_and_kv_writes(dim: int, heads: int, kv_heads: int) -> None:
    from sglang.kernels.ops.attention.rope import apply_rope_with_cos_sin_cache_inplace
    from sglang.kernels.ops.kvcache.kvcache import store_cache

    frequencies = 10_000 ** (-torch.arange(0, dim, 2, device="cuda") / dim)
    angles = torch.arange(9000, device="cuda")[:, None] * frequencies
    positions = torch.randint(0, 9000, (333,), device="cuda")
    cos, sin = angles[positions].cos()[:, None], angles[positions].sin()[:, None]
    both = values(333, heads, dim), values(333, kv_heads, dim)
    expected = []
    for x in both:
        a, b = x.float().chunk(2, -1)
        expected.append(torch.cat((a * cos - b * sin, b * cos + a * sin), -1))
    apply_rope_with_cos_sin_cache_inplace(*both, torch.cat((angles.cos(), angles.sin()), -1), positions, is_neox=True)
    for found, wanted in zip(both, expected, strict=True):
        assert_close(found, wanted)

    new = [values(333, kv_heads * dim) for _ in range(2)]
    pools = [torch.zeros(5000, kv_heads * dim, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    slots = 1 + torch.randperm(4999, device="cuda")[:333]
    written = [pool.index_copy(0, slots, rows) for pool, rows in zip(pools, new, strict=True)]
    store_cache(*new, *pools, slots)
    for found, wanted in zip(pools, written, strict=True):
        assert_close(found, wanted)
