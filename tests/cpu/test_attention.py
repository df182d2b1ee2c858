"""The CPU attention against the definition, in float64."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from sgl_prefill.cpu import attention
from sgl_prefill.cpu.attention import KVRows, attend, merge_by_log_sum_exp, runs_of
from sgl_prefill.cpu.lm_head import BLOCK_BYTES, float32_logits

SCALE = 0.2


def defined(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, window: int | None, cap: float
) -> torch.Tensor:
    """softmax(q k^T * scale) v with an explicit mask, float64."""
    n_q, n_kv, group = q.shape[0], k.shape[0], q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * SCALE
    if cap:
        scores = cap * torch.tanh(scores / cap)
    q_pos, k_pos = torch.arange(n_kv - n_q, n_kv)[:, None], torch.arange(n_kv)[None]
    visible = torch.ones(n_q, n_kv, dtype=torch.bool)
    if causal:
        visible &= k_pos <= q_pos
        if window is not None:
            visible &= k_pos >= q_pos - window
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~visible, -torch.inf).softmax(-1), v)


def rows(k: torch.Tensor, v: torch.Tensor) -> KVRows:
    """K and V as a pool that holds nothing else."""
    return KVRows(k, v, runs_of(torch.arange(k.shape[0])))


LENGTHS = [(1, 1), (1, 700), (7, 7), (200, 1500), (600, 600), (1100, 1400)]  # (new tokens, all tokens)
# Each once: a window bounds causal attention alone, and one that holds all tokens is none.
CASES = [
    (lengths, causal, window, cap)
    for lengths, causal, window, cap in itertools.product(LENGTHS, [True, False], [None, 0, 3, 100, 5000], [0.0, 30.0])
    if window is None or (causal and (window < lengths[1] - 1 or lengths == LENGTHS[-1]))
]


@pytest.mark.parametrize(("lengths", "causal", "window", "cap"), CASES)
def test_attend_equals_the_definition(lengths: tuple[int, int], causal: bool, window: int | None, cap: float) -> None:
    """Prefix, suffix, grouped heads, windows and soft caps, to float32 rounding."""
    torch.manual_seed(0)
    n_q, n_kv = lengths
    q, k, v = torch.randn(n_q, 6, 32), torch.randn(n_kv, 2, 32), torch.randn(n_kv, 2, 32)
    got = torch.empty_like(q)
    attend(q, rows(k, v), got, scale=SCALE, causal=causal, window_tokens=window, soft_cap=cap)
    torch.testing.assert_close(got.double(), defined(q, k, v, causal, window, cap), rtol=0, atol=1e-5)


def test_attend_in_bfloat16_is_off_by_rounding_alone() -> None:
    """Outputs are means of values of size 1 rounded to 8 bits: 2^-8, twice where two parts are merged."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(n, h, 64).bfloat16() for n, h in ((300, 9), (1000, 3), (1000, 3)))
    got = torch.empty_like(q)
    attend(q, rows(k, v), got, scale=SCALE)
    torch.testing.assert_close(got.double(), defined(q, k, v, True, None, 0.0), rtol=0, atol=2.5e-2)


def test_merging_survives_denominators_that_would_overflow() -> None:
    """Log-sum-exps of 1,000 overflow exp(); the merge is a weighted mean all the same."""
    left, right = torch.zeros(1, 1, 4), torch.ones(1, 1, 4)
    merged, lse = merge_by_log_sum_exp(left, torch.full((1, 1), 1000.0), right, torch.full((1, 1), 1000.0))
    torch.testing.assert_close(merged, torch.full((1, 1, 4), 0.5))
    torch.testing.assert_close(lse, torch.full((1, 1), 1000.0 + math.log(2)))


SLOTS = {
    "one run": torch.arange(500, 1300),
    "durable slots, then scratch": torch.cat([torch.arange(10, 310), torch.arange(900, 1400)]),
    "scattered": torch.randperm(2000, generator=torch.Generator().manual_seed(0))[:800],
    "long and short runs": torch.cat([torch.arange(0, 200), torch.arange(700, 710), torch.arange(1400, 1990)]),
}


@pytest.mark.parametrize("name", SLOTS)
@pytest.mark.parametrize(("window", "cap"), [(None, 0.0), (90, 0.0), (None, 30.0)])
def test_wherever_the_rows_lie_the_output_is_the_same_also_in_place(
    name: str, window: int | None, cap: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks and tiles far smaller than the prompt, K and V strewn over a pool of NaN, the output over the queries."""
    monkeypatch.setattr(attention, "QUERY_BLOCK_TOKENS", 96)
    monkeypatch.setattr(attention, "KEY_TILE_TOKENS", 130)
    torch.manual_seed(0)
    slots = SLOTS[name]
    n_kv, n_q = len(slots), 333
    q, k, v = torch.randn(n_q, 6, 32), torch.randn(n_kv, 2, 32), torch.randn(n_kv, 2, 32)
    expected = defined(q, k, v, True, window, cap)
    key_pool, value_pool = torch.full((2, 2000, 2, 32), torch.nan)
    key_pool[slots], value_pool[slots] = k, v
    attend(q, KVRows(key_pool, value_pool, runs_of(slots)), q, scale=SCALE, window_tokens=window, soft_cap=cap)
    torch.testing.assert_close(q.double(), expected, rtol=0, atol=1e-5)


def test_consecutive_slots_are_read_in_place_and_others_gathered_in_order() -> None:
    """A view where slots follow each other, the right rows in the right order where they do not."""
    pool = torch.arange(4000.0).view(2000, 1, 2)
    durable_then_scratch = KVRows(pool, pool, runs_of(SLOTS["durable slots, then scratch"]))
    assert [run.slots for run in durable_then_scratch.runs] == [slice(10, 310), slice(900, 1400)]
    key, _ = durable_then_scratch.between(300, 700)
    assert key.data_ptr() == pool[900].data_ptr()
    for slots in SLOTS.values():
        whole = KVRows(pool, pool, runs_of(slots))
        assert whole.n_tokens == len(slots)
        assert torch.equal(whole.between(5, 400)[0], pool[slots[5:400]])


@pytest.mark.parametrize("n_rows", [1, 2, 16, 17])
def test_float32_logits_tell_apart_what_bfloat16_rounds_together(n_rows: int) -> None:
    """The blockwise product equals the float32 one, also for a vocabulary that is no multiple of the block."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(n_rows, 48).bfloat16(), torch.randn(BLOCK_BYTES // (4 * 48) + 77, 48).bfloat16()
    got = float32_logits(hidden, weight)
    torch.testing.assert_close(got, hidden.float() @ weight.float().T, rtol=0, atol=1e-4)
    assert len(set(got[0].tolist())) > 1.5 * len(set((hidden @ weight.T)[0].tolist()))
