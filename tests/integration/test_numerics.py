"""Numerics in the two strengths of DESIGN section 4, through the offline engine and the server."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from sgl_prefill import demo_model
from sgl_prefill.errors import BadRequestError, ConfigurationError
from tests.integration.conftest import Server
from tests.integration.prompts import CANDIDATES, PROMPTS, reference_logprobs


@pytest.fixture(scope="module")
def token_ids(tokenizer: Any) -> list[int]:
    return [tokenizer.encode(label)[0] for label in CANDIDATES]


@pytest.fixture(scope="module")
def reference(token_ids: list[int]) -> list[list[float]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return reference_logprobs(demo_model.ensure("float32"), PROMPTS, token_ids)


@pytest.fixture(scope="module")
def float32_engine() -> Iterator[Any]:
    """`sgl_prefill.Engine` on the float32 demo model."""
    import sgl_prefill

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine = sgl_prefill.Engine(model_path=str(demo_model.ensure("float32")), dtype="float32", memory_budget_gb=3)
    yield engine
    engine.shutdown()


@pytest.fixture(scope="module")
def engine_with_our_features_off(demo_folder: Path) -> Iterator[Any]:
    """SGLang's own scheduler and logits inside our engine."""
    import sgl_prefill

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine = sgl_prefill.Engine(
            model_path=str(demo_folder), scheduling="stock", logits_dtype="model", memory_budget_gb=3
        )
    yield engine
    engine.shutdown()


def largest_difference(left: list[list[float]], right: list[list[float]]) -> float:
    """Of probabilities."""
    pairs = ((x, y) for row, other in zip(left, right, strict=True) for x, y in zip(row, other, strict=True))
    return max(abs(math.exp(x) - math.exp(y)) for x, y in pairs)


def test_float32_weights_agree_with_transformers(
    float32_engine: Any, token_ids: list[int], reference: list[list[float]]
) -> None:
    """32 prompts, 10 candidates each, over the whole vocabulary: |difference| <= 1e-3, cold and from the cache."""
    for _ in ("cold", "cached"):
        scored = float32_engine.score_labels(PROMPTS, allowed_token_ids=token_ids)
        assert largest_difference([one.distribution.logprobs for one in scored], reference) <= 1e-3
    assert all(one.meta_info["cached_tokens"] == one.meta_info["prompt_tokens"] - 1 for one in scored)


def test_bfloat16_weights_agree_with_transformers_in_float32(
    server: Server, token_ids: list[int], reference: list[list[float]]
) -> None:
    """|difference| <= 0.02: activations are rounded to 8 bits in each of 30 layers."""
    scored = server.scores(PROMPTS, allowed_token_ids=token_ids)
    ours = [[entry["logprob"] for entry in one["labels"]] for one in scored]
    assert largest_difference(ours, reference) <= 0.02


def test_with_our_features_off_the_answers_are_those_of_stock_bit_for_bit(
    engine_with_our_features_off: Any, stock_server: Server, token_ids: list[int]
) -> None:
    """*identical*: the same prompts in the same order from an empty cache give the same ids and log-probabilities."""
    engine_with_our_features_off.flush_cache()
    requests.post(stock_server.url + "/flush_cache", timeout=60)
    options = {"return_logprob": True, "token_ids_logprob": token_ids, "top_logprobs_num": 3}
    for prompt in PROMPTS:
        params = {"max_new_tokens": 1, "temperature": 0}
        ours = engine_with_our_features_off.generate(prompt, params, **options)
        stock = stock_server.post("/generate", {"text": prompt, "sampling_params": params, **options}).json()
        assert ours["output_ids"] == stock["output_ids"]
        for field in ("output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs", "cached_tokens"):
            assert _as_lists(ours["meta_info"][field]) == stock["meta_info"][field]


def _as_lists(value: Any) -> Any:
    """Tuples are lists in JSON."""
    return [_as_lists(one) for one in value] if isinstance(value, (list, tuple)) else value


def test_the_engine_scores_text_labels_and_refuses_what_the_server_refuses(float32_engine: Any) -> None:
    """The offline counterpart has the same labels, hooks and errors."""
    (scored,) = float32_engine.score_labels("The capital of France is", allowed_tokens=[" Paris", " Rome"])
    assert scored.best.text == " Paris"
    with pytest.raises(BadRequestError, match="--allow-generation"):
        float32_engine.generate("The capital of France is", {"max_new_tokens": 5})
    with pytest.raises(ValueError, match="more than once"):
        float32_engine.score_labels("Is it so?", allowed_tokens=[" yes", " yes"])
    record = float32_engine.get_server_info()["sgl_prefill"]
    assert "sglang.srt.managers.scheduler.Scheduler.get_new_batch_prefill" in record["hooks"]


def test_the_engine_refuses_contradicting_arguments_before_it_starts() -> None:
    """As the launcher does, naming all of them."""
    import sgl_prefill

    with pytest.raises(ConfigurationError) as caught:
        sgl_prefill.Engine(model_path=str(demo_model.ensure()), chunked_prefill_size=512, schedule_policy="lpm")
    assert "--chunked-prefill-size" in str(caught.value)
    assert "--schedule-policy" in str(caught.value)
