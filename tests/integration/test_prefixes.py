"""Prefix handles on the real server: the same answers as with the whole prompt."""

from __future__ import annotations

from typing import Any

import pytest

from sgl_prefill.held_prefix import HeldPrefix
from tests.integration.conftest import Server

POLICY = "Rule {n}: a message that sells something, or asks for money, is against the rules of this group. "
RULES = "".join(POLICY.format(n=n) for n in range(1, 25))
RESTS = [
    "Message: Buy now! Is it against the rules? Answer:",
    "Message: Good morning. Is it against the rules? Answer:",
]
LABELS = {"allowed_tokens": [" yes", " no"]}
SYSTEM, USER = {"role": "system", "content": RULES}, {"role": "user", "content": RESTS[0]}
# Path, the prefix, the request behind it, the whole request.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "completions": (
        "/v1/completions",
        {"text": RULES},
        {"prompt": RESTS, **LABELS},
        {"prompt": [RULES + one for one in RESTS], **LABELS},
    ),
    "chat": (
        "/v1/chat/completions",
        {"messages": [SYSTEM]},
        {"messages": [USER], **LABELS},
        {"messages": [SYSTEM, USER], **LABELS},
    ),
    "generate": (
        "/generate",
        {"text": RULES, "ttl_s": 60},
        {"text": RESTS[0], **LABELS},
        {"text": RULES + RESTS[0], **LABELS},
    ),
    "score": (
        "/v1/score",
        {"text": RULES},
        {"query": "Message: ", "items": ["Buy now!", "Good morning."], "label_token_ids": [500, 600]},
        {"query": RULES + "Message: ", "items": ["Buy now!", "Good morning."], "label_token_ids": [500, 600]},
    ),
    "rerank": (
        "/v2/rerank",
        {"text": RULES},
        {"query": "spam", "documents": ["Buy now!", "Good morning."]},
        {"query": RULES + "spam", "documents": ["Buy now!", "Good morning."]},
    ),
}
VARIES = {
    "id",
    "created",
    "meta_info",
    "queue_ms",
    "predicted_jct_ms",
    "actual_ms",
    "cached_tokens",
    "kept_tokens",
    "usage",
}


def without_times(reply: Any) -> Any:
    if isinstance(reply, dict):
        return {name: without_times(value) for name, value in reply.items() if name not in VARIES} | (
            {"scores": without_times(reply["meta_info"]["label_scores"])} if "meta_info" in reply else {}
        )
    return [without_times(one) for one in reply] if isinstance(reply, list) else reply


@pytest.mark.parametrize("case", CASES)
def test_answers_behind_a_prefix_are_those_of_the_whole_request(server: Server, case: str) -> None:
    path, prefix, rest, whole = CASES[case]
    asked = server.post(path, {"model": "m", **whole})
    assert asked.status_code == 200, asked.text
    assert without_times(HeldPrefix(server.url, **prefix).post(path, {"model": "m", **rest})) == without_times(
        asked.json()
    )


def test_token_ids_behind_token_ids(server: Server, tokenizer: Any) -> None:
    prefix, rests = tokenizer.encode(RULES), [tokenizer.encode(rest) for rest in RESTS]
    held = HeldPrefix(server.url, input_ids=prefix)
    choices = held.post("/v1/completions", {"model": "m", "prompt": rests, **LABELS})["choices"]
    whole = server.scores([prefix + rest for rest in rests], **LABELS)
    for choice, one in zip(choices, whole, strict=True):
        assert choice["label_scores"]["labels"] == one["labels"]
        assert choice["label_scores"]["cached_tokens"] >= len(prefix) - 1, "the handle has computed it"


def test_an_unknown_prefix_is_a_409_and_the_client_sends_it_again(server: Server) -> None:
    reply = server.post("/v1/completions", {"model": "m", "prompt": "a", "prefix": "prefix-00", **LABELS})
    assert reply.status_code == 409
    assert "'prefix-00' is not held here: send it to /v1/prefixes again" in reply.json()["error"]["message"]
    held = HeldPrefix(server.url, text=RULES)
    held._id = "prefix-00"
    assert held.post("/v1/completions", {"model": "m", "prompt": RESTS[0], **LABELS})["choices"]
    assert held._id != "prefix-00"


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"text": "a", "input_ids": [1]}, "give one of text, messages, input_ids"),
        ({"messages": [{"role": "unknown"}]}, "messages"),
        ({"text": "a", "ttl_s": 1e9}, "ttl_s"),
        ({"input_ids": [10**6]}, "1000000"),
    ],
)
def test_what_is_no_prefix_is_refused(server: Server, body: dict[str, Any], told: str) -> None:
    reply = server.post("/v1/prefixes", body)
    assert reply.status_code == 400, reply.text
    assert told in reply.json()["error"]["message"]


def test_a_tenants_prefix_is_its_own(bank: Server) -> None:
    body = {"model": "m", "prompt": RESTS[0], **LABELS}
    mine = bank.post("/v1/prefixes", {"text": RULES, "user": "anna"}).json()["id"]
    assert bank.post("/v1/completions", {**body, "prefix": mine, "user": "anna"}).status_code == 200
    assert bank.post("/v1/completions", {**body, "prefix": mine, "user": "bert"}).status_code == 409
