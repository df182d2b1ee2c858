"""The answer to one prompt: its distribution over the labels, what else was asked for, and both as JSON."""

from __future__ import annotations

from typing import Any, NamedTuple

from sgl_prefill.api.prompt_parts import SHOWN
from sgl_prefill.api.reply_options import PLAIN, ReplyOptions
from sgl_prefill.api.request_checks import check_has_logprobs
from sgl_prefill.core.labels import Label, LabelDistribution, restrict
from sgl_prefill.core.long_labels import ScoredLabels


class Alternative(NamedTuple):
    """One of the likeliest tokens after a prompt."""

    token_id: int
    text: str
    logprob: float  # over the whole vocabulary
    is_label: bool  # by itself


class ScoredPrompt(NamedTuple):
    """The answer to one prompt."""

    labels: list[Label]  # in the order of the request
    distribution: LabelDistribution
    meta_info: dict[str, Any]  # SGLang's, of this prompt
    long: ScoredLabels | None = None  # of labels of any length
    n_answer_tokens: int = 0  # that were computed beside the prompt's
    options: ReplyOptions = PLAIN
    calibrated: list[float] | None = None  # P(label) by the calibration that was asked for
    alternatives: list[Alternative] | None = None  # the likeliest first

    @property
    def best_index(self) -> int:
        """Says which label is the answer: of the calibrated distribution where there is one; the first one of equals."""
        if self.calibrated is None:
            return self.distribution.best
        return max(range(len(self.calibrated)), key=self.calibrated.__getitem__)

    @property
    def best(self) -> Label:
        return self.labels[self.best_index]

    def _said(self) -> list[dict[str, Any]]:
        """Returns which tokens each label is, as the reply shows it."""
        if self.long is None:
            return [{"token_id": label.token_id} for label in self.labels]
        return [
            {"score": score, "forms": [form._asdict() for form in forms]}
            for score, forms in zip(self.long.scores, self.long.forms, strict=True)
        ]

    def _valued(self) -> list[dict[str, float]]:
        """Returns what each label is worth among the labels."""
        values = [{"probability": probability} for probability in self.distribution.probabilities]
        if self.options.raw_scores:
            scores = self.distribution.logprobs if self.long is None else self.long.scores
            values = [{"raw_score": score} for score in scores]
        if self.calibrated is not None:
            for value, calibrated in zip(values, self.calibrated, strict=True):
                value["calibrated_probability"] = calibrated
        return values

    def _besides(self) -> dict[str, Any]:
        """Returns what else was asked for."""
        found: dict[str, Any] = {}
        if self.options.calibration is not None:
            found["calibration"] = self.options.calibration.name
        if self.alternatives is not None:
            found["top_alternatives"] = [one._asdict() for one in self.alternatives]
        return found

    def labels_to_json(self) -> dict[str, Any]:
        """Returns the part of the reply's `label_scores` that is about the labels, and not about how the prompt ran."""
        return {
            "labels": [
                {"label": label.text, **said, **valued, "logprob": logprob}
                for label, said, valued, logprob in zip(
                    self.labels, self._said(), self._valued(), self.distribution.logprobs, strict=True
                )
            ],
            "label_mass": self.distribution.label_mass,
            **self._besides(),
        }

    def to_json(self) -> dict[str, Any]:
        """Returns the reply's `label_scores` object."""
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


def scored_of(labels: list[Label], output: dict[str, Any]) -> ScoredPrompt:
    """Makes the answer for labels of one token from what SGLang answers. Raises HTTPException where its request has failed."""
    meta_info = output["meta_info"]
    check_has_logprobs(meta_info)
    by_id = {token_id: logprob for logprob, token_id, _ in meta_info["output_token_ids_logprobs"][0]}
    return ScoredPrompt(labels, restrict([by_id[label.token_id] for label in labels]), meta_info)


def with_reply(scored: ScoredPrompt, reply: ReplyOptions, texts: dict[int, str]) -> ScoredPrompt:
    """Returns the answer with what else its reply shall hold; texts: of all tokens that are alternatives."""
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
