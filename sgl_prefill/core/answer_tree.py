"""Answers of several tokens behind one prompt, as a tree: tokens with which several answers begin are computed once.

P(answer | prompt) is the product of P(token | prompt, the answer's tokens before it). The last token of an answer need not be
computed, only asked for behind the one before it: an answer of one token computes nothing beside its prompt.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

Tokens: TypeAlias = tuple[int, ...]  # of one answer


class Node(NamedTuple):
    """A token that is computed behind the prompt."""

    token: int
    parent: int  # the place of the node before it, -1 behind the prompt
    depth: int  # nodes before it
    asked_tokens: tuple[int, ...]  # tokens whose log-probabilities after this node are needed


class AnswerTree:
    """The tree of some answers, all different and none empty."""

    def __init__(self, answers: Sequence[Tokens]) -> None:
        beginnings: dict[Tokens, dict[int, None]] = {(): {}}  # and what is asked for behind each
        for answer in answers:
            for n_before, token in enumerate(answer):
                beginnings.setdefault(answer[:n_before], {})[token] = None
        self._places = {beginning: place for place, beginning in enumerate(beginnings, -1)}
        self.first: tuple[int, ...] = tuple(beginnings[()])  # asked for behind the prompt
        self.nodes = [
            Node(beginning[-1], self._places[beginning[:-1]], len(beginning) - 1, tuple(asked))
            for beginning, asked in beginnings.items()
            if beginning
        ]

    def logprobs(self, answer: Tokens, first: Sequence[float], behind: Sequence[Sequence[float]]) -> list[float]:
        """Returns the log-probability of each of an answer's tokens.

        first: of the tokens of `first`, in that order; behind: of what each node asks for, in the order of the nodes.
        """
        found = []
        for n_before, token in enumerate(answer):
            place = self._places[answer[:n_before]]
            asked, values = (self.first, first) if place < 0 else (self.nodes[place].asked_tokens, behind[place])
            found.append(values[asked.index(token)])
        return found


def divide(answers: Sequence[Sequence[Tokens]], most_nodes: int) -> list[list[int]]:
    """Divides answers into as few groups as their order allows, so that the tree of none has more nodes than that.

    Args:
        answers: of each prompt the same answers, as they are behind it; no answer is longer than `most_nodes` + 1.

    Returns the places of the answers of each group. Those that begin alike come together.
    """
    groups: list[list[int]] = []
    beginnings: list[set[Tokens]] = []
    for place in sorted(range(len(answers[0])), key=lambda place: [of_prompt[place] for of_prompt in answers]):
        new = [{of_prompt[place][:n] for n in range(1, len(of_prompt[place]))} for of_prompt in answers]
        if groups and all(len(known | more) <= most_nodes for known, more in zip(beginnings, new, strict=True)):
            groups[-1].append(place)
            beginnings = [known | more for known, more in zip(beginnings, new, strict=True)]
        else:
            groups.append([place])
            beginnings = new
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
