"""Whether what a server sent with status 200 is an answer of its route."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# What a reply holds, by route: the name and the kind of the field with the answers.
ANSWERS_IN: dict[str, tuple[str, type]] = {
    "/v1/completions": ("choices", list),
    "/v1/chat/completions": ("choices", list),
    "/generate": ("meta_info", dict),
    "/v1/score": ("scores", list),
    "/v2/rerank": ("results", list),
    "/v1/decisions": ("answers", list),
    "/v1/systemone": ("answers", dict),
    "/v1/embeddings": ("data", list),
}
LABELS_ASKED = ("allowed_answers", "allowed_tokens", "allowed_token_ids")
MAY_BE_EMPTY = ("/v2/rerank",)  # where min_score leaves nothing
COUNTS = ("prompt_tokens", "input_tokens", "cached_tokens", "prompt_tokens_details")


def problem(route: str, body: Mapping[str, Any], reply: Any) -> str | None:
    """What is wrong with a reply to this body, in words; None: nothing."""
    several = isinstance(reply, list)
    parts = reply if several else [reply]
    if not all(isinstance(part, dict) for part in parts):
        return "no JSON object"
    if route == "/v1/rerank":
        return None if several and all(_is_number(part.get("score")) for part in parts) else "no list of scores"
    name, kind = ANSWERS_IN[route]
    # A prompt of several that is refused has an error in the place of its answer.
    answered = [part for part in parts if not (several and "error" in part)]
    is_one_object = not several or route == "/generate"
    if not parts or not is_one_object or not all(isinstance(part.get(name), kind) for part in answered):
        return f"no {name}"
    for part in answered:
        wrong = _wrong_count(part.get("usage")) or _wrong_count(part.get("meta_info"))
        if wrong is not None:
            return wrong
    if any(body.get(field) for field in LABELS_ASKED):
        holders = answered if route == "/generate" else [one for one in reply[name] if not _is_refused(one)]
        if not all(_has_labels(one.get("meta_info") if route == "/generate" else one) for one in holders):
            return "no label_scores: is it a server of sgl_prefill?"
    if route == "/v1/systemone" and not all(_is_decision(reply[name].get(one)) for one in body.get("questions") or {}):
        return "no answer to a question"
    if route not in MAY_BE_EMPTY and not all(part[name] for part in answered):
        return f"empty {name}"
    n_found = len(parts) if route == "/generate" else len(reply[name])
    return None if n_found >= (n_wanted := _n_prompts(body)) else f"{n_found} answers to {n_wanted} prompts"


def _n_prompts(body: Mapping[str, Any]) -> int:
    given = body.get("prompt", body.get("text", body.get("input_ids")))
    return len(given) if isinstance(given, list) and given and not isinstance(given[0], int) else 0


def _is_refused(choice: Any) -> bool:
    return isinstance(choice, dict) and "error" in choice


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


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_decision(answer: Any) -> bool:
    if not isinstance(answer, dict) or not isinstance(kind := answer.get("type"), str) or kind not in answer:
        return False
    return kind != "choice" or isinstance(answer.get("probabilities"), dict)
