"""The log-probabilities of a step's labels, gathered without waiting for the device and read from it at once.

SGLang counts the labels of a step on the device and asks it for the sum: each step of label requests would be waited for in the
middle of its launch. It reads them request by request too, and fails where one request of a step asks for those of some tokens
and another for none: it puts an empty list among the tensors, and the scheduler ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


def around_gather(
    original: Callable[..., Any] | None, logprobs: torch.Tensor, token_ids_logprobs: Sequence[Sequence[int] | None]
) -> tuple[list[torch.Tensor], list[Sequence[int]]]:
    """Hook: the same as SGLang's, counted here. logprobs: [requests, vocabulary]. Returns (log-probabilities, their tokens) of
    each request."""
    asked = [token_ids or [] for token_ids in token_ids_logprobs]
    places = [(row, token_id) for row, token_ids in enumerate(asked) for token_id in token_ids]
    found = gather(logprobs, places)
    return list(torch.split_with_sizes(found, [len(token_ids) for token_ids in asked])), asked


def gather(logprobs: torch.Tensor, places: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Returns the values at (row, column), in this order; on a device nothing is waited for."""
    index = torch.tensor(places, dtype=torch.int64, pin_memory=logprobs.is_cuda).view(-1, 2)
    rows, columns = index.to(logprobs.device, non_blocking=True).unbind(1)
    return logprobs[rows, columns]


def around_lists_of_logprobs(original: Callable[..., Any], processor: Any, **options: Any) -> Any:
    """Hook: before SGLang makes lists of the tensors of all requests of a step, bring them from the device in one piece."""
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
