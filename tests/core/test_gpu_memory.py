"""What a model takes of a GPU, calculated."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from sgl_prefill.core import gpu_memory
from sgl_prefill.core.gpu_memory import CARDS, GIB, shape_of
from sgl_prefill.core.memory_plan import InputDoesNotFitError

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "sgl_prefill" / "GPU.md"
MODELS = ("llama-3.1-8b", "qwen-32b-fp8", "llama-3.3-70b-fp8")


def config(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "benchmarks" / "models" / f"{name}.json").read_text())
    return found


def shapes() -> list[gpu_memory.ModelShape]:
    return [shape_of(name, config(name)) for name in MODELS]


def test_the_table_of_cards_is_what_the_arithmetic_says() -> None:
    """Of three models on four cards; the message shows the table that belongs there."""
    table = gpu_memory.markdown(shapes())
    assert table in PAGE.read_text(), f"{PAGE} should have:\n{table}"
    assert len(re.findall(r"^\| (?:llama|qwen)", table, re.M)) == 12


def test_weights_are_those_of_the_published_models() -> None:
    """8.03, 32.76 and 70.55 billion parameters; two bytes each, in FP8 one, but two for embeddings and norms; and the table of
    rotary angles."""
    rotary = 131_072 * 128 * 4
    embeddings = [0, 2 * 152_064 * 5120, 2 * 128_256 * 8192]
    for shape, parameters, others, n_bytes in zip(
        shapes(), (8.03e9, 32.76e9, 70.55e9), embeddings, (2, 1, 1), strict=True
    ):
        assert shape.weights_bytes == pytest.approx(n_bytes * parameters + others + rotary, rel=2e-3), shape.name


def test_what_a_plan_takes_is_what_the_card_has() -> None:
    """Weights, workspace, margin, CUDA's own, activations, scratch and durable KV: all of it, within one token's KV."""
    shape, card = shapes()[0], CARDS[2]
    found = gpu_memory.plan(shape, card)
    per_token = (
        shape.retained_bytes_per_token + 2 * shape.kv_bytes_per_token
    )  # scratch, and a copy of one layer's K and V
    taken = found.durable_bytes + found.max_input_tokens * per_token + 8192 * shape.chunk_bytes_per_token
    taken += shape.weights_bytes + gpu_memory.CONTEXT_BYTES + gpu_memory.WORKSPACE_BYTES
    left = card.total_bytes - taken
    assert 0 <= left - gpu_memory.margin_bytes(card.total_bytes) <= shape.n_layers * shape.kv_bytes_per_token


def test_what_would_fit_fits_and_the_next_smaller_card_does_not() -> None:
    """For each model and card in whose place another one is named."""
    for shape in shapes():
        for smaller, card in itertools.pairwise(CARDS):
            try:
                gpu_memory.plan(shape, smaller)
            except InputDoesNotFitError as error:
                named = gpu_memory.what_fits(smaller.total_bytes + error.missing_bytes)
                (chosen,) = [one for one in CARDS if named == f"a card of {one.gb} GB"]
                assert chosen.gb >= card.gb
                gpu_memory.plan(shape, chosen)


def test_models_that_no_card_holds_get_a_power_of_two_of_the_largest() -> None:
    """As tensor parallelism takes."""
    assert gpu_memory.what_fits(CARDS[-1].total_bytes) == "a card of 141 GB"
    assert gpu_memory.what_fits(CARDS[-1].total_bytes + 1) == "2 cards of 141 GB with --tp-size 2"
    assert gpu_memory.what_fits(400 * GIB) == "4 cards of 141 GB with --tp-size 4"


@pytest.mark.parametrize("change", [{"model_type": "mixtral"}, {"quantization_config": {"quant_method": "awq"}}])
def test_a_model_of_another_kind_is_not_guessed_at(change: dict[str, Any]) -> None:
    """Its experts, or its four bits, would be missing from the sum."""
    with pytest.raises(KeyError):
        shape_of("other", config("llama-3.1-8b") | change)
