"""The policy in SGLang's real scheduler: order, bounds, deadlines, and steps of several requests."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.children import result_of
from tests.integration.scheduling_child import PACKED_FAMILIES

# float32: the rows of other requests change the order in which matrix products are summed (see test_memory.py).
CLOSE = 1e-4


order = result_of("scheduling_child", "order")
packing = result_of("scheduling_child", "packing")


def test_figure_5_runs_in_the_papers_order_with_its_two_hits(order: dict[str, Any]) -> None:
    """First in, first out and plain SRJF have one (test_srjf.py)."""
    assert order["figure_5"] == {"order": "ADCB", "hits": {"A": 0, "B": 80, "C": 0, "D": 80}}


def test_what_comes_while_a_step_runs_is_in_order_before_its_result_is_read_and_chosen_with_its_prefix(
    order: dict[str, Any],
) -> None:
    """SGLang's overlap loop would choose the short one next: it does not yet know what the running step caches."""
    found = order["while_a_step_runs"]
    assert found["waiting_when_the_result_is_read"] == 4
    assert found["order"] == ["first", "sharer 0", "sharer 1", "sharer 2", "short"]
    assert found["cached"] == {"first": 0, "sharer 0": 300, "sharer 1": 300, "sharer 2": 300, "short": 0}
    assert found["left_for_sglang"] == ["FlushCacheReqInput", "TokenizedGenerateReqInput"]


def test_what_waits_is_told_as_sglang_would_without_looking_at_each(order: dict[str, Any]) -> None:
    """20 requests of 20 to 39 tokens; they run as ever afterwards."""
    found = order["told"]
    assert found["looked_at"] == 0
    assert found["told"][:2] == found["sglangs"][:2]
    assert 0 <= found["told"][2] - found["sglangs"][2] < 20
    assert found["told"][0] == 20
    assert found["told"][1] >= sum(range(20, 40))
    assert found["answered"] == 20


def test_a_long_request_under_an_endless_stream_runs_as_soon_as_it_is_overdue(order: dict[str, Any]) -> None:
    """lambda 0 and --max-queue-s 100: 40 steps take short ones, then the clock passes the bound."""
    assert order["starvation"] == {"short_ones_before": 40}


def test_a_clock_that_jumps_backwards_changes_nothing(order: dict[str, Any]) -> None:
    """By 11 days, between two steps."""
    assert order["backwards"] == ["SML", "SML"]


def test_what_the_first_request_caches_reverses_the_order_of_the_others(order: dict[str, Any]) -> None:
    """450 tokens, 250 of them cached by now, before 300."""
    assert order["reversed"] == "first long short"


def test_a_cancelled_request_gives_its_place_up_at_once(order: dict[str, Any]) -> None:
    """It was next; another runs, and nothing of it is in the cache."""
    assert order["cancelled"] == {"other_ran_first": True, "cached_of_it": 0}


def test_waiting_is_worth_tokens(order: dict[str, Any]) -> None:
    """500 a second: two milliseconds are worth the one token that the older request is longer; without a credit they are not."""
    assert order["credit"] == ["shorter", "older"]


def test_the_policy_of_ten_lines_that_the_page_shows_serves(order: dict[str, Any]) -> None:
    """Newest first."""
    assert order["newest_first"] == "CBA"


def test_deadlines_are_refused_on_arrival_met_or_passed_in_the_queue(order: dict[str, Any]) -> None:
    """Behind 20 times 1,000 tokens, with the time of 10 of them; nothing is left of the refused ones."""
    deadlines = order["deadlines"]
    assert deadlines["refused"]["status_code"] == 429
    assert "predicted to finish" in deadlines["refused"]["message"]
    assert deadlines["met"] == "length"
    assert deadlines["late"]["status_code"] == 504
    assert deadlines["n_left"] == [0, 0]


def test_a_prediction_counts_a_prefix_that_several_wait_for_once(order: dict[str, Any]) -> None:
    """Five requests of 1,010 tokens that share 1,000: five steps, of which one computes the 1,000."""
    found = order["deadlines"]
    assert found["n_before"] == 4
    assert found["burst_ms"] == pytest.approx(found["shared_ms"], rel=1e-3)
    assert found["burst_ms"] < 0.999 * found["apart_ms"]


@pytest.mark.parametrize("family", PACKED_FAMILIES)
def test_packed_requests_get_the_answers_that_they_get_alone(packing: dict[str, Any], family: str) -> None:
    """23 requests with two shared profiles: with room for all, nothing is computed twice; with 260 slots, many have tails
    in scratch, next to each other; with 100, the profiles do not fit. Scratch is filled with NaN before every step, and slots
    are counted after it."""
    result = packing[family]
    for slots in ("2000", "260", "100"):
        assert result[slots]["worst"] <= CLOSE, slots
        assert result[slots]["steps"] < 10
        assert result[slots]["most"] > 4
    assert result["2000"]["computed"] == result["2000"]["least"]
    assert result["260"]["with_tail"] >= 10
    assert result["100"]["computed"] == result["100"]["least"], (
        "followers compute no prefix again that the cache cannot hold"
    )


@pytest.mark.parametrize("family", PACKED_FAMILIES)
def test_requests_that_follow_a_cancelled_one_get_their_answers(packing: dict[str, Any], family: str) -> None:
    result = packing[family]["aborted"]
    assert result["worst"] <= CLOSE
    assert result["cached"] == [0, 120, 120, 120, 120]
