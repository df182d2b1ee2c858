"""Label logits in float32, and the log-probabilities of a step's labels, read from the device in one copy: SGLang reads them
request by request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from sgl_prefill.cpu.lm_head import MAX_ROWS, float32_logits, is_plain
from sgl_prefill.cpu.native.library import native
from sgl_prefill.startup.arguments import DEVICE_MAX_REQUESTS
from sgl_prefill.startup.record import StartRecord


def around_compute_lm_head(
    record: StartRecord,
    original: Callable[..., torch.Tensor],
    processor: Any,
    hidden_states: torch.Tensor,
    lm_head: Any,
    embedding_bias: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor:
    """Hook: computes logits in float32 for an unquantized half-precision LM head and at most one row per request of a step.
    SGLang computes others, such as those of input log-probabilities. Adds the head's bias, which SGLang leaves out.
    """
    logits = _without_bias(record, original, processor, hidden_states, lm_head, embedding_bias, options)
    bias = bias_of(lm_head)
    return logits if bias is None else logits + bias


def bias_of(lm_head: Any) -> torch.Tensor | None:
    """Returns the bias of an LM head, which may be wrapped for adapters."""
    bias: torch.Tensor | None = getattr(getattr(lm_head, "base_layer", lm_head), "bias", None)
    return bias


def _without_bias(
    record: StartRecord,
    original: Callable[..., torch.Tensor],
    processor: Any,
    hidden_states: torch.Tensor,
    lm_head: Any,
    embedding_bias: torch.Tensor | None,
    options: dict[str, Any],
) -> torch.Tensor:
    weight: Any = getattr(lm_head, "weight", None)
    if record.stable_answers is not None:  # the start has checked that one kernel computes all rows of this LM head
        kernels = native().kernels
        assert kernels is not None
        assert embedding_bias is None
        return kernels.logits(hidden_states.contiguous(), weight)
    on_device = hidden_states.device.type == "cuda"
    most_rows = DEVICE_MAX_REQUESTS if on_device else MAX_ROWS
    if hidden_states.shape[0] > most_rows or not is_plain(lm_head, embedding_bias):
        return original(processor, hidden_states, lm_head, embedding_bias, **options)
    if not on_device:
        kernels = native().kernels
        if kernels is not None and kernels.fits_logits(hidden_states, weight):
            return kernels.logits(hidden_states, weight)
        return float32_logits(hidden_states, weight)
    if hidden_states.dtype != weight.dtype:
        return original(processor, hidden_states, lm_head, embedding_bias, **options)
    # The device sums in float32 anyway: keeping the sums costs four bytes a logit instead of two.
    return torch.mm(hidden_states, weight.T, out_dtype=torch.float32)


def gather(logprobs: torch.Tensor, places: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Returns the values at each (row, column), without waiting for the device."""
    index = torch.tensor(places, dtype=torch.int64, pin_memory=logprobs.is_cuda).view(-1, 2)
    rows, columns = index.to(logprobs.device, non_blocking=True).unbind(1)
    return logprobs[rows, columns]


def around_lists_of_logprobs(original: Callable[..., Any], processor: Any, **options: Any) -> Any:
    """Hook: copies the tensors of all requests of a step from the device in one piece before SGLang makes lists of them."""
    output = options["logits_output"]
    values = None if output is None else output.next_token_token_ids_logprobs_val
    if values:
        output.next_token_token_ids_logprobs_val = on_host([torch.as_tensor(value) for value in values])
    return original(processor, **options)


def on_host(values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns the same tensors in host memory, [n] each, with one copy."""
    device = next((value.device for value in values if value.numel()), torch.device("cpu"))
    if device.type == "cpu":
        return list(values)
    whole = torch.cat([value.to(device) for value in values]).cpu()
    return list(torch.split_with_sizes(whole, [len(value) for value in values]))
