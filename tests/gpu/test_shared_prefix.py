"""Requests of a step that attend to a shared prefix together, with each attention backend, against each request alone.

The right answers are transformers' in float32; those of `--set shared_prefix_attention=off` say how far bfloat16 alone is off.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
import requests
import torch

from sgl_prefill.port.runner.shared_prefixes import COUNTS_KEY
from tests.gpu.conftest import MEMORY, Scored, Server, difference, mean_difference, prompt

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

# Bfloat16 moves single log-probabilities of this model by up to 1 (transformers' on a CPU, from its float32 ones), and another
# prefix by more than 8. What moves few of them little is seen in the mean, beside that of each request alone.
MAX_LOGPROB_DIFFERENCE, MAX_MEAN_RATIO = 2.0, 1.25
PREFIX_TOKENS, SHARERS = 4_000, 24
# (tokens of the prefix, how many share it)
GROUPS = ((PREFIX_TOKENS, SHARERS), (1_100, 7), (64, 2), (3_000, 1))
FLAGS = ["--max-input-length", "8000", "--max-total-tokens", "24000", "--set", "pack_step_tokens=8192", *MEMORY]
ANSWERS = ["t40 t50", "t40 t60 t70", "t80 t90 t100"]
TOKEN_IDS = range(30, 60)

PREFIXES = [prompt(300 + number, n_tokens) for number, (n_tokens, _) in enumerate(GROUPS)]
ASKED = [
    [*prefix, *prompt(400 + 50 * group + number, 1 + 37 * number % 150)]
    for group, (prefix, (_, n_sharers)) in enumerate(zip(PREFIXES, GROUPS, strict=True))
    for number in range(n_sharers)
]
# One of each group in turn, as requests come, and a cold one among them.
MIXED = [*ASKED[::3], *ASKED[1::3], prompt(390, 200), *ASKED[2::3]]


def counts(server: Server) -> dict[str, int] | None:
    """What the server says that it has shared so far."""
    found: dict[str, int] | None = server.info()["internal_states"][0].get(COUNTS_KEY)
    return found


@pytest.fixture(scope="session")
def together(start: Callable[..., Server], model: Path, backend: str) -> Iterator[Server]:
    yield from _started(start, model, backend, "on")


@pytest.fixture(scope="session")
def apart(start: Callable[..., Server], model: Path, backend: str) -> Iterator[Server]:
    yield from _started(start, model, backend, "off")


def _started(start: Callable[..., Server], model: Path, backend: str, switch: str) -> Iterator[Server]:
    flags = ["--attention-backend", backend, "--set", f"shared_prefix_attention={switch}", *FLAGS]
    with ExitStack() as stack:
        server = start("sgl_prefill.launch_server", model, *flags, stack=stack)
        for prefix in PREFIXES:
            server.score(prefix)
        yield server


@pytest.fixture(scope="session")
def exact_ones(exact: Callable[..., list[Scored]]) -> list[Scored]:
    return exact(*MIXED, token_ids=TOKEN_IDS)


def test_a_prefix_attended_together_gives_the_answers_of_each_alone(
    together: Server, apart: Server, exact_ones: Sequence[Scored]
) -> None:
    """24 requests behind 4,000 tokens in a few steps, between others of three prefixes, and once more, when all are cached. The
    server says that it has read the prefix together, and the other one says nothing of it."""
    before = counts(together)
    assert before is not None
    found = together.score(*MIXED, token_ids=TOKEN_IDS)
    after = counts(together)
    assert after is not None
    assert after["steps"] > before["steps"]
    assert after["requests"] - before["requests"] >= SHARERS / 2, "they came together, and were not attended together"
    assert after["saved_tokens"] - before["saved_tokens"] >= SHARERS / 4 * PREFIX_TOKENS
    alone = apart.score(*MIXED, token_ids=TOKEN_IDS)
    assert counts(apart) is None
    assert sum(one.cached_tokens >= 64 for one in found) == len(ASKED)
    again = together.score(*MIXED, token_ids=TOKEN_IDS)
    noise = mean_difference(alone, exact_ones)
    for answers in (found, again):
        assert difference(answers, exact_ones) <= MAX_LOGPROB_DIFFERENCE
        assert difference(answers, alone) <= MAX_LOGPROB_DIFFERENCE
        assert mean_difference(answers, exact_ones) <= MAX_MEAN_RATIO * noise


def test_the_comparison_would_see_another_prefix(exact_ones: Sequence[Scored]) -> None:
    """Answers behind different prefixes differ by far more than is allowed."""
    firsts = [next(number for number, one in enumerate(MIXED) if one[:64] == prefix[:64]) for prefix in PREFIXES]
    answers = [exact_ones[number] for number in firsts]
    for one, other in itertools.combinations(answers, 2):
        assert difference([one], [other]) > 2 * MAX_LOGPROB_DIFFERENCE


def test_hits_that_are_replayed_from_a_graph_share_their_prefix(together: Server) -> None:
    """Twelve of few tokens make a step that SGLang replays: attention runs between the pieces of the graph, in two parts."""
    asked = [[*PREFIXES[0], *prompt(700 + number, 15)] for number in range(12)]
    passes, before = together.passes(), counts(together)
    for _ in range(4):
        together.score(*asked)
    assert together.passes().replayed > passes.replayed
    after = counts(together)
    assert before is not None
    assert after is not None
    assert after["saved_tokens"] - before["saved_tokens"] >= 4 * 6 * PREFIX_TOKENS


def test_answers_of_several_tokens_share_the_prefix_and_stay_right(together: Server, apart: Server) -> None:
    """Every token of an answer is a request of its own in the step, behind the whole prompt."""
    found, expected = (long_answers(server) for server in (together, apart))
    assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) <= MAX_LOGPROB_DIFFERENCE


def long_answers(server: Server) -> list[float]:
    """Log-probabilities of each answer to each of eight prompts behind one prefix."""
    asked = [[*PREFIXES[0], *prompt(800 + number, 20)] for number in range(8)]
    body = {"model": "default", "prompt": asked, "allowed_answers": ANSWERS}
    reply = requests.post(f"{server.url}/v1/completions", json=body, timeout=300)
    assert reply.status_code == 200, reply.text[:2000]
    return [entry["logprob"] for choice in reply.json()["choices"] for entry in choice["label_scores"]["labels"]]
