"""Which tokens of a prompt go where the whole is too long: those of parts that may be cut, at the sides that they allow.

The text of all parts together is tokenised once, and tokens are taken out of the result: what stays is bit for bit what the model
would have read uncut, and up to the first cut it is the same prompt, which the prefix cache may hold.

    characters  [ part 0, keep: true )[ part 1, keep: "start"  )[ part 2, keep: true )
    tokens      [ never cut         )S[ own of part 1         )S[ never cut         )     S: stands in two parts, is never cut
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

Keep = Literal[True, "start", "end", "middle"]
KEEPS: tuple[Keep, ...] = (True, "start", "end", "middle")
Offsets = Sequence[tuple[int, int]]  # of each token: its first character, and the one after its last; in order


class Span(NamedTuple):
    """A part, by its place in the text. Parts are in order and do not overlap. Text between them is never cut."""

    start: int  # characters
    end: int
    keep: (
        Keep  # what stays where it must be cut: all of it, its start, its end, or its middle (it is cut on both sides)
    )


class PartTokens(NamedTuple):
    """What became of a part. A token of two parts counts for the one that is kept whole, else for the first."""

    kept_tokens: int
    cut_tokens: int


class Cut(NamedTuple):
    """What is taken out of a prompt's tokens."""

    removed: list[range]  # of tokens, in order, none of them empty; nothing where the prompt fits
    parts: list[PartTokens]  # in the order of the parts

    def apply(self, token_ids: Sequence[int]) -> list[int]:
        """Returns what is left of the tokens."""
        left, start = list[int](), 0
        for gone in self.removed:
            left += token_ids[start : gone.start]
            start = gone.stop
        return left + list(token_ids[start:])


class CannotCutError(ValueError):
    """The tokens that are never cut are more than the limit, or nothing would be left."""

    def __init__(self, fixed_tokens: int) -> None:
        super().__init__(f"{fixed_tokens} tokens cannot be cut")
        self.fixed_tokens = fixed_tokens


def cut(offsets: Offsets, spans: Sequence[Span], limit_tokens: int) -> Cut:
    """Returns what must go so that at most so many tokens stay; the part that is the longest gives first, see `share`.

    A character of several tokens goes or stays as a whole, so that up to three tokens more may go than must.

    Raises CannotCutError.
    """
    own = _own_tokens(offsets, spans)
    counts = _counts(offsets, spans, own)
    if len(offsets) <= limit_tokens:
        return Cut([], [PartTokens(n_tokens, 0) for n_tokens in counts])
    lengths = [0 if span.keep is True else len(tokens) for span, tokens in zip(spans, own, strict=True)]
    fixed_tokens = len(offsets) - sum(lengths)
    if fixed_tokens > limit_tokens:
        raise CannotCutError(fixed_tokens)
    removed, parts = list[range](), list[PartTokens]()
    for span, tokens, n_left, count in zip(
        spans, own, share(lengths, limit_tokens - fixed_tokens), counts, strict=True
    ):
        gone = [] if span.keep is True else _removed(offsets, tokens, span.keep, n_left)
        n_gone = sum(map(len, gone))
        removed += gone
        parts.append(PartTokens(count - n_gone, n_gone))
    if sum(map(len, removed)) == len(offsets):
        raise CannotCutError(fixed_tokens)
    return Cut(removed, parts)


def share(lengths: Sequence[int], room: int) -> list[int]:
    """Returns how much of each stays, of the given lengths and at most `room` together.

    All are cut down to one common length, and those that are no longer stay as they are. What is left over then, less than one
    for each, goes to the first ones.
    """
    level, rest = max(lengths, default=0), room
    for n_shorter, length in enumerate(sorted(lengths)):
        fair = rest // (len(lengths) - n_shorter)
        if length > fair:
            level = fair
            break
        rest -= length
    kept = [min(length, level) for length in lengths]
    rest = room - sum(kept)
    for index, length in enumerate(lengths):
        if rest > 0 and kept[index] < length:
            kept[index] += 1
            rest -= 1
    return kept


def _own_tokens(offsets: Offsets, spans: Sequence[Span]) -> list[range]:
    """Returns, for each part, the tokens of characters that are its alone."""
    own, taken = list[range](), 0
    for span in spans:
        start = max(taken, bisect.bisect_left(offsets, span.start, key=lambda token: token[0]))
        end = bisect.bisect_right(offsets, span.end, key=lambda token: token[1])
        while start < end and not _begins_character(offsets, start):
            start += 1
        while start < end < len(offsets) and not _begins_character(offsets, end):
            end -= 1
        own.append(range(start, max(start, end)))
        taken = own[-1].stop
    return own


def _begins_character(offsets: Offsets, token: int) -> bool:
    """Says whether the token before ends where this one begins: a character of several tokens is in the offsets of each."""
    return token == 0 or offsets[token][0] >= offsets[token - 1][1]


def _counts(offsets: Offsets, spans: Sequence[Span], own: Sequence[range]) -> list[int]:
    """Returns how many tokens count for each part: its own, and of those that stand in several parts each for one."""
    sharers: dict[int, list[int]] = {}  # by token
    for index, (span, tokens) in enumerate(zip(spans, own, strict=True)):
        for token in _shared_tokens(offsets, span, tokens) if span.start < span.end else ():
            sharers.setdefault(token, []).append(index)
    counts = [len(tokens) for tokens in own]
    for indexes in sharers.values():
        counts[next((index for index in indexes if spans[index].keep is True), indexes[0])] += 1
    return counts


def _shared_tokens(offsets: Offsets, span: Span, own: range) -> Iterator[int]:
    """Yields the tokens that hold something of a part and are not its own."""
    before, after = own.start - 1, own.stop
    while before >= 0 and offsets[before][1] > span.start:
        yield before
        before -= 1
    while after < len(offsets) and offsets[after][0] < span.end:
        yield after
        after += 1


def _removed(offsets: Offsets, tokens: range, keep: Keep, n_left: int) -> list[range]:
    """Returns which of a part's own tokens go, so that at most so many stay."""
    n_gone = len(tokens) - n_left
    if n_gone == 0:
        return []
    n_gone_before = {"start": 0, "end": n_gone, "middle": n_gone // 2}[str(keep)]
    start, end = tokens.start + n_gone_before, tokens.start + n_gone_before + n_left
    while start < end and start > tokens.start and not _begins_character(offsets, start):
        start += 1
    while start < end < tokens.stop and not _begins_character(offsets, end):
        end -= 1
    if start >= end:
        return [tokens]
    return [gone for gone in (range(tokens.start, start), range(end, tokens.stop)) if gone]
