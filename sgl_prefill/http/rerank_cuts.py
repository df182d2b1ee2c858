"""Queries and documents of rerank requests, cut at tokens: their beginnings stay, and so do all other parts of the prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from sgl_prefill.errors import BadRequestError


class Cuts(NamedTuple):
    """Limits in tokens; None: there is none."""

    query: int | None = None
    document: int | None = None
    prompt: int | None = None  # query, document and template together
    to_fit: bool = False  # as `prompt`, with the longest prompt that the server takes

    @property
    def are_asked_for(self) -> bool:
        return self != Cuts()


class Fitted(NamedTuple):
    """Prompts of the documents that can be scored."""

    prompts: list[str]
    documents: list[int]  # of each prompt, its index in the request
    cut_tokens: dict[int, int]  # by document: how many tokens of query and document are left out
    too_long: dict[int, str]  # by document: why it is not scored


def fit(
    tokenizer: Any,
    prompts_of: Callable[[str, Sequence[str]], list[str]],
    query: str,
    passages: Sequence[str],
    cuts: Cuts,
    longest_tokens: int,
) -> Fitted:
    """Cuts what is asked to be cut, and sorts out documents whose prompt is longer than `longest_tokens`.

    Takes the tokenizer's time only where something is asked for or a prompt has more bytes than tokens may be in it.
    Raises BadRequestError if query and template leave no room.

    Args:
        prompts_of: renders query and documents.
    """
    query, n_cut_of_query = _cut(tokenizer, query, cuts.query)
    limit = min(cuts.prompt or longest_tokens, longest_tokens)
    found = Fitted([], [], {}, {})
    for index, passage in enumerate(passages):
        text, n_cut = _cut(tokenizer, passage, cuts.document)
        (prompt,) = prompts_of(query, [text])
        while len(prompt.encode(errors="replace")) > limit and (n := len(tokenizer.encode(prompt))) > limit:
            if cuts.prompt is None and not cuts.to_fit:
                found.too_long[index] = (
                    f"its prompt has {n} tokens, and this server takes at most {limit}: shorten it, or give max_tokens_per_doc"
                )
                break
            n_left = len(tokenizer.encode(text, add_special_tokens=False)) - (n - limit)
            if n_left < 1:
                raise BadRequestError(
                    f"query and template leave no room for documents[{index}] in a prompt of {limit} tokens: shorten the query"
                )
            text, n_more = _cut(tokenizer, text, n_left)
            n_cut += n_more
            (prompt,) = prompts_of(query, [text])
        if index in found.too_long:
            continue
        found.prompts.append(prompt)
        found.documents.append(index)
        if n_cut + n_cut_of_query:
            found.cut_tokens[index] = n_cut + n_cut_of_query
    return found


def _cut(tokenizer: Any, text: str, most: int | None) -> tuple[str, int]:
    """Returns the beginning of a text, and how many tokens are left out."""
    if most is None or len(text.encode(errors="replace")) <= most:
        return text, 0
    if not getattr(tokenizer, "is_fast", False):
        ids = tokenizer.encode(text, add_special_tokens=False)
        return (text, 0) if len(ids) <= most else (tokenizer.decode(ids[:most]), len(ids) - most)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ends = [end for _, end in encoded["offset_mapping"]]
    return (text, 0) if len(ends) <= most else (text[: ends[most - 1]], len(ends) - most)
