"""The division of the memory beyond the weights."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_prefill.core.memory_plan import InputDoesNotFitError, MemoryPlan, MemoryUse, largest_input, plan_memory, table

MIB = 1 << 20
# One layer's KV is 1 KiB a token, 32 layers keep 32 KiB; activations 4 KiB a token on top of 16 MiB.
USE = MemoryUse(1024 * MIB, 256 * MIB, 16 * MIB, 4096.0, 1024, 32 * 1024)


def plan(use: MemoryUse, max_input_tokens: int | None) -> MemoryPlan:
    return plan_memory(use, max_input_tokens, input_limit_tokens=131_065, min_durable_tokens=64, page_size=1)


def test_the_longest_input_is_what_the_arithmetic_says() -> None:
    """(256 - 16 - 2) MiB over 5 KiB a token."""
    assert largest_input(USE, 64) == 238 * MIB // (5 * 1024)
    whole_kv_kept = USE._replace(scratch_bytes_per_token=0)
    assert largest_input(whole_kv_kept, 64) == 238 * MIB // (36 * 1024)


def test_what_the_longest_input_does_not_need_becomes_durable() -> None:
    """10,000 tokens take 16 MiB + 5 KiB each; the rest is KV of all layers."""
    planned = plan(USE, 10_000)
    assert planned.durable_tokens == (256 * MIB - 16 * MIB - 10_000 * 5 * 1024) // (32 * 1024)
    assert sum(mib for _, mib, _ in table(planned)) == pytest.approx(1024 + 256, abs=0.1)


def test_an_input_that_cannot_fit_is_refused_with_the_longest_that_can() -> None:
    """Its number, not a hint."""
    with pytest.raises(ValueError, match=rf"longest input that fits has {largest_input(USE, 64)} tokens"):
        plan(USE, largest_input(USE, 64) + 1)
    assert plan(USE, largest_input(USE, 64)).durable_tokens >= 64
    with pytest.raises(InputDoesNotFitError, match="no input fits") as found:
        plan(USE._replace(budget_bytes=MIB), None)
    assert found.value.largest_tokens == 0


def test_without_a_wish_half_of_the_memory_stays_for_durable_kv() -> None:
    """Or the context length is the limit."""
    assert plan(USE, None).durable_bytes >= 127 * MIB
    roomy = USE._replace(budget_bytes=64 * 1024 * MIB)
    assert plan(roomy, None).max_input_tokens == 131_065


@given(st.integers(1, 512), st.integers(0, 64), st.floats(1, 1e5), st.integers(0, 4096), st.integers(1, 10**6))
def test_no_plan_spends_more_than_there_is(
    budget_mib: int, fixed_mib: int, per_token: float, scratch: int, wanted: int
) -> None:
    """Whatever is measured: a plan fits its budget, or there is none."""
    use = MemoryUse(0, budget_mib * MIB, fixed_mib * MIB, per_token, scratch, 2048)
    try:
        planned = plan(use, wanted)
    except ValueError:
        assert wanted > largest_input(use, 64)
        return
    assert use.input_bytes(planned.max_input_tokens) + planned.durable_bytes <= use.budget_bytes
    if scratch == 0:
        assert planned.durable_tokens >= planned.max_input_tokens, "the whole input must be kept"
