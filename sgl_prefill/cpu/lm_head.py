"""Label logits in float32 on a CPU, at the price of the model's own dtype.

A bfloat16 LM head rounds each logit to 3 significant digits: labels tie, and P(label) is off by up to 0.02. A scoring
request needs one row of logits, which is bound by reading the weights once; converting them block by block in a small
buffer keeps it so (vocabulary 49,152 x hidden 576 on 2 cores: 4.2 ms in bfloat16, 5.5 ms here, 46 ms for SGLang's
`--enable-fp32-lm-head`, which converts the whole weight first).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# More rows (the log-probabilities of a long tail) are bound by arithmetic, where float32 costs three times as much.
MAX_ROWS = 16
BLOCK_VOCAB_ROWS = 4096


def float32_logits(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`hidden @ weight.T` in float32. hidden: [rows, hidden size]; weight: [vocabulary, hidden size]; any float dtype."""
    hidden = hidden.float()
    logits = torch.empty(hidden.shape[0], weight.shape[0])
    block = torch.empty(BLOCK_VOCAB_ROWS, weight.shape[1])
    for start in range(0, weight.shape[0], BLOCK_VOCAB_ROWS):
        rows = weight[start : start + BLOCK_VOCAB_ROWS]
        converted = block[: rows.shape[0]].copy_(rows)
        logits[:, start : start + rows.shape[0]] = hidden @ converted.T
    return logits


def around_compute_lm_head(
    original: Callable[..., torch.Tensor],
    processor: Any,
    hidden_states: torch.Tensor,
    lm_head: Any,
    embedding_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Hook: float32 for a few rows of an unquantized half-precision LM head in host memory; SGLang's way for the rest."""
    from sglang.srt.layers.logits_processor import should_apply_lm_head_quant_method

    weight: Any = getattr(lm_head, "weight", None)
    is_ours = (
        weight is not None
        and weight.device.type == "cpu"
        and weight.dtype in (torch.bfloat16, torch.float16)
        and hidden_states.shape[0] <= MAX_ROWS
        and embedding_bias is None
        and not hasattr(lm_head, "apply_lora")
        and not should_apply_lm_head_quant_method(lm_head, getattr(lm_head, "quant_method", None))
    )
    if not is_ours:
        return original(processor, hidden_states, lm_head, embedding_bias)
    return float32_logits(hidden_states, weight)
