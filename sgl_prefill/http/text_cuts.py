"""Where a tokenizer lets a text be cut: tokens on each side do not depend on the text on the other.

A safe cut is between a letter and a separator that a letter follows (`SEPARATORS`): "good| day". `find_cuts` takes a separator
only where a tokenizer shows these:

1. Each step looks no further than a few characters: normalizers and pre-tokenizers of known kinds, regexes without lookbehind and
   anchors. Other steps are refused by name.
2. No added token has a letter and then the separator inside, so that none is found across a cut.
3. The pre-tokenizer ends a word at each cut of random texts. Or, as in Llama 2 and Gemma, it does not, and the model is a BPE
   whose vocabulary has the separator, and no token with a letter and then the separator inside: no merge crosses a cut.
4. Random texts that are encoded from a cut on have the tokens of the whole texts.
"""

from __future__ import annotations

import json
import random
import re
from bisect import bisect_left
from collections.abc import Iterator
from typing import Any, NamedTuple

from tokenizers import Tokenizer

MARGIN = 64  # characters: nothing further from a cut changes the tokens at the cut
WINDOW = 256  # characters before a cut that are searched for a place to start encoding


class Letters(NamedTuple):
    ranges: str  # of a regex
    tried: str  # some of them, for random texts


LATIN = Letters("A-Za-z", "adelmrstvzAISTZ")
CYRILLIC = Letters("\u0410-\u044f", "\u0434\u0436\u0439\u0419\u0446\u044f")
HANGUL = Letters("\uac00-\ud7a3", "\uac00\uac01\ud55c\uad6d\ud7a3")
KANA, IDEOGRAPHS = "\u3041-\u3096\u30a1-\u30fa", "\u3400-\u4dbf\u4e00-\u9fff"
CJK = Letters(KANA + IDEOGRAPHS, "\u304b\u304c\u3093\u30a2\u30d1\u4e2d\u6587\u5b57\u3400")
# The letters on both sides of a separator, and the separator; "\uff0c" and "\u3002" are the ideographic comma and full stop.
SEPARATORS = [
    (LATIN, " "),
    (LATIN, "\n"),
    (CYRILLIC, " "),
    (HANGUL, " "),
    (CJK, "\n"),
    (CJK, "\uff0c"),
    (CJK, "\u3002"),
]

# The kinds of steps, as a tokenizer.json names them.
KNOWN = {
    "normalizer": "NFC NFD NFKC NFKD Lowercase StripAccents BertNormalizer Prepend Replace Strip Precompiled Nmt Sequence",
    "pre_tokenizer": "ByteLevel Split Digits Punctuation Whitespace WhitespaceSplit BertPreTokenizer Metaspace"
    " CharDelimiterSplit Sequence",
    "model": "BPE WordPiece WordLevel Unigram",
    "post_processor": "TemplateProcessing ByteLevel BertProcessing RobertaProcessing Sequence",
}
LOCAL_REPLACEMENTS = {" {2,}", r"\s+"}  # a run of blanks never crosses a cut

# In a regex without classes and escaped punctuation: anchors, lookbehind, references to groups, lookahead of any length.
NOT_LOCAL = re.compile(r"\^|\$|\\[bBAZzGKyYXR0-9k]|\(\?<|\(\?[=!][^)]*[*+{(]")
CLASSES = re.compile(r"\\[^\w\s]|\[(?:\\.|[^\]\\])*\]")
LETTER_AND_SEPARATOR = re.compile(r"[^\W\d_][ \n\uff0c\u3002]")

PROBES = [
    "",
    "a",
    "Hello world",
    "  Two  blanks \n\n\tand 1234, don't!",
    "\u4f60\u597d\uff0c\u4e16",
    "e\u0301\u200d\U0001f600",
]
TRIED_TEXTS = 60  # for each separator: some 600 cuts
ODD_PIECES = [
    *"'_.,;:!?()<>#/-0123456789A\t\n\r\x07\u00a0\u3000\u2026\u00e9\u0301\u00df\ufb01\u4e2d\uff0c\u3002\u0434\ud55c\u0627"
]
ODD_PIECES += [
    "'s",
    "'ll ",
    "  ",
    "   ",
    " \n",
    "\n\n",
    "\r\n",
    "...",
    "1234",
    " Zq",
    "kx ",
    " I'm",
    "zzzz",
    "e\u0301",
    "\u200b",
]
ODD_PIECES += ["\u304b\u3099", "\u0915\u094d", "\U0001f600", "\U0001f469\u200d\U0001f467"]


class Cuts:
    """The safe cuts of one tokenizer, and what it sets around a text."""

    def __init__(self, backend: Tokenizer, separators: list[tuple[Letters, str]], is_split: bool) -> None:
        """is_split: the pre-tokenizer ends a word at each cut."""
        self.backend, self.is_split = backend, is_split
        any_cut = "|".join(f"(?<=[{letters}]){separator}(?=[{letters}])" for (letters, _), separator in separators)
        self.every, self._last = re.compile(any_cut), re.compile(f"(?s:.*)(?:{any_cut})")
        probe = backend.encode("Hello world")
        body = [i for i, is_special in enumerate(probe.special_tokens_mask) if not is_special]
        self.front: list[int] = probe.ids[: body[0]] if body else []
        self.back: list[int] = probe.ids[body[-1] + 1 :] if body else []

    def last(self, text: str, begin: int, end: int) -> int | None:
        """The last safe cut in text[begin:end]."""
        found = self._last.match(text, max(begin, 0), end + 1)
        return found.end() - 1 if found else None

    def window(self, text: str, cut: int) -> tuple[int, int] | None:
        """A cut to start encoding at, and one from which on tokens are right: a normalizer may change the first word."""
        check = self.last(text, cut - WINDOW, cut - MARGIN)
        start = None if check is None else self.last(text, cut - WINDOW, check)
        return None if check is None or start is None else (start, check)

    def boundary(self, encoding: Any, at: int) -> int | None:
        """Index of the first token after a cut; None where none begins there, or where offsets do not show it.

        It may begin a character later: post-processors leave blanks out of offsets, and normalizers out of tokens. Offsets are
        not quite in order where a pre-tokenizer puts a blank before a letter that follows an added token.
        """
        token = bisect_left(range(len(encoding)), at, key=lambda i: encoding.token_to_chars(i)[0])
        if not 0 < token < len(encoding):
            return None
        (begin, end), (next_begin, _) = encoding.token_to_chars(token - 1), encoding.token_to_chars(token)
        is_cut = begin < end == at <= next_begin <= at + 1
        is_word = not self.is_split or encoding.token_to_word(token - 1) != encoding.token_to_word(token)
        return token if is_cut and is_word else None


def find_cuts(tokenizer: Any) -> Cuts | str:
    """The cuts of a Hugging Face tokenizer, or why its texts are not cut."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        return f"{type(tokenizer).__name__} has no Rust tokenizer"
    if (fault := _fault_of_steps(backend) or _fault_of_wrapper(tokenizer, backend)) is not None:
        return fault
    free = [(letters, separator) for letters, separator in SEPARATORS if not _is_in_added_tokens(backend, separator)]
    split = [one for one in free if _is_shown(backend, *one, is_split=True)]
    unsplit = list[tuple[Letters, str]]()
    if len(split) < len(free) and _is_whole(backend):
        vocabulary = "\0".join(backend.get_vocab(with_added_tokens=False))
        unmerged = [one for one in free if _never_merges(backend, one[1], vocabulary)]
        unsplit = [one for one in unmerged if _is_shown(backend, *one, is_split=False)]
    if not split and not unsplit:
        return "tokens do not begin at each separator between letters"
    return Cuts(backend, split, True) if len(split) >= len(unsplit) else Cuts(backend, unsplit, False)


def _fault_of_steps(backend: Tokenizer) -> str | None:
    model = type(backend.model).__name__
    if model not in KNOWN["model"].split():
        return f"the model is of kind {model}"
    if getattr(backend.model, "dropout", None):
        return "the BPE model has dropout"
    for step in ("normalizer", "pre_tokenizer", "post_processor"):
        for part in _parts(getattr(backend, step)):
            if part["type"] not in KNOWN[step].split():
                return f"the {step} has a part of kind {part['type']}"
            if (pattern := part.get("pattern")) is not None and not _is_local(part["type"], pattern):
                return f"the pattern {pattern} of the {step} may look further than a few characters"
    for token in backend.get_added_tokens_decoder().values():
        if token.single_word:
            return f"the added token {token.content!r} is matched as a single word only"
        forms = [token.content, backend.normalizer.normalize_str(token.content) if backend.normalizer else ""]
        if max(map(len, forms)) >= MARGIN:
            return f"the added token {token.content!r} has {MARGIN} characters or more"
    return None


def _fault_of_wrapper(tokenizer: Any, backend: Tokenizer) -> str | None:
    """What Hugging Face's tokenizer does otherwise than the Rust one and the special tokens around it."""
    name = type(tokenizer).__name__
    for method in ("__call__", "_encode_plus"):
        module = getattr(getattr(type(tokenizer), method, None), "__module__", "")
        if not module.startswith("transformers.tokenization_utils"):
            return f"{name} has its own {method}"
    added = [f"x {token.content} y" for token in backend.get_added_tokens_decoder().values()]
    letters = "".join(letters.tried for letters, _ in SEPARATORS)
    for text in [*PROBES, *added[:8], letters, "".join(ODD_PIECES)]:
        try:
            whole = tokenizer(text)["input_ids"]  # truncation and padding are off from here on
            bare = tokenizer(text, add_special_tokens=False)["input_ids"]
            cuts = Cuts(backend, SEPARATORS, is_split=False)
        except Exception as error:  # what the Rust tokenizer raises, for letters without a token
            return f"{name} does not encode {text!r}: {error}"
        if whole != backend.encode(text).ids or bare != backend.encode(text, add_special_tokens=False).ids:
            return f"{name} gives other ids than its Rust tokenizer for {text!r}"
        if whole != [*cuts.front, *bare, *cuts.back]:
            return f"the special tokens around {text!r} are not those around other texts"
    return "special tokens in texts are split" if backend.encode_special_tokens else None


def _parts(step: Any) -> Iterator[dict[str, Any]]:
    """The parts of a step, and of sequences in it."""
    waiting = [] if step is None else [json.loads(step.__getstate__())]
    while waiting:
        part = waiting.pop()
        waiting += [one for key in ("normalizers", "pretokenizers", "processors") for one in part.get(key, ())]
        yield part


def _is_local(kind: str, pattern: dict[str, str]) -> bool:
    if "String" in pattern:
        return len(pattern["String"]) < MARGIN and not LETTER_AND_SEPARATOR.search(pattern["String"])
    if kind == "Replace":
        return pattern["Regex"] in LOCAL_REPLACEMENTS
    return not NOT_LOCAL.search(CLASSES.sub("", pattern["Regex"].replace(r"\\", "")))


def _is_in_added_tokens(backend: Tokenizer, separator: str) -> bool:
    """Says whether an added token might be found across a cut; the normalized ones are looked up in normalized text."""
    added = backend.get_added_tokens_decoder().values()
    normalize = backend.normalizer.normalize_str if backend.normalizer else str
    normalized = [normalize(token.content) for token in added if token.normalized]
    form = _between(normalize(f"a{separator}a"))
    return _crosses(separator, "\0".join(token.content for token in added)) or _crosses(form, "\0".join(normalized))


def _crosses(separator: str, tokens: str) -> bool:
    """Says whether the separator follows what may be a letter: anything but itself and ASCII characters that are none."""
    not_letters = rf"\x00-\x40\x5b-\x60\x7b-\x7f{re.escape(separator)}"
    return re.search(f"[^{not_letters}]{re.escape(separator)}", tokens) is not None


def _is_whole(backend: Tokenizer) -> bool:
    """Says whether the model is a BPE that gets texts whole, or parted at a character."""
    model = backend.model
    if type(model).__name__ != "BPE" or model.ignore_merges:
        return False
    if model.continuing_subword_prefix or model.end_of_word_suffix:
        return False
    return all(
        not part["split"] if part["type"] == "Metaspace" else len(part.get("pattern", {}).get("String", "")) == 1
        for part in _parts(backend.pre_tokenizer)
    )


def _never_merges(backend: Tokenizer, separator: str, vocabulary: str) -> bool:
    """Says of such a BPE that no merge crosses a cut. vocabulary: its tokens, between zeros."""
    form = f"a{separator}a"
    form = backend.normalizer.normalize_str(form) if backend.normalizer else form
    form = "".join(word for word, _ in backend.pre_tokenizer.pre_tokenize_str(form)) if backend.pre_tokenizer else form
    form = _between(form)
    return len(form) == 1 and backend.model.token_to_id(form) is not None and not _crosses(form, vocabulary)


def _between(text: str) -> str:
    """What is between the first and the last "a"."""
    return text[text.find("a") + 1 : text.rfind("a")]


def _is_shown(backend: Tokenizer, letters: Letters, separator: str, is_split: bool) -> bool:
    """Says whether random texts may be cut before the separator. is_split: because the pre-tokenizer ends a word there."""
    cuts, chance = Cuts(backend, [(letters, separator)], is_split), random.Random(0)
    return all(_holds(cuts, _random_text(chance, letters, separator)) for _ in range(TRIED_TEXTS))


def _holds(cuts: Cuts, text: str) -> bool:
    """Says whether encoding from a cut on gives the tokens of the whole text from the next cut on."""
    places = [found.start() for found in cuts.every.finditer(text)]
    whole = cuts.backend.encode(text, add_special_tokens=False)
    tokens = [cuts.boundary(whole, place) for place in places]
    if None in tokens:
        return False
    for start, check, token in list(zip(places, places[1:], tokens[1:], strict=False))[::3]:
        rest = cuts.backend.encode(text[start:], add_special_tokens=False)
        rest_token = cuts.boundary(rest, check - start)
        if rest_token is None or rest.ids[rest_token:] != whole.ids[token:]:
            return False
    return True


def _random_text(chance: random.Random, letters: Letters, separator: str) -> str:
    pieces = [chance.choice(ODD_PIECES) if chance.random() < 0.6 else _word(chance, letters) for _ in range(30)]
    for _ in range(10):
        at = chance.randrange(len(pieces))
        pieces[at] += _word(chance, letters) + separator + _word(chance, letters)
    return "".join(pieces)


def _word(chance: random.Random, letters: Letters) -> str:
    return "".join(chance.choices(letters.tried, k=2))
