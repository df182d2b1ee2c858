"""Replay of a trace on a simulated clock: the real policy, index, KV plan and radix tree; a JCT model for the forward pass.

Tokens are counted in pages, so that a prompt of 14,000 tokens is a key of some hundred symbols: a prefix is shared in whole
pages, as in an engine with pages of that size. One request runs at a time.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

import torch
from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from sgl_prefill.core.jct import FittedJct, JctModel, cache_miss_tokens
from sgl_prefill.core.kv_plan import plan_kv
from sgl_prefill.planner.workloads import Arrival
from sgl_prefill.scheduling.calibrated_queue import CalibratedQueue
from sgl_prefill.scheduling.watched_cache import WatchedRadixCache

Order = Literal["fifo", "srjf", "calibrated-srjf"]


class Setting(NamedTuple):
    """What is compared."""

    order: Order
    fairness_lambda: float = 0.0  # tokens of credit per second of waiting
    max_queue_s: float | None = None
    counts_sharers: bool = False

    @property
    def name(self) -> str:
        bound = "" if self.max_queue_s is None else f", at most {self.max_queue_s:g} s"
        sharers = ", sharers counted" if self.counts_sharers else ""
        return self.order if self.order == "fifo" else f"{self.order}, lambda {self.fairness_lambda:g}{sharers}{bound}"


class Served(NamedTuple):
    """One request of the replay."""

    arrival_s: float
    start_s: float
    finish_s: float
    n_tokens: int
    n_cached_tokens: int

    @property
    def latency_s(self) -> float:
        return self.finish_s - self.arrival_s


class _SlotCounter:
    """Stands in for the KV allocator: durable slots are only counted."""

    device = "cpu"

    def __init__(self, n_slots: int) -> None:
        self.n_free = n_slots

    def free_segment(self, slots: torch.Tensor, *, start_pos: int) -> None:
        self.n_free += len(slots)


class _Request:
    """What the queue asks of SGLang's `Req`."""

    output_ids = ()
    extra_key = None
    priority = 0

    def __init__(self, arrival: Arrival, keys: array[int]) -> None:
        self.arrival = arrival
        self.origin_input_ids = keys
        self.time_stats = SimpleNamespace(
            api_server_dispatch_time=arrival.arrival_s, wait_queue_entry_time=arrival.arrival_s
        )

    def _compute_max_prefix_len(self, n_pages: int) -> int:
        return n_pages - 1


def replay(
    arrivals: Iterable[Arrival],
    setting: Setting,
    jct_ms: JctModel,
    durable_tokens: int,
    *,
    page_tokens: int = 50,
    on_progress: Callable[[int], None] | None = None,
) -> Iterator[Served]:
    """Requests in the order in which they are served.

    Args:
        arrivals: in time order.
        jct_ms: how long a forward pass takes, (input tokens, cached tokens) -> milliseconds.
        durable_tokens: KV slots of the prefix cache.
    """
    slots = _SlotCounter(durable_tokens // page_tokens)
    tree = WatchedRadixCache(
        CacheInitParams(disable=False, req_to_token_pool=None, token_to_kv_pool_allocator=slots, page_size=1)
    )
    queue = CalibratedQueue(
        tree,
        *_order(setting, jct_ms, page_tokens),
        setting.max_queue_s,
        counts_sharers=setting.order == "calibrated-srjf" and setting.counts_sharers,
    )
    symbols = _Symbols(page_tokens)
    coming = iter(arrivals)
    next_one = next(coming, None)
    now_s, n_served = 0.0, 0
    while next_one is not None or len(queue.order) > 0:
        while next_one is not None and next_one.arrival_s <= now_s:
            queue.add(_Request(next_one, symbols.of(next_one)))
            next_one = next(coming, None)
        request: Any = queue.order.first(now_s)
        if request is None:
            assert next_one is not None
            now_s = next_one.arrival_s
            continue
        n_cached = _serve(request, queue, tree, slots)
        arrival, start_s = request.arrival, now_s
        n_cached_tokens = min(n_cached * page_tokens, arrival.n_tokens - 1)
        now_s += jct_ms(arrival.n_tokens, n_cached_tokens) / 1000
        yield Served(arrival.arrival_s, start_s, now_s, arrival.n_tokens, n_cached_tokens)
        n_served += 1
        if on_progress is not None and n_served % 1000 == 0:
            on_progress(n_served)


def _order(setting: Setting, jct_ms: JctModel, page_tokens: int) -> tuple[JctModel, float]:
    """(cost of a request in pages, credit per second), in the units that the engine would use with this JCT model."""
    if setting.order == "fifo":
        return (lambda n_input, n_cached: 0.0), 1.0
    is_fitted = isinstance(jct_ms, FittedJct)
    cost: JctModel = jct_ms if is_fitted else cache_miss_tokens
    token_cost = jct_ms(1000, 0) / 1000 if is_fitted else 1.0
    calibrates = setting.order == "calibrated-srjf"
    return (
        lambda n_input, n_cached: cost(n_input * page_tokens, n_cached * page_tokens if calibrates else 0)
    ), setting.fairness_lambda * token_cost


def _serve(request: Any, queue: CalibratedQueue, tree: WatchedRadixCache, slots: _SlotCounter) -> int:
    """What the engine does with the cache around a forward pass. Returns the cached pages."""
    keys = request.origin_input_ids
    n_pages = len(keys)
    match = tree.match_prefix(MatchPrefixParams(key=RadixKey(keys[: n_pages - 1])))
    n_cached, node = len(match.device_indices), match.last_device_node
    tree.inc_lock_ref(node)
    plan = plan_kv(n_pages, n_cached, queue.available_slots(request, n_cached, n_pages - n_cached, slots.n_free))
    tree.evict_unwanted_first(plan.n_new_durable - slots.n_free)
    slots.n_free -= plan.n_new_durable
    queue.remove(request)
    kept = keys[: plan.n_durable]
    result = tree.insert(InsertParams(key=RadixKey(kept), value=torch.zeros(len(kept), dtype=torch.int64)))
    slots.n_free += max(result.prefix_len - n_cached, 0)  # what was there already is given back
    tree.dec_lock_ref(node)
    return n_cached


class _Symbols:
    """Keys of a request: its prefix's pages, the same for all that share it, and pages of its own."""

    def __init__(self, page_tokens: int) -> None:
        self._page_tokens = page_tokens
        self._numbers = itertools.count()
        self._prefixes: dict[str, array[int]] = {}

    def of(self, arrival: Arrival) -> array[int]:
        n_prefix = arrival.prefix_tokens // self._page_tokens
        prefix = self._prefixes.setdefault(arrival.prefix_id, array("q"))
        while len(prefix) < n_prefix:  # the longest that this prefix id has had
            prefix.append(next(self._numbers))
        n_tail = max(-(-arrival.n_tokens // self._page_tokens) - n_prefix, 1)
        return prefix[:n_prefix] + array("q", itertools.islice(self._numbers, n_tail))
