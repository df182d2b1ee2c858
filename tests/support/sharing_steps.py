"""Steps whose requests share cached prefixes, with a KV pool and a table of slots, and what attention gives for each."""

from __future__ import annotations

import dataclasses
import itertools
import random
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from tests.support import slow_attention

HEADS, KV_HEADS = 4, 2


@dataclasses.dataclass
class SharingStep:
    """One step."""

    page_tokens: int
    table: torch.Tensor  # int32 [rows, positions]; what is nobody's is slot 0, whose K and V are NaN
    rows: list[int]  # of the requests
    cached: list[int]
    new: list[int]
    query: torch.Tensor  # [new tokens, heads * dim]
    keys: torch.Tensor  # [slots, KV heads, dim]
    values: torch.Tensor

    @property
    def layer(self) -> RadixAttention:
        return RadixAttention(HEADS, self.keys.shape[2], 0.3, KV_HEADS, 0)

    @property
    def new_slots(self) -> torch.Tensor:
        """Returns where K and V of the new tokens are written."""
        parts = [
            self.table[row, n_cached : n_cached + n_new]
            for row, n_cached, n_new in zip(self.rows, self.cached, self.new, strict=True)
        ]
        return torch.cat(parts).long()

    def batch(self, **changed: Any) -> Any:
        """A `ForwardBatch`, of what is read of it."""
        nothing = dict.fromkeys(
            ("spec_info", "encoder_lens", "multi_item_delimiter_indices", "cross_attention_custom_mask")
        )
        fields = {
            "forward_mode": ForwardMode.EXTEND,
            "extend_prefix_lens_cpu": self.cached,
            "extend_seq_lens_cpu": self.new,
            "req_pool_indices": torch.tensor(self.rows),
            "out_cache_loc": self.new_slots,
            "global_num_tokens_cpu": None,
        }
        return SimpleNamespace(**{**nothing, **fields, **changed})

    def runner(self) -> Any:
        """A `ModelRunner`, of what `Sharing` reads of it. Its layers are those of an 8B model, whatever is computed here."""
        return SimpleNamespace(
            page_size=self.page_tokens,
            req_to_token_pool=SimpleNamespace(req_to_token=self.table),
            token_to_kv_pool=SimpleNamespace(head_num=8, head_dim=128, v_head_dim=128, dtype=torch.bfloat16),
            model_config=SimpleNamespace(num_attention_heads=32),
        )

    def pool(self) -> Any:
        """SGLang's KV pool, to which the new tokens are still to be written."""
        keys, values = self.keys.clone(), self.values.clone()
        keys[self.new_slots] = values[self.new_slots] = torch.nan

        def set_kv_buffer(layer: Any, where: Any, key: torch.Tensor, value: torch.Tensor) -> None:
            keys[where.loc], values[where.loc] = key.view(-1, *keys.shape[1:]), value.view(-1, *values.shape[1:])

        return SimpleNamespace(
            get_key_buffer=lambda _: keys,
            get_value_buffer=lambda _: values,
            get_kv_buffer=lambda _: (keys, values),
            set_kv_buffer=set_kv_buffer,
        )

    def expected(self, soft_cap: float = 0.0) -> torch.Tensor:
        """Each request alone, in one piece, [new tokens, heads * dim]."""
        starts = itertools.accumulate(self.new, initial=0)
        queries = self.query.view(len(self.query), HEADS, -1)
        found = []
        for row, n_cached, n_new, start in zip(self.rows, self.cached, self.new, starts, strict=False):
            slots = self.table[row, : n_cached + n_new].long()
            mine = queries[start : start + n_new]
            output, _ = slow_attention.attend(
                mine, self.keys[slots], self.values[slots], 0.3, causal=True, soft_cap=soft_cap
            )
            found.append(output.flatten(1))
        return torch.cat(found)


def make(
    seed: int, *, page_tokens: int = 1, dim: int = 8, most_tokens: int = 200, most_requests: int = 9, n_nodes: int = 0
) -> SharingStep:
    """Makes a step at random: requests behind branches of a few prefixes, some cold, some with cached tokens of their own.

    n_nodes: as many more requests of one token each stand behind the prompt of one of the others, tokens of the same step
    included, as answers of several tokens do.
    """
    rng = random.Random(seed)
    pages = itertools.count(1)

    def dealt(n_tokens: int) -> list[int]:
        """Slots in whole pages, which lie anywhere."""
        mine = rng.sample([next(pages) for _ in range(-(-n_tokens // page_tokens))], -(-n_tokens // page_tokens))
        slots = [page_tokens * page + place for page in mine for place in range(page_tokens)]
        return slots[:n_tokens]

    def length(most: int) -> int:
        return rng.randrange(most // page_tokens + 1) * page_tokens

    trunks = [dealt(length(most_tokens)) for _ in range(rng.randint(1, 3))]
    branches = [trunk + dealt(length(most_tokens // 2)) for trunk in trunks for _ in range(rng.randint(1, 2))]
    paths: list[list[int]] = []
    cached: list[int] = []
    for _ in range(rng.randint(1, most_requests)):
        kind = rng.random()
        path = [] if kind < 0.15 else list(rng.choice(branches))
        if kind > 0.7:
            path += dealt(length(most_tokens // 3))  # cached for this one alone
        elif kind > 0.5:
            path = path[: length(len(path))]
        cached.append(len(path))
        paths.append(path + dealt(rng.randint(1, 12)))
    before: list[int] = list(rng.choice(paths)) if n_nodes else []
    for _ in range(n_nodes):
        cached.append(len(before))
        paths.append(before + dealt(1))
        before = paths[-1] if rng.random() < 0.5 else before
    new = [len(path) - n_cached for path, n_cached in zip(paths, cached, strict=True)]
    # What stands behind a request's own is left of others: slot 0 here, which shows where it is read.
    table = torch.zeros(len(paths) + 3, max(map(len, paths)) + rng.randrange(3), dtype=torch.int32)
    rows = rng.sample(range(len(table)), len(paths))
    for row, path in zip(rows, paths, strict=True):
        table[row, : len(path)] = torch.tensor(path, dtype=torch.int32)
    generator = torch.Generator().manual_seed(seed)
    n_slots = page_tokens * next(pages)
    keys, values = torch.randn(2, n_slots, KV_HEADS, dim, generator=generator)
    keys[:page_tokens] = values[:page_tokens] = torch.nan
    query = torch.randn(sum(new), HEADS * dim, generator=generator)
    return SharingStep(page_tokens, table, rows, cached, new, query, keys, values)
