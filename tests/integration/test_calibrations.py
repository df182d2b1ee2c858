"""Calibrations as objects of a server with the demo model, raw scores and top alternatives."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import requests

from sgl_prefill.core.rerank_template import load
from sgl_prefill.examples.label_reviews import NEGATIVE, POSITIVE, REVIEWS
from tests.integration.conftest import Server

PATH = "/v1/calibrations"
LABELS = {"allowed_tokens": [POSITIVE, NEGATIVE]}
# Nine positive examples and one negative: the model prefers what it has seen.
SHOTS = "".join(f"Review: {text}\nSentiment:{label}\n\n" for text, label in (*REVIEWS[:9], REVIEWS[-1]))
EXAMPLES = [{"prompt": f"{SHOTS}Review: {text}\nSentiment:", "label": label} for text, label in REVIEWS]
CONTENT_FREE = [f"{SHOTS}Review: {nothing}\nSentiment:" for nothing in ("N/A", "[MASK]", "")]
QUESTION = EXAMPLES[12]["prompt"]


def make(server: Server, name: str, **body: Any) -> requests.Response:
    return server.post(PATH, {"name": name, "replace": True, **LABELS, **body})


def get(server: Server, path: str) -> requests.Response:
    return requests.get(server.url + PATH + path, timeout=60)


@pytest.fixture(scope="module")
def shots(server: Server) -> Iterator[dict[str, Any]]:
    """A calibration of each method, by the name of the method."""
    made = {}
    for method, given in (
        ("temperature", {"examples": EXAMPLES}),
        ("vector", {"examples": EXAMPLES}),
        ("contextual", {"content_free": CONTENT_FREE, "evaluate_on": EXAMPLES}),
    ):
        reply = make(server, method, method=method, **given)
        assert reply.status_code == 200, reply.text
        made[method] = reply.json()
    yield made
    for method in made:
        requests.delete(f"{server.url}{PATH}/{method}", timeout=60)


def test_a_calibration_tells_what_it_is_worth(server: Server, shots: dict[str, Any]) -> None:
    """GET shows what POST has answered: the labels, how many examples, errors before and after, and on what."""
    for method, made in shots.items():
        assert get(server, f"/{method}").json() == made
        assert (made["name"], made["method"], made["labels"]) == (method, method, [POSITIVE, NEGATIVE])
        assert made["n_examples"] == (len(CONTENT_FREE) if method == "contextual" else len(REVIEWS))
        assert made["fits_this_model"]
        before, after = made["measured"]["before"], made["measured"]["after"]
        assert before["n_examples"] == after["n_examples"] == len(REVIEWS)
        assert 0 <= after["expected_calibration_error"] <= 1
        assert sum(one["n_examples"] for one in after["bins"]) == len(REVIEWS)
    assert "evaluate_on" in shots["contextual"]["measured"]["how"]
    assert "cross-validation" in shots["vector"]["measured"]["how"]
    assert (
        shots["temperature"]["measured"]["before"]["accuracy"] == shots["temperature"]["measured"]["after"]["accuracy"]
    )
    listed = get(server, "").json()["data"]
    assert set(shots) <= {one["name"] for one in listed}


def test_a_reliability_plot_is_a_png(server: Server, shots: dict[str, Any]) -> None:
    reply = get(server, "/vector/plot")
    assert (reply.status_code, reply.headers["content-type"]) == (200, "image/png")
    assert reply.content.startswith(b"\x89PNG")


def test_every_route_that_takes_allowed_answers_applies_it_by_name(server: Server, shots: dict[str, Any]) -> None:
    """The reply holds both distributions, and its text follows the calibrated one; the labels in another order are the same."""
    other_order = {"allowed_tokens": [NEGATIVE, POSITIVE]}
    asked = {"calibration": "contextual", **other_order}
    completion = server.post("/v1/completions", {"model": "demo", "prompt": [QUESTION] * 2, **asked}).json()
    generated = server.post("/generate", {"text": QUESTION, **asked}).json()
    scores = [choice["label_scores"] for choice in completion["choices"]]
    for one in (*scores, generated["meta_info"]["label_scores"]):
        assert one["calibration"] == "contextual"
        assert [entry["label"] for entry in one["labels"]] == [NEGATIVE, POSITIVE]
        for name in ("probability", "calibrated_probability"):
            assert sum(entry[name] for entry in one["labels"]) == pytest.approx(1.0)
        raw, calibrated = (
            [entry[name] for entry in one["labels"]] for name in ("probability", "calibrated_probability")
        )
        biases = shots["contextual"]["calibration"]["biases"]
        assert (calibrated[0] / calibrated[1]) / (raw[0] / raw[1]) == pytest.approx(
            2.718281828459045 ** (biases[1] - biases[0]), rel=1e-6
        )
    texts = [choice["text"] for choice in completion["choices"]] + [generated["text"]]
    assert set(texts) == {max(scores[0]["labels"], key=lambda entry: entry["calibrated_probability"])["label"]}


def test_the_answer_follows_the_calibrated_distribution(server: Server) -> None:
    """What is said after prompts without content counts as nothing: the second best becomes the best."""
    cities = {"allowed_tokens": [" Paris", " Rome"]}
    france, europe = "The capital of France is", "One of the largest cities of Europe is"
    reply = server.post(PATH, {"name": "cities", "method": "contextual", "content_free": [france], **cities})
    assert reply.status_code == 200, reply.text
    assert reply.json()["measured"] is None
    plain = server.post("/v1/completions", {"model": "demo", "prompt": europe, **cities}).json()["choices"][0]
    asked = {"model": "demo", "prompt": europe, **cities, "calibration": "cities", "logprobs": 2}
    choice = server.post("/v1/completions", asked).json()["choices"][0]
    assert (plain["text"], choice["text"]) == (" Paris", " Rome")
    assert choice["logprobs"]["tokens"] == [" Rome"]
    assert choice["logprobs"]["token_logprobs"] == [choice["label_scores"]["labels"][1]["logprob"]]
    itself = server.scores(france, **cities, calibration="cities")[0]["labels"]
    assert [entry["calibrated_probability"] for entry in itself] == pytest.approx([0.5, 0.5], abs=0.02)
    refused = get(server, "/cities/plot")
    assert refused.status_code == 400
    assert "evaluate_on" in refused.json()["error"]["message"]
    assert requests.delete(f"{server.url}{PATH}/cities", timeout=60).json() == {"name": "cities", "deleted": True}
    assert get(server, "/cities").status_code == 404


def test_conversations_are_examples_too(server: Server) -> None:
    """Beside texts and tokens; the template is the chat's."""
    chats = [
        {
            "messages": [{"role": "user", "content": f"Review: {text} Good or bad?"}],
            "label": "Good" if label == POSITIVE else "Bad",
        }
        for text, label in REVIEWS[2:22]
    ]
    labels = {"allowed_tokens": ["Good", "Bad"]}
    mixed = [*chats, {"prompt": [1000, 2000, 3000], "label": "Good"}, {"prompt": "A word:", "label": "Bad"}]
    body = {"name": "chats", "method": "temperature", "examples": mixed, "replace": True, **labels}
    made = server.post(PATH, body)
    assert made.status_code == 200, made.text
    asked = {"model": "demo", "messages": chats[0]["messages"], **labels, "calibration": "chats"}
    choice = server.post("/v1/chat/completions", asked).json()["choices"][0]
    entries = choice["label_scores"]["labels"]
    assert choice["message"]["content"] == max(entries, key=lambda entry: entry["calibrated_probability"])["label"]
    requests.delete(f"{server.url}{PATH}/chats", timeout=60)


def test_raw_scores_and_alternatives_change_nothing_of_the_answer(server: Server) -> None:
    """Bit for bit, on the same cache; raw scores are log-probabilities, and no shares of the labels."""
    server.scores(QUESTION, **LABELS)
    (plain,) = server.scores(QUESTION, **LABELS)
    (asked,) = server.scores(QUESTION, **LABELS, raw_scores=True, top_alternatives=5)
    assert [entry["logprob"] for entry in plain["labels"]] == [entry["raw_score"] for entry in asked["labels"]]
    assert [set(entry) for entry in asked["labels"]] == [{"label", "token_id", "raw_score", "logprob"}] * 2
    alternatives = asked["top_alternatives"]
    assert [set(one) for one in alternatives] == [{"token_id", "text", "logprob", "is_label"}] * 5
    assert [one["logprob"] for one in alternatives] == sorted((one["logprob"] for one in alternatives), reverse=True)
    of_labels = {entry["token_id"]: entry for entry in asked["labels"]}
    for one in alternatives:
        assert one["is_label"] == (one["token_id"] in of_labels)
        if one["is_label"]:
            assert (one["text"], one["logprob"]) == tuple(
                of_labels[one["token_id"]][name] for name in ("label", "raw_score")
            )
    assert any(one["is_label"] for one in alternatives)


def test_scores_have_them_too_and_stay_what_they_are(server: Server, tokenizer: Any, shots: dict[str, Any]) -> None:
    """Of SGLang's /v1/score, up to what bfloat16 rounds otherwise in other company; beside them stands what the label routes say
    of the same prompts."""
    ids = [tokenizer.encode(label)[0] for label in (POSITIVE, NEGATIVE)]
    items = [example["prompt"].removeprefix(SHOTS) for example in EXAMPLES[:2]]
    body = {"model": "demo", "query": SHOTS, "items": items, "label_token_ids": ids}
    for one in (body, {**body, "apply_softmax": True}):
        server.post("/v1/score", one)
        plain = server.post("/v1/score", one).json()
        asked = server.post("/v1/score", {**one, "calibration": "vector", "top_alternatives": 3}).json()
        label_scores = asked.pop("label_scores")
        pairs = zip(asked.pop("scores"), plain.pop("scores"), strict=True)
        assert all(one == pytest.approx(other, abs=0.02) for one, other in pairs)
        assert asked == plain
    ours = server.scores([SHOTS + item for item in items], **LABELS, calibration="vector", top_alternatives=3)
    for found, expected in zip(label_scores, ours, strict=True):
        assert [one["label"] for one in found["labels"]] == [POSITIVE, NEGATIVE]
        for name in ("probability", "calibrated_probability", "logprob"):
            values = [one[name] for one in expected["labels"]]
            assert [one[name] for one in found["labels"]] == pytest.approx(values, abs=0.02)
        assert found["calibration"] == shots["vector"]["name"]
        assert len(found["top_alternatives"]) == 3
        assert found["prompt_tokens"] == expected["prompt_tokens"]


def test_reranked_documents_are_ordered_by_their_calibrated_scores(server: Server) -> None:
    """In a stream too; this calibration moves the best one away from the others, and min_score goes by it."""
    prompts = load("yes-no").prompts(None, "a colour", documents := ["Blue.", "Seven is a number.", "I like to eat."])
    body = {"query": "a colour", "documents": documents}
    plain = {one["index"]: one["relevance_score"] for one in server.post("/v2/rerank", body).json()["results"]}
    best = max(plain, key=plain.__getitem__)
    labels = [" yes" if place == best else " no" for place in range(3)]
    examples = [{"prompt": prompt, "label": label} for prompt, label in zip(prompts, labels, strict=True)] * 7
    made = {"name": "turned", "method": "vector", "allowed_tokens": [" yes", " no"], "examples": examples}
    assert server.post(PATH, {**made, "replace": True}).status_code == 200
    asked = {**body, "calibration": "turned", "top_alternatives": 2, "raw_scores": True}
    whole = server.post("/rerank", asked).json()["results"]
    calibrated = {one["index"]: one["relevance_score"] for one in whole}
    assert {one["index"]: one["probability"] for one in whole} == pytest.approx(plain, abs=0.02)
    assert list(calibrated.values()) == sorted(calibrated.values(), reverse=True)
    worst = min(calibrated, key=calibrated.__getitem__)
    assert calibrated[best] - calibrated[worst] > plain[best] - plain[worst] + 0.03
    scores = server.scores(prompts, allowed_tokens=[" yes", " no"], calibration="turned")
    expected = {place: one["labels"][0]["calibrated_probability"] for place, one in enumerate(scores)}
    assert calibrated == pytest.approx(expected, abs=0.05)
    for one in whole:
        yes, no = one["label_scores"]["labels"]
        assert one["relevance_score"] == yes["calibrated_probability"]
        assert set(yes) == {"label", "token_id", "raw_score", "logprob", "calibrated_probability"}
        assert yes["raw_score"] - no["raw_score"] == pytest.approx(
            math.log(one["probability"] / (1 - one["probability"]))
        )
        assert len(one["label_scores"]["top_alternatives"]) == 2
    reply = server.post(
        "/v1/rerank", {**asked, "stream": True, "min_score": (calibrated[best] + calibrated[worst]) / 2}, stream=True
    )
    *events, done = [line.removeprefix(b"data: ") for line in reply.iter_lines() if line]
    assert done == b"[DONE]"
    *shown, last = map(json.loads, events)
    assert {one["index"]: one["relevance_score"] for one in shown} == pytest.approx(calibrated, abs=0.05)
    assert all(len(one["label_scores"]["top_alternatives"]) == 2 for one in shown)
    kept = {one["index"] for one in last}
    assert best in kept
    assert worst not in kept
    requests.delete(f"{server.url}{PATH}/turned", timeout=60)


def test_requests_with_and_without_alternatives_share_steps(server: Server) -> None:
    """Also with one that samples a token: nobody gets another's."""

    def ask(number: int) -> Any:
        if number % 3 == 2:
            body = {"text": f"{number} {QUESTION}", "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
            return server.post("/generate", body).status_code
        wanted = {} if number % 3 else {"top_alternatives": 1 + number}
        (scores,) = server.scores(f"{number} {QUESTION}", **LABELS, **wanted)
        return len(scores.get("top_alternatives", ()))

    with ThreadPoolExecutor(12) as clients:
        found = list(clients.map(ask, range(12)))
    assert found == [(1 + number, 0, 200)[number % 3] for number in range(12)]


def bad(**body: Any) -> dict[str, Any]:
    return {"name": "bad", "method": "temperature", **LABELS, "examples": EXAMPLES, **body}


ANSWER = {"model": "demo", "prompt": "Is it so? Answer:"}
ONE_CLASS = [{**example, "label": POSITIVE} for example in EXAMPLES]
SCORE = {"model": "demo", "query": "a", "items": ["b"], "label_token_ids": [500, 600]}
RERANK = {"query": "a", "documents": ["b"]}
BAD: list[tuple[str, dict[str, Any], int, list[str]]] = [
    ("/v1/score", {**SCORE, "calibration": "none-such"}, 404, ["'none-such'", "'vector'"]),
    ("/v1/score", {**SCORE, "calibration": "vector"}, 400, ["' positive', ' negative'"]),
    ("/v1/score", {**SCORE, "raw_scores": "yes"}, 400, ["raw_scores"]),
    ("/v1/score", {**SCORE, "raw_scores": True, "item_embed_overrides": [[[0.5]]]}, 400, ["raw_scores", "item_embed_"]),
    ("/v1/score", {**SCORE, "top_alternatives": 5, "items": [[7]]}, 400, ["query is a text", "items holds token ids"]),
    ("/v1/rerank", {**RERANK, "calibration": "none-such"}, 404, ["'none-such'", "'vector'"]),
    ("/v2/rerank", {**RERANK, "calibration": "vector"}, 400, ["' positive', ' negative'", "' yes', ' no'"]),
    ("/rerank", {**RERANK, "calibration": "vector", "stream": True}, 400, ["' positive', ' negative'"]),
    ("/rerank", {**RERANK, "top_alternatives": 101}, 400, ["top_alternatives is 101", "1 to 100"]),
    (
        "/rerank",
        {**RERANK, "documents": ["b"] * 500, "top_alternatives": 100, "stream": True},
        400,
        ["top_alternatives 100 after 500 prompts", "50000 are the limit"],
    ),
    (PATH, bad(name="../x"), 400, ["'../x'", "1 to 64"]),
    (PATH, bad(name=""), 400, ["1 to 64"]),
    (PATH, bad(method="platt"), 400, ["method is 'platt'", "temperature, vector, contextual"]),
    (PATH, bad(allowed_tokens=None), 400, ["allowed_tokens"]),
    (PATH, bad(allowed_token_ids=[5, 6]), 400, ["both given"]),
    (PATH, bad(allowed_tokens=[POSITIVE]), 400, ["one label", "at least two"]),
    (PATH, bad(content_free=["N/A"]), 400, ["examples and content_free are both given"]),
    (PATH, bad(examples=None), 400, ["both missing"]),
    (PATH, bad(method="contextual"), 400, ["contextual", "content_free"]),
    (PATH, bad(examples=None, content_free=["N/A"]), 400, ["temperature is made from examples"]),
    (PATH, bad(method="contextual", examples=None, content_free=[]), 400, ["content_free is empty"]),
    (PATH, bad(examples=EXAMPLES[:19]), 400, ["examples holds 19", "at least 20"]),
    (PATH, bad(examples=ONE_CLASS), 400, ["all 24 examples", "' positive'", "two labels"]),
    (
        PATH,
        bad(method="vector", examples=[*ONE_CLASS, EXAMPLES[-1]]),
        400,
        ["holds 1 with the label ' negative'", "at least 2"],
    ),
    (PATH, bad(examples=[*EXAMPLES, {"prompt": "a", "label": "good"}]), 400, ["examples[24]", "'good'", "' negative'"]),
    (PATH, bad(examples=[*EXAMPLES, {"label": POSITIVE}]), 400, ["examples[24]", "a prompt or messages"]),
    (PATH, bad(examples=[*EXAMPLES, {"prompt": "", "label": POSITIVE}]), 400, ["empty"]),
    (PATH, bad(examples=[*EXAMPLES, {"prompt": "a", "lable": POSITIVE}]), 400, ["label"]),
    (PATH, bad(temperature=2), 400, ["temperature"]),
    (
        "/v1/completions",
        {**ANSWER, **LABELS, "calibration": "none-such"},
        404,
        ["'none-such'", "those that do", "'vector'"],
    ),
    ("/generate", {"text": "a", **LABELS, "calibration": "none-such"}, 404, ["'none-such'", "'vector'"]),
    ("/v1/completions", {**ANSWER, **LABELS, "calibration": "a/b"}, 400, ["'a/b'", "1 to 64"]),
    (
        "/v1/completions",
        {**ANSWER, "allowed_tokens": [" yes", " no"], "calibration": "vector"},
        400,
        ["' positive', ' negative'", "' yes', ' no'"],
    ),
    ("/v1/completions", {**ANSWER, "calibration": "vector"}, 400, ["calibration without allowed answers"]),
    ("/generate", {"text": "a", "raw_scores": True}, 400, ["raw_scores without allowed answers"]),
    ("/v1/completions", {**ANSWER, **LABELS, "top_alternatives": 0}, 400, ["top_alternatives is 0", "1 to 100"]),
    ("/generate", {"text": "a", **LABELS, "top_alternatives": 101}, 400, ["top_alternatives is 101", "1 to 100"]),
    ("/v1/completions", {**ANSWER, **LABELS, "top_alternatives": "5"}, 400, ["top_alternatives"]),
    (
        "/v1/completions",
        {"model": "demo", "prompt": ["a b"] * 500, **LABELS, "top_alternatives": 100},
        400,
        ["top_alternatives 100 after 500 prompts", "51000", "50000 are the limit"],
    ),
]


@pytest.mark.parametrize(("route", "body", "status", "told"), BAD)
@pytest.mark.usefixtures("shots")
def test_nonsense_is_named(server: Server, route: str, body: dict[str, Any], status: int, told: list[str]) -> None:
    reply = server.post(route, body)
    assert reply.status_code == status, reply.text
    message = reply.json()["error"]["message"]
    assert all(one in message for one in told), message


@pytest.mark.usefixtures("shots")
def test_a_name_that_is_taken_is_not_written_over_by_accident(server: Server) -> None:
    reply = server.post(PATH, bad(name="vector"))
    assert reply.status_code == 409
    assert "replace" in reply.json()["error"]["message"]


def test_labels_of_several_tokens_are_calibrated_by_their_names(server: Server) -> None:
    """Their raw score is what is normalised over the labels; a calibration of another way to compute them does not fit."""
    labels = {"allowed_answers": {"good": [" very good indeed", " good"], "bad": [" not good at all"]}}
    body = {"name": "forms", "method": "contextual", "content_free": [QUESTION], "replace": True, **labels}
    made = server.post(PATH, body)
    assert made.status_code == 200, made.text
    (scores,) = server.scores(QUESTION, **labels, calibration="forms", raw_scores=True, top_alternatives=3)
    assert [entry["label"] for entry in scores["labels"]] == ["good", "bad"]
    assert [entry["calibrated_probability"] for entry in scores["labels"]] == pytest.approx([0.5, 0.5], abs=0.02)
    assert all(entry["raw_score"] == entry["logprob"] < 0 for entry in scores["labels"])
    assert len(scores["top_alternatives"]) == 3
    for other in ({"normalise": "mean"}, {"answer_end": "end_token"}):
        reply = server.post("/v1/completions", {**ANSWER, **labels, **other, "calibration": "forms"})
        assert reply.status_code == 400
        assert next(iter(other)) in reply.json()["error"]["message"]
    requests.delete(f"{server.url}{PATH}/forms", timeout=60)
