"""Sequences that are computed behind one prompt, in its forward pass: what several of them begin with is computed once.

Labels of several tokens: P(label | prompt) is the product of P(token | prompt, the label's tokens before it). A label's last
token is only asked for behind the one before it: a label of one token computes nothing beside its prompt. Questions about one
state: the prompt is what all of them begin with, and each is asked for the codes of its answers.
"""

from __future__ import annotations

import bisect
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

Tokens: TypeAlias = tuple[int, ...]
# Each a sequence behind the prompt, () for the prompt itself, with the tokens whose log-probabilities after it are needed. Every
# sequence begins with the one before it.
Asked: TypeAlias = Sequence[tuple[Tokens, Tokens]]


def asked_of_label(tokens: Tokens) -> Asked:
    """Each of a label's tokens, behind those before it."""
    return [(tokens[:n], (token,)) for n, token in enumerate(tokens)]


class Branch(NamedTuple):
    """One sequence of the forward pass."""

    tokens: Tokens
    parent: int  # the place of the branch that it continues, -1 behind the prompt
    n_before: int  # tokens of the branches before it
    asked: tuple[Tokens, ...]  # of its last tokens, one entry each: tokens whose log-probabilities after it are needed


class Branches:
    def __init__(self, all_asked: Iterable[Asked]) -> None:
        together: dict[Tokens, dict[int, None]] = {(): {}}
        for asked in all_asked:
            for sequence, tokens in asked:
                together.setdefault(sequence, {}).update(dict.fromkeys(tokens))
        self._columns = {
            sequence: {token: n for n, token in enumerate(tokens)} for sequence, tokens in together.items()
        }
        self._rows: dict[Tokens, int] = {}  # by sequence, of what is asked behind branches
        self._n_rows = 0
        self.first: Tokens = tuple(self._columns[()])  # asked for behind the prompt
        self.branches: list[Branch] = []
        self._grow(sorted(filter(None, together)), -1, 0)

    @property
    def n_tokens(self) -> int:
        return sum(len(branch.tokens) for branch in self.branches)

    def logprobs(self, asked: Asked, first: Sequence[float], behind: Sequence[Sequence[float]]) -> list[float]:
        """Returns what one caller asked for, in its order.

        first: of the tokens of `first`, in that order; behind: of each entry of the branches' `asked`, in their order.
        """
        return [
            (behind[self._rows[sequence]] if sequence else first)[self._columns[sequence][token]]
            for sequence, tokens in asked
            for token in tokens
        ]

    def _grow(self, sequences: Sequence[Tokens], parent: int, n_before: int) -> None:
        """Adds branches for sequences that begin with the same `n_before` tokens, and have more; sorted."""
        while sequences:
            first = sequences[0][n_before]
            n_alike = next((n for n, one in enumerate(sequences) if one[n_before] != first), len(sequences))
            alike, sequences = sequences[:n_alike], sequences[n_alike:]
            whole = next(
                one for one, following in zip(alike, [*alike[1:], ()], strict=True) if not _begins(following, one)
            )
            end = n_shared(whole, alike[-1])
            within = [one for one in alike if len(one) <= end]
            asked: list[Tokens] = [()] * (end - len(within[0]) + 1 if within else 0)
            for one in within:
                place = len(one) - len(within[0])
                asked[place] = tuple(self._columns[one])
                self._rows[one] = self._n_rows + place
            self._n_rows += len(asked)
            self.branches.append(Branch(whole[n_before:end], parent, n_before, tuple(asked)))
            self._grow([one for one in alike if len(one) > end], len(self.branches) - 1, end)


def n_shared(one: Tokens, other: Tokens) -> int:
    """Returns how many tokens both begin with."""
    return len(os.path.commonprefix((one, other)))


def _begins(sequence: Tokens, beginning: Tokens) -> bool:
    return sequence[: len(beginning)] == beginning


class _Group:
    """The size of the branches of some sequences behind one prompt, as they are added."""

    def __init__(self) -> None:
        self._sequences: list[Tokens] = []  # sorted
        self._cuts: set[Tokens] = set()  # where sequences part
        self._n_ends = self.n_tokens = 0

    @property
    def n_branches(self) -> int:
        return self._n_ends + len(self._cuts)

    def add(self, sequence: Tokens) -> None:
        place = bisect.bisect_left(self._sequences, sequence)
        before = self._sequences[place - 1] if place else ()
        after = self._sequences[place] if place < len(self._sequences) else ()
        self._sequences.insert(place, sequence)
        shared = max(n_shared(before, sequence), n_shared(sequence, after))
        self.n_tokens += len(sequence) - shared
        if shared == len(sequence) or (before and _begins(sequence, before) and not _begins(after, before)):
            return  # it begins another, or continues the end of one
        self._n_ends += 1
        if shared:
            self._cuts.add(sequence[:shared])


def divide(sequences: Sequence[Sequence[Tokens]], most_branches: int, most_tokens: int) -> list[list[int]]:
    """Divides sequences into as few groups as their order allows, none with more branches or tokens than that.

    Args:
        sequences: of each prompt the same ones, as they are behind it. One that is too long alone forms a group.

    Returns the places of the sequences of each group. Sequences with a common beginning are neighbours.
    """
    groups: list[list[int]] = []
    sizes: list[_Group] = []
    for place in sorted(range(len(sequences[0])), key=lambda place: [of_prompt[place] for of_prompt in sequences]):
        for size, of_prompt in zip(sizes, sequences, strict=bool(sizes)):
            size.add(of_prompt[place])
        if not groups or any(size.n_branches > most_branches or size.n_tokens > most_tokens for size in sizes):
            groups.append([])
            sizes = [_Group() for _ in sequences]
            for size, of_prompt in zip(sizes, sequences, strict=True):
                size.add(of_prompt[place])
        groups[-1].append(place)
    return groups


def told_apart(logprobs: Mapping[Tokens, float]) -> dict[Tokens, float]:
    """Returns log P(the model writes this answer, and no longer one of these that begins with it): no text counts twice.

    logprobs: log P(what the model writes begins with this answer).
    """
    longer: dict[Tokens, list[Tokens]] = {answer: [] for answer in logprobs}
    for answer in logprobs:
        shorter = next((answer[:n] for n in range(len(answer) - 1, 0, -1) if answer[:n] in longer), None)
        if shorter is not None:  # the longest: what it counts for those before it, it counts once
            longer[shorter].append(answer)
    return {answer: _without(logprobs[answer], [logprobs[one] for one in longer[answer]]) for answer in logprobs}


def _without(logprob: float, parts: Sequence[float]) -> float:
    if not parts or logprob == -math.inf:
        return logprob
    share = math.fsum(math.exp(part - logprob) for part in parts)
    return logprob + math.log1p(-share) if share < 1 else -math.inf


def log_sum(logprobs: Sequence[float]) -> float:
    """Returns the logarithm of the sum of probabilities."""
    top = max(logprobs)
    return top if top == -math.inf else top + math.log(math.fsum(math.exp(one - top) for one in logprobs))
