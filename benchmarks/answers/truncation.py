"""Are prompts with parts cut without harm? Random part lists and limits, and what is left of each prompt, token by token.

    python benchmarks/answers/truncation.py [--quick]

10,000 lists of parts, drawn by hypothesis: words, blanks, digits, characters of several tokens and added tokens, borders in the
middle of all of them; each list is one prompt, and each may or may not be cut from each side. A limit is drawn too. Counted are

* `kept parts altered`: a part that is kept whole has other tokens than in the uncut prompt;
* `limit exceeded`: what is left has more tokens than the limit;
* `cache misses caused`: the uncut prompt is put into SGLang's radix cache, and what is left of it finds fewer tokens there than
  stand before the first one that had to go.

`server` is how prompts are cut here. `texts` is what a client does without it: tokenise each part, cut its tokens to the same
number, decode them, and send the texts joined; the server tokenises them anew. Prompts that fit, or that both refuse, are counted
apart. One process, no model; OMP_NUM_THREADS does not matter.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey
from transformers import AutoTokenizer

from benchmarks import report
from sgl_prefill.core.prompt_parts import KEEPS, CannotCutError, Cut, Keep, Span, cut
from sgl_prefill.examples import demo_model
from sgl_prefill.http.parted_requests import PartTokenizer

N_PROMPTS, N_QUICK = 10_000, 300
MOST_PARTS, MOST_WORDS, MOST_TIMES = 8, 40, 4  # a part says the same up to four times
MOST_PERCENT = 110  # of a prompt's tokens, as its limit
WORDS = (
    *(
        "the",
        " refund",
        " of",
        " unbelievable",
        " Zürich",
        "\n\n",
        "\n",
        "  ",
        " ",
        "\t",
        ".",
        ", ",
        "'s",
        " 1234",
        "5.6",
    ),
    *(
        " 🎉🎉",
        "日本語",
        " д",
        "e\u0301",
        "<|im_end|>",
        "<|im_start|>user\n",
        " def f(x):\n    return x",
        "ab",
        "Answer:",
    ),
)
HARMS = ("kept parts altered", "limit exceeded", "cache misses caused")
Parts = list[tuple[str, Keep]]


class Prompt(NamedTuple):
    """A prompt, tokenised as a whole."""

    parts: Parts
    ids: list[int]
    offsets: list[tuple[int, int]]
    spans: list[Span]


def measure(quick: bool = False) -> dict[str, Any]:
    """Returns the rows, and the targets that they are held to."""
    tokenizer: Any = AutoTokenizer.from_pretrained(demo_model.ensure())
    part_tokenizer = PartTokenizer(tokenizer)
    prefixes = _Prefixes()
    words = st.lists(st.sampled_from(WORDS), max_size=MOST_WORDS).map("".join)
    said = st.tuples(words, st.integers(1, MOST_TIMES)).map(lambda drawn: drawn[0] * drawn[1])
    found = {"server": Counter[str](), "texts": Counter[str]()}
    kinds, n_cut_tokens = Counter[str](), 0

    @settings(
        max_examples=N_QUICK if quick else N_PROMPTS,
        phases=[Phase.generate],
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(
        st.lists(st.tuples(said, st.sampled_from(KEEPS)), min_size=1, max_size=MOST_PARTS), st.integers(1, MOST_PERCENT)
    )
    def look(parts: Parts, percent: int) -> None:
        nonlocal n_cut_tokens
        prompt = _tokenised(part_tokenizer, parts)
        limit_tokens = max(len(prompt.ids) * percent // 100, 1)
        try:
            done = cut(prompt.offsets, prompt.spans, limit_tokens)
        except CannotCutError:
            kinds["refused"] += 1
            return
        kinds["cut" if done.removed else "fit"] += 1
        n_cut_tokens += sum(map(len, done.removed))
        if not done.removed and len(prompt.ids) > limit_tokens:
            found["server"]["limit exceeded"] += 1
        if done.removed:
            prefixes.fill(prompt.ids)
            for name, left in (
                ("server", done.apply(prompt.ids)),
                ("texts", _cut_texts(tokenizer, prompt, done)),
            ):
                found[name].update(_harms(prompt, done, left, limit_tokens, prefixes))

    look()
    rows = [
        {"how": name, "prompts_cut": kinds["cut"], **{harm: counts[harm] for harm in HARMS}}
        for name, counts in found.items()
    ]
    targets = [report.Target.at_most(f"truncation by the server: {harm}", found["server"][harm], 0) for harm in HARMS]
    return {
        "n_lists": sum(kinds.values()),
        **{f"n_{kind}": kinds[kind] for kind in ("cut", "fit", "refused")},
        "n_tokens_cut": n_cut_tokens,
        "rows": rows,
        "targets": [target._asdict() for target in targets],
    }


def _tokenised(part_tokenizer: PartTokenizer, parts: Parts) -> Prompt:
    ends = list(itertools.accumulate(len(said) for said, _ in parts))
    spans = [Span(end - len(said), end, keep) for end, (said, keep) in zip(ends, parts, strict=True)]
    tokens = part_tokenizer.encode("".join(said for said, _ in parts))
    return Prompt(parts, [*tokens.before, *tokens.ids, *tokens.after], tokens.offsets, spans)


def _cut_texts(tokenizer: Any, prompt: Prompt, done: Cut) -> list[int]:
    """Returns what a server reads where a client has cut each part's text to as many tokens as `done` leaves of it."""
    left = []
    for (said, keep), part in zip(prompt.parts, done.parts, strict=True):
        if part.cut_tokens == 0:
            left.append(said)
            continue
        ids = tokenizer.encode(said, add_special_tokens=False)
        n_gone = max(len(ids) - part.kept_tokens, 0)
        start = {"start": 0, "end": n_gone, "middle": n_gone // 2}[str(keep)]
        left.append(tokenizer.decode(ids[start : start + len(ids) - n_gone], clean_up_tokenization_spaces=False))
    return list(tokenizer.encode("".join(left)))


def _harms(prompt: Prompt, done: Cut, left: Sequence[int], limit_tokens: int, prefixes: _Prefixes) -> set[str]:
    harms = set()
    if len(left) > limit_tokens:
        harms.add("limit exceeded")
    if prefixes.matched(left) < done.removed[0].start:
        harms.add("cache misses caused")
    place = 0
    for span in prompt.spans:
        if span.keep is True:
            own = [
                token
                for token, (start, end) in zip(prompt.ids, prompt.offsets, strict=True)
                if start < span.end and end > span.start
            ]
            place = _after(left, own, place)
            if place < 0:
                harms.add("kept parts altered")
                break
    return harms


def _after(tokens: Sequence[int], wanted: Sequence[int], start: int) -> int:
    """Returns where the first run of these tokens from `start` on ends; -1 where there is none. Parts side by side may share the
    token of their border."""
    if not wanted:
        return start
    for place in range(max(start - 1, 0), len(tokens) - len(wanted) + 1):
        if list(tokens[place : place + len(wanted)]) == list(wanted):
            return place + len(wanted)
    return -1


class _Prefixes:
    """SGLang's radix cache, with one prompt in it."""

    def __init__(self) -> None:
        self._cache = RadixCache(
            CacheInitParams(disable=False, req_to_token_pool=None, token_to_kv_pool_allocator=_NoSlots(), page_size=1)
        )

    def fill(self, tokens: Sequence[int]) -> None:
        self._cache.reset()
        value = torch.zeros(len(tokens), dtype=torch.int64)
        self._cache.insert(InsertParams(key=RadixKey(list(tokens), None), value=value))

    def matched(self, tokens: Sequence[int]) -> int:
        return len(self._cache.match_prefix(MatchPrefixParams(key=RadixKey(list(tokens), None))).device_indices)


class _NoSlots:
    """Stands in for the KV allocator."""

    device = "cpu"

    def free_segment(self, slots: torch.Tensor, *, start_pos: int) -> None:
        pass


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smoke run on few lists; its numbers mean nothing")
    print(json.dumps(measure(parser.parse_args().quick), indent=1))
