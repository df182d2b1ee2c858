"""Whether what a server sent with status 200 is an answer of its route."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# The field of a reply that holds its answers, and their kind; /generate and /v1/rerank also answer with a list of them.
ANSWERS_IN: dict[str, tuple[str, type]] = {
    "/v1/completions": ("choices", list),
    "/v1/chat/completions": ("choices", list),
    "/generate": ("meta_info", dict),
    "/v1/score": ("scores", list),
    "/v1/rerank": ("results", list),
    "/v2/rerank": ("results", list),
    "/v1/decisions": ("answers", list),
    "/v1/systemone": ("answers", dict),
    "/v1/embeddings": ("data", list),
}
LISTS = ("/generate", "/v1/rerank")
MAY_BE_EMPTY = ("/v1/rerank", "/v2/rerank")  # where min_score leaves nothing
LABELS_ASKED = ("allowed_answers", "allowed_tokens", "allowed_token_ids")
COUNTS = ("prompt_tokens", "input_tokens", "cached_tokens", "prompt_tokens_details")


def problem(route: str, body: Mapping[str, Any], reply: Any) -> str | None:
    """What is wrong with a reply to this body, in words; None: nothing."""
    name, kind = ANSWERS_IN[route]
    if isinstance(reply, list) and route in LISTS:
        answers = reply
    elif not isinstance(reply, dict) or not isinstance(reply.get(name), kind):
        return f"no {name}"
    else:
        answers = [reply] if route == "/generate" else list(reply[name])
        if (wrong := _wrong_count(reply.get("usage"))) is not None:
            return wrong
    if not answers and route not in MAY_BE_EMPTY:
        return f"empty {name}"
    if len(answers) < (n_prompts := _n_prompts(body)):
        return f"{len(answers)} answers to {n_prompts} prompts"
    # For a prompt or document that the server refuses, its list of answers holds an error.
    has_refused = isinstance(reply, list) or route != "/generate"
    answered = [one for one in answers if not (has_refused and isinstance(one, dict) and "error" in one)]
    if route == "/generate":
        answered = [one.get(name) if isinstance(one, dict) else None for one in answered]
        if not all(answered):
            return f"no {name}"
        if (wrong := next(filter(None, map(_wrong_count, answered)), None)) is not None:
            return wrong
    if any(body.get(field) for field in LABELS_ASKED) and not all(map(_has_labels, answered)):
        return "no label_scores: is it a server of sgl_prefill?"
    if isinstance(reply, list) and route == "/v1/rerank" and not all(map(_has_score, answered)):
        return "no score of a document"
    if route == "/v1/systemone" and not all(_is_decision(reply[name].get(one)) for one in body.get("questions") or {}):
        return "no answer to a question"
    return None


def _n_prompts(body: Mapping[str, Any]) -> int:
    given = body.get("prompt", body.get("text", body.get("input_ids")))
    return len(given) if isinstance(given, list) and given and not isinstance(given[0], int) else 0


def _wrong_count(counts: Any) -> str | None:
    if counts is None:
        return None
    if not isinstance(counts, dict):
        return f"no object as usage, but {counts!r:.50}"
    for name in COUNTS:
        value = counts.get(name)
        if isinstance(value, dict) and name == "prompt_tokens_details":
            return _wrong_count(value)
        if not (value is None or (isinstance(value, int) and value >= 0)):
            return f"{name} {value!r:.50}"
    return None


def _has_labels(holder: Any) -> bool:
    scores = holder.get("label_scores") if isinstance(holder, dict) else None
    labels = scores.get("labels") if isinstance(scores, dict) else None
    return isinstance(labels, list) and all(
        isinstance(one, dict) and "label" in one and _is_number(one.get("probability")) for one in labels
    )


def _has_score(document: Any) -> bool:
    return isinstance(document, dict) and _is_number(document.get("score"))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_decision(answer: Any) -> bool:
    if not isinstance(answer, dict) or not isinstance(kind := answer.get("type"), str) or kind not in answer:
        return False
    return kind != "choice" or isinstance(answer.get("probabilities"), dict)
