"""What is left of a job in the order of its plan, and what is printed about it before it runs."""

from __future__ import annotations

import sys

import numpy as np

from sgl_prefill.batch.prompts import Prompts
from sgl_prefill.core.batch import batch_plan
from sgl_prefill.core.batch.batch_plan import JobPlan
from sgl_prefill.core.batch.token_rows import IntArray
from sgl_prefill.core.jct import FittedJct
from sgl_prefill.core.packing import StepSize, fill_steps


class Planned:
    """The rows left of a job, in the order in which they run."""

    def __init__(self, prompts: Prompts, rows: IntArray, n_before: int) -> None:
        self.prompts = prompts  # of the rows left
        self.order: JobPlan = batch_plan.depth_first(prompts.tokens)
        if (prompts.max_new_tokens > 1).any():
            self.order = batch_plan.decode_first(self.order, prompts.tokens.lengths, prompts.max_new_tokens)
        self.n_rows, self.n_before = len(rows), n_before
        self.plan_s = 0.0  # of reading, tokenising and planning

    @property
    def n_tokens(self) -> int:
        return int(self.prompts.tokens.lengths.sum())


def report_plan(planned: Planned, unit: str) -> None:
    n_saved = planned.order.saved_tokens
    share = n_saved / planned.n_tokens if planned.n_tokens else 0.0
    before = f", {planned.n_before:,} of them answered before" if planned.n_before else ""
    print(
        f"{planned.n_rows:,} rows{before}: {planned.n_tokens:,} {unit}, of which {n_saved:,} ({share:.1%}) need not be"
        f" computed (read, tokenised and planned in {planned.plan_s:.1f} s)",
        file=sys.stderr,
    )


def describe(planned: Planned, unit: str) -> list[str]:
    """The size of the job and what its plan saves, in lines."""
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
    """Predicted computing time if each step is filled and the cache holds what the plan reuses."""
    in_order = lengths[order.rows]
    jobs = list(zip(in_order.tolist(), order.reused_tokens.tolist(), strict=True))
    n_steps = fill_steps(sum(step.tokens_of(*job) for job in jobs), len(order), step).n_steps
    tokens_ms = sum(model.tokens_ms(*job) for job in jobs)
    return sum(model.work(n_steps, len(order), tokens_ms))


def time_and_price(ms: float, price_per_hour: float | None) -> list[str]:
    """Predicted time and price of the job, in lines."""
    hours = ms / 3_600_000
    lines = [f"predicted time of computing: {ms / 1000:,.1f} s"]
    if price_per_hour is not None:
        lines.append(f"predicted price, at {price_per_hour:g} an hour: {hours * price_per_hour:,.4f}")
    return lines
