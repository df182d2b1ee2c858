"""Prompts whose parts say what may be cut: with the demo model's tokenizer, and through a server."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_prefill.core.prompt_parts import KEEPS, CannotCutError, Span, cut
from sgl_prefill.http.parted_requests import PartTokenizer
from tests.integration.conftest import Server

LABELS = [" yes", " no"]
INSTRUCTIONS = "You read letters, and you answer the question that stands behind each of them with one word, yes or no."
QUESTION = " Question: Is this letter about a refund? Answer:"
LETTER = " We are sorry that your parcel came late, and shall give back what you paid for it."
WORDS = [
    "the",
    " refund",
    " of",
    " Zürich",
    "\n\n",
    "  ",
    " 🎉🎉",
    "日本語",
    " 1234",
    "'s",
    "<|im_end|>",
    "e\u0301",
    "\t",
    ".",
]


@pytest.fixture(scope="module")
def part_tokenizer(tokenizer: Any) -> PartTokenizer:
    return PartTokenizer(tokenizer)


@given(
    st.lists(
        st.tuples(st.lists(st.sampled_from(WORDS), max_size=30).map("".join), st.sampled_from(KEEPS)),
        min_size=1,
        max_size=6,
    ),
    st.integers(1, 150),
)
def test_kept_parts_and_the_prefix_are_those_of_the_uncut_prompt(
    part_tokenizer: PartTokenizer, tokenizer: Any, parts: list[tuple[str, Any]], limit_tokens: int
) -> None:
    """Texts end in the middle of tokens, and of characters of several tokens."""
    spans, whole = list[Span](), ""
    for said, keep in parts:
        spans.append(Span(len(whole), len(whole) + len(said), keep))
        whole += said
    tokens = part_tokenizer.encode(whole)
    uncut = tokenizer.encode(whole)
    assert tokens.ids == uncut
    try:
        found = cut(tokens.offsets, spans, limit_tokens)
    except CannotCutError:
        assert len(uncut) > limit_tokens
        return
    left = found.apply(uncut)
    assert len(left) <= limit_tokens
    assert bool(found.removed) == (len(uncut) > limit_tokens)
    first_cut = found.removed[0].start if found.removed else len(uncut)
    assert left[:first_cut] == uncut[:first_cut]
    said_after_cut, place = tokenizer.decode(left, clean_up_tokenization_spaces=False), 0
    assert "\ufffd" not in said_after_cut
    for span in spans:
        if span.keep is True:
            said = whole[span.start : span.end]
            place = said_after_cut.index(said, place) + len(said)
            own = [index for index, (start, end) in enumerate(tokens.offsets) if start < span.end and end > span.start]
            assert not {*own} & {token for gone in found.removed for token in gone} or span.start == span.end


def parts_of(n_times: int) -> list[dict[str, Any]]:
    return [{"text": INSTRUCTIONS}, {"text": LETTER * n_times, "keep": "start"}, {"text": QUESTION}]


def test_a_long_prompt_is_cut_and_still_finds_its_prefix(server: Server, tokenizer: Any) -> None:
    """A short letter comes first; of a long one behind the same instructions as much is cached as the two have in common."""
    n_instructions, n_question = len(tokenizer.encode(INSTRUCTIONS)), len(tokenizer.encode(QUESTION))
    body = {"model": "demo", "allowed_tokens": LABELS, "on_overflow": "cut", "max_prompt_tokens": 150}
    replies = [
        server.post("/v1/completions", {**body, "prompt_parts": parts_of(n_times)}).json()["choices"][0]["label_scores"]
        for n_times in (1, 30)
    ]
    short, long = replies
    assert [part["cut_tokens"] for part in short["prompt_parts"]] == [0, 0, 0]
    assert long["prompt_tokens"] == 150
    kept, n_letter = long["prompt_parts"][1]["kept_tokens"], short["prompt_parts"][1]["kept_tokens"]
    assert [part["kept_tokens"] for part in long["prompt_parts"]] == [n_instructions, kept, 150 - n_instructions - kept]
    assert 150 - n_instructions - kept == n_question
    assert long["cached_tokens"] >= n_instructions + n_letter - 1
    uncut = "".join(part["text"] for part in parts_of(30))
    same = tokenizer.encode(uncut)[: n_instructions + kept] + tokenizer.encode(QUESTION)
    (scores,) = server.scores(same, allowed_tokens=LABELS)
    assert scores["cached_tokens"] == len(same) - 1, "the very same tokens"


def test_without_allowed_answers_the_reply_says_what_was_cut_too(server: Server) -> None:
    """Whole, in a stream, and of several prompts with several samples each."""
    body = {"model": "demo", "prompt_parts": parts_of(30), "on_overflow": "cut", "max_prompt_tokens": 100}
    reply = server.post("/v1/completions", body).json()
    assert reply["usage"]["prompt_tokens"] == 100
    assert sum(part["kept_tokens"] for part in reply["prompt_parts"]) == 100
    stream = server.post("/v1/completions", {**body, "stream": True}, stream=True)
    events = [line[len(b"data: ") :] for line in stream.iter_lines() if line]
    assert events.pop() == b"[DONE]"
    first, *others = map(json.loads, events)
    assert (first["choices"], first["prompt_parts"]) == ([], reply["prompt_parts"])
    assert others[0]["choices"]
    several = [parts_of(30), parts_of(1)]
    batch = server.post("/v1/completions", {**body, "prompt_parts": several}).json()
    assert [sum(part["cut_tokens"] > 0 for part in one) for one in batch["prompt_parts"]] == [1, 0]
    sampling = {"max_new_tokens": 1, "n": 2}
    native = server.post("/generate", {**body, "prompt_parts": several, "sampling_params": sampling}).json()
    assert [one["meta_info"]["prompt_parts"] for one in native] == [
        parts for parts in batch["prompt_parts"] for _ in range(2)
    ]
    labels = server.post("/generate", {**body, "allowed_tokens": LABELS}).json()["meta_info"]
    assert labels["label_scores"]["prompt_parts"] == labels["prompt_parts"] == reply["prompt_parts"]


@pytest.mark.parametrize("labels", [{}, {"allowed_tokens": ["Yes", "No"]}])
def test_a_marked_message_of_a_chat_is_dropped(server: Server, tokenizer: Any, labels: dict[str, Any]) -> None:
    """The prompt is that of the chat without it."""
    letter = {"role": "user", "content": LETTER * 30}
    rest = [{"role": "system", "content": INSTRUCTIONS}, {"role": "user", "content": QUESTION}]
    whole, without = (
        len(tokenizer.encode(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)))
        for messages in ([rest[0], letter, rest[1]], rest)
    )
    body = {"model": "demo", "messages": [rest[0], {**letter, "keep": False}, rest[1]], **labels}
    cut = server.post("/v1/chat/completions", {**body, "on_overflow": "cut", "max_prompt_tokens": 120}).json()
    told = cut["choices"][0]["label_scores"] if labels else cut
    assert told["prompt_parts"] == [{"message": 1, "dropped": True}]
    assert cut["usage"]["prompt_tokens"] == without
    refused = server.post("/v1/chat/completions", {**body, "max_prompt_tokens": 120})
    assert refused.status_code == 400
    assert f"has {whole} tokens, and max_prompt_tokens allows at most 120" in refused.json()["error"]["message"]


def test_what_is_too_long_for_the_server_is_refused_unless_it_may_be_cut(server: Server) -> None:
    body = {"model": "demo", "prompt_parts": parts_of(500), "allowed_tokens": LABELS}
    refused = server.post("/v1/completions", body)
    kept_whole = server.post(
        "/v1/completions", {**body, "prompt_parts": [{"text": LETTER * 500}], "on_overflow": "cut"}
    )
    assert (refused.status_code, kept_whole.status_code) == (400, 400)
    assert '"on_overflow": "cut"' in refused.json()["error"]["message"]
    assert "tokens cannot be cut, and this server takes at most" in kept_whole.json()["error"]["message"]
