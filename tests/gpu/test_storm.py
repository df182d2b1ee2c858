"""Hundreds of requests in bursts on a card, packed and alone, cold and behind cached prefixes, with suffix scratch that holds NaN
before each burst: a layer that reads what its step has not written answers NaN.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from sgl_prefill.config import PrefillConfig
from tests.gpu.conftest import DURABLE_TOKENS, LONGEST_TOKENS, Scored, difference, mean_difference, prompt

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

N_REQUESTS = 500
MAX_LOGPROB_DIFFERENCE, MAX_MEAN_DIFFERENCE = 2.0, 0.4  # of bfloat16 from float32; another prompt differs by 8 and more
LABELS = range(30, 60)


@pytest.mark.filterwarnings("ignore")  # SGLang, in this process
def test_a_storm_with_poisoned_scratch_is_answered_right(model: Path, exact: Callable[..., list[Scored]]) -> None:
    from tests.support.in_process import InProcessScheduler

    config = PrefillConfig(
        suffix_kv="evict", hybrid_prefill="on", hybrid_chunk_tokens=1024, max_input_length=LONGEST_TOKENS
    )
    scheduler = InProcessScheduler(
        config,
        model,
        dtype="bfloat16",
        max_total_tokens=DURABLE_TOKENS,
        max_running_requests=64,
        mem_fraction_static=0.3,
    )
    rng = random.Random(0)
    prefixes = [prompt(900 + number, n_tokens) for number, n_tokens in enumerate((64, 500, 900, 1_500, 2_500, 3_200))]
    asked: dict[str, list[int]] = {}
    answers: dict[str, list[float]] = {}
    while len(asked) < N_REQUESTS:
        scheduler.poison_scratch()
        burst = []
        for _ in range(rng.choice((1, 2, 8, 40))):
            number = len(asked)
            one = [*rng.choice(prefixes), *prompt(1000 + number, rng.choice((1, 2, 15, 63, 150, 600)))]
            if rng.random() < 0.05:
                one = prompt(5000 + number, rng.choice((1_023, 1_025, 5_000, LONGEST_TOKENS - 1)))
            rid = scheduler.submit(one, LABELS)
            asked[rid] = one
            burst.append(rid)
        scheduler.run_all()
        answers |= {rid: scheduler.answer(rid).label_logprobs for rid in burst}
        scheduler.check_slots()
    assert len(answers) == len(asked)
    assert all(len(one) == len(LABELS) for one in answers.values())
    found, expected = [Scored(one, 0, None) for one in answers.values()], exact(*asked.values(), token_ids=LABELS)
    assert difference(found, expected) <= MAX_LOGPROB_DIFFERENCE  # infinite for NaN
    assert mean_difference(found, expected) <= MAX_MEAN_DIFFERENCE
