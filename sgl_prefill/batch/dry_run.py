"""What `--dry-run` tells of a job before it runs."""

from __future__ import annotations

import numpy as np

from sgl_prefill.batch.job import Planned
from sgl_prefill.core.batch.plan import JobPlan
from sgl_prefill.core.batch.token_rows import IntArray
from sgl_prefill.core.jct import FittedJct
from sgl_prefill.core.packing import StepSize, fill_steps


def describe(planned: Planned, unit: str) -> list[str]:
    """Returns lines that say what the job holds, and what its plan saves."""
    order, n_tokens = planned.order, planned.n_tokens
    lengths = planned.prompts.tokens.lengths
    begins = order.group_begins()
    sizes = np.diff([*begins.tolist(), len(order)])
    n_groups, largest = int((sizes > 1).sum()), int(sizes.max(initial=0))
    share = order.saved_tokens / n_tokens if n_tokens else 0.0
    return [
        f"rows: {planned.n_rows:,}, prompts: {len(order):,}",
        f"{unit} of all prompts: {n_tokens:,}; longest prompt: {int(lengths.max(initial=0)):,}",
        f"saved at most: {order.saved_tokens:,} {unit} ({share:.1%}), since prompts begin alike",
        f"groups that share a prefix: {n_groups:,}, the largest of {largest:,} prompts",
    ]


def predicted_ms(order: JobPlan, lengths: IntArray, model: FittedJct, step: StepSize) -> float:
    """Predicts how long an engine computes, if each step is filled and the cache holds what the plan reuses."""
    in_order = lengths[order.rows]
    computed = in_order - order.reused_tokens
    n_steps = fill_steps(int(np.minimum(computed, step.max_tokens or computed).sum()), len(order), step).n_steps
    tokens_ms = sum(map(model.tokens_ms, in_order.tolist(), order.reused_tokens.tolist()))
    return sum(model.work(n_steps, len(order), tokens_ms))


def time_and_price(ms: float, price_per_hour: float | None) -> list[str]:
    """Returns lines that say how long the job will take, and what that costs."""
    hours = ms / 3_600_000
    lines = [f"predicted time of computing: {ms / 1000:,.1f} s"]
    if price_per_hour is not None:
        lines.append(f"predicted price, at {price_per_hour:g} an hour: {hours * price_per_hour:,.4f}")
    return lines
