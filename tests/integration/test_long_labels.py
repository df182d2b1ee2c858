"""Labels of any length over HTTP on the demo model; against transformers in test_numerics.py."""

from __future__ import annotations

import math
from typing import Any

import pytest
import sglang as sgl

from tests.integration.conftest import Server

PROMPT = "Text: The orchestra tuned up before the second symphony.\nThe text is about"
LABELS = [" sports", " classical music", " the weather forecast", " cooking"]
FORMS = {"music": [" music", " classical music", " Music"], "weather": [" weather", " the weather forecast"]}
# bfloat16: single log-probabilities move by some hundredths with the rows of their step (test_numerics.py).
CLOSE = 0.1

BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": "demo", "prompt": PROMPT},
    "/v1/chat/completions": {"model": "demo", "messages": [{"role": "user", "content": PROMPT}]},
    "/generate": {"text": PROMPT},
}


def scores_of(reply: Any) -> dict[str, Any]:
    body = reply.json()
    assert reply.status_code == 200, body
    found: dict[str, Any] = (
        body["choices"][0]["label_scores"] if "choices" in body else body["meta_info"]["label_scores"]
    )
    return found


def logprobs(scores: dict[str, Any]) -> list[float]:
    return [entry["logprob"] for entry in scores["labels"]]


def one_by_one(server: Server, token_ids: list[int], answer: list[int]) -> float:
    asked = [server.scores([[*token_ids, *answer[:n]]], allowed_token_ids=[token])[0] for n, token in enumerate(answer)]
    return sum(logprobs(one)[0] for one in asked)


@pytest.mark.parametrize("route", BODIES)
def test_every_route_scores_labels_of_several_tokens_in_one_step(server: Server, route: str) -> None:
    reply = server.post(route, {**BODIES[route], "allowed_answers": LABELS})
    scores = scores_of(reply)
    assert [entry["label"] for entry in scores["labels"]] == LABELS
    assert sum(entry["probability"] for entry in scores["labels"]) == pytest.approx(1)
    assert 0 < scores["label_mass"] <= 1
    forms = [entry["forms"] for entry in scores["labels"]]
    assert scores["answer_tokens"] == sum(len(form["token_ids"]) - 1 for (form,) in forms) >= 3
    best = max(scores["labels"], key=lambda entry: entry["probability"])
    usage = reply.json().get("usage") or reply.json()["meta_info"]
    assert usage["completion_tokens"] == len(best["forms"][0]["token_ids"])
    assert usage["prompt_tokens"] == scores["prompt_tokens"]


def test_the_probabilities_are_those_of_the_tokens_one_by_one(server: Server, tokenizer: Any) -> None:
    token_ids = tokenizer.encode(PROMPT)
    (scores,) = server.scores([token_ids], allowed_answers=FORMS)
    for entry in scores["labels"]:
        parts = [form["logprob"] for form in entry["forms"]]
        assert entry["logprob"] == pytest.approx(math.log(sum(map(math.exp, parts)))), "surface forms add up"
        for form in entry["forms"]:
            assert form["logprob"] == pytest.approx(one_by_one(server, token_ids, form["token_ids"]), abs=CLOSE)


def test_labels_of_one_token_are_bit_for_bit_what_allowed_tokens_gives(server: Server) -> None:
    prompt = f"{PROMPT} (one token)"
    server.scores(prompt, allowed_tokens=[" music"])
    (by_tokens,) = server.scores(prompt, allowed_tokens=[" music", " sports"])
    (by_answers,) = server.scores(prompt, allowed_answers=[" music", " sports"])
    assert logprobs(by_answers) == logprobs(by_tokens)
    assert by_answers["answer_tokens"] == 0


def test_a_batch_is_answered_in_order(server: Server) -> None:
    prompts = [f"{PROMPT} ({n})" for n in range(3)]
    together = server.scores(prompts, allowed_answers=LABELS)
    for prompt, scores in zip(prompts, together, strict=True):
        (alone,) = server.scores(prompt, allowed_answers=LABELS)
        assert logprobs(scores) == pytest.approx(logprobs(alone), abs=CLOSE)


def test_trees_that_are_too_large_for_a_step_are_divided(server: Server) -> None:
    many = [f" number {n} of {m} parts" for n in range(40) for m in range(40, 48)]
    (scores,) = server.scores(PROMPT, allowed_answers=many)
    assert scores["answer_tokens"] > 256
    (few,) = server.scores(PROMPT, allowed_answers=[many[0], many[200], many[-1]])
    assert [logprobs(scores)[n] for n in (0, 200, -1)] == pytest.approx(logprobs(few), abs=CLOSE)
    assert len(scores["labels"]) == 320


def test_a_label_that_begins_another_is_told_apart(server: Server) -> None:
    (alone,) = server.scores(PROMPT, allowed_answers=[" classical"])
    (both,) = server.scores(PROMPT, allowed_answers=[" classical", " classical music"])
    begins, rest, longer = (math.exp(x) for x in (*logprobs(alone), *logprobs(both)))
    assert rest + longer == pytest.approx(begins, rel=CLOSE)
    for end in ("end_token", {"text": "."}):
        (ended,) = server.scores(PROMPT, allowed_answers=[" classical", " classical music"], answer_end=end)
        assert all(math.exp(x) < y for x, y in zip(logprobs(ended), (rest, longer), strict=True)), end


def test_a_baseline_prompt_is_scored_beside_the_prompt(server: Server) -> None:
    baseline = "The text is about"
    (plain,) = server.scores(PROMPT, allowed_answers=LABELS)
    (without,) = server.scores(baseline, allowed_answers=LABELS)
    (pmi,) = server.scores(PROMPT, allowed_answers=LABELS, normalise="pmi", baseline_prompt=baseline)
    expected = [mine - other for mine, other in zip(logprobs(plain), logprobs(without), strict=True)]
    assert [entry["score"] for entry in pmi["labels"]] == pytest.approx(expected, abs=2 * CLOSE)


def test_select_programs_and_means_agree(server: Server) -> None:
    """SGLang's frontend asks one request a choice. Its own mean counts the prompt's last token too (0.5.17): that of the choice's
    tokens is compared."""

    @sgl.function  # type: ignore[untyped-decorator]
    def program(s: Any) -> None:
        s += PROMPT
        s += sgl.select("topic", choices=LABELS)

    state = program.run(backend=sgl.RuntimeEndpoint(server.url))
    by_select = state.get_meta_info("topic")["input_token_logprobs"]
    (scores,) = server.scores(PROMPT, allowed_answers=LABELS, normalise="mean")
    for entry, asked in zip(scores["labels"], by_select, strict=True):
        tokens = entry["forms"][0]["token_ids"]
        assert [token for _, token, _ in asked[-len(tokens) :]] == tokens
        mean = sum(logprob for logprob, *_ in asked[-len(tokens) :]) / len(tokens)
        assert entry["score"] == pytest.approx(mean, abs=CLOSE)


@pytest.mark.parametrize("route", BODIES)
@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"allowed_answers": []}, "allowed_answers is empty"),
        ({"allowed_answers": ["a", "a"]}, "2 times"),
        ({"allowed_answers": [" a"], "allowed_tokens": [" a"]}, "allowed_tokens and allowed_answers"),
        ({"allowed_tokens": [" a"], "answer_end": "end_token"}, "answer_end goes with allowed_answers"),
        ({"allowed_answers": ["a " * 100]}, "64 are the limit"),
        ({"allowed_answers": ["a" * 1001]}, "1000 are the limit"),
        ({"allowed_answers": [" a"], "normalise": "pmi"}, "baseline_prompt"),
        ({"allowed_answers": {"a": "b"}}, "list of texts"),
        ({"allowed_answers": [" a b"], "max_tokens": 5}, "max_tokens"),
    ],
)
def test_what_cannot_be_scored_is_a_400_that_says_why(
    server: Server, route: str, given: dict[str, Any], named: str
) -> None:
    if route == "/generate" and "max_tokens" in given:
        given, named = {**given, "sampling_params": {"max_new_tokens": given["max_tokens"]}}, "max_new_tokens"
        del given["max_tokens"]
    reply = server.post(route, {**BODIES[route], **given})
    assert reply.status_code == 400, reply.text
    assert named in reply.text


def test_a_deadline_holds_for_labels_of_several_tokens_too(server: Server) -> None:
    body = {**BODIES["/v1/completions"], "allowed_answers": LABELS, "deadline_ms": 0.001}
    assert server.post("/v1/completions", body).status_code in (429, 504)
