"""Decisions over HTTP: answers against separate prompts, what does not change them, usage, and bad bodies in both formats."""

from __future__ import annotations

import json
import uuid
from typing import Any

import pytest
import requests
import zstandard

from sgl_prefill.core.decision_prompts import Kind, Option, Question, prompts_of
from sgl_prefill.http.branch_requests import MOST_TOKENS
from tests.integration.conftest import Server

STATE = {"order": 71, "text": "The chain broke after two days. I want my money back, and the bell is green."}
STATE_SHOWN = '{"order":71,"text":"The chain broke after two days. I want my money back, and the bell is green."}'
CRITERIA = {"workshop": "repairs", "sales": None, "finance": "money", "other": ""}
LEVELS: list[Any] = ["calm", {"word": "annoyed"}, "furious"]
QUESTIONS: dict[str, Any] = {
    "refund": {"type": "noul", "instructions": "Is money asked back?", "criteria": {"true": "they ask"}},
    "desk": {"type": "choice", "instructions": "Who handles it?", "criteria": CRITERIA},
    "mood": {"type": "score", "instructions": ["How annoyed?"], "criteria": LEVELS},
}
ASKED = {
    "refund": Question(Kind.YES_NO, "Is money asked back?", (Option("yes", "they ask"), Option("no"))),
    "desk": Question(
        Kind.CHOICE, "Who handles it?", tuple(Option(name, more or "") for name, more in CRITERIA.items())
    ),
    "mood": Question(Kind.SCORE, '["How annoyed?"]', (Option("calm"), Option('{"word":"annoyed"}'), Option("furious"))),
}


def system_one(server: Server, **changes: Any) -> dict[str, Any]:
    body = {"model": "jev-latest", "state": STATE, "questions": QUESTIONS, **changes}
    reply = requests.post(f"{server.url}/v1/systemone", json=body, timeout=120)
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


def numbers_of(answer: dict[str, Any]) -> Any:
    return answer["noul"] if answer["type"] == "noul" else answer["probabilities"]


def test_answers_are_those_of_separate_prompts(server: Server) -> None:
    answers = system_one(server, x_options={"desk": {"orders": 1}})["answers"]
    for name, question in ASKED.items():
        rows = []
        for prompt in prompts_of(question, 1 if name == "desk" else None):
            message = {"role": "user", "content": f"{STATE_SHOWN}\n\n{prompt.text}"}
            body = {"model": "demo", "messages": [message], "allowed_tokens": list(prompt.codes)}
            reply = requests.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).json()
            rows.append([one["probability"] for one in reply["choices"][0]["label_scores"]["labels"]])
        means = [sum(column) / len(rows) for column in zip(*rows, strict=True)]
        found = numbers_of(answers[name])
        found = [found, 1 - found] if name == "refund" else list(found.values())
        assert found == pytest.approx(means, abs=1e-12)
    assert answers["mood"]["legend"] == {str(index): level for index, level in enumerate(LEVELS)}
    assert answers["desk"]["choice"] == max(CRITERIA, key=answers["desk"]["probabilities"].__getitem__)


def test_neither_names_nor_neighbours_nor_the_order_of_options_change_an_answer(server: Server) -> None:
    first = system_one(server)["answers"]
    backwards = {**QUESTIONS["desk"], "criteria": dict(reversed(CRITERIA.items()))}
    others = {"another 😡 'name'": backwards, "mood": QUESTIONS["mood"]}
    second = system_one(server, questions=others)["answers"]
    assert second["another 😡 'name'"]["probabilities"] == first["desk"]["probabilities"]
    assert second["mood"] == first["mood"]
    as_given = system_one(server, questions={"desk": backwards}, x_options={"desk": {"orders": 1}})["answers"]["desk"]
    assert as_given["probabilities"] != first["desk"]["probabilities"]
    assert (as_given["x_orders"], first["desk"]["x_orders"]) == (1, 4)


def test_questions_of_several_passes_are_answered_as_alone(server: Server) -> None:
    """40 questions in four orders have more tokens than the branches of one pass may have."""
    questions = {f"{n}": {**QUESTIONS["desk"], "instructions": f"Who handles part {n}?"} for n in range(40)}
    together = system_one(server, questions=questions)
    assert together["usage"]["input_tokens"] > 2 * MOST_TOKENS
    for name in ("0", "17", "39"):
        alone = system_one(server, questions={name: questions[name]})
        assert alone["answers"][name] == together["answers"][name]


def test_a_long_state_is_tokenised_once(server: Server) -> None:
    def n_hits() -> int:
        found = requests.get(f"{server.url}/server_info", timeout=60).json()
        return int(found["internal_states"][0]["text_cache"]["hits"])

    before = n_hits()
    system_one(server, state=f"{uuid.uuid4()} {'The bell rings. ' * 200}")
    assert n_hits() - before >= 6, "seven prompts, for three questions in all orders"


def test_usage_counts_the_state_once_and_what_was_cached_before(server: Server) -> None:
    state = f"{uuid.uuid4()} {STATE_SHOWN}"  # not seen before
    first, second = system_one(server, state=state), system_one(server, state=state)
    assert first["x_cached_tokens"] < first["x_shared_tokens"]
    body = {"model": "demo", "messages": [{"role": "user", "content": state}], "allowed_tokens": ["A", "B"]}
    chat = requests.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).json()
    assert abs(chat["usage"]["prompt_tokens"] - first["x_shared_tokens"]) < 10
    assert first["usage"] == second["usage"]
    n_prompts = 1 + 4 + 2
    own = first["usage"]["input_tokens"] - first["x_shared_tokens"]
    assert 10 * n_prompts < own < 50 * n_prompts
    assert second["x_cached_tokens"] == second["x_shared_tokens"] - 1, "its last token is computed again"


def test_openais_format_asks_the_same(server: Server) -> None:
    of_typesafe = system_one(server)["answers"]
    choices = [{"value": name, **({"description": more} if more else {})} for name, more in CRITERIA.items()]
    questions = [
        {"type": "choice", "name": "desk", "instructions": "Who handles it?", "choices": choices},
        {"type": "predicate", "instructions": "Is money asked back?"},
    ]
    body = {"model": "any", "input": [{"role": "user", "content": [{"type": "input_json", "data": STATE}]}]}
    options = {"1": {"baseline": True, "abstain_below": 1.0}}
    sent = json.dumps({**body, "questions": questions, "x_options": options}).encode()
    packed = zstandard.ZstdCompressor().compress(sent)
    headers = {"content-type": "application/json", "content-encoding": "zstd"}
    reply = requests.post(f"{server.url}/v1/decisions", data=packed, headers=headers, timeout=60).json()
    desk, refund = reply["answers"]
    assert {one["value"]: one["probability"] for one in desk["probabilities"]} == of_typesafe["desk"]["probabilities"]
    assert desk["confidence"] == of_typesafe["desk"]["confidence"]
    assert refund["x_abstains"] is True
    assert refund["name"] is None
    plain = requests.post(f"{server.url}/v1/decisions", json={**body, "questions": questions}, timeout=60).json()
    assert plain["answers"][1]["probability"] != refund["probability"]  # the baseline is divided out
    assert reply["usage"]["total_tokens"] == reply["usage"]["input_tokens"]


QUESTION: dict[str, Any] = {"type": "predicate", "instructions": "Is it so?"}
CHOICE = {"type": "choice", "instructions": "Which?", "choices": [{"value": "a"}, {"value": "b"}]}
BAD_OF_OPENAI: list[tuple[dict[str, Any], str | None]] = [
    ({"questions": []}, "questions"),
    ({"questions": [QUESTION] * 401}, "questions"),
    ({"questions": [{**CHOICE, "choices": [{"value": str(n)} for n in range(256)]}]}, "questions[0].choices"),
    ({"questions": [QUESTION, {**CHOICE, "choices": [{"value": "a"}]}]}, "questions[1].choices"),
    ({"questions": [{**CHOICE, "choices": [{"value": True}, {"value": True}]}]}, "questions[0]"),
    ({"questions": [{**CHOICE, "choices": [{"value": 1}, {"value": 2}]}]}, "questions[0].choices[0].value"),
    ({"questions": [{"type": "score", "instructions": "x", "levels": [{"label": "a"}]}]}, "questions[0].levels"),
    ({"questions": [{**QUESTION, "instructions": " "}]}, "questions[0].instructions"),
    ({"questions": [{**QUESTION, "type": "essay"}]}, "questions[0]"),
    ({"questions": [{**QUESTION, "weight": 1}]}, "questions[0].weight"),
    ({"temperature": 1}, "temperature"),
    ({"input": 5}, "input"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0].type"),
    ({"input": [{"role": "system", "content": [{"type": "input_json", "data": {}}]}]}, "input[0]"),
    ({"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}, None),
    ({"x_options": {"unknown": {}}}, "x_options.unknown"),
    ({"x_options": {"0": {"orders": 0}}}, "x_options.0.orders"),
]


@pytest.mark.parametrize(("changes", "param"), BAD_OF_OPENAI)
def test_a_bad_body_of_openais_is_a_400_that_names_the_field(
    server: Server, changes: dict[str, Any], param: str | None
) -> None:
    body = {"model": "demo", "input": "A state.", "questions": [QUESTION], **changes}
    reply = requests.post(f"{server.url}/v1/decisions", json=body, timeout=60)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == param
    assert reply.json()["error"]["message"]


BAD_OF_TYPESAFE: list[tuple[dict[str, Any], list[str]]] = [
    ({"questions": {}}, ["questions"]),
    ({"questions": {"": {"type": "noul", "instructions": "x"}}}, ["questions", "", "[key]"]),
    ({"questions": {str(n): QUESTIONS["refund"] for n in range(401)}}, ["questions"]),
    ({"questions": {"q": {"type": "noul"}}}, ["questions", "q", "noul"]),
    ({"questions": {"q": {"type": "noul", "instructions": 5}}}, ["questions", "q", "noul", "instructions"]),
    ({"questions": {"q": {"type": "choice", "criteria": {"a": None}}}}, ["questions", "q", "choice", "criteria"]),
    ({"questions": {"q": {"type": "score", "criteria": {"a": 1}}}}, ["questions", "q", "score", "criteria"]),
    ({"questions": {"q": {"type": "score", "criteria": ["a"] * 11}}}, ["questions", "q", "score", "criteria"]),
    ({"questions": {"q": {"type": "box"}}}, ["questions", "q", "box", "type"]),
    ({"questions": {"q": {**QUESTIONS["mood"], "weight": 2}}}, ["questions", "q", "score", "weight"]),
    ({"assets": {"<image:1>": {"type": "image"}}}, ["assets"]),
    ({"state": None}, ["state"]),
]


@pytest.mark.parametrize(("changes", "place"), BAD_OF_TYPESAFE)
def test_a_bad_body_of_typesafes_is_a_422_with_its_place(
    server: Server, changes: dict[str, Any], place: list[str]
) -> None:
    body = {"model": "demo", "state": "A state.", "questions": QUESTIONS, "unknown": 1, **changes}
    reply = requests.post(f"{server.url}/v1/systemone", json=body, timeout=60)
    assert reply.status_code == 422
    assert reply.json()["detail"][0]["loc"] == ["body", *place]


def test_other_errors_have_the_format_of_their_route(server: Server) -> None:
    body = {"model": "demo", "state": "word " * 20_000, "questions": QUESTIONS}
    reply = requests.post(f"{server.url}/v1/systemone", json=body, timeout=60)
    detail = reply.json()["detail"]
    assert (reply.status_code, detail["error_type"]) == (413, "invalid_request_error")
    assert "too many" in detail["message"]
    openais = {"model": "demo", "input": body["state"], "questions": [QUESTION]}
    reply = requests.post(f"{server.url}/v1/decisions", json=openais, timeout=60)
    assert "too many" in reply.json()["error"]["message"]
    for path, status in (("/v1/systemone", 422), ("/v1/decisions", 400)):
        assert requests.post(f"{server.url}{path}", data=b"{", timeout=60).status_code == status
        form = requests.post(f"{server.url}{path}", files={"request": b"{}"}, timeout=60)
        assert form.status_code == status
        assert "images" in form.text
    late = {**body, "state": "word " * 1_000, "x_options": {"mood": {"deadline_ms": 0.01}}}
    reply = requests.post(f"{server.url}/v1/systemone", json=late, timeout=60)
    assert (reply.status_code, "deadline" in reply.json()["detail"]["message"]) == (429, True), reply.text
    deep: Any = 1
    for _ in range(40):
        deep = {"a": deep}
    parts = [{"role": "user", "content": [{"type": "input_json", "data": deep}]}]
    reply = requests.post(f"{server.url}/v1/decisions", json={**openais, "input": parts}, timeout=60)
    assert "deeper than 32 levels" in reply.json()["error"]["message"]


def test_a_held_prefix_comes_before_the_state(server: Server) -> None:
    text = "A long preamble. " * 50
    held = requests.post(f"{server.url}/v1/prefixes", json={"text": text}, timeout=60).json()["id"]
    whole, by_handle = system_one(server, state=f"{text}The rest."), system_one(server, state="The rest.", prefix=held)
    assert by_handle["answers"] == whole["answers"]


def test_models_are_listed_for_both_clients(server: Server) -> None:
    found = requests.get(f"{server.url}/v1/models", timeout=60).json()
    assert [one["id"] for one in found["data"]] == [one["name"] for one in found["models"]]
