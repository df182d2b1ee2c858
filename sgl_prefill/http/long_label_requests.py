"""Labels of any length as requests to the scheduler: one tree of answer tokens per prompt, divided if too large for a step."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from sglang.srt.managers.io_struct import GenerateReqInput

from sgl_prefill.core.answer_tree import AnswerTree, Tokens, divide
from sgl_prefill.core.packing import MOST_ANSWER_TOKENS
from sgl_prefill.http.request_checks import PER_PROMPT_FIELDS, check_has_logprobs, count_prompts
from sgl_prefill.port.runner import answer_trees

if TYPE_CHECKING:
    from sgl_prefill.port.runner.answer_trees import Logprobs

# Each token of a tree lists all KV slots of its prompt, so long prompts get smaller trees.
MOST_NAMED_SLOTS = 4 << 20
FEWEST_NODES = 64  # lower bound of the largest tree, so that every label fits into one


class TreeRequests:
    """The requests for answers of several tokens: as few as the trees need, each with all prompts."""

    def __init__(
        self, obj: GenerateReqInput, prompts: Sequence[str | list[int]], answers: Sequence[Sequence[Tokens]]
    ) -> None:
        """
        Args:
            obj: becomes the first of the requests, and is changed.
            answers: per prompt, all different.
        """
        self._answers = answers
        longest = max(len(prompt.encode()) if isinstance(prompt, str) else len(prompt) for prompt in prompts)
        most_nodes = min(max(MOST_NAMED_SLOTS // longest, FEWEST_NODES), MOST_ANSWER_TOKENS)
        self._groups = divide(answers, most_nodes)
        self._trees = [
            [AnswerTree([of_prompt[place] for place in group]) for of_prompt in answers] for group in self._groups
        ]
        self.requests = list(self._make(obj))

    def _make(self, obj: GenerateReqInput) -> Iterator[GenerateReqInput]:
        for index, trees in enumerate(self._trees):
            one = obj if index == 0 else _copy(obj)
            first = [list(tree.first) for tree in trees]
            one.token_ids_logprob = first if count_prompts(one) is not None else first[0]
            answer_trees.attach(one, trees)
            yield one

    @property
    def n_nodes(self) -> list[int]:
        """The number of answer tokens that are computed, per prompt."""
        return [sum(len(trees[place].nodes) for trees in self._trees) for place in range(len(self._answers))]

    def logprobs(self, outputs: Sequence[Sequence[dict[str, Any]]]) -> list[dict[Tokens, float]]:
        """Returns the log-probability of each answer, per prompt. outputs: per request, per prompt."""
        found: list[dict[Tokens, float]] = [{} for _ in self._answers]
        for group, trees, of_request in zip(self._groups, self._trees, outputs, strict=True):
            for place, (tree, output) in enumerate(zip(trees, of_request, strict=True)):
                first, behind = _read(tree, output["meta_info"])
                for index in group:
                    answer = self._answers[place][index]
                    found[place][answer] = sum(tree.logprobs(answer, first, behind))
        return found


def _read(tree: AnswerTree, meta_info: dict[str, Any]) -> tuple[list[float], Logprobs]:
    check_has_logprobs(meta_info)
    by_id = {token_id: logprob for logprob, token_id, _ in meta_info["output_token_ids_logprobs"][0]}
    return [by_id[token_id] for token_id in tree.first], meta_info.pop(answer_trees.FACT, [])


def _copy(obj: GenerateReqInput) -> GenerateReqInput:
    """Copies a request without its ids. Lists are copied, since SGLang changes requests in place."""
    one = copy.copy(obj)
    one.rid = None
    for name in (*PER_PROMPT_FIELDS, "text", "input_ids"):
        setattr(one, name, copy.copy(getattr(one, name)))
    return one
