"""Labels of any length, in one or several surface forms: what a request may say of them, and their probabilities.

P(form) is the product of its tokens' probabilities (`branches`), P(label) the sum over its forms. No text counts for two: a
form that begins another counts only where the model does not go on to the other (`told_apart`), or, where the request says how
an answer ends, with what ends it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, cast, get_args

from sgl_prefill.core.branches import Tokens, log_sum, told_apart
from sgl_prefill.core.labels import LabelDistribution, LabelError, restrict

MOST_FORM_TOKENS = 64
END_TOKEN = "end_token"  # of the model
Normalise = Literal["sum", "mean", "pmi"]


class LongLabel(NamedTuple):
    """A label and the texts that mean it."""

    name: str
    forms: tuple[str, ...]


class AnswerOptions(NamedTuple):
    """What a request says of its labels."""

    labels: tuple[LongLabel, ...]
    ends_with_token: bool = False  # one of the model's end tokens follows each form
    end_text: str = ""  # follows each form
    normalise: Normalise = "sum"
    baseline: str | tuple[int, ...] | None = None  # the prompt without what it is about, for pmi

    @property
    def texts(self) -> list[str]:
        """Returns what is looked up: all forms, in order, each with the text that ends it."""
        return [form + self.end_text for label in self.labels for form in label.forms]


class ScoredForm(NamedTuple):
    """One form behind one prompt."""

    text: str
    token_ids: Tokens  # with the text that ends it
    logprob: float  # natural logarithm of its probability, no text counting twice


class ScoredLabels(NamedTuple):
    """All labels of a request behind one prompt, in its order."""

    forms: list[list[ScoredForm]]
    # `logprobs` and `label_mass` are of P(label); `probabilities` and `best` come from the normalised scores.
    distribution: LabelDistribution
    scores: list[float]  # what is normalised over the labels: log P(label), or as `normalise` says


def parse(answers: Any, end: Any, normalise: Any, baseline: Any) -> AnswerOptions:
    """Reads `allowed_answers`, `answer_end`, `normalise` and `baseline_prompt` of a request. Raises LabelError."""
    labels = [_label(item) for item in _items(answers)]
    if not labels:
        raise LabelError("allowed_answers is empty: give at least one label")
    _check_once([label.name for label in labels], "label")
    _check_once([form for label in labels for form in label.forms], "surface form")
    normalise = "sum" if normalise is None else normalise
    if normalise not in get_args(Normalise):
        raise LabelError(f"normalise is {normalise!r}: it must be one of {', '.join(get_args(Normalise))}")
    is_prompt = isinstance(baseline, str) or (isinstance(baseline, list) and all(type(x) is int for x in baseline))
    if baseline is not None and not (is_prompt and baseline):
        raise LabelError("baseline_prompt must be a text or a list of token ids, and not empty")
    if (normalise == "pmi") != (baseline is not None):
        raise LabelError(
            "normalise: pmi compares each label with itself behind baseline_prompt, which is the prompt without what it is"
            " about: give both or neither"
        )
    known_end = end is None or end == END_TOKEN or (isinstance(end, dict) and list(end) == ["text"])
    text = end["text"] if isinstance(end, dict) and known_end else ""
    if not known_end or not isinstance(text, str) or (isinstance(end, dict) and not text):
        raise LabelError(
            f'answer_end is {end!r}: it must be "{END_TOKEN}", or {{"text": ...}} with what your prompts have behind an answer'
        )
    return AnswerOptions(
        tuple(labels),
        end == END_TOKEN,
        text,
        cast(Normalise, normalise),
        tuple(baseline) if isinstance(baseline, list) else baseline,
    )


def _items(answers: Any) -> list[Any]:
    if isinstance(answers, dict):
        return [{name: forms} for name, forms in answers.items()]
    if isinstance(answers, list):
        return answers
    raise LabelError('allowed_answers must be a list of labels, or an object such as {"label": ["surface", "form"]}')


def _label(item: Any) -> LongLabel:
    if isinstance(item, str):
        item = {item: [item]}
    if not isinstance(item, dict) or len(item) != 1:
        raise LabelError(
            f'allowed_answers holds {item!r}: a label is a text, or one text with its surface forms: {{"label": ["form", ...]}}'
        )
    ((name, forms),) = item.items()
    if not isinstance(name, str) or not isinstance(forms, list) or not all(isinstance(form, str) for form in forms):
        raise LabelError(f"allowed_answers: the surface forms of {name!r} are {forms!r}: they must be a list of texts")
    if not name or not forms or "" in forms:
        raise LabelError(
            f"allowed_answers: {name!r} has the surface forms {forms!r}: no text may be empty, and no list of them"
        )
    return LongLabel(name, tuple(forms))


def _check_once(texts: Sequence[str], kind: str) -> None:
    text, n = Counter(texts).most_common(1)[0]
    if n > 1:
        raise LabelError(f"allowed_answers holds the {kind} {text!r} {n} times: each may stand there once")


def check_tokens(texts: Sequence[str], answers: Sequence[Tokens]) -> None:
    """Refuses labels with equal tokens or too many tokens. Raises LabelError."""
    known: dict[Tokens, str] = {}
    for text, answer in zip(texts, answers, strict=True):
        if len(answer) > MOST_FORM_TOKENS:
            raise LabelError(
                f"allowed_answers: {text[:40]!r}... is {len(answer)} tokens after this prompt, and {MOST_FORM_TOKENS} are the"
                " limit of a label: shorten it"
            )
        if answer in known:
            raise LabelError(
                f"allowed_answers: {known[answer]!r} and {text!r} are the same tokens {list(answer)} after this prompt: keep one"
            )
        known[answer] = text


def ways_to_end(answer: Tokens, end_token_ids: Sequence[int]) -> list[Tokens]:
    """Returns the token sequences in which an answer may be written out; one where nothing has to end it."""
    return [(*answer, token_id) for token_id in end_token_ids] or [answer]


def score(
    options: AnswerOptions,
    answers: Sequence[Tokens],
    end_token_ids: Sequence[int],
    logprobs: Mapping[Tokens, float],
    baseline_answers: Sequence[Tokens] = (),
    baseline: Mapping[Tokens, float] | None = None,
) -> ScoredLabels:
    """Returns the distribution over the labels.

    Args:
        answers: the tokens of each form, in the order of `options.texts`.
        logprobs: of each of their ways to end (`ways_to_end`).
        baseline_answers, baseline: the same behind the baseline prompt, for pmi.
    """
    forms = _forms(options, answers, end_token_ids, logprobs)
    of_labels = [log_sum([form.logprob for form in of_label]) for of_label in forms]
    scores = of_labels
    if options.normalise == "mean":
        n_ends = 1 if end_token_ids else 0
        scores = [log_sum([form.logprob / (len(form.token_ids) + n_ends) for form in of_label]) for of_label in forms]
    elif baseline is not None:
        without = [
            log_sum([form.logprob for form in of_label])
            for of_label in _forms(options, baseline_answers, end_token_ids, baseline)
        ]
        if -math.inf in without:
            name = options.labels[without.index(-math.inf)].name
            raise LabelError(
                f"baseline_prompt: the model gives {name!r} no probability behind it, and pmi divides by it"
            )
        scores = [mine - other for mine, other in zip(of_labels, without, strict=True)]
    normalised, plain = restrict(scores), restrict(of_labels)
    distribution = normalised._replace(logprobs=plain.logprobs, label_mass=plain.label_mass)
    return ScoredLabels(forms, distribution, scores)


def _forms(
    options: AnswerOptions, answers: Sequence[Tokens], end_token_ids: Sequence[int], logprobs: Mapping[Tokens, float]
) -> list[list[ScoredForm]]:
    apart = told_apart(logprobs)
    left = iter(answers)
    found = []
    for label in options.labels:
        of_label = []
        for text in label.forms:
            tokens = next(left)
            of_label.append(
                ScoredForm(text, tokens, log_sum([apart[way] for way in ways_to_end(tokens, end_token_ids)]))
            )
        found.append(of_label)
    return found
