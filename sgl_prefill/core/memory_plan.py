"""What the memory beyond the weights is used for: how many durable KV slots are left, and the longest input there is room for.

    budget = activations of the longest input + its suffix scratch (one layer's KV) + durable KV (all layers') slots

Activations are a fixed part (one chunk) and a part for each token of the longest input; both are measured (startup/).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple


class MemoryUse(NamedTuple):
    """Measured or known before the plan is made."""

    weights_bytes: int
    budget_bytes: int  # beyond the weights
    fixed_bytes: int  # activations that do not grow with the input: one chunk, one block of attention, the logits
    activation_bytes_per_token: float  # of the longest input
    scratch_bytes_per_token: int  # one layer's K and V; 0 where the whole KV is kept
    durable_bytes_per_token: int  # all layers' K and V

    def input_bytes(self, n_tokens: int) -> int:
        """Returns what an input of this length takes besides durable slots."""
        per_token = self.activation_bytes_per_token + self.scratch_bytes_per_token
        return self.fixed_bytes + math.ceil(n_tokens * per_token)


class MemoryPlan(NamedTuple):
    """The result; `table` shows it to people."""

    use: MemoryUse
    max_input_tokens: int
    largest_input_tokens: int  # that this memory could serve, with no durable slot to spare
    durable_tokens: int

    @property
    def durable_bytes(self) -> int:
        return self.durable_tokens * self.use.durable_bytes_per_token


class InputDoesNotFitError(ValueError):
    """There is no plan; how many tokens the longest input has that would fit, and what is missing for the one that was to."""

    def __init__(self, largest_tokens: int, missing_bytes: int, message: str) -> None:
        super().__init__(message)
        self.largest_tokens = largest_tokens
        self.missing_bytes = missing_bytes


def largest_input(use: MemoryUse, min_durable_tokens: int) -> int:
    """Counts the tokens of the longest input that fits, at least 0.

    Where the whole KV is kept (no scratch) the input itself must find durable slots.
    """
    keeps_all = use.scratch_bytes_per_token == 0
    per_token = use.activation_bytes_per_token + use.scratch_bytes_per_token
    per_token += use.durable_bytes_per_token if keeps_all else 0
    left = use.budget_bytes - use.fixed_bytes - min_durable_tokens * use.durable_bytes_per_token
    return max(0, math.floor(left / per_token))


def plan_memory(
    use: MemoryUse, max_input_tokens: int | None, *, input_limit_tokens: int, min_durable_tokens: int, page_size: int
) -> MemoryPlan:
    """Divide the budget.

    Args:
        max_input_tokens: what the user asked for; None chooses the longest that leaves half of the budget to durable KV.
        input_limit_tokens: what the model's context length allows.
        min_durable_tokens: slots without which nothing can be served, a multiple of `page_size`.

    Raises InputDoesNotFitError with a message for people where `max_input_tokens` does not fit.
    """
    largest = largest_input(use, min_durable_tokens)
    if max_input_tokens is None:
        # Where the whole KV is kept, the input itself fills the durable slots.
        share = 2 if use.scratch_bytes_per_token else 1
        part = use._replace(budget_bytes=use.budget_bytes // share)
        max_input_tokens = min(input_limit_tokens, largest_input(part, min_durable_tokens))
    if max_input_tokens < 1 or max_input_tokens > largest:
        kept = min_durable_tokens + (0 if use.scratch_bytes_per_token else max_input_tokens)
        needed = use.input_bytes(max_input_tokens) + kept * use.durable_bytes_per_token
        fits = f"the longest input that fits has {largest} tokens" if largest else "no input fits"
        raise InputDoesNotFitError(
            largest,
            max(needed - use.budget_bytes, 1),
            f"inputs of {max(max_input_tokens, 1)} tokens need {needed / 2**20:.0f} MiB beyond the weights"
            f" ({kept} durable KV slots among them), and there are {use.budget_bytes / 2**20:.0f} MiB:"
            f" {fits}",
        )
    durable_bytes = use.budget_bytes - use.input_bytes(max_input_tokens)
    durable_tokens = durable_bytes // use.durable_bytes_per_token // page_size * page_size
    return MemoryPlan(use, max_input_tokens, largest, durable_tokens)


def table(plan: MemoryPlan) -> list[tuple[str, float, float | None]]:
    """Returns rows of (what, MiB, bytes per token of it): where the memory went."""
    use, n = plan.use, plan.max_input_tokens
    return [
        ("weights", use.weights_bytes / 2**20, None),
        ("activations, fixed", use.fixed_bytes / 2**20, None),
        (f"activations of {n} tokens", n * use.activation_bytes_per_token / 2**20, use.activation_bytes_per_token),
        (f"suffix scratch of {n} tokens", n * use.scratch_bytes_per_token / 2**20, use.scratch_bytes_per_token),
        (f"durable KV of {plan.durable_tokens} tokens", plan.durable_bytes / 2**20, use.durable_bytes_per_token),
    ]


def shown(plan: MemoryPlan) -> dict[str, Any]:
    """Returns the plan for /server_info."""
    return {
        "max_input_tokens": plan.max_input_tokens,
        "largest_input_tokens": plan.largest_input_tokens,
        "durable_tokens": plan.durable_tokens,
        "rows": [{"what": what, "mib": round(mib, 2), "bytes_per_token": each} for what, mib, each in table(plan)],
    }


def as_text(plan: MemoryPlan) -> str:
    """Returns the plan for the log."""
    lines = [
        f"  {what:<42} {mib:10.1f} MiB" + (f" {each:12.0f} bytes a token" if each is not None else "")
        for what, mib, each in table(plan)
    ]
    first = f"longest input {plan.max_input_tokens} tokens (this memory could serve {plan.largest_input_tokens}):"
    return "\n".join([first, *lines])
