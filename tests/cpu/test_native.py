"""The native kernels of every build that this processor runs, against their definitions in float64."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_prefill.core.shared_groups import Group
from sgl_prefill.cpu.attention import KVRows, attend, runs_of
from sgl_prefill.cpu.native import library
from sgl_prefill.cpu.native.build import PLAIN, X86_BUILDS
from sgl_prefill.cpu.native.calls import Kernels, StepRequests
from sgl_prefill.errors import ConfigurationError

BUILDS = [build.name for build in (*X86_BUILDS, PLAIN)]
DTYPES = [torch.bfloat16, torch.float32]
# Half a unit in the last place: what one rounding costs, relative to the value.
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24}
# Relative error of a power of 2, as `exp2_of` in vector.h says.
EXP2_ERROR = {torch.bfloat16: 8e-5, torch.float32: 3e-6}


@pytest.fixture(autouse=True, scope="module")
def _two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=BUILDS)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    """One build; skips, with the reason, where it does not run here."""
    automatic = library.find("auto")
    if automatic.kernels is None:
        pytest.skip(str(automatic.reason))
    try:
        found = library.find(request.param).kernels
    except ConfigurationError as error:
        if "must be auto, off, or one of" not in str(error):
            raise
        pytest.skip(f"not for this processor: {error}")
    assert found is not None
    return found


class Case(NamedTuple):
    """One step: requests of `new_tokens`, each behind `shared_tokens` of all and `own_tokens` of its own."""

    heads: int
    kv_heads: int
    dim: int
    new_tokens: tuple[int, ...]
    shared_tokens: int = 0
    own_tokens: int = 0
    dtype: torch.dtype = torch.bfloat16
    window_tokens: int | None = None
    soft_cap: float = 0.0
    causal: bool = True
    magnitude: float = 1.0  # of the queries


class Step(NamedTuple):
    query: torch.Tensor
    key_pool: torch.Tensor  # NaN in the slots of nobody
    value_pool: torch.Tensor
    table: torch.Tensor  # [rows, positions], slots in disorder
    rows: list[int]
    first_tokens: list[int]
    kv_tokens: list[int]

    def requests(self, groups: Sequence[Group]) -> StepRequests:
        return StepRequests(self.table, self.rows, self.first_tokens, self.kv_tokens, groups)


class Wanted(NamedTuple):
    output: torch.Tensor
    lse: torch.Tensor
    score_error: float  # of a score, by adding its products in float32


def make_step(case: Case) -> Step:
    generator = torch.Generator().manual_seed(hash(case[:6]) % 2**31)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(case.dtype)

    kv_tokens = [case.shared_tokens + case.own_tokens + n for n in case.new_tokens]
    n_requests, n_used = len(kv_tokens), sum(kv_tokens) - (len(kv_tokens) - 1) * case.shared_tokens
    slots = torch.randperm(n_used + 20, generator=generator)
    key_pool, value_pool = random(n_used + 20, case.kv_heads, case.dim), random(n_used + 20, case.kv_heads, case.dim)
    key_pool[slots[n_used:]] = value_pool[slots[n_used:]] = math.nan
    table = torch.full((n_requests + 2, max(kv_tokens) + 3), int(slots[-1]), dtype=torch.int32)
    rows = torch.randperm(n_requests + 2, generator=generator)[:n_requests].tolist()
    used = case.shared_tokens
    for row, n_kv in zip(rows, kv_tokens, strict=True):
        table[row, : case.shared_tokens] = slots[: case.shared_tokens]
        table[row, case.shared_tokens : n_kv] = slots[used : used + n_kv - case.shared_tokens]
        used += n_kv - case.shared_tokens
    query = (random(sum(case.new_tokens), case.heads, case.dim) * case.magnitude).to(case.dtype)
    first_tokens = [0, *itertools.accumulate(case.new_tokens)]
    return Step(query, key_pool, value_pool, table, rows, first_tokens, kv_tokens)


@functools.lru_cache(maxsize=512)
def wanted_of(case: Case) -> Wanted:
    """The definition: softmax(q k^T * scale) v with an explicit mask."""
    step, scale = make_step(case), case.dim**-0.5
    outputs, lses, score_error = [], [], 0.0
    for request, (start, end) in enumerate(itertools.pairwise(step.first_tokens)):
        queries, n_kv, n_q = step.query[start:end], step.kv_tokens[request], end - start
        slots = step.table[step.rows[request], :n_kv].long()
        group = case.heads // case.kv_heads
        k, v = (pool[slots].double().transpose(0, 1) for pool in (step.key_pool, step.value_pool))
        q = (
            queries.double().view(n_q, case.kv_heads, group, case.dim).permute(1, 2, 0, 3)
        )  # [kv heads, group, n_q, dim]
        scores = (q.flatten(1, 2) @ k.transpose(1, 2)).view(case.kv_heads, group, n_q, n_kv) * scale
        if case.soft_cap:
            scores = case.soft_cap * torch.tanh(scores / case.soft_cap)
        positions, keys = torch.arange(n_kv - n_q, n_kv)[:, None], torch.arange(n_kv)[None]
        unseen = torch.zeros(n_q, n_kv, dtype=torch.bool)
        if case.causal:
            unseen |= keys > positions
        if case.window_tokens is not None:
            unseen |= keys < positions - case.window_tokens
        scores = scores.masked_fill(unseen, -math.inf)
        output = (scores.softmax(-1).flatten(1, 2) @ v).view(case.kv_heads, group, n_q, case.dim)
        outputs.append(output.permute(2, 0, 1, 3).flatten(1, 2).float())
        lses.append(scores.logsumexp(-1).flatten(0, 1).T)
        # dim roundings of partial sums, none larger than the product of the lengths, and as a random walk.
        largest = max(q.norm(dim=-1).flatten().tolist(), default=0.0) * float(k.norm(dim=-1).max()) * scale
        score_error = max(score_error, 2.0**-24 * (case.dim**0.5 + 2) * largest)
    score_error += case.soft_cap * EXP2_ERROR[torch.float32] / 2  # tanh(y) is 1 - 2 / (1 + e^2y)
    return Wanted(torch.cat(outputs), torch.cat(lses), score_error)


def run(
    kernels: Kernels, case: Case, *, stacked: bool = True, step: Step | None = None, **given: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(output, lse). stacked: the requests in one group."""
    step = make_step(case) if step is None else step
    members = tuple(range(len(case.new_tokens)))
    groups = [Group(members, case.shared_tokens)] if stacked else [Group((request,), 0) for request in members]
    lse = torch.full(step.query.shape[:2], math.nan)
    output = given.get("output", torch.full_like(step.query, math.nan, memory_format=torch.contiguous_format))
    kernels.attention(
        step.requests(groups),
        step.query,
        step.key_pool,
        step.value_pool,
        output,
        scale=case.dim**-0.5,
        causal=case.causal,
        window_tokens=case.window_tokens,
        soft_cap=case.soft_cap,
        lse=lse,
    )
    return output, lse


def output_tolerance(case: Case, wanted: Wanted) -> float:
    """What the roundings can cost: of scores and powers of 2 in the numerator and the denominator, of the probabilities and of
    the result; the mean of values is no larger than the largest (4.5 of some 10,000 normal ones)."""
    of_weights = 2 * (EXP2_ERROR[case.dtype] + wanted.score_error)
    return 4.5 * (min(of_weights, 1) + ROUNDING[case.dtype]) + ROUNDING[case.dtype] * float(wanted.output.abs().max())


def check(case: Case, output: torch.Tensor, lse: torch.Tensor) -> None:
    wanted = wanted_of(case)
    assert output.isfinite().all()
    error = float((output.float() - wanted.output).abs().max())
    assert error <= output_tolerance(case, wanted), f"off by {error:.3g}"
    largest_lse = float(wanted.lse.abs().max())
    of_summands = (
        ROUNDING[torch.bfloat16] if case.dtype == torch.bfloat16 else 0
    )  # which are added as they were rounded
    lse_tolerance = EXP2_ERROR[case.dtype] + of_summands + wanted.score_error + 2.0**-21 * largest_lse
    error = float((lse - wanted.lse).abs().max())
    assert error <= lse_tolerance, f"lse is off by {error:.3g}"


SHAPES = [(16, 4, 64), (9, 3, 64), (32, 8, 128), (4, 4, 96), (8, 1, 256), (14, 2, 32), (4, 2, 80), (3, 3, 6)]
MIXES: list[tuple[tuple[int, ...], int, int]] = [
    ((300,), 0, 0),
    ((55, 55, 55, 55), 200, 0),
    ((7, 1, 90), 131, 33),
    ((1, 1), 0, 0),
    ((1, 1), 0, 5),
    ((5,), 500, 0),
    ((33, 120), 0, 70),
]
# What varies beside them: (window, soft cap, causal, magnitude); 3,000 makes scores beyond 10,000.
VARIANTS: list[tuple[int | None, float, bool, float]] = [
    (None, 0.0, True, 1.0),
    (40, 0.0, True, 1.0),
    (None, 0.0, True, 3000.0),
    (None, 30.0, True, 4.0),
    (None, 0.0, False, 1.0),
    (0, 0.0, True, 12.0),
    (100, 50.0, True, 1.0),
    (None, 0.0, True, 12.0),
    (None, 20.0, False, 3000.0),
    (None, 0.0, True, 1.0),
    (60, 0.0, True, 3000.0),
]


def cases(dtype: torch.dtype) -> list[Case]:
    """Every shape with every mix, and the variants in turn: 11 of them, so that each meets nearly every shape and mix."""
    combinations = itertools.product(SHAPES, MIXES)
    made = []
    for i, (shape, (new, shared, own)) in enumerate(combinations):
        window_tokens, soft_cap, causal, magnitude = VARIANTS[i % len(VARIANTS)]
        made.append(Case(*shape, new, shared, own, dtype, window_tokens, soft_cap, causal, magnitude))
    return made


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attention_equals_the_definition(kernels: Kernels, dtype: torch.dtype) -> None:
    """Grouped heads, requests with and without prefixes, windows, soft caps, large scores: to rounding, none of it NaN."""
    for case in cases(dtype):
        check(case, *run(kernels, case))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_requests_attend_alone_as_in_a_group(kernels: Kernels, dtype: torch.dtype) -> None:
    """Each request in a group of its own reads the shared positions itself, with the same result."""
    for case in cases(dtype):
        if len(case.new_tokens) > 1 and case.dim <= 96:
            check(case, *run(kernels, case, stacked=False))


@st.composite
def small_cases(draw: st.DrawFn) -> Case:
    kv_heads, group = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 3, 7, 17, 40]))
    causal = draw(st.booleans())
    return Case(
        kv_heads * group,
        kv_heads,
        2 * draw(st.integers(1, 40)),
        tuple(draw(st.lists(st.integers(1, 70), min_size=1, max_size=4))),
        draw(st.integers(0, 300)),
        draw(st.integers(0, 80)),
        draw(st.sampled_from(DTYPES)),
        draw(st.none() | st.integers(0, 400)) if causal else None,
        draw(st.sampled_from([0.0, 0.0, 15.0])),
        causal,
        draw(st.sampled_from([1.0, 1.0, 30.0])),
    )


@settings(max_examples=25, deadline=None, derandomize=True)
@given(case=small_cases(), stacked=st.booleans())
def test_attention_of_any_small_step_equals_the_definition(kernels: Kernels, case: Case, stacked: bool) -> None:
    check(case, *run(kernels, case, stacked=stacked))


STRIDED = Case(9, 3, 64, (55, 20), 40, 10)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_queries_pools_and_output_may_be_parts_of_larger_tensors(kernels: Kernels, dtype: torch.dtype) -> None:
    """Query rows of a fused product, heads with a gap between them, and the output over the query, give what copies give."""
    case = STRIDED._replace(dtype=dtype)
    step = make_step(case)
    expected, expected_lse = run(kernels, case, step=step)
    wide = torch.full((len(step.query), 9 + 5, 64 + 7), math.nan, dtype=dtype)
    wide[:, 2:11, :64] = step.query
    query = wide[:, 2:11, :64]
    pools = torch.full((len(step.key_pool), 5, 2 * 64), math.nan, dtype=dtype)
    pools[:, 1:4, :64], pools[:, 1:4, 64:] = step.key_pool, step.value_pool
    strided = step._replace(query=query, key_pool=pools[:, 1:4, :64], value_pool=pools[:, 1:4, 64:])
    output, lse = run(kernels, case, step=strided)
    assert torch.equal(output, expected)
    assert torch.equal(lse, expected_lse)
    assert run(kernels, case, step=strided, output=query)[0] is query
    assert torch.equal(query, expected)
    wide[:, 2:11, :64] = math.nan
    assert wide.isnan().all(), "nothing around the output is written"


def test_the_number_of_threads_does_not_change_the_result(kernels: Kernels) -> None:
    """More threads than processors too; blocks are cut elsewhere, so equal to rounding and not to the bit."""
    case = Case(16, 4, 64, (90, 7, 55), 131, 33)
    for n_threads in (1, 2, 5):
        torch.set_num_threads(n_threads)
        try:
            check(case, *run(kernels, case))
        finally:
            torch.set_num_threads(2)


def test_a_step_without_new_tokens_of_some_request_is_computed(kernels: Kernels) -> None:
    """A request with none has no row in the output; the others' rows are theirs."""
    case = Case(4, 2, 32, (20, 0, 11), 33, 9)
    check(case, *run(kernels, case))


@pytest.mark.parametrize("window_tokens", [None, 64])
@pytest.mark.parametrize("magnitude", [1.0, 10.0, 1000.0])
def test_bfloat16_is_as_exact_as_the_kernel_of_pytorch(
    kernels: Kernels, window_tokens: int | None, magnitude: float
) -> None:
    """Root mean square against float64 on the same bfloat16 input, also where one score outweighs all others.

    Both kernels round the probabilities and the result to bfloat16. PyTorch's takes the largest probability as 1, which no
    rounding changes, and ours measures against a reference that is mostly not the largest, and divides by the sum of the rounded
    probabilities: it may be 5 % worse where few keys are seen (the window), and is better elsewhere.
    """
    case = Case(16, 4, 64, (60,), 200, 0, window_tokens=window_tokens, magnitude=magnitude)
    step, wanted = make_step(case), wanted_of(case).output
    slots = step.table[step.rows[0], : step.kv_tokens[0]]
    theirs = torch.empty_like(step.query)
    rows = KVRows(step.key_pool, step.value_pool, runs_of(slots))
    attend(step.query, rows, theirs, scale=64**-0.5, window_tokens=window_tokens)
    ours, _ = run(kernels, case)
    our_error, their_error = (float((x.float() - wanted).pow(2).mean().sqrt()) for x in (ours, theirs))
    assert our_error <= (1.0 if window_tokens is None else 1.05) * their_error


def test_layers_of_other_sizes_are_refused() -> None:
    """What the C++ side would refuse, the caller is told before."""
    bf16, f32 = torch.bfloat16, torch.float32
    assert Kernels.fits_attention(512, 1, 6, 6, bf16, bf16, bf16)
    for heads, kv_heads, head_dim, v_head_dim, dtypes in [
        (513, 1, 64, 64, (bf16, bf16)),
        (7, 2, 64, 64, (bf16, bf16)),
        (4, 2, 63, 63, (bf16, bf16)),
        (4, 2, 64, 32, (bf16, bf16)),
        (4, 2, 64, 64, (bf16, f32)),
        (4, 2, 64, 64, (torch.float16, torch.float16)),
    ]:
        assert not Kernels.fits_attention(heads, kv_heads, head_dim, v_head_dim, *dtypes)


# --- The kernels around attention and matrix products


def random_tensor(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_rounded(actual: torch.Tensor, wanted: torch.Tensor, float32_error: float = 2e-6) -> None:
    """One rounding to the result's type, besides `float32_error` of the arithmetic."""
    rtol = float32_error + (ROUNDING[actual.dtype] if actual.dtype == torch.bfloat16 else 0)
    torch.testing.assert_close(actual.double(), wanted.double(), rtol=rtol, atol=1e-6)


# Columns: a multiple of every vector, odd, fewer than a vector. Rows: enough for two threads, few.
SIZES = [(33, 1024), (5, 577), (7, 3), (1, 64)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("has_residual", [True, False])
def test_rms_norm_equals_the_definition(
    kernels: Kernels, dtype: torch.dtype, offset: float, has_residual: bool
) -> None:
    """The residual becomes the rounded sum; with an offset (Gemma) that is normalized, else the sum before it is rounded."""
    for rows, columns in SIZES:
        x = random_tensor(dtype, rows, columns + 9)[:, 4 : columns + 4]  # rows of a larger tensor
        weight, residual = random_tensor(dtype, columns, seed=1), random_tensor(dtype, rows, columns, seed=2) * 3
        before = x.clone()
        total = x.float() + residual.float() if has_residual else x.float()
        summed = total.to(dtype)
        basis = (summed if offset else total).double()
        wanted = basis * torch.rsqrt(basis.pow(2).mean(-1, keepdim=True) + 1e-5) * (weight.double() + offset)
        output = kernels.rms_norm(x, weight, 1e-5, residual if has_residual else None, offset)
        assert_rounded(output, wanted)
        assert torch.equal(x, before)
        if has_residual:
            assert torch.equal(residual, summed)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gated_equals_the_definition(kernels: Kernels, dtype: torch.dtype, activation: str) -> None:
    """Far from 0 the activation is the gate itself or nothing, never NaN."""
    for rows, columns in SIZES:
        gate_up = random_tensor(dtype, rows, 2 * columns) * 2
        gate_up[0, :3] = torch.tensor([90.0, -90.0, 10000.0])
        gate, up = gate_up.double().chunk(2, -1)
        activated = (
            torch.nn.functional.silu(gate)
            if activation == "silu"
            else torch.nn.functional.gelu(gate, approximate="tanh")
        )
        # A negative gate's gelu is a small difference in the definition, and a quotient here.
        assert_rounded(kernels.gated(gate_up, activation), activated * up, float32_error=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("rotary_dim", [64, 24, 6])
def test_rotate_equals_the_definition(kernels: Kernels, dtype: torch.dtype, is_neox: bool, rotary_dim: int) -> None:
    """In place on heads of a larger tensor, of which nothing else changes; also where only a part of a head is rotated."""
    rows, heads, dim = 301, 3, 64
    whole = random_tensor(dtype, rows, heads + 2, dim + 8)
    before = whole.clone()
    angles = random_tensor(torch.float32, 50, rotary_dim // 2, seed=1) * 10
    positions = torch.randint(0, 50, (rows,), generator=torch.Generator().manual_seed(2))
    cos_sin = torch.cat([angles.cos(), angles.sin()], -1)
    kernels.rotate(whole[:, 1 : heads + 1, 4 : dim + 4], positions, cos_sin, is_neox=is_neox)
    rotated = before.double()[:, 1 : heads + 1, 4 : rotary_dim + 4]
    one, other = rotated.chunk(2, -1) if is_neox else (rotated[..., 0::2], rotated[..., 1::2])
    cos, sin = (table.double()[positions, None] for table in cos_sin.chunk(2, -1))
    turned = one * cos - other * sin, other * cos + one * sin
    wanted = before.double()
    wanted[:, 1 : heads + 1, 4 : rotary_dim + 4] = (
        torch.cat(turned, -1) if is_neox else torch.stack(turned, -1).flatten(-2)
    )
    assert_rounded(whole, wanted, float32_error=1e-6)
    unchanged = torch.ones_like(whole, dtype=torch.bool)
    unchanged[:, 1 : heads + 1, 4 : rotary_dim + 4] = False
    assert torch.equal(whole[unchanged], before[unchanged])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "dim", "v_dim"), [(8, 128, 128), (3, 5, 7), (1, 2, 1)])
@pytest.mark.parametrize("n_slots", [90, 0])
def test_store_puts_rows_in_their_slots_and_touches_no_other(
    kernels: Kernels, dtype: torch.dtype, heads: int, dim: int, v_dim: int, n_slots: int
) -> None:
    """Rows of a larger tensor, in slots of a larger pool; key and value of other sizes; heads apart or in one dimension."""
    slots = torch.randperm(200, generator=torch.Generator().manual_seed(1))[:n_slots]
    pools = [random_tensor(dtype, 200, heads + 1, size)[:, 1:] for size in (dim, v_dim)]
    key = random_tensor(dtype, n_slots, 2 * heads + 1, dim, seed=2)[:, heads : 2 * heads]
    value = random_tensor(dtype, n_slots, heads * v_dim + 3, seed=3)[:, 3:]
    wanted = [pool.clone() for pool in pools]
    wanted[0][slots], wanted[1][slots] = key, value.view(-1, heads, v_dim)
    kernels.store(pools[0], pools[1], slots, key, value)
    assert all(map(torch.equal, pools, wanted))


@pytest.mark.parametrize(("outputs", "depth"), [(32, 32), (96, 576), (960, 4096)])
@pytest.mark.parametrize("activation", [None, "silu", "gelu_tanh"])
def test_product_is_rounded_once(kernels: Kernels, outputs: int, depth: int, activation: str | None) -> None:
    """Rows of a larger tensor with NaN around them; with and without a bias; gates from sums that were not rounded."""
    weight, bias = random_tensor(torch.bfloat16, outputs, depth, seed=1), random_tensor(torch.bfloat16, outputs, seed=2)
    if not kernels.fits_product(weight):
        pytest.skip("this build leaves products to oneDNN")
    packed = kernels.pack_product(weight, has_gate=activation is not None)
    for rows, added, threads in itertools.product([0, 1, 16, 17, 32, 61, 200], [bias, None], [1, 2, 5]):
        torch.set_num_threads(threads)
        around = torch.full((rows + 40, depth + 64), torch.nan, dtype=torch.bfloat16)
        x = around[:rows, 32 : depth + 32]
        x.copy_(random_tensor(torch.bfloat16, rows, depth) / depth**0.5)
        wanted = x.double() @ weight.double().T + (0 if added is None else added.double())
        if activation is not None:
            gate, up = wanted.chunk(2, -1)
            is_silu = activation == "silu"
            of_gate = torch.nn.functional.silu(gate) if is_silu else torch.nn.functional.gelu(gate, approximate="tanh")
            wanted = of_gate * up
        product = kernels.product(x, packed, added, activation)
        error = 2**-8 * wanted.abs() + 2e-5  # of 4,096 float32 additions of products that mostly cancel out
        assert product.shape == wanted.shape
        assert bool(((product.double() - wanted).abs() <= error).all()), f"{rows} rows, {threads} threads"
    torch.set_num_threads(2)


def test_products_that_do_not_fit_are_left_to_onednn(kernels: Kernels) -> None:
    def fits(outputs: int, depth: int, dtype: torch.dtype = torch.bfloat16) -> bool:
        return kernels.fits_product(torch.empty((outputs, depth), dtype=dtype))

    assert fits(64, 64) == (kernels.build == "amx")
    assert not fits(48, 64)
    assert not fits(64, 48)
    assert not fits(64, 8192)
    assert not fits(64, 64, torch.float32)
    assert not kernels.fits_product(torch.empty((64, 128), dtype=torch.bfloat16)[:, ::2])


@pytest.mark.parametrize("rows", [1, 8, 33])
@pytest.mark.parametrize("vocabulary", [1, 1009])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_logits_add_exact_products_in_float32(kernels: Kernels, rows: int, vocabulary: int, dtype: torch.dtype) -> None:
    """Small whole numbers come out exactly; others as exactly as 576 additions in float32 are."""
    hidden, weight = random_tensor(dtype, rows, 576), random_tensor(dtype, vocabulary, 576, seed=1)
    assert Kernels.fits_logits(hidden, weight)
    wanted = hidden.double() @ weight.double().T
    logits = kernels.logits(hidden, weight)
    assert logits.dtype == torch.float32
    assert float((logits - wanted).abs().max()) <= 2.0**-24 * 576 * 4
    hidden, weight = (hidden * 4).round(), (weight * 4).round()
    assert torch.equal(kernels.logits(hidden, weight).double(), hidden.double() @ weight.double().T)


def test_logits_of_other_layouts_are_refused() -> None:
    """A width that is no multiple of 32, two number types, or columns that are not side by side."""
    weight = torch.zeros(10, 64)
    fits: Any = Kernels.fits_logits
    assert fits(torch.zeros(3, 64), weight)
    for hidden, rows in [
        (torch.zeros(3, 48), torch.zeros(10, 48)),
        (torch.zeros(3, 64).bfloat16(), weight),
        (torch.zeros(64, 3).T, weight),
        (torch.zeros(3, 64), torch.zeros(64, 10).T),
        (torch.zeros(3, 64).half(), weight.half()),
    ]:
        assert not fits(hidden, rows)
