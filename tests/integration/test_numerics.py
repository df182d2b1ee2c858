"""Numerics, exact in float32 and close in bfloat16, through the offline engine and the server."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import requests
import torch

from sgl_prefill.examples import demo_model
from tests.integration.children import result_of
from tests.integration.conftest import Server
from tests.integration.prompts import CANDIDATES, LONG_LABELS, PROMPTS, make_reference, read_reference


@pytest.fixture(scope="module")
def token_ids(tokenizer: Any) -> list[int]:
    return [tokenizer.encode(label)[0] for label in CANDIDATES]


@pytest.fixture(scope="module")
def reference() -> list[list[float]]:
    return read_reference().candidates


float32 = result_of("engine_child", "float32")
features_off = result_of("engine_child", "features_off", process="without our hooks")


def largest_difference(left: list[list[float]], right: list[list[float]]) -> float:
    """Of probabilities."""
    pairs = ((x, y) for row, other in zip(left, right, strict=True) for x, y in zip(row, other, strict=True))
    return max(abs(math.exp(x) - math.exp(y)) for x, y in pairs)


def test_the_reference_is_what_transformers_says() -> None:
    """Made again by transformers, on this machine: log-probabilities differ by at most 1e-4."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = make_reference(demo_model.ensure("float32"))
    for ours, theirs in zip(read_reference(), made, strict=True):
        assert (torch.tensor(ours) - torch.tensor(theirs)).abs().max() <= 1e-4


def test_float32_weights_agree_with_transformers(float32: dict[str, Any], reference: list[list[float]]) -> None:
    """32 prompts, 10 candidates each, over the whole vocabulary: |difference| <= 1e-3, cold and from the cache."""
    assert largest_difference(float32["cold"], reference) <= 1e-3
    assert largest_difference(float32["cached"], reference) <= 1e-3
    assert set(float32["reused"]) == {-1}, "all but the last token of each prompt is reused"


def test_labels_of_several_tokens_agree_with_transformers(float32: dict[str, Any], tokenizer: Any) -> None:
    """8 prompts, 6 labels of up to 5 tokens: log P(label) differs by at most 1e-4, cold and behind a cached prompt."""
    expected = read_reference().long_labels
    assert {len(answer) for of_prompt in float32["long_tokens"] for answer in of_prompt} >= {1, 2, 3, 4}
    assert all(tokens == [tokenizer.encode(label) for label in LONG_LABELS] for tokens in float32["long_tokens"])
    for name in ("long_cold", "long_cached"):
        pairs = zip(expected, float32[name], strict=True)
        assert max(abs(a - b) for row, other in pairs for a, b in zip(row, other, strict=True)) <= 1e-4, name


def test_bfloat16_weights_agree_with_transformers_in_float32(
    server: Server, token_ids: list[int], reference: list[list[float]]
) -> None:
    """|difference| <= 0.02 for 97 of 100 probabilities, and <= 0.05 for all: activations are rounded to 8 bits in 30 layers.

    How the prompts share prefixes depends on the order in which they arrive, and another order of the same float32 sums
    inside attention moves single probabilities by up to 0.036 after 30 roundings (with attention in float32 as well).
    """
    scored = server.scores(PROMPTS, allowed_token_ids=token_ids)
    ours = [[entry["logprob"] for entry in one["labels"]] for one in scored]
    pairs = [(a, b) for row, other in zip(ours, reference, strict=True) for a, b in zip(row, other, strict=True)]
    differences = sorted(abs(math.exp(a) - math.exp(b)) for a, b in pairs)
    assert differences[int(0.97 * len(differences))] <= 0.02
    assert differences[-1] <= 0.05


def test_the_engine_has_the_labels_hooks_and_errors_of_the_server(float32: dict[str, Any]) -> None:
    """The offline counterpart is the same engine; a contradiction is refused before anything starts."""
    assert float32["best"] == " Paris"
    first, second = float32["decided"]
    assert 0 < first["answers"]["a"]["noul"] < 1
    assert first["answers"]["a"] == second["answers"]["b"]
    calibrated = float32["calibrated"]
    raw = calibrated["raw"]
    assert calibrated["calibrated"] == pytest.approx([p**2 / sum(q**2 for q in raw) for p in raw])
    (_, text, logprob, is_label), second = calibrated["alternatives"]
    assert (text, is_label) == (" Paris", True)
    assert second[2] <= logprob
    refused = float32["refused"]
    assert "--allow-generation" in refused["generation"]
    assert "more than once" in refused["duplicate"]
    n_kept = {"kept_tokens": 15, "cut_tokens": 185}
    assert float32["best_of_cut"] == [" Paris", 20, [n_kept, {"kept_tokens": 5, "cut_tokens": 0}]]
    assert "--chunked-prefill-size" in refused["contradiction"]
    assert "--schedule-policy" in refused["contradiction"]
    assert "sglang.srt.managers.scheduler.Scheduler.get_new_batch_prefill" in float32["hooks"]


def test_with_our_features_off_the_answers_are_those_of_stock_bit_for_bit(
    stock_server: Server, token_ids: list[int], features_off: dict[str, Any]
) -> None:
    """*identical*: the same prompts in the same order from an empty cache give the same ids and log-probabilities."""
    ours = features_off["outputs"]
    requests.post(stock_server.url + "/flush_cache", timeout=60)
    params = {"max_new_tokens": 1, "temperature": 0}
    options = {"return_logprob": True, "token_ids_logprob": token_ids, "top_logprobs_num": 3}
    for prompt, output in zip(PROMPTS, ours, strict=True):
        stock = stock_server.post("/generate", {"text": prompt, "sampling_params": params, **options}).json()
        assert output["output_ids"] == stock["output_ids"]
        for field in ("output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs", "cached_tokens"):
            assert output["meta_info"][field] == stock["meta_info"][field]
