"""SGLang's Triton attention in Triton's interpreter, for a request whose rows begin where 32 bits no longer count numbers.

Run in a process of its own by `test_device_paths`. Only pages that are touched take memory: the rows before are never computed.
"""

from __future__ import annotations

import warnings

import torch

from tests.support import quiet_imports  # noqa: F401  (before all else that imports SGLang)

NEW_TOKENS, KV_HEADS = 16, 1
SHAPES = ((32, 128), (64, 128), (8, 256))  # of queries: heads, numbers of a head


def check(heads: int, head_dim: int) -> None:
    """Raises where the last request's attention is not causal attention over its own rows."""
    from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd

    first = 2**31 // (heads * head_dim)  # row: its first number has the index 2^31
    n_rows = first + NEW_TOKENS
    queries, output = (torch.empty(n_rows, heads, head_dim, dtype=torch.float16) for _ in range(2))
    keys, values = (torch.empty(n_rows, KV_HEADS, head_dim, dtype=torch.float16) for _ in range(2))
    for tensor in (queries, keys, values):
        tensor[:NEW_TOKENS] = 0
        tensor[first:] = torch.randn(
            NEW_TOKENS, *tensor.shape[1:], generator=torch.Generator().manual_seed(len(tensor))
        )
    pool = torch.zeros(1, KV_HEADS, head_dim, dtype=torch.float16)
    extend_attention_fwd(
        *(queries, keys, values, output, pool, pool),
        torch.tensor([0, first, n_rows], dtype=torch.int64),  # with int32 the kernel reads what is not there
        torch.zeros(3, dtype=torch.int32),
        torch.zeros(1, dtype=torch.int64),
        *(None, True, None, NEW_TOKENS, 1.0, 1.0),  # of the first request only its first rows are looked at
    )
    query, key, value = (tensor[first:].float().transpose(0, 1) for tensor in (queries, keys, values))
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(output[first:].float(), expected.transpose(0, 1), rtol=2e-2, atol=2e-2)


if __name__ == "__main__":
    warnings.simplefilter("ignore", RuntimeWarning)  # of rows that are not there
    for shape in SHAPES:
        check(*shape)
    print("compared", len(SHAPES))
