"""What the policy of a server knows, made of its options: the same for the server and for who replays its decisions."""

from __future__ import annotations

from sgl_prefill.config import PrefillConfig
from sgl_prefill.core.jct import FittedJct
from sgl_prefill.core.packing import StepSize
from sgl_prefill.core.policy import PolicySettings


def settings_of(config: PrefillConfig, jct_ms: FittedJct | None, step_size: StepSize, kv_tokens: int) -> PolicySettings:
    """Makes the settings of a policy. jct_ms: what the start has measured, which some options do not look at."""
    return PolicySettings.of(
        step_size,
        jct_ms=jct_ms if config.jct_model == "fitted" else None,
        fairness_lambda=config.fairness_lambda,
        max_queue_s=config.max_queue_s,
        counts_sharers=config.sharers == "count",
    )._replace(kv_tokens=kv_tokens, background_step_ms=config.background_step_ms, quotas=config.quotas)
