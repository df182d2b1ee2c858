"""Random texts that tokenizers find hard, and sequences of them that share prefixes, for tests of exact token ids."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence

BLANKS = [" ", "  ", "    ", "\t", "\n", "\n\n", " \n", "\r\n", "\u00a0", "\u3000", "\u2009", "\u200b", "\ufeff"]
MARKS = ["\u0301", "\u0308", "\u0327\u0301", "\u3099", "\u094d", "\u200d", "\ufe0f", "\u0345", "\u1160"]
CONTROLS = ["\x00", "\x07", "\x1b", "\x7f", "\x85", "\ufffd", "\ue000", "\u2028", "\u00ad"]
SYMBOLS = [
    *"'\"_.,;:!?()<>[]{}#/\\-+=*&%$@~^|0123456789",
    "...",
    "'s",
    "'LL",
    "``",
    "''",
    "1234567",
    "3.14",
    "\u2026",
    "\u2581",
]
SYMBOLS += ["\U0001f600", "\U0001f469\u200d\U0001f469\u200d\U0001f467", "\U0001f1e9\U0001f1ea", "\U0001f44d\U0001f3fd"]
LETTERS = [
    "\u00e9",
    "e\u0301",
    "\u00df",
    "\u0130",
    "\ufb01",
    "\u01c5",
    "\u00bd",
    "\u2460",
    "\u0627\u0644",
    "\u0915\u094d\u0937",
]
LETTERS += [
    "\u304b\u3099",
    "\uff76\uff9e",
    "\uf900",
    "\U00020000",
    "\u1112\u1161\u11ab",
    "\u0e01\u0e33",
    "\u1e9b\u0323",
    "\u03a3",
]
ODD = [BLANKS, MARKS, CONTROLS, SYMBOLS, LETTERS]
SEPARATED = re.compile(r"(?<=\w)[ \n\uff0c\u3002](?=\w)")


def _word(chance: random.Random, letters: str, n: int) -> str:
    return "".join(chance.choices(letters, k=chance.randint(1, n)))


def _prose(chance: random.Random) -> str:
    end = chance.choices([" ", ", ", ". ", ".\n", "\n", "\n\n", "'s ", " - ", "! "], [80, 5, 5, 2, 3, 1, 2, 1, 1])[0]
    word = _word(chance, "etaoinshrdlu", 8)
    return (word.capitalize() if chance.random() < 0.1 else word) + end


def _russian(chance: random.Random) -> str:
    return _word(chance, "\u043e\u0435\u0430\u0438\u043d\u0442\u0439\u0451\u0416\u044f", 8) + chance.choice(
        [" ", " ", ", ", ".\n"]
    )


def _korean(chance: random.Random) -> str:
    return _word(chance, "\uac00\ud55c\uad6d\uc5b4\uc774\ub2e4", 4) + chance.choice([" ", " ", ". "])


def _chinese(chance: random.Random) -> str:
    letters = "\u7684\u4e00\u662f\u4e0d\u4e86\u4eba\u6211\u5728\u304b\u304c\u306e\u30a2\u30d1"
    return _word(chance, letters, 12) + chance.choice(["\uff0c", "\uff0c", "\u3002", "\n", "\uff01", ""])


def _code(chance: random.Random) -> str:
    name, indent = _word(chance, "abcxyz_", 6), " " * 4 * chance.randint(0, 3)
    return indent + chance.choice(
        [f"def {name}(self):\n", f"{name} = {name}[{chance.randint(0, 999)}]\n", f"# {name} and {name}\n", "}\n\n"]
    )


def _long(chance: random.Random) -> str:
    return _word(chance, chance.choice(["a", "ab", "\u4e2d", "-", "0123456789abcdef"]), chance.choice([90, 700])) + " "


Style = Callable[[random.Random], str]
STYLES: list[Style] = [_prose, _russian, _korean, _chinese, _code, _long]


def text(chance: random.Random, n: int, added: Sequence[str] = ()) -> str:
    """About n characters, of styles that change. added: the added tokens of a tokenizer, put in between and into words."""
    pieces, length = list[str](), 0
    style: Style = _prose
    odd_share = added_share = 0.0
    while length < n:
        if not pieces or chance.random() < 0.01:
            style = chance.choices(STYLES, [6, 1, 1, 2, 2, 1])[0]
            odd_share, added_share = chance.choice([0.0, 0.02, 0.2]), chance.choice([0.0, 0.0, 0.05])
        piece = style(chance)
        if chance.random() < odd_share:
            piece = "".join(chance.choice(chance.choice(ODD)) for _ in range(chance.randint(1, 4))) + piece
        if added and chance.random() < added_share:
            at = chance.randint(0, len(piece))
            piece = (
                piece[:at]
                + chance.choice(["", " ", "\n"])
                + chance.choice(added)
                + chance.choice(["", " ", "  "])
                + piece[at:]
            )
        pieces.append(piece)
        length += len(piece)
    return "".join(pieces)[:n]


def sequence(chance: random.Random, n_texts: int, n: int, block: int, added: Sequence[str] = ()) -> Iterator[str]:
    """Texts of about n characters, most of which share a prefix with an earlier one and differ at a nasty place."""
    earlier = [text(chance, chance.randint(n // 2, n), added)]
    yield earlier[0]
    for _ in range(n_texts - 1):
        base = chance.choice(earlier)
        at = _place(chance, base, block)
        new = chance.choice(chance.choice([*ODD, ["", "a", "\u4e2d", "\u3002", " b"], list(added) or ["z"]]))
        kind = chance.random()
        if kind < 0.15:  # as it is
            one = base
        elif kind < 0.5:  # an edit
            one = base[:at] + new + base[at + chance.choice([0, 1, len(new)]) :]
        elif kind < 0.6:  # an end
            one = base[:at] + new
        elif kind < 0.95:  # another rest
            one = base[:at] + new + text(chance, chance.randint(1, n), added)
        else:
            one = text(chance, chance.randint(n // 2, n), added)
        earlier.append(one[: 2 * n])
        yield earlier[-1]


def _place(chance: random.Random, base: str, block: int) -> int:
    """A place in the text: any, one near the end of a block, or one near a separator between letters."""
    kind = chance.random()
    if kind < 0.3:
        return chance.randint(0, len(base))
    if kind < 0.6:
        places, offsets = list(range(block, len(base) + 1, block)), [-66, -65, -64, -63, -2, -1, 0, 1, 2]
    else:
        places, offsets = [found.start() for found in SEPARATED.finditer(base)], [-2, -1, 0, 1, 2]
    return min(len(base), max(0, chance.choice(places or [0]) + chance.choice(offsets)))
