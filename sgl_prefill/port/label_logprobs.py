"""The log-probabilities of a step in which one request asks for those of some tokens, and another does not.

SGLang puts an empty list among the tensors for the other, and fails at it: the scheduler ends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def around_lists_of_logprobs(original: Callable[..., Any], processor: Any, **options: Any) -> Any:
    """Hook: before SGLang makes lists of the tensors of all requests of a step."""
    output = options["logits_output"]
    values = None if output is None else output.next_token_token_ids_logprobs_val
    if values:
        output.next_token_token_ids_logprobs_val = [
            value if isinstance(value, torch.Tensor) else torch.tensor(value) for value in values
        ]
    return original(processor, **options)
