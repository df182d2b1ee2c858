"""Cache of token ids by text: a prefix that was tokenized once is not tokenized again, and the ids stay exactly the same.

A tree of blocks of `BLOCK` characters; each block may hold a *safe cut*: the place between a letter and a separator that a letter
follows (`SEPARATORS`). There, tokens left of the cut depend on no text after it and tokens right of it on none before it, which
`text_cuts` shows for a tokenizer before it is used. On a hit, the text from some 100 characters before the deepest cut on is
encoded; its tokens before the cut must be those of the cache, or the whole text is encoded.

    text      0 ......... cut 1 ......... start ... check ... cut 2 .................. end
    ids       |--- block 1 ---|------------ block 2 ------------|---- encoded again ----|   (`start` to `check` is dropped)
"""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from dataclasses import asdict, dataclass
from itertools import count
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sgl_prefill.http.text_cuts import MARGIN, Cuts, find_cuts
from sgl_prefill.http.token_ids import TokenIds

BLOCK = 512  # characters
LEAST = 2000  # characters: shorter texts are encoded whole and not stored
NODE_BYTES = 512  # a node's objects and its place in the table, without text and ids
NO_IDS: NDArray[np.int32] = np.empty(0, np.int32)


@dataclass
class Counters:
    texts: int = 0
    hits: int = 0  # texts with a cached part
    mismatches: int = 0  # texts encoded whole because their tokens before the cut were not those of the cache
    cached_tokens: int = 0
    tokens: int = 0  # the cached ones included
    held_bytes: int = 0


class _Node(NamedTuple):
    """A block of text below its parent's; never changed."""

    number: int
    cut: int | None  # characters from the text's beginning
    ids: NDArray[np.int32]  # from the last cut above to this one


_Key = tuple[int | str, str]  # the parent's number, or the tenant at the root; the block


class _Encoded(NamedTuple):
    """A text's end, encoded."""

    start: int  # characters of the text before it
    encoding: Any
    ids: list[int]
    token: int  # index of the first token after the last cached cut


class TextCache:
    """For any thread. The tokenizer must stay as it is: no truncation, padding or more tokens later."""

    def __init__(self, tokenizer: Any, most_bytes: int) -> None:
        """tokenizer: Hugging Face's. most_bytes: bound of texts, ids and tables together."""
        self._tokenizer, self._most_bytes = tokenizer, most_bytes
        found = find_cuts(tokenizer)
        self._cuts = None if isinstance(found, str) else found
        self.why_not = found if isinstance(found, str) else None  # why the tokenizer's texts are not cached
        self.counters = Counters()
        self._taken = (0, 0)  # cached tokens, and all, of the last `take_new`
        self._lock = threading.Lock()  # for the two below and the counters
        # Least recently used first. A parent is always more recent than its children: the first node is a leaf.
        self._nodes: OrderedDict[_Key, _Node] = OrderedDict()
        self._numbers = count()

    def take_new(self) -> dict[str, int]:
        """Tokens since the last call, by whether they were cached: "yes" or "no"."""
        with self._lock:
            now = self.counters.cached_tokens, self.counters.tokens
            (cached, tokens), self._taken = (a - b for a, b in zip(now, self._taken, strict=True)), now
        return {"yes": cached, "no": tokens - cached}

    def state(self) -> dict[str, Any]:
        """For /server_info."""
        return asdict(self.counters) if self.why_not is None else {"why_not": self.why_not}

    def encode(self, text: str, tenant: str = "", add_special_tokens: bool = True) -> list[int]:
        """What `tokenizer(text).input_ids` would be, or its error. Tenants share nothing."""
        n_cached, is_mismatch = 0, False
        ids: list[int]
        try:
            if self._cuts is None:
                ids = self._tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]
            elif len(text) < LEAST:
                ids = self._cuts.backend.encode(text, add_special_tokens=add_special_tokens).ids
            else:
                found, n_cached, is_mismatch = self._encode_long(self._cuts, text, tenant)
                front, back = (self._cuts.front, self._cuts.back) if add_special_tokens else ((), ())
                ids = TokenIds.of(np.concatenate([front, *found, back], dtype=np.int64, casting="unsafe"))
        except TypeError:  # of a lone surrogate; Hugging Face's message is another
            ids = self._tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]
        with self._lock:
            self.counters.texts += 1
            self.counters.hits += n_cached > 0
            self.counters.mismatches += is_mismatch
            self.counters.cached_tokens += n_cached
            self.counters.tokens += len(ids)
        return ids

    def _encode_long(self, cuts: Cuts, text: str, tenant: str) -> tuple[list[ArrayLike], int, bool]:
        """Parts of the token ids without special tokens, how many of them are cached, and whether the check failed."""
        path = self._walk(text, tenant)
        cached = [node for _, node in path]
        while cached and cached[-1].cut is None:
            cached.pop()
        if not cached:
            encoding = cuts.backend.encode(text, add_special_tokens=False)
            whole = _Encoded(0, encoding, encoding.ids, 0)
            self._store(cuts, text, tenant, path, whole)
            return [whole.ids], 0, False
        cut = cached[-1].cut
        assert cut is not None
        window = cuts.window(text, cut)
        assert window is not None, "stored cuts have a window"
        start, check = window
        encoding = cuts.backend.encode(text[start:], add_special_tokens=False)
        check_token, token = cuts.boundary(encoding, check - start), cuts.boundary(encoding, cut - start)
        known, ids = np.concatenate([node.ids for node in cached]), encoding.ids
        if check_token is None or token is None or known[check_token - token :].tolist() != ids[check_token:token]:
            return [cuts.backend.encode(text, add_special_tokens=False).ids], 0, True
        self._store(cuts, text, tenant, path, _Encoded(start, encoding, ids, token))
        return [known, ids[token:]], len(known), False

    def _walk(self, text: str, tenant: str) -> list[tuple[_Key, _Node]]:
        """The stored nodes of the text's blocks from the root on, now the most recently used."""
        path = list[tuple[_Key, _Node]]()
        parent: int | str = tenant
        with self._lock:
            for at in range(0, len(text) - BLOCK + 1, BLOCK):
                key = (parent, text[at : at + BLOCK])
                if (node := self._nodes.get(key)) is None:
                    break
                path.append((key, node))
                parent = node.number
            self._touch(path)
        return path

    def _touch(self, path: list[tuple[_Key, _Node]]) -> None:
        for key, _ in reversed(path):
            self._nodes.move_to_end(key)

    def _store(self, cuts: Cuts, text: str, tenant: str, path: list[tuple[_Key, _Node]], end: _Encoded) -> None:
        """Adds the text's blocks below the path, and removes the least recently used ones."""
        block_ends = range((len(path) + 1) * BLOCK, len(text) + 1, BLOCK)
        if not block_ends:
            return
        ids, token = np.array(end.ids, np.int32), end.token
        new = [(text[at - BLOCK : at], *self._cut(cuts, text, at, end)) for at in block_ends]
        with self._lock:
            if path and self._nodes.get(path[-1][0]) is not path[-1][1]:
                return  # another thread removed it
            parent = path[-1][1].number if path else tenant
            for block, cut, cut_token in new:
                key: _Key = (parent, block)
                if (node := self._nodes.get(key)) is None:
                    part = NO_IDS if cut is None else ids[token:cut_token].copy()
                    node = self._nodes[key] = _Node(next(self._numbers), cut, part)
                    self.counters.held_bytes += _n_bytes(key, node)
                elif node.cut != cut:
                    break  # offsets showed the cut in one text only
                token = token if cut is None else cut_token
                path.append((key, node))
                parent = node.number
            self._touch(path)
            while self.counters.held_bytes > self._most_bytes:
                self.counters.held_bytes -= _n_bytes(*self._nodes.popitem(last=False))

    @staticmethod
    def _cut(cuts: Cuts, text: str, block_end: int, end: _Encoded) -> tuple[int | None, int]:
        """A block's last safe cut, and the index of the first token after it; None and 0 where there is none."""
        cut = cuts.last(text, block_end - BLOCK, block_end - MARGIN)
        if cut is None or cuts.window(text, cut) is None:
            return None, 0
        token = cuts.boundary(end.encoding, cut - end.start)
        return (None, 0) if token is None else (cut, token)


def _n_bytes(key: _Key, node: _Node) -> int:
    return NODE_BYTES + sys.getsizeof(key[1]) + node.ids.nbytes
