"""Calibrations by name on a server with the demo model, raw scores and top alternatives."""

from __future__ import annotations

import json
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from sgl_prefill import calibrate
from sgl_prefill.core.rerank_template import load
from sgl_prefill.examples.label_reviews import NEGATIVE, POSITIVE, REVIEWS
from sgl_prefill.startup.calibrations import StoredCalibration
from tests.integration.conftest import CALIBRATIONS, FORMS, Server

LABELS = {"allowed_tokens": [POSITIVE, NEGATIVE]}
# Nine positive examples and one negative: the model prefers what it has seen.
SHOTS = "".join(f"Review: {text}\nSentiment:{label}\n\n" for text, label in (*REVIEWS[:9], REVIEWS[-1]))
EXAMPLES = [{"prompt": f"{SHOTS}Review: {text}\nSentiment:", "label": label} for text, label in REVIEWS]
QUESTION = EXAMPLES[12]["prompt"]


def test_what_a_server_scores_is_fitted_for_this_server(server: Server, demo_folder: Path, tmp_path: Path) -> None:
    """Its replies are the rows of `sgl_prefill.calibrate`, whose file has the fingerprint of those that the server has read."""
    scores = server.scores([example["prompt"] for example in EXAMPLES], **LABELS)
    rows = [{"label_scores": one, "label": example["label"]} for one, example in zip(scores, EXAMPLES, strict=True)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    made, plot = tmp_path / "made.json", tmp_path / "plot.png"
    files = [str(tmp_path / "rows.jsonl"), "--output", str(made), "--plot", str(plot)]
    calibrate.main([*files, "--method", "vector", "--model-path", str(demo_folder)])
    fitted, read = (
        StoredCalibration.from_json(path.stem, json.loads(path.read_text()))
        for path in (made, server.calibrations / "reviews.json")
    )
    assert fitted.model.fingerprint == read.model.fingerprint
    assert (fitted.labels, fitted.n_examples) == ([POSITIVE, NEGATIVE], len(REVIEWS))
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_every_route_that_takes_allowed_answers_applies_it_by_name(server: Server) -> None:
    """The reply holds both distributions, and its text follows the calibrated one; the labels in another order are the same."""
    asked = {"calibration": "reviews", "allowed_tokens": [NEGATIVE, POSITIVE]}
    completion = server.post("/v1/completions", {"model": "demo", "prompt": [QUESTION] * 2, **asked}).json()
    generated = server.post("/generate", {"text": QUESTION, **asked}).json()
    scores = [choice["label_scores"] for choice in completion["choices"]]
    for one in (*scores, generated["meta_info"]["label_scores"]):
        assert one["calibration"] == "reviews"
        assert [entry["label"] for entry in one["labels"]] == [NEGATIVE, POSITIVE]
        for name in ("probability", "calibrated_probability"):
            assert sum(entry[name] for entry in one["labels"]) == pytest.approx(1.0)
        positive_first = [math.log(entry["probability"]) for entry in one["labels"]][::-1]
        expected = CALIBRATIONS["reviews"][1].probabilities(positive_first)
        assert [entry["calibrated_probability"] for entry in one["labels"]][::-1] == pytest.approx(expected, rel=1e-6)
    texts = [choice["text"] for choice in completion["choices"]] + [generated["text"]]
    assert set(texts) == {max(scores[0]["labels"], key=lambda entry: entry["calibrated_probability"])["label"]}


def test_the_answer_follows_the_calibrated_distribution(server: Server) -> None:
    """The second best becomes the best, in a chat too."""
    cities = {"allowed_tokens": [" Paris", " Rome"]}
    europe = "One of the largest cities of Europe is"
    plain = server.post("/v1/completions", {"model": "demo", "prompt": europe, **cities}).json()["choices"][0]
    asked = {"model": "demo", "prompt": europe, **cities, "calibration": "cities", "logprobs": 2}
    choice = server.post("/v1/completions", asked).json()["choices"][0]
    assert (plain["text"], choice["text"]) == (" Paris", " Rome")
    assert choice["logprobs"]["tokens"] == [" Rome"]
    assert choice["logprobs"]["token_logprobs"] == [choice["label_scores"]["labels"][1]["logprob"]]
    messages = [{"role": "user", "content": f"Review: {REVIEWS[2][0]} Good or bad?"}]
    chat = {"model": "demo", "messages": messages, "allowed_tokens": ["Good", "Bad"], "calibration": "chats"}
    choice = server.post("/v1/chat/completions", chat).json()["choices"][0]
    entries = choice["label_scores"]["labels"]
    assert choice["message"]["content"] == max(entries, key=lambda entry: entry["calibrated_probability"])["label"]


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


def test_scores_have_them_too_and_stay_what_they_are(server: Server, tokenizer: Any) -> None:
    """Of SGLang's /v1/score, up to what bfloat16 rounds otherwise in other company; beside them stands what the label routes say
    of the same prompts."""
    ids = [tokenizer.encode(label)[0] for label in (POSITIVE, NEGATIVE)]
    items = [example["prompt"].removeprefix(SHOTS) for example in EXAMPLES[:2]]
    body = {"model": "demo", "query": SHOTS, "items": items, "label_token_ids": ids}
    for one in (body, {**body, "apply_softmax": True}):
        server.post("/v1/score", one)
        plain = server.post("/v1/score", one).json()
        asked = server.post("/v1/score", {**one, "calibration": "reviews", "top_alternatives": 3}).json()
        label_scores = asked.pop("label_scores")
        pairs = zip(asked.pop("scores"), plain.pop("scores"), strict=True)
        assert all(one == pytest.approx(other, abs=0.02) for one, other in pairs)
        assert asked == plain
    ours = server.scores([SHOTS + item for item in items], **LABELS, calibration="reviews", top_alternatives=3)
    for found, expected in zip(label_scores, ours, strict=True):
        assert [one["label"] for one in found["labels"]] == [POSITIVE, NEGATIVE]
        for name in ("probability", "calibrated_probability", "logprob"):
            values = [one[name] for one in expected["labels"]]
            assert [one[name] for one in found["labels"]] == pytest.approx(values, abs=0.02)
        assert found["calibration"] == "reviews"
        assert len(found["top_alternatives"]) == 3
        assert found["prompt_tokens"] == expected["prompt_tokens"]


def test_reranked_documents_are_ordered_by_their_calibrated_scores(server: Server) -> None:
    """In a stream too, and min_score goes by them."""
    prompts = load("yes-no").prompts(None, "a colour", documents := ["Blue.", "Seven is a number.", "I like to eat."])
    body = {"query": "a colour", "documents": documents}
    plain = {one["index"]: one["relevance_score"] for one in server.post("/v2/rerank", body).json()["results"]}
    best = max(plain, key=plain.__getitem__)
    asked = {**body, "calibration": "turned", "top_alternatives": 2, "raw_scores": True}
    whole = server.post("/rerank", asked).json()["results"]
    calibrated = {one["index"]: one["relevance_score"] for one in whole}
    assert {one["index"]: one["probability"] for one in whole} == pytest.approx(plain, abs=0.02)
    assert list(calibrated.values()) == sorted(calibrated.values(), reverse=True)
    worst = min(calibrated, key=calibrated.__getitem__)
    assert worst != best
    for one in whole:
        logprobs = [math.log(one["probability"]), math.log(1 - one["probability"])]
        expected_score = CALIBRATIONS["turned"][1].probabilities(logprobs)[0]
        assert one["relevance_score"] == pytest.approx(expected_score, rel=1e-5)
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


ANSWER = {"model": "demo", "prompt": "Is it so? Answer:"}
SCORE = {"model": "demo", "query": "a", "items": ["b"], "label_token_ids": [500, 600]}
RERANK = {"query": "a", "documents": ["b"]}
BAD: list[tuple[str, dict[str, Any], int, list[str]]] = [
    ("/v1/score", {**SCORE, "calibration": "none-such"}, 400, ["'none-such'", "'reviews'"]),
    ("/v1/score", {**SCORE, "calibration": "reviews"}, 400, ["' positive', ' negative'"]),
    ("/v1/score", {**SCORE, "raw_scores": "yes"}, 400, ["raw_scores"]),
    ("/v1/score", {**SCORE, "raw_scores": True, "item_embed_overrides": [[[0.5]]]}, 400, ["raw_scores", "item_embed_"]),
    ("/v1/score", {**SCORE, "top_alternatives": 5, "items": [[7]]}, 400, ["query is a text", "items holds token ids"]),
    ("/v1/rerank", {**RERANK, "calibration": "none-such"}, 400, ["'none-such'", "'reviews'"]),
    ("/v2/rerank", {**RERANK, "calibration": "reviews"}, 400, ["' positive', ' negative'", "' yes', ' no'"]),
    ("/rerank", {**RERANK, "calibration": "reviews", "stream": True}, 400, ["' positive', ' negative'"]),
    ("/rerank", {**RERANK, "top_alternatives": 101}, 400, ["top_alternatives is 101", "1 to 100"]),
    (
        "/rerank",
        {**RERANK, "documents": ["b"] * 500, "top_alternatives": 100, "stream": True},
        400,
        ["top_alternatives 100 after 500 prompts", "50000 are the limit"],
    ),
    (
        "/v1/completions",
        {**ANSWER, **LABELS, "calibration": "none-such"},
        400,
        ["'none-such'", "this server has", "'reviews'"],
    ),
    ("/generate", {"text": "a", **LABELS, "calibration": "none-such"}, 400, ["'none-such'", "'reviews'"]),
    (
        "/v1/completions",
        {**ANSWER, "allowed_tokens": [" yes", " no"], "calibration": "reviews"},
        400,
        ["' positive', ' negative'", "' yes', ' no'"],
    ),
    ("/v1/completions", {**ANSWER, "calibration": "reviews"}, 400, ["calibration without allowed answers"]),
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
def test_nonsense_is_named(server: Server, route: str, body: dict[str, Any], status: int, told: list[str]) -> None:
    reply = server.post(route, body)
    assert reply.status_code == status, reply.text
    message = reply.json()["error"]["message"]
    assert all(one in message for one in told), message


def test_labels_of_several_tokens_are_calibrated_by_their_names(server: Server) -> None:
    """Their raw score is what is normalised over the labels; a calibration of another way to compute them does not fit."""
    labels = {"allowed_answers": FORMS}
    (scores,) = server.scores(QUESTION, **labels, calibration="forms", raw_scores=True, top_alternatives=3)
    assert [entry["label"] for entry in scores["labels"]] == ["good", "bad"]
    good, bad = scores["labels"]
    expected = math.exp(0.5 + good["raw_score"] - bad["raw_score"])
    assert good["calibrated_probability"] / bad["calibrated_probability"] == pytest.approx(expected, rel=1e-6)
    assert all(entry["raw_score"] == entry["logprob"] < 0 for entry in scores["labels"])
    assert len(scores["top_alternatives"]) == 3
    for other in ({"normalise": "mean"}, {"answer_end": "end_token"}):
        reply = server.post("/v1/completions", {**ANSWER, **labels, **other, "calibration": "forms"})
        assert reply.status_code == 400
        assert next(iter(other)) in reply.json()["error"]["message"]
