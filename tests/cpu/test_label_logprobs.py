"""The log-probabilities of labels, without waiting for a device."""

from __future__ import annotations

import inspect

import pytest
import torch
from sglang.srt.layers import logprob_processor

from sgl_prefill.port.runner import logits

ASKED = [[3, 1], None, [2], [], [0, 4, 4]]


def _sglangs(logprobs: torch.Tensor) -> tuple[list[torch.Tensor], list[list[int]]]:
    """Whatever has been hooked in this process."""
    found: tuple[list[torch.Tensor], list[list[int]]] = inspect.unwrap(
        logprob_processor.get_token_ids_logprobs_batch_optimized
    )(logprobs, ASKED)
    return found


def test_the_gathered_values_are_sglangs() -> None:
    """For requests that ask for several tokens, one, and none."""
    logprobs = torch.randn(5, 6)
    values, tokens = logits.around_gather(None, logprobs, ASKED)
    expected, expected_tokens = _sglangs(logprobs)
    assert [value.tolist() for value in values] == [value.tolist() for value in expected]
    assert [list(of_request) for of_request in tokens] == expected_tokens


def test_gathering_asks_the_device_for_nothing() -> None:
    """A tensor without memory has no value to wait for: SGLang's own function ends at the first."""
    logprobs = torch.empty(5, 6, device="meta")
    values, _ = logits.around_gather(None, logprobs, ASKED)
    assert [len(value) for value in values] == [2, 0, 1, 0, 3]
    with pytest.raises(RuntimeError, match="meta"):
        _sglangs(logprobs)


def test_nobody_asking_is_no_error() -> None:
    values, tokens = logits.around_gather(None, torch.randn(2, 3), [None, []])
    assert [len(value) for value in values] == [0, 0]
    assert tokens == [[], []]
