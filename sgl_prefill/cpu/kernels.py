"""Plain PyTorch for the Triton kernels that SGLang's native model code still calls on a CPU platform of another name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def around_softcap_logits(original: Callable[..., Any], logits: torch.Tensor, cap: float) -> Any:
    """Hook: `logits` become cap * tanh(logits / cap), in place. Gemma 2."""
    if logits.device.type != "cpu":
        return original(logits, cap)
    return logits.div_(cap).tanh_().mul_(cap)


def around_gate_sigmoid_mul_add(
    original: Callable[..., Any],
    hidden_states: torch.Tensor,
    gate_weight: torch.Tensor,
    shared_output: torch.Tensor,
    final_hidden_states: torch.Tensor,
) -> Any:
    """Hook: `final_hidden_states` gains sigmoid(hidden_states @ gate_weight) * shared_output, in place. Qwen2-MoE."""
    if hidden_states.device.type != "cpu":
        return original(hidden_states, gate_weight, shared_output, final_hidden_states)
    gate = torch.sigmoid(hidden_states.float() @ gate_weight.float()).unsqueeze(-1)
    final_hidden_states.copy_(final_hidden_states.float() + gate * shared_output.float())
    return None
