"""Compares the token ids of random texts through the text cache with those of the tokenizer itself."""

from __future__ import annotations

import random
import time
from concurrent.futures import ProcessPoolExecutor
from typing import Any
from unittest import mock

from transformers import AutoTokenizer

from sgl_prefill.examples import demo_model
from sgl_prefill.http import text_cache
from sgl_prefill.http.text_cache import TextCache
from tests.support import nasty_texts, small_tokenizers

# The demo model's, and small ones of the families with other algorithms, normalizers or splits.
TOKENIZERS = ("demo", "llama3", "deepseek", "gemma", "unigram", "bert")
BLOCK = 160  # characters; servers have 512: shorter blocks have more cuts
TEXTS_OF_SEQUENCE = 20
CACHE_BYTES = 200_000  # so that blocks are forgotten too


def one_token_words(tokenizer: Any) -> list[str]:
    """Words with a blank before them that are one token each, in any order one after the other."""
    tokens = {tokenizer.decode([token_id]) for token_id in range(2000, 20_000)}
    return sorted(word for word in tokens if word.startswith(" ") and word[1:].isascii() and word[1:].isalpha())


def compare(n_texts: int) -> list[dict[str, Any]]:
    """A row for each tokenizer; two at a time."""
    with ProcessPoolExecutor(2) as processes:
        return list(processes.map(_compare, TOKENIZERS, [n_texts // len(TOKENIZERS)] * len(TOKENIZERS)))


def _compare(name: str, n_texts: int) -> dict[str, Any]:
    tokenizer: Any = AutoTokenizer.from_pretrained(demo_model.ensure()) if name == "demo" else None
    if tokenizer is None:
        tokenizer = small_tokenizers.hugging_face(small_tokenizers.FAMILIES[name]())
    added = [token.content for token in tokenizer.backend_tokenizer.get_added_tokens_decoder().values()]
    chance, n_different, n_done, started = random.Random(name), 0, 0, time.perf_counter()
    with mock.patch.multiple(text_cache, BLOCK=BLOCK, LEAST=4 * BLOCK):
        texts = TextCache(tokenizer, CACHE_BYTES)
        while n_done < n_texts:
            n_sequence = min(TEXTS_OF_SEQUENCE, n_texts - n_done)
            for text in nasty_texts.sequence(chance, n_sequence, 8 * BLOCK, BLOCK, added):
                n_different += texts.encode(text) != tokenizer(text).input_ids
            n_done += n_sequence
    counters = texts.counters
    return {
        "tokenizer": name,
        "texts": n_done,
        "hits": counters.hits,
        "encoded_again": counters.mismatches,
        "cached_share": counters.cached_tokens / counters.tokens,
        "different": n_different,
        "seconds": time.perf_counter() - started,
        **({} if texts.why_not is None else {"why_not": texts.why_not}),
    }
