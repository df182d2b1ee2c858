"""How branches behind prompts are divided into requests."""

from __future__ import annotations

import pytest
from sglang.srt.managers.io_struct import GenerateReqInput

from sgl_prefill.core.branches import asked_of_label
from sgl_prefill.http.branch_requests import FEWEST_TOKENS, BranchRequests

# Of 100 tokens each, of which the last is only asked for.
LABELS = [asked_of_label((label, *range(1000, 1099))) for label in range(10)]


@pytest.mark.parametrize(
    ("prompt", "longest_input", "n_requests"),
    [
        ([1] * 900, 2000, 1),
        ([1] * 900, 1200, 4),  # three labels beside the prompt
        ("x" * 900, 1200, 4),
        ("x" * 4000, 1200, 5),  # its tokens are not known: perhaps a few hundred
    ],
)
def test_labels_are_divided_where_they_do_not_fit_beside_their_prompt(
    prompt: str | list[int], longest_input: int, n_requests: int
) -> None:
    requests = BranchRequests(GenerateReqInput(), [prompt], [LABELS], longest_input)
    assert len(requests.requests) == n_requests
    assert sum(requests.n_tokens) == 990


def test_a_prompt_that_is_too_long_is_refused_by_few_requests() -> None:
    """The refusal comes later, from the tokenizer manager."""
    requests = BranchRequests(GenerateReqInput(), [[1] * 5000], [LABELS], 1200)
    assert len(requests.requests) == -(-990 // (FEWEST_TOKENS // 99 * 99))
