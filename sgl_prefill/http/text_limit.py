"""Limits on the length of texts: above the first they are tokenised in another thread, above the second refused untokenised."""

from __future__ import annotations

import json
from typing import Any

# A tokenizer reads some megabytes a second: shorter texts take a few milliseconds.
OFF_LOOP_CHARACTERS = 20_000
# Limit on a text that may be cut, per token of the longest prompt. Prose has some 4.5 characters a token.
CUT_CHARACTERS_PER_TOKEN = 64


def longest_token_characters(tokenizer: Any) -> int | None:
    """Returns the largest number of characters that one token can stand for; None where it is unlimited.

    It is limited for byte-level BPE without a normalizer (most models since GPT-2). Other tokenizers join blanks, or have one
    token for everything unknown.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    parts = json.loads(backend.to_str())
    if parts["model"]["type"] != "BPE" or parts["normalizer"] is not None or not _is_byte_level(parts["pre_tokenizer"]):
        return None
    added = parts["added_tokens"]
    if any(token["lstrip"] or token["rstrip"] for token in added):  # such a token includes any number of blanks
        return None
    # A character of the vocabulary is one byte of a text, so at most one character.
    return max(map(len, [*parts["model"]["vocab"], *(token["content"] for token in added)]))


def _is_byte_level(pre_tokenizer: dict[str, Any] | None) -> bool:
    if pre_tokenizer is None:
        return False
    if pre_tokenizer["type"] == "Sequence":
        return any(_is_byte_level(part) for part in pre_tokenizer["pretokenizers"])
    return bool(pre_tokenizer["type"] == "ByteLevel")
