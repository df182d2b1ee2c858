"""The policy's part of a dashboard snapshot: counts, histograms, and the first items of each list."""

from __future__ import annotations

import bisect
import operator
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from sgl_prefill.core.job import Job
from sgl_prefill.core.policy import Policy
from sgl_prefill.port.steps.recent import Recent
from sgl_prefill.port.steps.step_state import Answered

AGES_S = (0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)
PREDICTED_MS = (3, 10, 30, 100, 300, 1000, 3000, 10_000, 30_000)
LENGTHS_TOKENS = (128, 512, 2048, 8192, 32_768)
N_NEXT = 12
N_CLIENTS = 12
N_SHOWN_STEPS = 200
LONGEST_NAME = 40  # characters


def of_policy(policy: Policy, recent: Recent, now_s: float) -> dict[str, Any]:
    queue = _Queue(policy, now_s)
    return {
        "now": {
            "waiting": queue.n_jobs,
            "waiting_tokens": int(queue.n_input.sum()),
            "oldest_s": _rounded(queue.ages_s.max(initial=0.0)),
            "by_age": {"edges": AGES_S, "counts": _histogram(queue.ages_s, AGES_S)},
            "by_predicted": None
            if queue.predicted_ms is None
            else {"edges": PREDICTED_MS, "counts": _histogram(queue.predicted_ms, PREDICTED_MS)},
            "unit": "tokens" if policy.settings.predictor is None else "ms",
            "next": next_step(policy, now_s),
        },
        "steps": _steps(recent),
        "knee_tokens": policy.settings.step.max_tokens,
        "speed": _speed(recent),
        "clients": _clients(recent, queue),
        "totals": recent.totals._asdict(),
    }


def next_step(policy: Policy, now_s: float) -> list[dict[str, Any]]:
    """Returns the jobs of the step that would begin now, the best first, with their scores. Changes nothing."""
    jobs = policy.choose(now_s) if policy.waiting else []
    return [
        {**_why(policy, job, now_s), "rides": place > 0, "of": len(jobs)} for place, job in enumerate(jobs[:N_NEXT])
    ]


def _why(policy: Policy, job: Job, now_s: float) -> dict[str, Any]:
    parts = policy.parts_of_score(job, now_s)
    return {
        "client": _client(job.client),
        "input_tokens": job.n_input_tokens,
        "cached_tokens": job.n_cached_tokens,
        "sharers": job.n_sharers,
        "background": job.is_background,
        "wait_s": _rounded(now_s - job.arrival_s),
        "cost": None if parts is None else _rounded(parts.cost),
        "credit": None if parts is None else _rounded(parts.credit),
        "score": None if parts is None else _rounded(parts.cost - parts.credit),
    }


class _Queue:
    """Waiting jobs, an array per property. Ten thousand jobs take a few milliseconds."""

    def __init__(self, policy: Policy, now_s: float) -> None:
        n = self.n_jobs = len(policy.waiting)

        def column(name: str) -> Iterator[Any]:
            return map(operator.attrgetter(name), policy.waiting)

        self.ages_s = np.maximum(now_s - np.fromiter(column("arrival_s"), float, n), 0.0)
        self.n_input = np.fromiter(map(len, column("tokens")), float, n)
        self.n_input += np.fromiter(column("n_branch_tokens"), float, n)
        n_cached = np.fromiter(column("n_cached_tokens"), float, n)
        self.clients = Counter(column("client"))
        self.predicted_ms: Any = None
        if policy.settings.predictor is not None:
            model: Any = policy.settings.predictor.model  # its arithmetic works on arrays too
            n_priced = self.n_input + np.fromiter(column("n_sampling_tokens"), float, n)
            tokens_ms = model.tokens_ms(n_priced, n_cached)
            self.predicted_ms = policy.settings.predictor.ms(model.work(1, 1, tokens_ms))


def _histogram(values: Any, edges: Sequence[float]) -> list[int]:
    """Returns how many values are in (edge before, edge] for each edge, and last how many are above all edges."""
    counts: list[int] = np.bincount(np.searchsorted(edges, values), minlength=len(edges) + 1).tolist()
    return counts


def _steps(recent: Recent) -> dict[str, Any]:
    """Returns the last steps, a list per property, and the parts of their time."""
    steps = list(recent.steps)[-N_SHOWN_STEPS:]
    return {
        "predicted_ms": [None if one.predicted_ms is None else _rounded(one.predicted_ms) for one in steps],
        "forward_ms": [_rounded(one.forward_ms) for one in steps],
        "tokens": [one.n_computed_tokens for one in steps],
        "requests": [len(one.requests) for one in steps],
        "parts_ms": {
            "forward": _rounded(sum(one.forward_ms for one in steps)),
            "policy": _rounded(sum(one.policy_ms for one in steps)),
            "other, between steps": _rounded(sum(max(one.between_ms - one.policy_ms, 0.0) for one in steps)),
        },
    }


def _speed(recent: Recent) -> list[dict[str, Any]]:
    """Returns latencies of the last requests by prompt length."""
    classes: list[list[float]] = [[] for _ in range(len(LENGTHS_TOKENS) + 1)]
    for one in recent.requests:
        classes[bisect.bisect_left(LENGTHS_TOKENS, one.n_input_tokens)].append(one.latency_s)
    shown = []
    for place, latencies_s in enumerate(classes):
        if latencies_s:
            p50, p99 = np.percentile(latencies_s, (50, 99), method="inverted_cdf")
            up_to = LENGTHS_TOKENS[place] if place < len(LENGTHS_TOKENS) else None
            shown.append(
                {"up_to_tokens": up_to, "requests": len(latencies_s), "p50_s": float(p50), "p99_s": float(p99)}
            )
    return shown


def _clients(recent: Recent, queue: _Queue) -> list[dict[str, Any]]:
    """Returns the clients with the most computed tokens lately, then those with the most waiting requests; none where requests
    name no client.
    """
    by_client: dict[str, list[Answered]] = {}
    for one in recent.requests:
        by_client.setdefault(one.client, []).append(one)
    computed = {name: sum(one.n_input_tokens - one.n_cached_tokens for one in of) for name, of in by_client.items()}
    all_computed = sum(computed.values()) or 1
    names = {**dict.fromkeys(by_client), **dict.fromkeys(queue.clients)}
    if not any(names):
        return []
    first = sorted(names, key=lambda name: (-computed.get(name, 0), -queue.clients[name]))[:N_CLIENTS]
    shown = []
    for name in first:
        waits_s = sorted(one.wait_s for one in by_client.get(name, ()))
        shown.append(
            {
                "client": _client(name),
                "waiting": queue.clients[name],
                "requests": len(waits_s),
                "share": computed.get(name, 0) / all_computed,
                "wait_s": _rounded(sum(waits_s) / len(waits_s)) if waits_s else None,
                "longest_wait_s": _rounded(waits_s[-1]) if waits_s else None,
            }
        )
    return shown


def _client(name: str) -> str:
    return name if len(name) <= LONGEST_NAME else f"{name[:LONGEST_NAME]}..."


def _rounded(value: float) -> float:
    """Rounds to the four digits that the page shows."""
    return float(f"{value:.4g}")


def age_of(began_s: float) -> float:
    """Returns milliseconds since `began_s`."""
    return 1000 * (time.perf_counter() - began_s)
