"""A guard model: one long policy that every request shares, and a short message each. At saturation, and when little comes?

    python benchmarks/guard/run.py [--quick] [--json PATH]

The demo model and real text. See the README beside this file.
"""

from __future__ import annotations

import os
import pydoc_data.topics
import random
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "2")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import report, shapes
from benchmarks.harness import engines, traffic
from benchmarks.harness.client import Due
from benchmarks.harness.compare import SATURATION, Comparison, Rate, Served
from sgl_prefill import demo_model

POLICY_TOKENS, MESSAGE_TOKENS = 1_500, (10, 80)
N_MESSAGES, QUICK_MESSAGES = 300, 20
LITTLE = 0.2  # of what our engine serves at once
MAX_LOGPROB_DIFFERENCE = 0.25  # bfloat16, in steps of other sizes
ONE = engines.ours("ours, one a step")
PACKED = engines.ours("ours, packed", "--pack-step-tokens", "auto")
RIVALS = (engines.stock("fcfs"), engines.stock("lpm"))


def main() -> int:
    arguments = report.arguments(__doc__, Path(__file__).with_name("result.json"))
    messages = prompts(QUICK_MESSAGES if arguments.quick else N_MESSAGES)

    def requests_of(rate: Rate) -> list[Due]:
        return [Due(at_s, ids) for at_s, ids in zip(traffic.poisson(rate, len(messages)), messages, strict=True)]

    served = Served(
        None,
        ["--context-length", "4096", "--max-total-tokens", "8000", "--max-running-requests", "64"],
        ["--max-input-length", "4000", *shapes.budget(3)],
    )
    with Comparison(arguments, requests_of, served, MAX_LOGPROB_DIFFERENCE) as comparison:
        (at_once,) = comparison.measure(ONE, [SATURATION])
        x = comparison.conditions["x_requests_per_s"] = at_once.figures.requests_per_s
        rivals = [*RIVALS[: 1 if arguments.quick else None], *engines.newer("shortest-prefill-first")]
        runs = {engine.name: comparison.measure(engine, [SATURATION, LITTLE * x]) for engine in (ONE, PACKED, *rivals)}
        if not arguments.quick:
            comparison.measure(engines.transformers(), [SATURATION])
    little = {name: of_engine[1].figures for name, of_engine in runs.items()}
    at_once_s = {name: of_engine[0].figures.requests_per_s for name, of_engine in runs.items()}
    best_mean = min(little[rival.name].mean_s for rival in rivals)
    best_rate = max(at_once_s[rival.name] for rival in rivals)
    targets = [
        report.Target.at_least(
            f"guard, {LITTLE:g}x: mean latency, best stock / ours", best_mean / little[ONE.name].mean_s, 0.97
        ),
        report.Target.at_least(
            "guard, all at once: requests a second, packed / best stock", at_once_s[PACKED.name] / best_rate, 1.0
        ),
    ]
    comparison.finish(targets)
    return 0


def prompts(n_messages: int) -> list[list[int]]:
    """A policy and messages cut from Python's own documentation, which is on every machine."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(demo_model.ensure("bfloat16"))
    text = "\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    ids = tokenizer.encode(text[:400_000])
    rng = random.Random(0)
    made = []
    for _ in range(n_messages):
        start, n_tokens = rng.randrange(POLICY_TOKENS, len(ids) - MESSAGE_TOKENS[1]), rng.randint(*MESSAGE_TOKENS)
        made.append([*ids[:POLICY_TOKENS], *ids[start : start + n_tokens]])
    return made


if __name__ == "__main__":
    sys.exit(main())
