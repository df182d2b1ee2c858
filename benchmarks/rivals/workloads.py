"""Guard, reranking and mixed lengths as requests for the log-probabilities of labels, and with what each is served."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

from benchmarks import shapes
from benchmarks.harness import traffic
from benchmarks.harness.client import Due
from benchmarks.harness.turns import Served
from sgl_prefill.examples import demo_model

POLICY_TOKENS, MESSAGE_TOKENS = 1_500, (10, 80)
QUESTION, LABELS = "\n\nIs this about the same subject? Answer yes or no:", (" yes", " no")
QUERY_CHARACTERS, PASSAGE_CHARACTERS = 4_000, 240
ASKED = "\n\nDoes the following passage belong to this page? Answer Yes or No.\n\n"


def _served(model: str | None, context: int, kv_tokens: int) -> Served:
    flags = ["--context-length", str(context), "--max-total-tokens", str(kv_tokens), "--max-running-requests", "64"]
    return Served(model, flags, ["--max-input-length", str(context - 96), *shapes.budget(4)])


GUARD, RERANKING = _served(None, 4096, 8_000), _served(None, 4096, 20_000)
MIXED = _served(shapes.DEVICE_MODEL if shapes.HAS_CUDA else "llama-small", 10_000, 40_000)


def guard(n_messages: int) -> list[Due]:
    """A policy that all share, messages cut from Python's own documentation, which is on every machine, and a question."""
    tokenizer = _tokenizer()
    ids, question = tokenizer.encode(traffic.real_text()[:400_000]), tokenizer.encode(QUESTION)
    labels = [tokenizer.encode(label)[0] for label in LABELS]
    rng = random.Random(0)
    made = []
    for _ in range(n_messages):
        start, n_tokens = rng.randrange(POLICY_TOKENS, len(ids) - MESSAGE_TOKENS[1]), rng.randint(*MESSAGE_TOKENS)
        made.append(Due(0.0, [*ids[:POLICY_TOKENS], *ids[start : start + n_tokens], *question], labels))
    return made


def reranking(n_passages: int) -> list[Due]:
    """A page of Python's documentation as query, cuts of other pages as passages."""
    tokenizer, text = _tokenizer(), traffic.real_text()
    labels = [tokenizer.encode(word)[0] for word in (" Yes", " No")]
    query, rest = text[:QUERY_CHARACTERS] + ASKED, text[QUERY_CHARACTERS:]
    passages = [rest[n * PASSAGE_CHARACTERS :][:PASSAGE_CHARACTERS] for n in range(n_passages)]
    return [Due(0.0, tokenizer.encode(query + passage), labels) for passage in passages]


def mixed(n_requests: int) -> list[Due]:
    """Lengths of 128 to 8,192 tokens in equal counts; nothing shared."""
    return traffic.short_mix(None, n_requests // len(traffic.SHORT_MIX_TOKENS))


def _tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(demo_model.ensure())


class Workload(NamedTuple):
    """All requests come at once."""

    served: Served
    requests: Callable[[int], list[Due]]
    n_requests: int
    least_of_vllm: float  # times its requests a second


WORKLOADS = {
    "guard": Workload(GUARD, guard, 60, 2.0),
    "reranking": Workload(RERANKING, reranking, 60, 2.0),
    "mixed": Workload(MIXED, mixed, 40, 3.0),
}
