"""Label logits in float32 on a CPU, nearly as fast as in the model's own dtype.

A bfloat16 LM head rounds each logit to 3 significant digits: labels tie, and P(label) is off by up to 0.02. The time for one
row of logits is the time to read the weights once, so these are converted block by block in a small buffer (vocabulary
49,152 x hidden 576 on 2 cores: 4.2 ms in bfloat16, 5.5 ms here, 46 ms for SGLang's `--enable-fp32-lm-head`, which converts
the whole weight first). Several rows are multiplied as columns: 16 take 9 ms this way, and 14 to 40 ms as rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sgl_prefill.core.kv_plan import ceil_to

# More rows (log-probabilities of a long tail) are bound by arithmetic, where float32 takes three times as long.
MAX_ROWS = 32
COLUMNS = 16  # the matrix product is fast with a multiple of these
BLOCK_BYTES = 4 << 20


def float32_logits(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Computes `hidden @ weight.T` in float32. hidden: [rows, hidden size]; weight: [vocabulary, hidden size]; any float
    dtype.
    """
    n_rows, (n_vocab, n_hidden) = hidden.shape[0], weight.shape
    n_columns = 1 if n_rows == 1 else ceil_to(n_rows, COLUMNS)
    columns = torch.zeros(n_hidden, n_columns)
    columns[:, :n_rows] = hidden.T
    logits = torch.empty(n_vocab, n_columns)
    block = torch.empty(max(BLOCK_BYTES // (4 * n_hidden), 1), n_hidden)
    for start in range(0, n_vocab, block.shape[0]):
        rows = weight[start : start + block.shape[0]]
        torch.mm(block[: rows.shape[0]].copy_(rows), columns, out=logits[start : start + rows.shape[0]])
    return logits[:, :n_rows].T.contiguous()


def around_softcap_logits(original: Callable[..., Any], logits: torch.Tensor, cap: float) -> Any:
    """Hook for Gemma 2, instead of a Triton kernel: `logits` become cap * tanh(logits / cap), in place."""
    if logits.device.type != "cpu":
        return original(logits, cap)
    return logits.div_(cap).tanh_().mul_(cap)


def is_plain(lm_head: Any, embedding_bias: torch.Tensor | None) -> bool:
    """Whether logits are only a product with one unquantized weight of half precision."""
    from sglang.srt.layers.logits_processor import should_apply_lm_head_quant_method

    weight: Any = getattr(lm_head, "weight", None)
    return (
        weight is not None
        and weight.dtype in (torch.bfloat16, torch.float16)
        and embedding_bias is None
        and not hasattr(lm_head, "apply_lora")
        and not should_apply_lm_head_quant_method(lm_head, getattr(lm_head, "quant_method", None))
    )
