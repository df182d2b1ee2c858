"""What is cut out of a prompt that is too long, on tokens drawn at random."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_prefill.core.prompt_parts import KEEPS, CannotCutError, Cut, PartTokens, Span, cut, share

# A token a character, and nobody's text around.
LETTERS = [(place, place + 1) for place in range(30)]


@st.composite
def tokenised(draw: st.DrawFn) -> tuple[list[tuple[int, int]], list[Span]]:
    """Tokens of up to 4 characters, characters of up to 3 tokens, and parts whose borders know nothing of either."""
    offsets, place = list[tuple[int, int]](), 0
    for n_characters, n_tokens in draw(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 3)), max_size=40)):
        end = place + n_characters
        offsets.append((place, end))
        offsets += [(end - 1, end)] * (n_tokens - 1 if n_characters > 0 else 0)
        place = end
    borders = sorted(draw(st.lists(st.integers(0, place), min_size=2, max_size=9)))
    keeps = draw(st.lists(st.sampled_from(KEEPS), min_size=len(borders) - 1, max_size=len(borders) - 1))
    return offsets, [Span(start, end, keep) for start, end, keep in zip(borders, borders[1:], keeps, strict=False)]


def part_cut(keep: object, limit_tokens: int, before: int = 3, after: int = 5) -> Cut:
    """One part of 20 tokens that may be cut, with others around it that may not."""
    spans = [Span(0, before, True), Span(before, before + 20, keep), Span(before + 20, before + 20 + after, True)]  # type: ignore[arg-type]
    return cut(LETTERS[: before + 20 + after], spans, limit_tokens)


@pytest.mark.parametrize(
    ("keep", "removed"),
    [("start", [range(16, 23)]), ("end", [range(3, 10)]), ("middle", [range(3, 6), range(19, 23)])],
)
def test_the_word_says_which_side_stays(keep: str, removed: list[range]) -> None:
    """7 of 28 tokens too many; of both sides the end gives the odd one."""
    found = part_cut(keep, 21)
    assert found.removed == removed
    assert found.parts == [PartTokens(3, 0), PartTokens(13, 7), PartTokens(5, 0)]


def test_a_prompt_that_fits_is_not_cut() -> None:
    assert part_cut("start", 28).removed == []


@pytest.mark.parametrize("limit_tokens", [7, 0, -3])
def test_what_is_kept_whole_and_does_not_fit_is_counted(limit_tokens: int) -> None:
    with pytest.raises(CannotCutError) as caught:
        part_cut("end", limit_tokens)
    assert caught.value.fixed_tokens == 8


def test_a_part_may_be_cut_to_nothing_but_not_a_prompt() -> None:
    assert part_cut("end", 8).parts[1] == PartTokens(0, 20)
    with pytest.raises(CannotCutError):
        cut([(0, 1)] * 3, [Span(0, 1, "end")], 2)  # one character of three tokens


def test_a_token_of_two_parts_is_never_cut_and_counts_for_the_one_that_is_kept() -> None:
    """Characters 0 to 5 are two parts, and the second of three tokens stands in both."""
    offsets, spans = [(0, 2), (2, 4), (4, 6)], [Span(0, 3, "start"), Span(3, 6, True)]
    found = cut(offsets, spans, 2)
    assert (found.removed, found.parts) == ([range(1)], [PartTokens(0, 1), PartTokens(2, 0)])
    both = [Span(0, 3, "start"), Span(3, 6, "end")]
    assert cut(offsets, both, 1).parts == [PartTokens(1, 1), PartTokens(0, 1)]


def test_a_character_of_several_tokens_is_cut_as_a_whole() -> None:
    """Three tokens are one character: one token too many takes all three, from either side."""
    offsets = [(0, 1), (1, 2), (1, 2), (1, 2), (2, 3)]
    assert cut(offsets, [Span(0, 2, "start"), Span(2, 3, True)], 4).removed == [range(1, 4)]
    assert cut(offsets, [Span(0, 1, True), Span(1, 3, "end")], 4).removed == [range(1, 4)]
    assert cut(offsets, [Span(0, 3, "middle")], 3).removed == [range(1), range(4, 5)]


@pytest.mark.parametrize(
    ("lengths", "room", "kept"),
    [
        ([10, 2, 7], 19, [10, 2, 7]),
        ([10, 2, 7], 16, [7, 2, 7]),
        ([10, 2, 7], 13, [6, 2, 5]),
        ([10, 2, 7], 4, [2, 1, 1]),
        ([0, 5, 0], 3, [0, 3, 0]),
        ([], 5, []),
    ],
)
def test_the_longest_gives_first(lengths: list[int], room: int, kept: list[int]) -> None:
    """Down to one length for all; what does not divide stays with the first."""
    assert share(lengths, room) == kept


@given(st.lists(st.integers(0, 50), max_size=8), st.integers(0, 300))
def test_shares_use_all_the_room_and_differ_by_one_at_most(lengths: list[int], room: int) -> None:
    kept = share(lengths, room)
    assert sum(kept) == min(room, sum(lengths))
    assert all(0 <= n_kept <= length for n_kept, length in zip(kept, lengths, strict=True))
    cut_ones = [n_kept for n_kept, length in zip(kept, lengths, strict=True) if n_kept < length]
    assert not cut_ones or max(kept) - min(cut_ones) <= 1


def holds_anything_of(span: Span, token: tuple[int, int]) -> bool:
    return span.start < span.end and token[0] < span.end and token[1] > span.start


@given(tokenised(), st.integers(-1, 70))
def test_only_what_may_be_cut_is_cut_and_only_where_it_must(
    prompt: tuple[list[tuple[int, int]], list[Span]], limit_tokens: int
) -> None:
    """Kept parts lose no token, nothing is longer than the limit, what fits stays whole, no character is parted, each token
    counts once, and no more goes than must, but for what is left of characters."""
    offsets, spans = prompt
    try:
        found = cut(offsets, spans, limit_tokens)
    except CannotCutError as error:
        is_possible = (
            error.fixed_tokens <= limit_tokens and max(error.fixed_tokens, limit_tokens - 2 * 2 * len(spans)) > 0
        )
        assert len(offsets) > limit_tokens
        assert not is_possible
        return
    left = found.apply(range(len(offsets)))
    gone = [token for removed in found.removed for token in removed]
    assert sorted(gone + left) == list(range(len(offsets)))
    assert left == sorted(left)
    assert len(left) <= limit_tokens
    assert len(offsets) > limit_tokens or not gone
    kept_whole = [span for span in spans if span.keep is True]
    assert not any(holds_anything_of(span, offsets[token]) for span in kept_whole for token in gone)
    for removed in found.removed:
        for border in (removed.start, removed.stop):
            assert border in (0, len(offsets)) or offsets[border][0] >= offsets[border - 1][1], "a character is parted"
    assert [span.keep is True and part.cut_tokens > 0 for span, part in zip(spans, found.parts, strict=True)].count(
        True
    ) == 0
    assert sum(part.cut_tokens for part in found.parts) == len(gone)
    n_of_parts = sum(any(holds_anything_of(span, token) for span in spans) for token in offsets)
    n_without_characters = sum(start == end for start, end in offsets)
    assert n_of_parts <= sum(map(sum, found.parts)) <= n_of_parts + n_without_characters
    n_sides = sum(
        2 if span.keep == "middle" else 1 for span, part in zip(spans, found.parts, strict=True) if part.cut_tokens
    )
    assert not gone or limit_tokens - len(left) <= 2 * n_sides
