"""Label logits in float32 on a GPU, from weights of half precision: a matrix product whose sums are not rounded at their end.

A bfloat16 LM head rounds each logit to 3 significant digits: labels tie, and P(label) is off by up to 0.02. The sums are float32
on the device anyway, so that keeping them costs four bytes a logit instead of two; SGLang's `--enable-fp32-lm-head` converts the
whole weight in each step (a vocabulary of 128,256 x hidden 4,096: 2 GB).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sgl_prefill.cpu.lm_head import is_plain
from sgl_prefill.startup.arguments import DEVICE_MAX_REQUESTS


def around_compute_lm_head(
    original: Callable[..., torch.Tensor],
    processor: Any,
    hidden_states: torch.Tensor,
    lm_head: Any,
    embedding_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Hook: float32 for the rows of a step of an unquantized half-precision LM head; SGLang's way for the rest, such as the
    log-probabilities of a long tail."""
    is_ours = (
        hidden_states.device.type == "cuda"
        and hidden_states.shape[0] <= DEVICE_MAX_REQUESTS
        and is_plain(lm_head, embedding_bias)
        and hidden_states.dtype == lm_head.weight.dtype
    )
    if not is_ours:
        return original(processor, hidden_states, lm_head, embedding_bias)
    return torch.mm(hidden_states, lm_head.weight.T, out_dtype=torch.float32)
