"""Can one tenant tell from times and counts whether another's prompt is cached?

Of two prompts, tenant A asks one; tenant B asks one of the two, drawn by a coin, and guesses from what it is answered whether
that was A's. A rule is learned from half of the trials, for each thing that B sees, and tried on the other half.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import requests

from benchmarks import report, shapes
from benchmarks.harness import engines
from benchmarks.harness.turns import Served, Servers
from benchmarks.storm import attack

N_TRIALS = 400
PROMPT_TOKENS, N_LABELS = 300, 300
Z = 2.39  # in standard deviations of a fair coin: the best of six rules that know nothing is within in 19 of 20 runs
SERVED = Served(None, ["--context-length", "4096", "--max-total-tokens", "20000"], [*shapes.budget(3)])
SEEN = ("latency_ms", "cached_tokens", "queue_ms", "actual_ms", "predicted_jct_ms", "kept_tokens")


class Trial(NamedTuple):
    """What B saw of one prompt."""

    was_asked: bool  # by A
    seen: dict[str, float]


def measure(quick: bool) -> dict[str, Any]:
    """Tries without isolation, where B should know, and with it."""
    n_trials = 20 if quick else N_TRIALS
    rows: list[dict[str, Any]] = []
    commands: dict[str, str] = {}
    best: dict[str, float] = {}
    for by in ("none", "user"):
        engine = engines.ours(f"isolate-by {by}", "--isolate-by", by)
        with Servers(SERVED, 1) as servers:
            server = servers.of(engine)
            commands[engine.name] = server.command
            trials = [trial(server.url, number) for number in range(n_trials)]
        shares = {name: guessed_right(trials, name) for name in SEEN}
        best[by] = max(shares.values())
        rows += [{"engine": engine.name, "seen": name, "right": share} for name, share in shares.items()]
    by_chance = 0.5 + Z * 0.5 / math.sqrt(n_trials / 2)
    targets = [
        report.Target.at_most(
            "tenants: B guesses right what A asked, by the best of what it sees", best["user"], by_chance
        ),
        report.Target.at_least("the same without isolation, which shows that B looks well", best["none"], 0.95),
    ]
    return report.part(rows, targets, commands=commands)


def trial(url: str, number: int) -> Trial:
    """One trial with two new prompts of equal length."""
    rng = random.Random(number)
    both = [shapes.token_ids(rng, PROMPT_TOKENS) for _ in range(2)]
    coin = rng.randrange(2)
    ask(url, "A", both[0])
    return Trial(coin == 0, ask(url, "B", both[coin]))


def ask(url: str, user: str, prompt: list[int]) -> dict[str, float]:
    """Asks with many labels as text, which are looked up after this end of a prompt."""
    body: dict[str, Any] = {"model": "demo", "prompt": prompt, "allowed_tokens": attack.words()[:N_LABELS]}
    began_s = time.perf_counter()
    reply = requests.post(f"{url}/v1/completions", json=body, headers={"x-user-id": user}, timeout=60)
    latency_ms = 1000 * (time.perf_counter() - began_s)
    if reply.status_code != 200:
        raise report.InvalidRunError(f"a request failed with {reply.status_code}: {reply.text[:300]}")
    scores = reply.json()["choices"][0]["label_scores"]
    return {"latency_ms": latency_ms, **{name: scores[name] or 0.0 for name in SEEN[1:]}}


def guessed_right(trials: Sequence[Trial], name: str) -> float:
    """Learns a threshold and its direction from every other trial; returns the share of the others that it guesses right."""
    learn, test = trials[::2], trials[1::2]

    def right(threshold: float, is_less: bool, among: Sequence[Trial]) -> float:
        return sum(((one.seen[name] < threshold) == is_less) == one.was_asked for one in among) / len(among)

    rules = [(one.seen[name], is_less) for one in learn for is_less in (True, False)]
    threshold, is_less = max(rules, key=lambda rule: right(rule[0], rule[1], learn))
    return right(threshold, is_less, test)
