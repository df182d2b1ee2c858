"""Label arithmetic: from log-probabilities over the whole vocabulary to a distribution over the allowed answers."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

# How much of the prompt's end is encoded again, with and without a label, to see which token the label is there. A
# tokenizer decides a boundary from the word around it; 64 characters or 32 tokens hold more than one word.
CONTEXT_CHARACTERS = 64
CONTEXT_TOKENS = 32


def text_of_bytes(token: bytes) -> str:
    """Writes a token that is no text by itself, such as a part of an emoji, as OpenAI's API does."""
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


def bytes_of(text: str) -> bytes:
    """Returns the UTF-8 of a text, or the bytes that `text_of_bytes` has written."""
    if re.fullmatch(r"bytes:(\\x[0-9a-f]{2})+", text):
        return bytes.fromhex(text.removeprefix("bytes:").replace("\\x", ""))
    return text.encode()


class Label(NamedTuple):
    """One allowed answer: its text as asked for (or decoded), and the tokens that it is after this prompt."""

    text: str
    token_id: int  # the first, and for most labels the only one
    rest: tuple[int, ...] = ()
    other: tuple[str, int] | None = None  # with a blank before it, or without: its text and token

    @property
    def token_ids(self) -> tuple[int, ...]:
        return (self.token_id, *self.rest)


class LabelDistribution(NamedTuple):
    """P(label | prompt, the answer is one of the labels), in the order of the request."""

    probabilities: list[float]  # sum to 1
    logprobs: list[float]  # natural log-probability of each over the whole vocabulary
    label_mass: float  # share of the whole vocabulary's probability that the labels hold together, 0..1
    best: int  # index of the most probable label; the first one of equals


class LabelError(ValueError):
    """A label that cannot be scored after this prompt; the message names it and says why."""


def restrict(logprobs: Sequence[float]) -> LabelDistribution:
    """Normalise full-vocabulary log-probabilities of the labels over the labels alone (paper, section 2.3).

    Subtracts the largest first, so labels that the model finds very unlikely still get exact shares. A label with
    probability 0 (-inf) gets 0. Raises LabelError where all labels have probability 0 or one is NaN.
    """
    top = max(logprobs, default=-math.inf)
    if top == -math.inf or any(math.isnan(x) for x in logprobs):
        raise LabelError(f"the model gave no usable probability to any label (log-probabilities {list(logprobs)})")
    weights = [math.exp(x - top) for x in logprobs]
    total = math.fsum(weights)
    mass = math.fsum(math.exp(x) for x in logprobs)
    return LabelDistribution(
        probabilities=[w / total for w in weights],
        logprobs=list(logprobs),
        label_mass=min(mass, 1.0),
        best=list(logprobs).index(top),
    )


def check_distinct(names: Sequence[str] | Sequence[int], field: str) -> None:
    """Refuse an empty list and duplicates, naming the first one; `field` is the request field's name."""
    if not names:
        raise LabelError(f"{field} is empty: give at least one allowed answer")
    seen: set[str | int] = set()
    for name in names:
        if name in seen:
            raise LabelError(f"{field} holds {name!r} more than once: each allowed answer may stand there once")
        seen.add(name)


def tokens_in_context(
    labels: Sequence[str],
    prompt_end: str,
    encode: Callable[[Sequence[str]], list[list[int]]],
    decode: Callable[[list[int]], str],
) -> list[list[int]]:
    """Returns the tokens that each label is when it follows `prompt_end`.

    A label is read as literal text: `Yes` and ` Yes` are two labels. Encoding `prompt_end + label` shows the tokens
    after the prompt's own, which can differ from encoding the label alone (SentencePiece marks the start of a text).

    Where the tokenizer would rather merge the label into the prompt's last token (a prompt that ends in a space), the
    prompt's tokens stay as they are and the label is what it is on its own, if that gives the same text.

    Args:
        prompt_end: the last characters of the prompt; special tokens as text.
        encode, decode: without special tokens added or skipped; `encode` takes several texts, and is called for few.

    Raises:
        LabelError: a label is empty, or would change the prompt's own tokens here.
    """
    before, *together = encode([prompt_end, *(prompt_end + label for label in labels)])
    return [
        _tokens_of(label, prompt_end, before, with_label, encode, decode)
        for label, with_label in zip(labels, together, strict=True)
    ]


def resolve_in_context(
    labels: Sequence[str],
    prompt_end: str,
    encode: Callable[[Sequence[str]], list[list[int]]],
    decode: Callable[[list[int]], str],
) -> list[int]:
    """Returns the one token that each label is when it follows `prompt_end`, as `tokens_in_context` finds it.

    Raises LabelError where it is several; the message lists them.
    """
    found = []
    for label, tokens in zip(labels, tokens_in_context(labels, prompt_end, encode, decode), strict=True):
        if len(tokens) != 1:
            pieces = [decode([token]) for token in tokens]
            raise LabelError(
                f"allowed answer {label!r} is {len(tokens)} tokens after this prompt: {pieces} (ids {tokens});"
                " an allowed token must be one: give it in allowed_answers, which takes labels of any length, shorten it, or"
                " add or remove the space before it"
            )
        found.append(tokens[0])
    return found


def other_forms(
    labels: Sequence[str],
    prompt_end: str,
    encode: Callable[[Sequence[str]], list[list[int]]],
    decode: Callable[[list[int]], str],
) -> list[tuple[str, int] | None]:
    """Returns each label with a blank before it, or without the one that it has, where that is one token after this prompt."""
    texts = [label[1:] if label.startswith(" ") else f" {label}" for label in labels]
    before, *together = encode([prompt_end, *(prompt_end + text for text in texts)])
    found: list[tuple[str, int] | None] = []
    for text, with_text in zip(texts, together, strict=True):
        try:
            tokens = _tokens_of(text, prompt_end, before, with_text, encode, decode)
        except LabelError:
            tokens = []
        found.append((text, tokens[0]) if len(tokens) == 1 else None)
    return found


def hint_of(labels: Sequence[Label], label_mass: float, logprobs: Mapping[int, float]) -> str | None:
    """Says so where the labels' other forms hold more of the probability than the labels. logprobs: by token id."""
    given = {label.token_id for label in labels}
    others = {label.other[1]: label.other[0] for label in labels if label.other and label.other[1] not in given}
    mass = math.fsum(math.exp(logprobs[token_id]) for token_id in others)
    if mass <= label_mass:
        return None
    shown = ", ".join(repr(text) for text in list(others.values())[:3])
    return (
        f"as written the labels hold {label_mass:.2g} of the probability, and {shown}{', ...' * (len(others) > 3)}"
        f" {mass:.2g}: mind the blank before a label"
    )


def _tokens_of(
    label: str,
    prompt_end: str,
    before: list[int],
    together: list[int],
    encode: Callable[[Sequence[str]], list[list[int]]],
    decode: Callable[[list[int]], str],
) -> list[int]:
    if not label:
        raise LabelError("an allowed answer is the empty text, which is no token")
    if together[: len(before)] == before:
        tokens = together[len(before) :]
    else:
        (tokens,) = encode([label])
        if decode(before + tokens) != decode(together):
            raise LabelError(
                f"allowed answer {label!r} merges with the end of the prompt {prompt_end[-8:]!r} into other tokens:"
                " move the last characters of the prompt to the start of the answer"
            )
    if not tokens:
        raise LabelError(f"allowed answer {label!r} is no token after this prompt")
    return tokens
