"""The paper's WL2, credit verification: long prompts that share nothing."""

from __future__ import annotations

from typing import Any

from benchmarks import report, shapes
from benchmarks.harness import engines, traffic
from benchmarks.harness.client import Due
from benchmarks.harness.compare import SATURATION, Comparison, Rate
from benchmarks.harness.turns import MANY, Contest, Served
from benchmarks.load import curves

MODEL, SCALE = (shapes.DEVICE_MODEL, 1) if shapes.HAS_CUDA else ("llama-small", 30)
LONGEST_TOKENS = 61_000 // SCALE
# The paper's 60; a device is lent for minutes.
USERS, QUICK_USERS = 12 if shapes.HAS_CUDA else 60, 4
KV_TOKENS = 4 * LONGEST_TOKENS
SERVED = Served(
    MODEL,
    ["--context-length", str(2 * LONGEST_TOKENS), "--max-total-tokens", str(KV_TOKENS), "--max-running-requests", "8"],
    ["--max-input-length", str(LONGEST_TOKENS), *shapes.budget(4)],
)
POLICIES = (
    engines.stock("fcfs"),
    engines.stock("fcfs", "--chunked-prefill-size", "-1")._replace(name="stock fcfs, unchunked"),
    engines.stock("shortest-prefill-first"),
)
AT_LEAST = 1.2 if shapes.HAS_CUDA else 2.2  # times the requests a second of stock as installed
AT_LEAST_SAME_KERNEL = 1.2


def load(quick: bool) -> dict[str, Any]:
    """All at once in turns, and latency against load."""

    def requests_of(rate: Rate) -> list[Due]:
        return traffic.credit_verification(rate, SCALE, n_users=QUICK_USERS if quick else USERS)

    contest = Contest(POLICIES, 1 if shapes.HAS_CUDA else 2, others=() if shapes.HAS_CUDA else (engines.VLLM,))
    contest = contest.smoke() if quick else contest
    place = report.beside(__file__, "wl2", quick=quick)
    with Comparison(place, requests_of, SERVED, n_servers=MANY) as comparison:
        comparison.conditions |= {"kv_tokens": KV_TOKENS, "scaled_by": SCALE, "users": USERS}
        found = comparison.take_turns(contest, [SATURATION], cost=lambda one: -one.requests_per_s)
        per_s = {engine: figures.requests_per_s for engine, (figures,) in found.items()}
        comparison.conditions["x_requests_per_s"] = per_s[engines.OURS]
        if not quick:
            curves.measure(comparison, {engine: one for engine, (one,) in found.items() if engine != engines.PAPER})
    targets = [
        report.Target.at_least(
            f"WL2, all at once: requests a second, ours / {rival.name}",
            per_s[engines.OURS] / per_s[rival],
            AT_LEAST_SAME_KERNEL if rival.reference == engines.NEW_KERNEL else AT_LEAST,
        )
        for rival in found
        if not rival.is_ours
    ]
    return comparison.part(targets)
