"""Texts that are too long for a tokenizer to be asked in the event loop, or to be asked at all."""

from __future__ import annotations

import json
from typing import Any

# A tokenizer reads some megabytes a second: shorter texts take a few milliseconds.
OFF_LOOP_CHARACTERS = 20_000
BYTES_PER_CHARACTER = 12  # of JSON, at most: two escapes of UTF-16
# Of a text that may be cut, for each token that a prompt may have: of prose some 14 times as much as fits.
CUT_CHARACTERS_PER_TOKEN = 64


def has_long_text(body: bytes, limit_bytes: int) -> bool:
    """Says whether JSON holds more than so many bytes without a quote, in a few milliseconds of 30 MB."""
    start = 0  # after a quote
    while start + limit_bytes < len(body):
        quote = body.rfind(b'"', start, start + limit_bytes + 1)
        if quote < 0:
            return True
        start = quote + 1
    return False


def longest_token_characters(tokenizer: Any) -> int | None:
    """Returns how many characters of a text one token stands for at most; None where there is no such number.

    There is one where every byte of a text is a byte of a token: byte-level BPE that changes no text before it (most models
    since GPT-2). Others join blanks, or have one token for all that they do not know.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    parts = json.loads(backend.to_str())
    if parts["model"]["type"] != "BPE" or parts["normalizer"] is not None or not _is_byte_level(parts["pre_tokenizer"]):
        return None
    added = parts["added_tokens"]
    if any(token["lstrip"] or token["rstrip"] for token in added):  # takes the blanks around it with it
        return None
    # Of bytes that stand for themselves, one character in the vocabulary is one byte, and at most one character of a text.
    return max(map(len, [*parts["model"]["vocab"], *(token["content"] for token in added)]))


def _is_byte_level(pre_tokenizer: dict[str, Any] | None) -> bool:
    if pre_tokenizer is None:
        return False
    if pre_tokenizer["type"] == "Sequence":
        return any(_is_byte_level(part) for part in pre_tokenizer["pretokenizers"])
    return bool(pre_tokenizer["type"] == "ByteLevel")
