"""Tiny models of each causal family with default flags, against transformers in float32; see `families_child`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.integration.children import result_of
from tests.support import tiny_models

RESULT = Path(__file__).resolve().parents[2] / "benchmarks/families/result.json"
ROWS = {row["family"]: row for row in json.loads(RESULT.read_text())["rows"]}
EXACT = 2e-5
# What SGLang alone answers wrongly, and what has a KV pool of another kind.
FEW = ("cohere2", "glm4-moe-lite", "laguna", "mistral-window", "phi3-long")
OTHERS = tuple(family for family, row in ROWS.items() if row["ours_starts"] and family not in FEW)


kv_of_8_bits = result_of("families_child", "kv_of_8_bits")
for _name in (*FEW, *OTHERS):
    globals()[f"family_{_name}"] = result_of("families_child", _name, process=_name)


def check(found: dict[str, Any], family: str) -> None:
    """Each prompt alone, cached, evicted, and with the others in a step."""
    exact = EXACT if ROWS[family]["ours_difference"] <= EXACT else 1.2 * ROWS[family]["ours_difference"]
    assert max(found["differences"]) <= exact, found["differences"]
    assert max(found["evicted_tokens"]) > 0
    assert found["cached_tokens"][1] == 24
    assert found["record"]["left_to_sglang"] == {}


@pytest.mark.usefixtures(*FEW)
def test_families_with_a_fault_or_a_pool_of_their_own_are_right(request: pytest.FixtureRequest) -> None:
    for family in FEW:
        check(request.getfixturevalue(family), family)


@pytest.mark.usefixtures(*OTHERS)
def test_every_other_family_is_right(request: pytest.FixtureRequest) -> None:
    for family in OTHERS:
        check(request.getfixturevalue(family), family)


def test_what_sglang_ignores_is_mended_and_shown(request: pytest.FixtureRequest) -> None:
    notes = {family: row["model_notes"] for family, row in ROWS.items() if row["ours_starts"]}
    assert "no window" in notes["mistral-window"][0]
    assert "SGLang gives them a window of 33" in notes["cohere2"][0]
    assert notes["llama"] == notes["gemma2"] == []


def test_all_families_that_stock_starts_start() -> None:
    assert [family for family, row in ROWS.items() if row["stock_starts"] and not row["ours_starts"]] == []
    assert set(ROWS) == set(tiny_models.ALL_FAMILIES) - set(tiny_models.EMBEDDING_FAMILIES)


def test_kv_of_8_bits_is_evicted_and_found_again(kv_of_8_bits: dict[str, Any]) -> None:
    """Rounding K and V moves a log-probability by less than 0.6 (0.36 seen), and by the same in whatever state the cache is."""
    assert max(kv_of_8_bits["differences"]) < 0.6
    assert max(kv_of_8_bits["evicted_tokens"]) > 0
    alone, together = kv_of_8_bits["logprobs"][:7], kv_of_8_bits["logprobs"][7:]
    assert (
        max(abs(a - b) for one, other in zip(alone, together, strict=True) for a, b in zip(one, other, strict=True))
        < 0.01
    )
