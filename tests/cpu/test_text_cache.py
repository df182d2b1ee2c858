"""Token ids of texts through the cache of text prefixes: those of the tokenizer, whatever was encoded before."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from sgl_prefill.http import text_cache
from sgl_prefill.http.text_cache import BLOCK, LEAST, TextCache
from sgl_prefill.http.text_cuts import find_cuts
from tests.support import nasty_texts, small_tokenizers

ROOM = 1 << 24
DEMO = Path.home() / ".cache/sgl_prefill/SmolLM2-135M-Instruct-bfloat16-v2/tokenizer.json"
FAMILIES = [*small_tokenizers.FAMILIES, "demo"]


@cache
def tokenizer_of(family: str) -> Any:
    if family != "demo":
        return small_tokenizers.hugging_face(small_tokenizers.FAMILIES[family]())
    if not DEMO.exists():
        pytest.skip(f"the demo model is not installed: {DEMO}")
    return small_tokenizers.hugging_face(Tokenizer.from_file(str(DEMO)))


@cache
def _cuts_of(family: str) -> Any:
    return find_cuts(tokenizer_of(family))


def cache_of(family: str, most_bytes: int) -> TextCache:
    with mock.patch.object(text_cache, "find_cuts", return_value=_cuts_of(family)):  # once for each tokenizer
        return TextCache(tokenizer_of(family), most_bytes)


def prose(seed: int, n: int = 6 * BLOCK) -> str:
    chance = random.Random(seed)
    words = ("".join(chance.choices("etaoinshrdlu", k=chance.randint(1, 8))) for _ in range(n))
    return " ".join(words)[:n]


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([160, BLOCK]), st.sampled_from([ROOM, 40_000, 8_000]))
def test_ids_are_those_of_the_whole_text(family: str, seed: int, block: int, most_bytes: int) -> None:
    """Blocks smaller than those of servers have more cuts in shorter texts."""
    tokenizer = tokenizer_of(family)
    added = [token.content for token in tokenizer.backend_tokenizer.get_added_tokens_decoder().values()]
    texts = cache_of(family, most_bytes)
    with mock.patch.multiple(text_cache, BLOCK=block, LEAST=4 * block):
        for text in nasty_texts.sequence(random.Random(seed), 6, 7 * block, block, added):
            assert texts.encode(text) == tokenizer(text).input_ids
            assert texts.counters.held_bytes <= most_bytes
        assert texts.encode(text, add_special_tokens=False) == tokenizer(text, add_special_tokens=False).input_ids


@pytest.mark.parametrize("family", FAMILIES)
def test_a_shared_prefix_is_cached_but_for_its_last_blocks(family: str) -> None:
    tokenizer = tokenizer_of(family)
    texts, shared = cache_of(family, ROOM), prose(0)
    assert texts.why_not is None
    texts.encode(shared + prose(1))
    assert texts.counters.cached_tokens == 0
    for seed in range(2, 5):
        before = texts.counters.cached_tokens
        text = shared + prose(seed)
        ids = texts.encode(text)
        assert ids == tokenizer(text).input_ids
        n_shared = len(tokenizer(shared).input_ids)
        assert n_shared * (len(shared) - 2 * BLOCK) / len(shared) < texts.counters.cached_tokens - before <= n_shared
    counters = texts.counters
    assert (counters.texts, counters.hits, counters.mismatches) == (4, 3, 0)
    assert counters.tokens == sum(len(tokenizer(shared + prose(seed)).input_ids) for seed in range(1, 5))


@pytest.mark.parametrize("family", FAMILIES)
def test_cached_tokens_do_not_depend_on_what_follows_the_last_shared_block(family: str) -> None:
    """Cuts keep away from the ends of blocks, so the comparison with the tokens of the cache never fails."""
    tokenizer, texts = tokenizer_of(family), cache_of(family, ROOM)
    chance, tails = random.Random(0), [piece for pieces in nasty_texts.ODD for piece in pieces]
    for seed in range(3):
        shared = (prose(seed)[: 5 * BLOCK - 3] + chance.choice(["x a", " ab", "ab ", "b\nc"]))[: 5 * BLOCK]
        texts.encode(shared + prose(99))
        for tail in chance.sample(tails, 12):
            text = shared + tail + prose(100, BLOCK)
            assert texts.encode(text) == tokenizer(text).input_ids
    assert texts.counters.mismatches == 0
    assert texts.counters.hits == texts.counters.texts - 3


def test_the_whole_text_is_found_again_in_other_scripts() -> None:
    texts = cache_of("qwen2", ROOM)
    chance = random.Random(0)
    for style in ("\u4e2d\u6587\u5b57", "\u0430\u0431\u0432", "\uac00\ud55c\uad6d"):
        separator = "\uff0c" if style[0] == "\u4e2d" else " "
        text = separator.join("".join(chance.choices(style, k=5)) for _ in range(600))
        assert texts.encode(text) == texts.encode(text)
    assert texts.counters.hits == 3
    assert texts.counters.cached_tokens > 0.8 * texts.counters.tokens / 2


def test_tenants_share_nothing() -> None:
    texts, text = cache_of("gpt2", ROOM), prose(0)
    texts.encode(text, tenant="a")
    held_bytes = texts.counters.held_bytes
    texts.encode(text, tenant="b")
    assert texts.counters.hits == 0
    assert texts.counters.held_bytes == 2 * held_bytes
    texts.encode(text, tenant="a")
    assert texts.counters.hits == 1


def test_the_least_recently_used_texts_leave_from_their_ends() -> None:
    texts = cache_of("gpt2", ROOM)
    texts.encode(prose(0))
    one_text = texts.counters.held_bytes
    texts = cache_of("gpt2", int(2.5 * one_text))
    for seed in (0, 1, 0, 2):  # half of 1 leaves
        texts.encode(prose(seed))
        assert texts.counters.held_bytes <= 2.5 * one_text
    assert texts.counters.hits == 1

    def cached_tokens(seed: int) -> int:
        before = texts.counters.cached_tokens
        texts.encode(prose(seed))
        return texts.counters.cached_tokens - before

    whole, half = cached_tokens(0), cached_tokens(1)
    assert 0 < half < 0.7 * whole
    small = cache_of("gpt2", 0)
    assert small.encode(prose(0)) == small.encode(prose(0)) == tokenizer_of("gpt2")(prose(0)).input_ids
    assert small.counters.held_bytes == small.counters.hits == 0


@pytest.mark.parametrize("most_bytes", [ROOM, 30_000])
def test_threads_encode_at_once(most_bytes: int) -> None:
    tokenizer = tokenizer_of("qwen2")
    texts, chance = TextCache(tokenizer, most_bytes), random.Random(0)
    waiting = [
        prose(seed, 3 * BLOCK) + prose(9 + chance.randrange(4), 3 * BLOCK) for seed in range(4) for _ in range(20)
    ]
    chance.shuffle(waiting)
    expected = [tokenizer(text).input_ids for text in waiting]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(texts.encode, waiting)) == expected
    assert texts.counters.texts == len(waiting)
    assert texts.counters.hits > 0
    assert texts.counters.held_bytes <= most_bytes


@pytest.mark.parametrize("at", [10, LEAST, 5 * BLOCK + 100])
def test_a_lone_surrogate_is_the_tokenizers_error(at: int) -> None:
    tokenizer, text = tokenizer_of("gpt2"), prose(0)
    texts = TextCache(tokenizer, ROOM)
    texts.encode(text)
    bad = text[:at] + "\ud800" + text[at : at + 1000]
    with pytest.raises(TypeError) as expected:
        tokenizer(bad)
    with pytest.raises(TypeError) as found:
        texts.encode(bad)
    assert str(found.value) == str(expected.value)


def test_short_texts_are_not_stored() -> None:
    texts = cache_of("gpt2", ROOM)
    for _ in range(2):
        assert texts.encode(prose(0, LEAST - 1)) == tokenizer_of("gpt2")(prose(0, LEAST - 1)).input_ids
    assert texts.counters.held_bytes == texts.counters.hits == 0
    assert texts.counters.texts == 2


def _merging_across_blanks() -> Tokenizer:
    tokenizer = small_tokenizers.llama2()
    vocab = dict(tokenizer.get_vocab(with_added_tokens=False))
    vocab["s\u2581"] = len(vocab)
    tokenizer.model = models.BPE(vocab, [("s", "\u2581")], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    return tokenizer


def _changed(family: str, **changes: Any) -> Tokenizer:
    tokenizer = Tokenizer.from_str(small_tokenizers.FAMILIES[family]().to_str())
    for name, value in changes.items():
        setattr(tokenizer, name, value)
    return tokenizer


def _with_added(token: AddedToken) -> Tokenizer:
    tokenizer = small_tokenizers.smollm()
    tokenizer.add_tokens([token])
    return tokenizer


def _with_dropout() -> Tokenizer:
    tokenizer = small_tokenizers.smollm()
    tokenizer.model.dropout = 0.1
    return tokenizer


def _splitting(pattern: Any, behavior: str = "isolated") -> Tokenizer:
    words = pre_tokenizers.Split(pattern, behavior)
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return _changed("smollm", pre_tokenizer=pre_tokenizers.Sequence([words, bytes_of]))


LEFT_OUT = {
    "merges across blanks": (_merging_across_blanks, ""),
    "dropout": (_with_dropout, "dropout"),
    "a single word": (lambda: _with_added(AddedToken("foo", single_word=True)), "'foo' is matched as a single word"),
    "a long added token": (lambda: _with_added(AddedToken("<" + "x" * 63)), "64 characters or more"),
    "added tokens across cuts": (lambda: _with_added(AddedToken("a b\nc")), ""),
    "byte-level normalizer": (lambda: _changed("smollm", normalizer=normalizers.ByteLevel()), "kind ByteLevel"),
    "replaced regex": (lambda: _changed("smollm", normalizer=normalizers.Replace(Regex("a.*b"), "c")), "pattern"),
    "replaced words": (lambda: _changed("smollm", normalizer=normalizers.Replace("a b", "c")), "pattern"),
    "no unknown token": (lambda: Tokenizer(models.Unigram([("a", -1.0)])), "does not encode"),
    "scripts": (lambda: _changed("smollm", pre_tokenizer=pre_tokenizers.UnicodeScripts()), "kind UnicodeScripts"),
    "unsplit unigram": (
        lambda: _changed("unigram", pre_tokenizer=pre_tokenizers.Metaspace(split=False)),
        "tokens do not begin",
    ),
    "blanks at the ends of words": (lambda: _splitting(" ", "merged_with_previous"), "tokens do not begin"),
    "two words each": (lambda: _splitting(Regex(r"\w+\W+\w+")), "tokens do not begin"),
    "lookbehind": (lambda: _splitting(Regex(r"(?<=a)b|\w+")), "pattern"),
    "anchor": (lambda: _splitting(Regex(r"^\w+|\s+")), "pattern"),
    "word end": (lambda: _splitting(Regex(r"\b\w+")), "pattern"),
    "long lookahead": (lambda: _splitting(Regex(r"\w+(?=.*x)|\s")), "pattern"),
}


STILL_CUT = {"merges across blanks", "added tokens across cuts"}  # before separators of other scripts


@pytest.mark.parametrize("kind", LEFT_OUT)
def test_a_tokenizer_that_is_left_out_says_why_and_encodes_whole_texts(kind: str) -> None:
    make, reason = LEFT_OUT[kind]
    tokenizer = small_tokenizers.hugging_face(make())
    texts = TextCache(tokenizer, ROOM)
    if kind in STILL_CUT:
        assert texts.why_not is None
        text = prose(0) + "a b\nc" + prose(1)
        assert texts.encode(text) == texts.encode(text) == tokenizer(text).input_ids
        assert texts.counters.hits == 0
        return
    assert texts.why_not is not None
    assert reason in texts.why_not
    assert "\n" not in texts.why_not
    if kind not in ("dropout", "no unknown token"):
        assert texts.encode(prose(0)) == texts.encode(prose(0)) == tokenizer(prose(0)).input_ids
    assert texts.counters.hits == 0


def test_tokenizers_without_a_rust_tokenizer_or_with_a_call_of_their_own_are_left_out() -> None:
    class Slow:
        def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
            return {"input_ids": [len(text)]}

    texts = TextCache(Slow(), ROOM)
    assert texts.why_not == "Slow has no Rust tokenizer"
    assert texts.encode(prose(0, 3000)) == [3000]

    class Odd(type(tokenizer_of("gpt2"))):  # type: ignore[misc]
        def __call__(self, *arguments: Any, **options: Any) -> Any:
            return super().__call__(*arguments, **options)

    odd = TextCache(Odd(tokenizer_object=small_tokenizers.gpt2()), ROOM)
    assert odd.why_not == "Odd has its own __call__"
    split = small_tokenizers.hugging_face(small_tokenizers.gpt2(), split_special_tokens=True)
    assert TextCache(split, ROOM).why_not is not None
