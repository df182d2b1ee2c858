"""Small tokenizers of the common families, trained on made-up texts, as Hugging Face tokenizers."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, normalizers, pre_tokenizers, processors, trainers
from tokenizers.models import BPE, Unigram, WordPiece
from transformers import PreTrainedTokenizerFast

from tests.support import nasty_texts

LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
DEEPSEEK = [
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
]
SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
STRIPPING = [
    AddedToken("<mask>", lstrip=True, special=True),
    AddedToken("<sep>", rstrip=True, special=True),
    AddedToken("[Both]", lstrip=True, rstrip=True, normalized=True),
    AddedToken("ing", rstrip=True, normalized=True),
    AddedToken("th", normalized=False),
    AddedToken(" of", lstrip=True, normalized=False),
]


def corpus() -> Iterator[str]:
    chance = random.Random(0)
    for _ in range(30):
        yield nasty_texts.text(chance, 3000)


def _trained(model: Any, trainer: Any, normalizer: Any = None, pre_tokenizer: Any = None) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, pre_tokenizer
    tokenizer.train_from_iterator(corpus(), trainer)
    return tokenizer


def _byte_level(*splits: Any, ignore_merges: bool = False, normalizer: Any = None, **settings: Any) -> Tokenizer:
    pre_tokenizer = pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(**settings)])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=900, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    return _trained(BPE(ignore_merges=ignore_merges), trainer, normalizer, pre_tokenizer)


def _split(pattern: str) -> Any:
    return pre_tokenizers.Split(Regex(pattern), "isolated")


def gpt2() -> Tokenizer:
    tokenizer = _byte_level(add_prefix_space=False)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    tokenizer.add_tokens(STRIPPING)
    return tokenizer


def roberta() -> Tokenizer:
    tokenizer = _byte_level(add_prefix_space=True)
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 1))
    tokenizer.add_tokens(STRIPPING[:1])
    return tokenizer


def smollm() -> Tokenizer:
    return _byte_level(pre_tokenizers.Digits(individual_digits=True), add_prefix_space=False)


def llama3() -> Tokenizer:
    tokenizer = _byte_level(_split(LLAMA3), ignore_merges=True, add_prefix_space=False, use_regex=False)
    begin = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), begin])
    return tokenizer


def o200k() -> Tokenizer:
    return _byte_level(_split(O200K), add_prefix_space=False, use_regex=False)


def qwen2() -> Tokenizer:
    tokenizer = _byte_level(_split(QWEN2), normalizer=normalizers.NFC(), add_prefix_space=False, use_regex=False)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.add_tokens(STRIPPING)
    return tokenizer


def deepseek() -> Tokenizer:
    return _byte_level(*map(_split, DEEPSEEK), add_prefix_space=False, use_regex=False)


def _unsplit_bpe(normalizer: Any, pre_tokenizer: Any, more: list[str]) -> Tokenizer:
    """As sentencepiece makes them: trained on words, which are not split when texts are encoded."""
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=SPECIAL, show_progress=False)
    words = pre_tokenizers.Sequence([pre_tokenizers.Metaspace(), pre_tokenizers.Punctuation()])
    model = json.loads(_trained(BPE(unk_token="<unk>"), trainer, None, words).to_str())["model"]
    tokens = [
        *model["vocab"],
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *(one for one in more if one not in model["vocab"]),
    ]
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = [tuple(pair) for pair in model["merges"]]
    tokenizer = Tokenizer(BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, pre_tokenizer
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def llama2() -> Tokenizer:
    steps = [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    return _unsplit_bpe(normalizers.Sequence(steps), None, [])


def mistral() -> Tokenizer:
    return _unsplit_bpe(None, pre_tokenizers.Metaspace(prepend_scheme="first", split=False), [])


def gemma() -> Tokenizer:
    blanks = ["\n", *("\n" * n for n in range(2, 6)), *("\u2581" * n for n in range(2, 6))]
    split = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer = _unsplit_bpe(normalizers.Replace(" ", "\u2581"), split, blanks)
    tokenizer.add_tokens([AddedToken(one, normalized=False) for one in blanks])
    return tokenizer


def metaspace_bpe() -> Tokenizer:
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=SPECIAL, show_progress=False)
    tokenizer = _trained(BPE(unk_token="<unk>"), trainer, normalizers.NFKC(), pre_tokenizers.Metaspace())
    tokenizer.add_tokens(STRIPPING)
    return tokenizer


def unigram() -> Tokenizer:
    """As T5 and XLM-R."""
    trainer = trainers.UnigramTrainer(vocab_size=500, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False)
    steps = [normalizers.Nmt(), normalizers.NFKC(), normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    words = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    tokenizer = _trained(Unigram(), trainer, normalizers.Sequence(steps), words)
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 2)])
    return tokenizer


def bert() -> Tokenizer:
    special = ["[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=700, special_tokens=special, show_progress=False)
    words = pre_tokenizers.BertPreTokenizer()
    tokenizer = _trained(WordPiece(unk_token="[UNK]"), trainer, normalizers.BertNormalizer(), words)
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    tokenizer.add_tokens([AddedToken("Ing", normalized=True), AddedToken("[X]", lstrip=True, normalized=False)])
    return tokenizer


FAMILIES: dict[str, Callable[[], Tokenizer]] = {
    make.__name__: make
    for make in (
        gpt2,
        roberta,
        smollm,
        llama3,
        o200k,
        qwen2,
        deepseek,
        llama2,
        mistral,
        gemma,
        metaspace_bpe,
        unigram,
        bert,
    )
}


def hugging_face(backend: Tokenizer, **settings: Any) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=backend, **settings)  # type: ignore[no-untyped-call]
