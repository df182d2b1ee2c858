"""What is asked behind prompts as requests to the scheduler: branches of one forward pass (`core.branches`), divided where they
are too many for a step.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

from sglang.srt.managers.io_struct import GenerateReqInput

from sgl_prefill.core.branches import Asked, Branches, divide
from sgl_prefill.core.packing import MOST_BRANCHES
from sgl_prefill.http.request_checks import PER_PROMPT_FIELDS, count_prompts
from sgl_prefill.http.scored_prompt import logprobs_of
from sgl_prefill.port.runner import branch_rows

# Each branch lists all KV slots of its prompt, so long prompts get fewer.
MOST_NAMED_SLOTS = 4 << 20
FEWEST_BRANCHES = 64
# Tokens of a step's branches, some 32 questions, or as many as its prompt has: so branches at most double the time of a long
# prompt. Others wait for such a step.
MOST_TOKENS = 1_280
# At least so many behind a text, whose tokens are not counted yet.
FEWEST_TOKENS = 256
ANY_TOKEN = 0  # asked for where nothing else is asked behind the prompt: each request asks for something


class BranchRequests:
    """As few requests as the branches need, each with all prompts."""

    def __init__(
        self,
        obj: GenerateReqInput,
        prompts: Sequence[str | list[int]],
        asked: Sequence[Sequence[Asked]],
        longest_input_tokens: int,
    ) -> None:
        """
        Args:
            obj: becomes the first of the requests, and is changed.
            asked: per prompt the same number of entries.
            longest_input_tokens: limit of a prompt and its branches together.
        """
        self._asked = asked
        longest = max(len(prompt.encode()) if isinstance(prompt, str) else len(prompt) for prompt in prompts)
        most_branches = min(max(MOST_NAMED_SLOTS // longest, FEWEST_BRANCHES), MOST_BRANCHES)
        sequences = [[one[-1][0] for one in of_prompt] for of_prompt in asked]
        room = longest_input_tokens - longest
        if room <= 0 or any(isinstance(prompt, str) for prompt in prompts):  # a text has fewer tokens than bytes
            room = max(room, FEWEST_TOKENS)
        most_tokens = min(max(longest, MOST_TOKENS), room)
        self._groups = divide(sequences, most_branches, most_tokens)
        self._branches = [
            [Branches([of_prompt[place] for place in group]) for of_prompt in asked] for group in self._groups
        ]
        self.requests = list(self._make(obj))

    def _make(self, obj: GenerateReqInput) -> Iterator[GenerateReqInput]:
        for index, of_prompts in enumerate(self._branches):
            one = obj if index == 0 else _copy(obj)
            first = [list(branches.first) or [ANY_TOKEN] for branches in of_prompts]
            one.token_ids_logprob = first if count_prompts(one) is not None else first[0]
            branch_rows.attach(one, of_prompts)
            yield one

    @property
    def n_tokens(self) -> list[int]:
        """The number of tokens that are computed beyond the prompt, per prompt."""
        return [sum(of_prompts[place].n_tokens for of_prompts in self._branches) for place in range(len(self._asked))]

    def logprobs(self, outputs: Sequence[Sequence[dict[str, Any]]]) -> list[list[list[float]]]:
        """Returns the log-probabilities of each entry of `asked`, per prompt. outputs: per request, per prompt."""
        found: list[list[list[float]]] = [[[]] * len(of_prompt) for of_prompt in self._asked]
        for group, of_prompts, of_request in zip(self._groups, self._branches, outputs, strict=True):
            for place, (branches, output) in enumerate(zip(of_prompts, of_request, strict=True)):
                by_id = logprobs_of(output)
                first = [by_id[token_id] for token_id in branches.first]
                behind = output["meta_info"].pop(branch_rows.FACT, [])
                for index in group:
                    found[place][index] = branches.logprobs(self._asked[place][index], first, behind)
        return found


def _copy(obj: GenerateReqInput) -> GenerateReqInput:
    """Copies a request without its ids. Lists are copied, since SGLang changes requests in place."""
    one = copy.copy(obj)
    one.rid = None
    for name in (*PER_PROMPT_FIELDS, "text", "input_ids"):
        setattr(one, name, copy.copy(getattr(one, name)))
    return one
