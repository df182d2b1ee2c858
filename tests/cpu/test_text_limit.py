"""How few tokens a text can be, by the kind of its tokenizer."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from sgl_prefill.http.request_checks import longest_token_characters


def tokenizer(pre_tokenizer: Any, normalizer: Any = None, added: AddedToken | None = None) -> Any:
    backend = Tokenizer(models.BPE(vocab={"a": 0, "b": 1, "ab": 2, "abab": 3}, merges=[("a", "b"), ("ab", "ab")]))
    backend.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        backend.normalizer = normalizer
    if added is not None:
        backend.add_tokens([added])
    return type("Fast", (), {"backend_tokenizer": backend})()


BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False)


@pytest.mark.parametrize("split", [BYTES, pre_tokenizers.Sequence([pre_tokenizers.Digits(), BYTES])])
def test_of_bytes_the_longest_token_tells(split: Any) -> None:
    assert longest_token_characters(tokenizer(split)) == 4
    assert longest_token_characters(tokenizer(split, added=AddedToken("<longest>"))) == 9


@pytest.mark.parametrize(
    "other",
    [
        tokenizer(pre_tokenizers.Whitespace()),
        tokenizer(BYTES, normalizer=normalizers.Strip()),
        tokenizer(BYTES, added=AddedToken("<mask>", lstrip=True)),
        object(),
    ],
)
def test_where_a_token_may_stand_for_any_length_nothing_is_said(other: Any) -> None:
    assert longest_token_characters(other) is None
