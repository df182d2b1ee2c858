"""Stable answers (`--stable-answers`): checks at every start that the bits of a row depend on this row only.

Native kernels ensure it by construction: each row is computed by the same instructions in the same order, whatever the other
rows (`native/attention.h`). oneDNN gives no such guarantee for matrix products. They are computed only for a few row counts
for which, on this machine, the same row has given the same bits at every tested place.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import fx

from sgl_prefill.core.kv_plan import ceil_to
from sgl_prefill.core.shared_groups import Group
from sgl_prefill.cpu.fused import Linear
from sgl_prefill.cpu.native.calls import Kernels, StepRequests
from sgl_prefill.errors import UnsupportedModelError
from sgl_prefill.hybrid.trace import op_name

# Row counts: multiples of 4 up to 256, of 16 up to 512, of 64 up to 2,048; more rows are computed in pieces. Padding rows cost
# as much as others, and a start tries all counts on each shape of weights: some 45,000 rows.
STEPS = ((4, 256), (16, 512), (64, 2048))
LEAST_COMPARED = 1 << 18  # values; with oneDNN on AMX a row's place changes one in some ten thousand, if any
PLACES = (1, 5, 12)  # distances by which rows are moved

# Operations of a traced body that are exact for each element: they move numbers, or apply one IEEE operation per element.
EXACT_FUNCTIONS: frozenset[Callable[..., Any]] = frozenset(
    {
        *(operator.getitem, operator.add, operator.iadd, operator.sub, operator.mul, operator.imul),
        *(torch.tensor, torch.nn.functional.embedding),
    }
)
EXACT_METHODS = frozenset(
    {
        *("long", "int", "float", "to", "split", "chunk", "view", "reshape"),
        *("size", "contiguous", "clone", "unsqueeze", "squeeze"),
    }
)


def unknown_operations(graphs: Iterable[fx.Graph]) -> list[str]:
    """Returns the names of operations whose result for a row may depend on other rows."""
    unknown = set()
    for graph in graphs:
        for node in graph.nodes:
            if node.op == "call_function" and node.target not in EXACT_FUNCTIONS:
                is_operator = isinstance(node.target, torch._ops.OpOverload)
                unknown.add(op_name(node) if is_operator else getattr(node.target, "__name__", str(node.target)))
            elif node.op == "call_method" and node.target not in EXACT_METHODS:
                unknown.add(str(node.target))
    return sorted(unknown)


def row_counts(most_rows: int) -> list[int]:
    """Returns the row counts, ascending, of products of at most `most_rows` rows."""
    counts: list[int] = []
    for step, up_to in STEPS:
        first = counts[-1] if counts else 0
        counts += range(first + step, ceil_to(min(most_rows, up_to), step) + 1, step)
    return counts


def fix_row_counts(products: Sequence[Linear], most_rows: int) -> int:
    """Sets `row_counts` of each product to the counts that give a row the same bits. Returns the length of the shortest list.

    Raises UnsupportedModelError if a row's bits depend on its place in a product.
    """
    counts_of: dict[tuple[Any, ...], list[int]] = {}
    for product in products:
        assert product.packed is not None
        key = (tuple(product.packed.shape), product.packed.dtype, product.activation)
        if key not in counts_of:
            counts_of[key] = agreeing_counts(product.at_once, product.packed, row_counts(most_rows))
        product.row_counts = counts_of[key]
    return min(map(len, counts_of.values()), default=0)


@torch.no_grad()
def agreeing_counts(
    product: Callable[[torch.Tensor], torch.Tensor], weight: torch.Tensor, counts: Sequence[int]
) -> list[int]:
    """Returns those of `counts` for which `product` gives the same bits as for the largest.

    weight: [outputs, depth]; only its shape and type are used. Raises UnsupportedModelError if bits depend on a row's place.
    """
    most, (outputs, depth) = counts[-1], weight.shape
    agreeing = list(counts)
    for seed in range(max(-(-LEAST_COMPARED // (most * outputs)), 1)):
        x = torch.randn((most, depth), generator=torch.Generator().manual_seed(most + seed)).to(weight.dtype)
        whole = product(x)
        if not all(torch.equal(product(x.roll(by, 0)).roll(-by, 0), whole) for by in PLACES):
            raise UnsupportedModelError(
                f"a product with weights of {outputs} x {depth} in {weight.dtype} rounds a row by its place among {most} rows on"
                " this processor"
            )
        agreeing = [n for n in agreeing if n == most or torch.equal(product(x[-n:]), whole[-n:])]
    return agreeing


def kernel_problem(kernels: Kernels, dtype: torch.dtype) -> str | None:
    """Returns the name of a native kernel whose bits for a row depend on other rows, or None. Takes milliseconds."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    rows, weight = random(40, 96), random(70, 96)
    token_wise: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "logits": lambda x: kernels.logits(x, weight),
        "rms_norm": lambda x: kernels.rms_norm(x, weight[0], 1e-5),
        "gated": lambda x: kernels.gated(x, "silu"),
    }
    for name, kernel in token_wise.items():
        whole = kernel(rows)
        ends = [end for n in (1, 7, 33) for end in (slice(n), slice(-n, None))]
        if not all(torch.equal(kernel(rows[end].contiguous()), whole[end]) for end in ends):
            return name
    return None if _attention_is_stable(kernels, random) else "attention"


def _attention_is_stable(kernels: Kernels, random: Callable[..., torch.Tensor]) -> bool:
    """Compares a request of 190 positions alone with its last 61 as a cache hit, beside a request that shares 75 positions."""
    n_shared, n_kv, n_new, heads, kv_heads, dim = 75, (190, 130), (61, 50), 6, 2, 64
    table = torch.zeros((2, n_kv[0]), dtype=torch.int32)
    table[0] = torch.arange(n_kv[0])
    table[1, :n_shared] = table[0, :n_shared]
    table[1, n_shared : n_kv[1]] = torch.arange(n_kv[0], n_kv[0] + n_kv[1] - n_shared)
    key, value = random(sum(n_kv), kv_heads, dim) * 8, random(sum(n_kv), kv_heads, dim)
    query, others = random(n_kv[0], heads, dim) * 8, random(n_new[1], heads, dim)
    alone = torch.empty_like(query)
    whole = StepRequests(table, [0], [0, n_kv[0]], n_kv[:1], [Group((0,), 0)])
    kernels.attention(whole, query, key, value, alone, scale=dim**-0.5)
    together = torch.cat([others, query[-n_new[0] :]])
    step = StepRequests(table, [1, 0], [0, n_new[1], sum(n_new)], n_kv[::-1], [Group((0, 1), n_shared)])
    kernels.attention(step, together, key, value, together, scale=dim**-0.5)
    return torch.equal(together[n_new[1] :], alone[-n_new[0] :])
