"""`--stable-answers`: a row's bits in every kernel, alone and in any company; and what is refused by name."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from sgl_prefill.config import PrefillConfig
from sgl_prefill.core.shared_groups import Group
from sgl_prefill.cpu import stable
from sgl_prefill.cpu.fused import Linear, pack
from sgl_prefill.cpu.native.calls import Kernels, StepRequests
from sgl_prefill.cpu.native.library import Native
from sgl_prefill.errors import ConfigurationError, UnsupportedModelError
from sgl_prefill.startup import arguments
from tests.cpu.conftest import skip_where_not_packed
from tests.cpu.test_native import DTYPES, _two_threads, kernels, random_tensor

__all__ = ["_two_threads", "kernels"]  # fixtures

N_SLOTS, MOST_KV = 2000, 360


class Requests:
    """Three requests that share their first positions, and what attention says of each alone, from its first position on."""

    def __init__(
        self, kernels: Kernels, dtype: torch.dtype, shape: tuple[int, int, int], n_shared: int, **options: Any
    ):
        heads, kv_heads, dim = shape
        self.kernels, self.options = kernels, {"scale": dim**-0.5, **options}
        self.n_kv = [n_shared + n for n in (1, 57, 100)]
        self.table = torch.randperm(N_SLOTS)[: 3 * MOST_KV].view(3, MOST_KV).to(torch.int32)
        self.table[1:, :n_shared] = self.table[0, :n_shared]
        self.key, self.value = torch.randn(N_SLOTS, kv_heads, dim) * 8, torch.randn(N_SLOTS, kv_heads, dim)
        self.key, self.value = self.key.to(dtype), self.value.to(dtype)
        self.queries = [(torch.randn(n, heads, dim) * 8).to(dtype) for n in self.n_kv]
        self.alone = [self.attend([request], [n], [Group((0,), 0)]) for request, n in enumerate(self.n_kv)]

    def attend(self, members: list[int], n_new: list[int], groups: list[Group]) -> torch.Tensor:
        query = torch.cat(
            [self.queries[one][len(self.queries[one]) - n :] for one, n in zip(members, n_new, strict=True)]
        )
        first = [sum(n_new[:index]) for index in range(len(n_new) + 1)]
        step = StepRequests(self.table, members, first, [self.n_kv[one] for one in members], groups)
        self.kernels.attention(step, query, self.key, self.value, query, **self.options)
        return query


@settings(max_examples=8, deadline=None)
@given(st.data())
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attention_of_a_row_is_the_same_bits_in_any_company(kernels: Kernels, dtype: torch.dtype, data: Any) -> None:
    """Whatever is cached of its request, whoever shares how much of the prefix, however many threads there are.

    Scores of some hundreds make rows renew their references at different keys; windows and soft caps too.
    """
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    shape = data.draw(st.sampled_from([(4, 2, 64), (9, 3, 32), (7, 1, 16)]))
    options = data.draw(st.sampled_from([{}, {"window_tokens": 50}, {"soft_cap": 30.0}]))
    n_shared = data.draw(st.integers(1, 250))
    requests = Requests(kernels, dtype, shape, n_shared, **options)
    members = data.draw(st.permutations(range(3)))[: data.draw(st.integers(1, 3))]
    n_new = [data.draw(st.integers(1, requests.n_kv[one])) for one in members]
    n_common = min(n_shared, *(requests.n_kv[one] - n for one, n in zip(members, n_new, strict=True)))
    alone = [Group((index,), 0) for index in range(len(members))]
    together = [Group(tuple(range(len(members))), data.draw(st.integers(0, n_common)))]
    torch.set_num_threads(data.draw(st.sampled_from([1, 2, 3])))
    try:
        output = requests.attend(members, n_new, data.draw(st.sampled_from([alone, together])))
    finally:
        torch.set_num_threads(2)
    wanted = torch.cat([requests.alone[one][-n:] for one, n in zip(members, n_new, strict=True)])
    assert torch.equal(output, wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_other_kernels_give_a_row_the_same_bits_among_any_number_of_rows(kernels: Kernels, dtype: torch.dtype) -> None:
    """Logits, norms with residual, gates and rotations, of 1 to 70 rows and at other places."""
    x, weight = random_tensor(dtype, 70, 192), random_tensor(dtype, 301, 192, seed=1)
    angles = random_tensor(torch.float32, 70, 16, seed=2)
    table, positions = torch.cat([angles.cos(), angles.sin()], -1), torch.arange(70)

    def rotated(at: slice) -> torch.Tensor:
        rows = x[at].clone().view(-1, 3, 64)
        kernels.rotate(rows, positions[at], table, is_neox=True)
        return rows

    of_rows = (
        lambda at: kernels.logits(x[at], weight),
        lambda at: kernels.rms_norm(x[at], weight[0], 1e-5, x[at].clone()),
        lambda at: kernels.gated(x[at], "gelu_tanh"),
        rotated,
    )
    for kernel in of_rows:
        whole = kernel(slice(None))
        for n_rows in (*range(1, 19), 33, 64, 69):
            for at in (slice(n_rows), slice(70 - n_rows, 70)):
                assert torch.equal(kernel(at), whole[at]), n_rows


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_in_fixed_counts_give_a_row_the_same_bits(
    kernels: Kernels, dtype: torch.dtype, activation: str | None
) -> None:
    """Of up to 100 rows, in pieces and whole; one row alone is oneDNN's other kernel where the weights are deep."""
    outputs, depth = 64, 1536
    bias = random_tensor(dtype, outputs, seed=2)
    linear = Linear(torch.nn.Parameter(random_tensor(dtype, outputs, depth, seed=1)), bias, kernels)
    linear.activation = activation
    skip_where_not_packed(dtype)
    assert pack([linear]) is None
    assert stable.fix_row_counts([linear], 40) == len(linear.row_counts) > 0
    x = random_tensor(dtype, 100, depth + 8)[:, 4 : depth + 4]
    with torch.no_grad():
        whole = linear(x)
        assert whole.shape == (100, outputs if activation is None else outputs // 2)
        for n_rows in (0, 1, 2, 15, 16, 17, 33, 49, 97):
            assert torch.equal(linear(x[:n_rows]), whole[:n_rows])
            assert torch.equal(linear(x[100 - n_rows :]), whole[100 - n_rows :])
        assert torch.equal(linear(x.view(100, 1, depth)), whole.unsqueeze(1))


def test_counts_whose_bits_differ_are_left_out_and_places_that_show_are_refused() -> None:
    """A stand-in that rounds otherwise below 33 rows, and one that does by the row's place."""
    weight = torch.empty((8, 16))
    assert stable.row_counts(18) == [4, 8, 12, 16, 20]
    assert stable.row_counts(1) == [4]
    assert stable.row_counts(300)[-5:] == [252, 256, 272, 288, 304]
    assert stable.row_counts(10_000)[-2:] == [1984, 2048]

    def by_count(x: torch.Tensor) -> torch.Tensor:
        return x * (1.0 if len(x) > 32 else 1.001)

    assert stable.agreeing_counts(by_count, weight, stable.row_counts(48)) == [36, 40, 44, 48]
    with pytest.raises(UnsupportedModelError, match=r"8 x 16 in torch.float32 rounds a row by its place among 64 rows"):
        stable.agreeing_counts(lambda x: x * torch.arange(len(x))[:, None], weight, stable.row_counts(64))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_check_at_start_passes_here_and_names_a_kernel_that_fails(kernels: Kernels, dtype: torch.dtype) -> None:
    assert stable.kernel_problem(kernels, dtype) is None
    original = kernels.logits
    with mock.patch.object(kernels, "logits", lambda x, weight: original(x, weight) * (1 + len(x))):
        assert stable.kernel_problem(kernels, dtype) == "logits"
    attention = kernels.attention

    def by_company(requests: StepRequests, query: Any, key: Any, value: Any, output: Any, **options: Any) -> None:
        attention(requests, query, key, value, output, **options)
        output += requests.n_requests

    with mock.patch.object(kernels, "attention", by_company):
        assert stable.kernel_problem(kernels, dtype) == "attention"


def test_operations_of_which_nobody_knows_are_named() -> None:
    """A softmax adds a row in an order of PyTorch's choosing; moving numbers and single operations are exact."""

    def body(x: torch.Tensor) -> torch.Tensor:
        rows = x.view(-1, 4)
        one, other = rows[:, :2], rows[:, 2:]
        return torch.softmax(one + other * 2, -1).sum(-1)

    graph = fx.symbolic_trace(body).graph
    assert stable.unknown_operations([graph]) == ["softmax", "sum"]


def test_contradicting_options_are_refused_by_name() -> None:
    with pytest.raises(ConfigurationError) as error:
        PrefillConfig(stable_answers="on", hybrid_prefill="off", logits_dtype="model")
    assert "--hybrid-prefill off" in str(error.value)
    assert "--logits-dtype is model" in str(error.value)


def test_what_cannot_be_stable_is_refused_before_a_process_starts() -> None:
    """Other attention backends, several ranks, no kernels, an accelerator."""

    @dataclasses.dataclass
    class Arguments:
        tp_size: int = 1
        attention_backend: str = "cpu_flash"
        prefill_attention_backend: str | None = None
        decode_attention_backend: str | None = None

    with mock.patch.object(arguments, "native", return_value=Native(SimpleNamespace(), None)):  # type: ignore[arg-type]
        assert arguments.unstable(Arguments()) == []
        (ranks,) = arguments.unstable(Arguments(tp_size=2))
        (backend,) = arguments.unstable(Arguments(decode_attention_backend="torch_native"))
    assert "--tp-size is 2" in ranks
    assert "torch_native and not cpu_flash" in backend
    with mock.patch.object(arguments, "native", return_value=Native(None, "PREFILL_CPU_KERNEL is off")):
        (missing,) = arguments.unstable(Arguments())
    assert "PREFILL_CPU_KERNEL is off" in missing
    with mock.patch.object(arguments, "this_device", return_value=SimpleNamespace(is_host=False)):
        (device,) = arguments.unstable(Arguments())
    assert "on an accelerator" in device
