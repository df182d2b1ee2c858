"""The shapes of answers: choices with label scores, and usage."""

from __future__ import annotations

from typing import Any

from sgl_prefill.api.scored_prompt import ScoredPrompt


def completion_choice(index: int, scored: ScoredPrompt, logprobs: int | None) -> dict[str, Any]:
    """Makes one choice of /v1/completions; `logprobs` as asked for, over the whole vocabulary."""
    shown = None
    if logprobs is not None:
        texts = [label.text for label in scored.labels]
        shown = {
            "tokens": [scored.best.text],
            "token_logprobs": [scored.distribution.logprobs[scored.best_index]],
            "top_logprobs": [dict(zip(texts, scored.distribution.logprobs, strict=True))],
            "text_offset": [0],
        }
    return {
        "index": index,
        "text": scored.best.text,
        "logprobs": shown,
        "finish_reason": "stop",
        "label_scores": scored.to_json(),
    }


def chat_choice(index: int, scored: ScoredPrompt, logprobs: bool, message_field: str) -> dict[str, Any]:
    """Makes one choice of /v1/chat/completions; `message_field` is "message", or "delta" in a stream."""
    entries = [
        {"token": label.text, "logprob": logprob, "bytes": list(label.text.encode())}
        for label, logprob in zip(scored.labels, scored.distribution.logprobs, strict=True)
    ]
    shown = {"content": [{**entries[scored.best_index], "top_logprobs": entries}]} if logprobs else None
    return {
        "index": index,
        message_field: {"role": "assistant", "content": scored.best.text},
        "logprobs": shown,
        "finish_reason": "stop",
        "label_scores": scored.to_json(),
    }


def usage(scored: list[ScoredPrompt]) -> dict[str, Any]:
    """Counts the tokens of all prompts together; cached ones are part of the prompt's. The best label is the answer."""
    prompt_tokens = sum(one.meta_info["prompt_tokens"] for one in scored)
    answer_tokens = sum(len(one.best.token_ids) for one in scored)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": answer_tokens,
        "total_tokens": prompt_tokens + answer_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(one.meta_info["cached_tokens"] for one in scored)},
    }
