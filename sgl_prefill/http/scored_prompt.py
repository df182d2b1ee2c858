"""The answer to one prompt: its distribution over the labels, the options of its reply, and the JSON of replies."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any, NamedTuple

import orjson
from pydantic import BaseModel, StrictBool, StrictInt, model_validator

from sgl_prefill.core.labels import Label, LabelDistribution, bytes_of, hint_of, restrict
from sgl_prefill.core.long_labels import ScoredLabels
from sgl_prefill.errors import BadRequestError
from sgl_prefill.http.parted_requests import SHOWN
from sgl_prefill.http.request_checks import check_has_logprobs
from sgl_prefill.startup.calibrations import StoredCalibration

MOST_ALTERNATIVES = 100


class ReplyFields(BaseModel):
    """Fields of request bodies on every route that scores labels."""

    calibration: str | None = None
    raw_scores: StrictBool = False
    top_alternatives: StrictInt | None = None

    @model_validator(mode="before")
    @classmethod
    def _null_is_the_default(cls, values: Any) -> Any:
        """Of fields that the route knows. Another may have a meaning by being there, as `rid` of SGLang's gateway."""
        if not isinstance(values, dict):
            return values
        return {name: value for name, value in values.items() if value is not None or name not in cls.model_fields}


class ReplyOptions(NamedTuple):
    """The checked options. None of them changes the log-probabilities of the labels."""

    calibration: StoredCalibration | None = None
    raw_scores: bool = False
    top_alternatives: int = 0  # how many of the likeliest tokens of the whole vocabulary


PLAIN = ReplyOptions()


def given_reply_fields(request: Any) -> str:
    """Names the reply fields that a body sets, for an error message; "" if it sets none."""
    values = {name: getattr(request, name) for name in ReplyFields.model_fields}
    return ", ".join(name for name, value in values.items() if value is not None and value is not False)


def check_reply_fields(request: Any, has_answers: bool) -> None:
    """Raises BadRequestError for these fields without allowed answers, and for values outside their range."""
    if request.top_alternatives is not None:
        check_alternatives(request.top_alternatives)
    if (names := given_reply_fields(request)) and not has_answers:
        raise BadRequestError(
            f"{names} without allowed answers: they say something about labels, so give allowed_tokens or the like,"
            " or leave them out"
        )


def check_alternatives(n: int) -> None:
    if not 1 <= n <= MOST_ALTERNATIVES:
        raise BadRequestError(
            f"top_alternatives is {n}: ask for 1 to {MOST_ALTERNATIVES} tokens, or leave it out for none"
        )


class Alternative(NamedTuple):
    """One of the likeliest tokens after a prompt."""

    token_id: int
    text: str
    logprob: float  # over the whole vocabulary
    is_label: bool  # by itself


class ScoredPrompt(NamedTuple):
    labels: list[Label]  # in the order of the request
    distribution: LabelDistribution
    meta_info: dict[str, Any]  # SGLang's, of this prompt
    long: ScoredLabels | None = None  # only for labels of any length
    n_answer_tokens: int = 0  # computed beyond the prompt
    options: ReplyOptions = PLAIN
    calibrated: list[float] | None = None  # P(label) by the requested calibration
    alternatives: list[Alternative] | None = None  # the likeliest first
    hint: str | None = None  # that labels with or without a blank are likelier

    @property
    def best_index(self) -> int:
        """The index of the likeliest label, by the calibrated distribution if there is one; the first of equals."""
        if self.calibrated is None:
            return self.distribution.best
        return max(range(len(self.calibrated)), key=self.calibrated.__getitem__)

    @property
    def best(self) -> Label:
        return self.labels[self.best_index]

    def likeliest(self, n: int) -> list[tuple[Label, float]]:
        """The n likeliest labels and their log-probabilities, the best first; equal ones in the order of the request."""
        found = zip(self.labels, self.distribution.logprobs, strict=True)
        return sorted(found, key=lambda one: -one[1])[:n]

    def _tokens_json(self) -> list[dict[str, Any]]:
        if self.long is None:
            return [{"token_id": label.token_id} for label in self.labels]
        return [
            {"score": score, "forms": [form._asdict() for form in forms]}
            for score, forms in zip(self.long.scores, self.long.forms, strict=True)
        ]

    def _values_json(self) -> list[dict[str, float]]:
        values = [{"probability": probability} for probability in self.distribution.probabilities]
        if self.options.raw_scores:
            scores = self.distribution.logprobs if self.long is None else self.long.scores
            values = [{"raw_score": score} for score in scores]
        if self.calibrated is not None:
            for value, calibrated in zip(values, self.calibrated, strict=True):
                value["calibrated_probability"] = calibrated
        return values

    def _additions_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if self.options.calibration is not None:
            found["calibration"] = self.options.calibration.name
        if self.alternatives is not None:
            found["top_alternatives"] = [one._asdict() for one in self.alternatives]
        if self.hint is not None:
            found["hint"] = self.hint
        return found

    def labels_to_json(self) -> dict[str, Any]:
        """The part of the reply's `label_scores` about the labels, without the prompt's token counts and times."""
        return {
            "labels": [
                {"label": label.text, **tokens, **values, "logprob": logprob}
                for label, tokens, values, logprob in zip(
                    self.labels, self._tokens_json(), self._values_json(), self.distribution.logprobs, strict=True
                )
            ],
            "label_mass": self.distribution.label_mass,
            **self._additions_json(),
        }

    def to_json(self) -> dict[str, Any]:
        """The reply's `label_scores` object."""
        meta = self.meta_info
        actual_s = meta["prefill_finished_time"] - meta["forward_entry_time"]
        queue_s = meta["forward_entry_time"] - meta["api_server_dispatch_finish_ts"]
        return {
            **self.labels_to_json(),
            "prompt_tokens": meta["prompt_tokens"],
            **({} if self.long is None else {"answer_tokens": self.n_answer_tokens}),
            "cached_tokens": meta["cached_tokens"],
            "kept_tokens": meta.get("kept_tokens", meta["prompt_tokens"]),
            "evicted_tokens": meta.get("evicted_tokens", 0),
            "queue_ms": round(max(queue_s, 0.0) * 1e3, 3),
            "predicted_jct_ms": meta.get("predicted_jct_ms"),
            "actual_ms": round(actual_s * 1e3, 3),
            **({SHOWN: meta[SHOWN]} if SHOWN in meta else {}),
        }


class UnscoredPrompt(NamedTuple):
    """A prompt of a batch that is too long, among others that are scored."""

    message: str

    @property
    def error(self) -> dict[str, Any]:
        return {"message": self.message, "type": "BadRequestError", "param": None, "code": HTTPStatus.BAD_REQUEST}


def scored_of(labels: list[Label], output: dict[str, Any]) -> ScoredPrompt:
    """Makes the answer for labels of one token from SGLang's output. Raises HTTPException if the request failed."""
    by_id = logprobs_of(output)
    distribution = restrict([by_id[label.token_id] for label in labels])
    hint = hint_of(labels, distribution.label_mass, by_id)
    return ScoredPrompt(labels, distribution, output["meta_info"], hint=hint)


def distribution_of(token_ids: Sequence[int], output: dict[str, Any]) -> LabelDistribution:
    """As `scored_of`, for tokens."""
    by_id = logprobs_of(output)
    return restrict([by_id[token_id] for token_id in token_ids])


def logprobs_of(output: dict[str, Any]) -> dict[int, float]:
    """The log-probabilities of the tokens that were asked for. Raises HTTPException if the request failed."""
    check_has_logprobs(output["meta_info"])
    return {token_id: logprob for logprob, token_id, _ in output["meta_info"]["output_token_ids_logprobs"][0]}


def with_reply(scored: ScoredPrompt, reply: ReplyOptions, texts: dict[int, str]) -> ScoredPrompt:
    """Adds what `reply` requests. texts: by token id, of all alternatives."""
    calibrated = alternatives = None
    if reply.calibration is not None:
        names = [label.text for label in scored.labels]
        calibrated = reply.calibration.probabilities(names, scored.distribution.probabilities)
    if reply.top_alternatives:
        forms = [label.token_ids for label in scored.labels]
        if scored.long is not None:
            forms = [form.token_ids for of_label in scored.long.forms for form in of_label]
        alone = {tokens[0] for tokens in forms if len(tokens) == 1}
        alternatives = [
            Alternative(token_id, texts[token_id], logprob, token_id in alone)
            for logprob, token_id, _ in scored.meta_info["output_top_logprobs"][0]
        ]
    return scored._replace(options=reply, calibrated=calibrated, alternatives=alternatives)


def completion_choice(index: int, scored: ScoredPrompt | UnscoredPrompt, logprobs: int | None) -> dict[str, Any]:
    """One choice of /v1/completions. Log-probabilities are over the whole vocabulary."""
    if isinstance(scored, UnscoredPrompt):
        return {"index": index, "text": "", "logprobs": None, "finish_reason": "error", "error": scored.error}
    shown = None
    if logprobs is not None:
        shown = {
            "tokens": [scored.best.text],
            "token_logprobs": [scored.distribution.logprobs[scored.best_index]],
            "top_logprobs": [{label.text: logprob for label, logprob in scored.likeliest(logprobs)}],
            "text_offset": [0],
        }
    return _choice(index, {"text": scored.best.text}, shown, scored)


def chat_choice(index: int, scored: ScoredPrompt, top_logprobs: int | None, message_field: str) -> dict[str, Any]:
    """One choice of /v1/chat/completions.

    Args:
        top_logprobs: how many of the likeliest labels have log-probabilities; None: without log-probabilities.
        message_field: "message", or "delta" in a stream.
    """
    shown = None
    if top_logprobs is not None:
        entries = [_entry(label, logprob) for label, logprob in scored.likeliest(top_logprobs)]
        best = _entry(scored.best, scored.distribution.logprobs[scored.best_index])
        shown = {"content": [{**best, "top_logprobs": entries}]}
    return _choice(index, {message_field: {"role": "assistant", "content": scored.best.text}}, shown, scored)


def _entry(label: Label, logprob: float) -> dict[str, Any]:
    return {"token": label.text, "logprob": logprob, "bytes": list(bytes_of(label.text))}


def _choice(index: int, text: dict[str, Any], logprobs: Any, scored: ScoredPrompt) -> dict[str, Any]:
    return {"index": index, **text, "logprobs": logprobs, "finish_reason": "stop", "label_scores": scored.to_json()}


def generate_output(scored: ScoredPrompt | UnscoredPrompt) -> dict[str, Any]:
    """One output of /generate."""
    if isinstance(scored, UnscoredPrompt):
        return {"text": "", "error": scored.error}
    n_tokens, label_scores = len(scored.best.token_ids), scored.to_json()
    meta_info = {**scored.meta_info, "completion_tokens": n_tokens, "label_scores": label_scores}
    return {"text": scored.best.text, "output_ids": list(scored.best.token_ids), "meta_info": meta_info}


def usage(answers: Sequence[ScoredPrompt | UnscoredPrompt]) -> dict[str, Any]:
    """The token counts of all prompts together. Cached tokens count as prompt tokens, the best label's as completion tokens."""
    scored = [one for one in answers if isinstance(one, ScoredPrompt)]
    prompt_tokens = sum(one.meta_info["prompt_tokens"] for one in scored)
    answer_tokens = sum(len(one.best.token_ids) for one in scored)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": answer_tokens,
        "total_tokens": prompt_tokens + answer_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(one.meta_info["cached_tokens"] for one in scored)},
    }


def envelope(request: Any, *, is_chunk: bool) -> dict[str, Any]:
    """The fields of an OpenAI reply beside `choices`."""
    is_chat = hasattr(request, "messages")
    kind = "text_completion" if not is_chat else "chat.completion.chunk" if is_chunk else "chat.completion"
    name = f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}"
    return {"id": name, "object": kind, "created": int(time.time()), "model": request.model}


def event_of(data: Any) -> bytes:
    """A server-sent event."""
    return b"data: " + orjson.dumps(data) + b"\n\n"


LAST_EVENT = b"data: [DONE]\n\n"
