"""Hybrid prefilling and suffix-KV eviction in a real scheduler, against the plain path on the same weights."""

from __future__ import annotations

from typing import Any

import pytest

from sgl_prefill.startup.device import Host
from tests.integration.children import result_of
from tests.support.tiny_models import FAMILIES

# float32: chunks change the order in which matrix products are summed, and tiles that of attention: 2^-23 each, over a few
# hundred terms and 4 layers. bfloat16 is checked on the demo model, in test_numerics.py.
CLOSE = 1e-4


profile = result_of("memory_child", "profile")  # first: it measures memory, and later ones find what others have freed
families = result_of("memory_child", "families")
faults = result_of("memory_child", "faults")
storm = result_of("memory_child", "storm")
unusual = result_of("memory_child", "unusual")


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_gives_the_plain_answers_hybrid_evicting_and_both(families: dict[str, Any], family: str) -> None:
    """*close*: 20 label log-probabilities that differ by whole units among each other, scratch filled with NaN before."""
    result = families[family]
    assert result["spread"] > 1, "labels that are all alike would hide an error"
    for switches in ("hybrid", "evict", "both"):
        assert result[switches]["cold"] <= CLOSE, switches
        assert result[switches]["sharer"] <= CLOSE, switches
        assert result[switches]["answers"] <= CLOSE, f"{switches}: answers of several tokens, cold and cached"
    assert result["as_wide_as_a_weight"] <= CLOSE
    # With native kernels every step runs there; else hybrid cold, both cold, and its sharer of more than one chunk.
    assert result["hybrid_runs"] == (6 if result["serves_short"] else 3)


@pytest.mark.parametrize("family", FAMILIES)
def test_durable_space_smaller_than_the_prompt_keeps_a_prefix_and_says_so(
    families: dict[str, Any], family: str
) -> None:
    """The trap of the first experiment: 777 tokens on 300 durable slots, then a request that shares 760 of them.

    When scratch slots reached the tree, the second one "hit" them and was answered wrongly, silently.
    """
    both = families[family]["both"]
    assert (both["kept_tokens"], both["evicted_tokens"]) == (300, 477)
    assert both["cached_tokens"] == 300
    assert families[family]["hybrid"]["cached_tokens"] == 760


def test_a_storm_of_500_requests_is_answered_as_if_each_ran_alone(storm: dict[str, Any]) -> None:
    """512 durable slots, prompts of up to 3 times that; SGLang's slot count and ours are checked after every step."""
    result = storm
    assert result["finished"] + result["cancelled"] == 500
    assert result["worst"] <= CLOSE
    assert min(result["with_tail"], result["evicting"], result["cached"], result["cancelled"]) >= 20, result
    assert result["free_after_flush"] == 2000
    assert result["scratch_lent_after_flush"] == 0


def test_an_input_of_the_limit_is_served_and_one_more_is_refused(faults: dict[str, Any]) -> None:
    """--max-input-length 900 on 400 durable slots."""
    assert faults["memory"]["max_input_tokens"] == 900
    assert faults["memory"]["durable_tokens"] == 400
    assert faults["exact"]["type"] == "length"
    assert faults["one_over"]["status_code"] == 400


def test_a_model_with_experts_gets_a_chunk_size_too(faults: dict[str, Any]) -> None:
    """Measuring one runs a piece outside a forward pass; the operation for experts once found no layer there."""
    assert faults["chunk_tokens_of_experts"] in Host.chunk_candidates


def test_where_all_kv_is_kept_sglangs_own_allocator_follows_the_plan(faults: dict[str, Any]) -> None:
    """Its invariant, free + cached + in use = total, ends the server where the two disagree."""
    assert faults["kept_whole"]["type"] == "length"
    assert 900 < faults["kept_slots"] == faults["kept_slots_free"]
    assert faults["kept_slots"] < faults["kept_slots_without_a_plan"]


def test_an_out_of_memory_forward_is_answered_with_503_and_the_next_request_is_served(faults: dict[str, Any]) -> None:
    """SGLang alone would end the server; nothing leaks."""
    assert faults["out_of_memory"]["status_code"] == 503
    assert "can't allocate memory: 99 bytes" in faults["out_of_memory"]["message"]
    assert faults["nothing_leaked"]
    assert faults["next_one"]["type"] == "length"


def test_requests_whose_step_runs_out_of_memory_run_again_alone(faults: dict[str, Any]) -> None:
    """The first leads two others of 20 tokens of their own; then each finds its prefix cached."""
    assert faults["together"] == {"sizes": [260, 220, 20, 20], "answers": ["length"] * 3}


def test_a_request_that_generates_keeps_its_kv_or_is_refused_with_the_numbers(faults: dict[str, Any]) -> None:
    """And one token needs no slot, however long the prompt."""
    assert faults["decodes_and_fits"] == {"type": "length", "length": 5}
    assert faults["decodes_and_does_not"]["status_code"] == 400
    assert (
        "507 durable slots and as many positions, and this server has 400" in faults["decodes_and_does_not"]["message"]
    )
    assert faults["one_token_beyond_durable"] == {"type": "length", "length": 1}


def test_the_parity_gate_passes_and_fails_where_a_path_is_wrong(faults: dict[str, Any]) -> None:
    """A hybrid pass that is off by half, and a layer that reads other slots than were written."""
    pairs = {"hybrid and plain", "cache hit and miss", "scratch and durable slots"}
    assert set(faults["gate"]) - {"native kernels and plain"} == pairs
    assert max(faults["gate"].values()) <= CLOSE
    assert faults["gate_with_wrong_hybrid"].startswith("ParityError")
    assert "and plain differ by" in faults["gate_with_wrong_hybrid"]
    assert faults["gate_with_scratch_in_the_cache"].startswith("ParityError")


def test_an_input_length_that_cannot_be_served_fails_the_start_with_the_longest_that_can(
    faults: dict[str, Any],
) -> None:
    """Beyond the context length, and beyond the memory."""
    assert "allows 4089" in faults["too_long"]
    assert "MemoryPlanError" in faults["does_not_fit"]
    assert "no input fits. Raise --memory-budget-gb" in faults["does_not_fit"]


def test_what_waiting_requests_will_use_is_kept_and_computed_once(faults: dict[str, Any]) -> None:
    """300 slots hold a prefix of 200 that two requests wait to use: a lone prompt of 400 gets the other 100."""
    result = faults["waiting"]
    assert (result["lone"]["kept_tokens"], result["lone"]["evicted_tokens"]) == (100, 300)
    assert result["lone"]["predicted_jct_ms"] > 0
    assert result["sharers"] == [200, 200]
    assert result["burst"] == [0, 300, 300, 300, 300]


def test_what_waiting_requests_will_use_is_evicted_last_where_all_kv_is_kept_too(faults: dict[str, Any]) -> None:
    """The older of two prefixes is waited for: the other one goes."""
    assert faults["kept"] == {"ran_first": True, "sharer": 150, "other": 0, "answers_left_nothing": True}


def test_a_prefix_that_more_requests_wait_for_goes_first_also_in_pages(unusual: dict[str, Any]) -> None:
    """200 tokens for one request, 240 for four: together they cost less a request. Cached are whole pages of 16."""
    assert unusual["order_count"] == "many many many many few"
    assert unusual["order_ignore"] == "few many many many many"
    assert unusual["cached_count"] == unusual["cached_ignore"] == [0, 0, 240, 240, 240]


def test_without_a_prefix_cache_nothing_is_kept_and_nothing_leaks(unusual: dict[str, Any]) -> None:
    """--disable-radix-cache: the same prompt again is computed again."""
    assert unusual["no_cache"] == [0, 0]
    assert unusual["no_cache_difference"] == 0
    assert unusual["no_cache_scratch"] == 0


def test_of_many_deadlines_at_once_those_that_cannot_be_met_are_refused_at_once(unusual: dict[str, Any]) -> None:
    """300 requests, and time for some twenty, one step after the other or together: each is answered or refused."""
    burst = unusual["burst"]
    assert 100 < burst["refused_at_once"] < 300
    assert burst["answered"] + burst["refused"] == 300
    assert burst["answered"] > 0
    assert burst["waiting"] == 0


def test_an_embedding_model_gives_what_transformers_does_also_where_it_evicts(unusual: dict[str, Any]) -> None:
    """300 tokens, whole and on 128 durable slots."""
    assert unusual["embedding"] <= CLOSE
    assert unusual["embedding_evicting"] <= CLOSE


def test_stable_answers_are_the_same_bits_in_any_company_cache_state_and_chunk_size(unusual: dict[str, Any]) -> None:
    """100 answers of labels, and some of several tokens; experts are refused by the names of their operations."""
    if not unusual["has_kernels"]:
        pytest.skip("without native kernels there are no stable answers")
    assert unusual["stable"]["differing"] == 0
    assert unusual["stable"]["apart"] == 0, "branches have the bits of separate prompts"
    assert unusual["stable"]["cached"] > 20
    assert unusual["stable"]["record"]["row_counts"] > 0
    assert "--stable-answers on cannot hold here: PyTorch computes" in unusual["unstable"]
    assert "softmax" in unusual["unstable"]
    assert "softmax" in unusual["unstable_by_itself"]


def test_the_short_memory_pass_takes_the_memory_of_a_whole_one(profile: dict[str, Any]) -> None:
    """A token retains what the buffers and its four indices hold; how the last tile of keys falls makes the rest.

    Resident memory spreads from run to run, so its bound is wide.
    """
    result = profile
    assert result["whole"] == pytest.approx(result["decides"], rel=0.02)
    assert result["measured_bytes_per_token"] == pytest.approx(result["retained_bytes_per_token"] + 28, rel=0.1)
    assert 0.3 < result["resident"] / result["planned"] < 1.2


def test_a_model_whose_body_has_another_name_is_served_on_the_plain_path(faults: dict[str, Any]) -> None:
    """GPT-2's is `transformer`: the start had ended with an AttributeError of SGLang's."""
    assert faults["plain_family"]["type"] == "length"
    assert faults["plain_family_answers"] <= CLOSE, "SGLang's own layers compute answers of several tokens too"
    assert not faults["plain_family_is_hybrid"]
    assert "GPT2LMHeadModel cannot be prefilled in a hybrid way: it has no `model`" in faults["plain_family_on"]
