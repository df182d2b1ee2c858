"""A tiny model of a family in SGLang's engine and in ours, with default flags, against transformers in float32.

The prompts: a first, one that shares a prefix with it, a long one, one that shares most of that, both long ones together with
short ones in a step, and the first again. Ours has room for a part of the long prompts' KV only.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support import tiny_models

VOCABULARY = 512
SERVED: dict[str, Any] = {"dtype": "float32", "skip_tokenizer_init": True, "random_seed": 1, "log_level": "error"}
STOCK: dict[str, Any] = {"max_total_tokens": 4000, "max_running_requests": 16, "disable_overlap_schedule": True}
OURS: dict[str, Any] = {"memory_budget_gb": 1, "max_input_length": 1000, "max_total_tokens": 420}


def prompts() -> list[list[int]]:
    rng = random.Random(7)

    def tokens(n: int) -> list[int]:
        return [rng.randrange(3, VOCABULARY) for _ in range(n)]

    first, long = tokens(40), tokens(500)
    return [
        first,
        [*first[:24], *tokens(30)],
        long,
        [*long[:350], *tokens(20)],
        [*long[:100], *tokens(3)],
        tokens(90),
        first,
    ]


def answers(engine: Any) -> dict[str, Any]:
    """Log-probabilities of the next token and cached tokens, prompt by prompt, then of all prompts at once."""
    params = {"max_new_tokens": 1, "temperature": 0}
    options = {"sampling_params": params, "return_logprob": True, "top_logprobs_num": VOCABULARY}
    texts = prompts()
    outputs = [engine.generate(input_ids=text, **options) for text in texts]
    outputs += engine.generate(input_ids=texts, **options)
    found = []
    for output in outputs:
        row = dict.fromkeys(range(VOCABULARY), float("nan"))
        row |= {token: logprob for logprob, token, _ in output["meta_info"]["output_top_logprobs"][0]}
        found.append([row[token] for token in range(VOCABULARY)])
    meta = [output["meta_info"] for output in outputs]
    return {
        "logprobs": found,
        "cached_tokens": [one["cached_tokens"] for one in meta],
        "evicted_tokens": [one.get("evicted_tokens", 0) for one in meta],
    }


def stock(folder: Path, family: str) -> dict[str, Any]:
    from sglang import Engine

    with Engine(model_path=str(tiny_models.write(folder / family, family)), **SERVED, **STOCK) as engine:
        return answers(engine)


def ours(folder: Path, family: str, **options: Any) -> dict[str, Any]:
    from sgl_prefill import Engine
    from sgl_prefill.entry import prefork

    prefork.begin()
    with Engine(model_path=str(tiny_models.write(folder / family, family)), **SERVED, **{**OURS, **options}) as engine:
        return {**answers(engine), "record": engine.get_server_info()["sgl_prefill"]}


def largest_differences(folder: Path, family: str, found: dict[str, Any]) -> list[float]:
    """From transformers, of each answer."""
    expected = tiny_models.next_logprobs(folder / family, prompts())
    rows = zip(found["logprobs"], [*expected, *expected], strict=True)
    return [max(abs(a - b) for a, b in zip(row, right, strict=True)) for row, right in rows]


def one_family(family: str) -> Callable[[Path], dict[str, Any]]:
    def run(folder: Path) -> dict[str, Any]:
        found = ours(folder, family)
        return {**found, "differences": largest_differences(folder, family, found), "logprobs": None}

    return run


def kv_of_8_bits(folder: Path) -> dict[str, Any]:
    found = ours(folder, "llama", kv_cache_dtype="fp8_e4m3")
    return {**found, "differences": largest_differences(folder, "llama", found)}


SCENARIOS: dict[str, Callable[[Path], Any]] = {
    **{family: one_family(family) for family in tiny_models.ALL_FAMILIES},
    "kv_of_8_bits": kv_of_8_bits,
}
