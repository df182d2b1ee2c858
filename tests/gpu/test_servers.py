"""The engine on a CUDA device with each attention backend, against stock SGLang on the same card.

In the order in which the answers matter: is it up, are aliased memory and hybrid prefilling right, is the parity gate real, are
graphs replayed for a hit; then what else a device may do to answers.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from sgl_prefill.entry import local_server
from sgl_prefill.errors import ServerStartError
from tests.gpu.conftest import (
    DURABLE_TOKENS,
    LONGEST_TOKENS,
    ON,
    Scored,
    Server,
    assert_as_right_as,
    difference,
    graph_settings,
    prompt,
    wait_until_idle,
)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

# Twice what bfloat16 moves a log-probability by (0.19 on an H200), and a fifth of what another prompt moves it by.
MAX_LOGPROB_DIFFERENCE = 0.3
LONG_TOKENS = 11_000
CHUNK_TOKENS = 1024
GRAPH_TOKENS = 2048  # of a step, at most, that a graph replays


@pytest.fixture(scope="session")
def long_ones(
    ours: Server, stock: Server, exact: Callable[..., list[Scored]]
) -> tuple[list[Scored], list[Scored], list[Scored]]:
    """(ours, stock's, in float32): a prompt of nearly three times the durable slots, cold, one that shares its beginning, the
    first again, and one that fits one chunk."""
    long = prompt(0, LONG_TOKENS)
    asked = [long, [*long[:2_500], *prompt(1, 700)], long, prompt(2, 600)]
    return [ours.score(one)[0] for one in asked], [stock.score(one)[0] for one in asked], exact(*asked)


def test_the_engine_starts_with_this_backend_and_everything_on(ours: Server, backend: str) -> None:
    """Row by row of its record: the backend that was asked for attends, and no technique has been left out."""
    info = ours.info()
    assert (info.get("prefill_attention_backend") or info["attention_backend"]) == backend
    config = info["sgl_prefill"]["config"]
    assert (config["suffix_kv"], config["hybrid_prefill"]) == ("evict", "on")
    assert info["sgl_prefill"]["memory"]["max_input_tokens"] == LONGEST_TOKENS


def test_answers_of_aliased_memory_and_hybrid_prefilling_are_those_of_stock(
    long_ones: tuple[list[Scored], list[Scored], list[Scored]],
) -> None:
    """Cold, behind a cached prefix, again, and short."""
    assert_as_right_as(*long_ones)


def test_the_comparison_would_see_a_wrong_answer(long_ones: tuple[list[Scored], list[Scored], list[Scored]]) -> None:
    """The answers to different prompts, and to one prompt about different labels, differ by far more."""
    _, expected, _ = long_ones
    assert difference(expected[:1], expected[1:2]) > 5 * MAX_LOGPROB_DIFFERENCE
    assert max(expected[0].logprobs) - min(expected[0].logprobs) > 5 * MAX_LOGPROB_DIFFERENCE


def test_the_long_prompt_was_longer_than_the_cache_and_its_prefix_was_kept(
    long_ones: tuple[list[Scored], list[Scored], list[Scored]],
) -> None:
    """Suffix rows lived in scratch, and what was kept is what the next one found."""
    cold, sharer, again, _ = long_ones[0]
    assert cold.evicted_tokens is not None
    assert cold.evicted_tokens >= LONG_TOKENS - DURABLE_TOKENS
    assert (cold.cached_tokens, sharer.cached_tokens) == (0, 2_500)
    assert again.cached_tokens > 0


def test_many_long_prompts_one_after_the_other_stay_right(
    ours: Server, stock: Server, exact: Callable[..., list[Scored]]
) -> None:
    """Scratch of the last one is not read by the next, nor is a slot that was given back twice."""
    asked = [prompt(100 + number, 5_000 + 600 * number) for number in range(8)]
    found = [ours.score(one)[0] for one in asked]
    assert_as_right_as(found, [stock.score(one)[0] for one in asked], exact(*asked))


def test_the_parity_gate_has_compared_every_path(ours: Server) -> None:
    """Hybrid with plain, hit with miss, scratch with durable, replay with plain; each difference is a number within the limit."""
    found = ours.record()["parity_gate"]
    assert {"hybrid and plain", "cache hit and miss", "scratch and durable slots", "replay and plain"} <= set(found)
    assert all(0 <= value <= 0.5 for value in found.values())


def test_the_parity_gate_refuses_a_hybrid_pass_that_is_wrong(model: Path, backend: str, tmp_path: Path) -> None:
    """A server whose hybrid body hands on its rows in the wrong order does not start, and says why: a gate whose prompt is
    replayed from a graph would never reach that body."""
    flags = ["--model-path", str(model), "--dtype", "bfloat16", "--attention-backend", backend, *ON]
    with pytest.raises(ServerStartError, match=r"the paths of this engine disagree.*hybrid and plain"):
        local_server.start("tests.gpu.wrong_hybrid_child", flags, tmp_path / "log").stop()


def test_a_hit_is_replayed_from_a_graph(ours: Server) -> None:
    """Of 2, 15, 150 and 600 tokens, each alone in its step. One token alone is not: SGLang's smallest graph has 4, and no graph
    is replayed for less than half of its tokens."""
    prefix = prompt(5, 1_500)
    ours.score(prefix)
    wait_until_idle(ours)
    ours.score(prefix)
    before = ours.passes()
    for number, n_tokens in enumerate((2, 15, 150, 600)):
        ours.score([*prefix, *prompt(50 + number, n_tokens)])
    ours.score(prompt(60, 3_000))  # the last step before is counted by now
    after = ours.passes()
    assert after.replayed - before.replayed >= 4
    assert after.eager - before.eager <= 1


def test_graphs_are_captured_for_short_prefills_and_none_for_decoding(ours: Server) -> None:
    """A server that never decodes spends neither memory nor its start on 36 graphs for it."""
    info = ours.info()
    assert graph_settings(info, "decode")["backend"] == "disabled"
    prefill = graph_settings(info, "prefill")
    assert prefill["backend"] != "disabled"
    assert max(prefill["bs"]) == GRAPH_TOKENS


def test_replayed_and_eager_answers_are_alike(ours: Server, stock: Server, exact: Callable[..., list[Scored]]) -> None:
    """Hits on both sides of the largest graph."""
    prefix = prompt(7, 1_000)
    asked = [[*prefix, *prompt(70 + n, n)] for n in (1, 15, 150, 1_000, GRAPH_TOKENS - 1, GRAPH_TOKENS + 1)]
    found = [ours.score(one)[0] for one in asked]
    assert_as_right_as(found, [stock.score(one)[0] for one in asked], exact(*asked))


def test_a_packed_step_answers_each_request_as_alone(
    ours: Server, stock: Server, exact: Callable[..., list[Scored]]
) -> None:
    """48 hits of one prefix and 16 of another that come together, in far fewer steps."""
    prefixes = prompt(8, 1_200), prompt(9, 900)
    asked = [[*prefixes[number % 4 == 0], *prompt(200 + number, 1 + number)] for number in range(64)]
    expected = [stock.score(one)[0] for one in asked]
    for prefix in prefixes:
        ours.score(prefix)
    before = ours.passes()
    assert_as_right_as(ours.score(*asked), expected, exact(*asked))
    assert ours.passes().n_all - before.n_all <= 32


def test_labels_do_not_tie(ours: Server) -> None:
    """Of 470 labels, in float32: bfloat16 keeps 8 bits of a logit, and dozens of them would be equal."""
    (scored,) = ours.score(prompt(10, 200), token_ids=range(30, 500))
    assert len(set(scored.logprobs)) >= 465


def test_the_request_table_fits_what_a_step_packs(ours: Server) -> None:
    """Not 2,048 rows of the whole context."""
    assert ours.info()["internal_states"][0]["effective_max_running_requests_per_dp"] <= 256
