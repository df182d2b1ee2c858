"""Limits of parsed bodies, and prefixes in front of their prompts."""

from __future__ import annotations

import time
from typing import Any

import pytest

from sgl_prefill.errors import BadRequestError, UnknownPrefixError
from sgl_prefill.http import bodies, token_ids
from sgl_prefill.http.prefix_handles import INPUT_IDS, MESSAGES, TEXT, Prefix, Prefixes, PrefixRequest
from sgl_prefill.http.token_ids import TokenIds

MOST = 1000


def add(held: Prefixes, *arguments: Any, **options: Any) -> Prefix:
    prefix = held.make(*arguments, **options)
    held.hold(prefix)
    return prefix


SAYS = {"role": "user", "content": "Is it so?"}
CHAT, GENERATE, COMPLETIONS = "/v1/chat/completions", "/generate", "/v1/completions"


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": "", "reasoning_content": "x" * MOST}]},
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "x" * MOST}}]}]},
        {"chat_template_kwargs": {"a": {"b": ["x" * MOST]}}},
        {"chat_template_kwargs": {"x" * MOST: 1}},
        {"tools": [{"function": {"parameters": {"enum": ["x"] * 30}}}]},
        {"logit_bias": {str(n): 1.0 for n in range(30)}},
    ],
)
def test_text_anywhere_outside_of_prompts_is_counted(body: dict[str, Any]) -> None:
    with pytest.raises(BadRequestError, match=f"more than {MOST} characters"):
        bodies.check(body, MOST)
    bodies.check(body, 10 * MOST)


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "x" * 2 * MOST},
        {"prompt": ["x" * 2 * MOST] * 10},
        {"input_ids": [[7] * 50_000] * 10},
        {"text": "x" * 2 * MOST, "token_ids_logprob": [5] * 20_000},
        {"documents": [{"text": "x" * 2 * MOST}] * 10},
        {"allowed_tokens": ["x"] * 20_000},
        {"input_embeds": [[[0.5] * 100] * 100] * 2},
    ],
)
def test_prompts_and_labels_have_their_own_limits(body: dict[str, Any]) -> None:
    bodies.check(body, MOST)


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [SAYS] * (bodies.MOST_PARTS + 1)},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * (bodies.MOST_PARTS + 1)}]},
        {"documents": [{"text": [{}] * 100}] * (bodies.MOST_PROMPT_PARTS // 100)},
        {"documents": [{"x": [{}] * 300_000 + [0] * 110_000}]},
    ],
)
def test_objects_are_counted(body: dict[str, Any]) -> None:
    with pytest.raises(BadRequestError, match=r"more than (8192 messages|65536 prompts)"):
        bodies.check(body, 1 << 30)


@pytest.mark.parametrize(
    "body",
    [
        {"items": [0] * 200_000},
        {"text": [0] * 200_000},
        {"label_token_ids": [0, *["a"] * 100_000]},
        {"tokens": [0, *["a"] * 100_000]},
    ],
)
def test_numbers_where_texts_belong_and_texts_among_numbers_are_refused(body: dict[str, Any]) -> None:
    """pydantic would make an error of each, 3.8 s for the first."""
    with pytest.raises(BadRequestError, match="values, and a request at most"):
        bodies.check(body, MOST)


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x" * 2 * MOST}}]}]},
        {"image_data": ["x" * 2 * MOST]},
        {"prompt_parts": [[{"text": "a", "keep": True}] * 3] * 5_500},
        {"text": ["a"] * 9_000, "sampling_params": [{"custom_params": {}}] * 9_000},
        {"documents": [{"text": "a", "metadata": {}}] * 9_000},
        {"input_embeds": [[0.5] * 4] * 12_000},
    ],
)
def test_ordinary_large_requests_are_served(body: dict[str, Any]) -> None:
    bodies.check(body, MOST)


def test_too_many_prompts_are_refused_before_they_are_validated() -> None:
    with pytest.raises(BadRequestError, match="prompt holds 10001 values"):
        bodies.check({"prompt": ["a"] * 10_001}, MOST)
    deep: list[Any] = []
    for _ in range(500):
        deep = [deep]
    with pytest.raises(BadRequestError, match="lists in lists"):
        bodies.check({"prompt": deep}, MOST)


@pytest.mark.parametrize(
    ("kind", "value", "path", "own", "field", "whole"),
    [
        (TEXT, "a b", COMPLETIONS, {"prompt": " c"}, "prompt", "a b c"),
        (TEXT, "a b", COMPLETIONS, {"prompt": [" c", " d"]}, "prompt", ["a b c", "a b d"]),
        (TEXT, "a b", GENERATE, {}, "text", "a b"),
        (TEXT, "a b", "/v1/score", {"query": " c", "items": ["d"]}, "query", "a b c"),
        (TEXT, "a b", "/v2/rerank", {"query": " c"}, "query", "a b c"),
        (INPUT_IDS, TokenIds([1, 2]), GENERATE, {"input_ids": [3]}, "input_ids", [1, 2, 3]),
        (INPUT_IDS, TokenIds([1, 2]), COMPLETIONS, {"prompt": [[3], [4, 5]]}, "prompt", [[1, 2, 3], [1, 2, 4, 5]]),
        (MESSAGES, [SAYS], CHAT, {"messages": [SAYS]}, "messages", [SAYS, SAYS]),
    ],
)
def test_a_prefix_comes_before_what_the_request_says(
    kind: str, value: Any, path: str, own: dict[str, Any], field: str, whole: Any
) -> None:
    held = Prefixes()
    prefix = add(held, "", kind, value)
    expanded = held.expand(path, {**own, "model": "m", "prefix": prefix.id}, "")
    assert expanded == {**own, "model": "m", field: whole}
    for one in expanded[field] if kind == INPUT_IDS and isinstance(whole[0], list) else [expanded[field]]:
        if kind == INPUT_IDS:
            assert isinstance(one, TokenIds)
            assert one.array.tolist() == list(one)


@pytest.mark.parametrize(
    ("kind", "value", "path", "own", "told"),
    [
        (
            TEXT,
            "a",
            CHAT,
            {"messages": [SAYS]},
            "made of text, and /v1/chat/completions takes one that was made of messages",
        ),
        (TEXT, "a", GENERATE, {"text": [1]}, "text is not what goes with"),
        (INPUT_IDS, TokenIds([1]), GENERATE, {"input_ids": ["a"]}, "give a list of token ids"),
        (MESSAGES, [SAYS], CHAT, {"messages": "a"}, "give a list of messages"),
        (MESSAGES, [SAYS], CHAT, {"messages": [], "input_ids": [1]}, "prefix and input_ids are both given"),
        (TEXT, "a" * 1000, COMPLETIONS, {"prompt": ["b"] * 9000}, "9000 prompts behind this prefix are 9000000 bytes"),
        (TEXT, "a", "/v1/embeddings", {}, "takes none"),
    ],
)
def test_a_prefix_that_does_not_go_with_the_request(
    kind: str, value: Any, path: str, own: dict[str, Any], told: str
) -> None:
    held = Prefixes(most_expanded_bytes=1 << 20)
    with pytest.raises(BadRequestError, match=told):
        held.expand(path, {**own, "prefix": add(held, "", kind, value).id}, "")


def test_another_tenants_prefix_is_unknown() -> None:
    held = Prefixes()
    mine, theirs = add(held, "mine", TEXT, "a"), add(held, "theirs", TEXT, "a")
    assert mine.id != theirs.id
    assert add(held, "mine", TEXT, "a").id == mine.id
    for name in (theirs.id, "prefix-0"):
        with pytest.raises(UnknownPrefixError):
            held.expand(GENERATE, {"prefix": name}, "mine")
    wrong: Any
    for wrong in ("", 5, [], {}):
        with pytest.raises(BadRequestError, match="give the id"):
            held.expand(GENERATE, {"prefix": wrong}, "mine")


def test_the_least_recently_used_prefix_is_forgotten_and_a_pinned_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    size = Prefixes().make("", TEXT, "0" * 1000).n_bytes
    held = Prefixes(most_bytes=4 * size)

    ids = {name: add(held, "", TEXT, name * 1000, ttl_s=10 if name == "p" else None).id for name in "pabc"}
    held.expand(GENERATE, {"prefix": ids["a"]}, "")
    add(held, "", TEXT, "d" * 1000)
    assert {name for name, one in ids.items() if one in held} == set("pac")
    add(held, "", TEXT, "q" * 1000, ttl_s=10)  # half of the bytes
    with pytest.raises(BadRequestError, match=f"ttl_s would take {3 * size} bytes"):
        add(held, "", TEXT, "r" * 1000, ttl_s=10)
    now_s += 11
    add(held, "", TEXT, "r" * 1000, ttl_s=10)
    for name in "efg":
        add(held, "", TEXT, name * 1000)
    assert ids["p"] not in held
    assert (len(held), held.n_bytes) == (4, 4 * size)
    with pytest.raises(BadRequestError, match="this prefix takes"):
        add(held, "", TEXT, "s" * 20_000)


@pytest.mark.parametrize(
    "body", [{}, {"text": "a", "input_ids": [1]}, {"text": ""}, {"input_ids": [[1]]}, {"messages": []}]
)
def test_what_is_no_prefix(body: dict[str, Any]) -> None:
    with pytest.raises(BadRequestError):
        PrefixRequest(**body).content()


@pytest.mark.parametrize("value", ["a", [1, "a"], [[1], "a"], [[1], [None]], [1.5], [2**70], [["a"]], 5])
def test_what_are_no_token_ids(value: Any) -> None:
    with pytest.raises(ValueError, match=r"token id"):
        token_ids.read(value)


def test_token_ids_are_converted_once_and_stay_equal() -> None:
    one = token_ids.read([5, 6])
    assert (one, one.array.tolist(), token_ids.read(one)) == ([5, 6], [5, 6], one)
    assert token_ids.read([[5], [6, 7]]) == [[5], [6, 7]]
    assert token_ids.read_prompt(["a", "b"]) == ["a", "b"]
    assert (token_ids.is_within(one, 7), token_ids.is_within(one, 6), token_ids.is_within([-1], 6)) == (
        True,
        False,
        False,
    )
    assert not token_ids.is_within(TokenIds([-1, 3]), 6)


@pytest.mark.parametrize(
    "name", ["token_indices_to_pool", "multi_item_delimiter_indices", "positional_embed_overrides"]
)
def test_what_sglang_fills_in_for_a_score_comes_from_no_client(name: str) -> None:
    """Wrong positions ended SGLang's scheduler, and the server with it."""
    with pytest.raises(BadRequestError, match=f"{name} is filled in by the server: leave it out"):
        bodies.check({"text": "x", name: [[9]]}, MOST)
    bodies.check({"text": "x", name: None}, MOST)
