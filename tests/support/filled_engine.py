"""A scheduler process without a model that has much to show: requests that wait, cached prefixes, and steps that have run."""

from __future__ import annotations

import random
from array import array
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import InsertParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from sgl_prefill.config import PrefillConfig
from sgl_prefill.core import policies
from sgl_prefill.core.jct import FittedJct
from sgl_prefill.core.job import Job
from sgl_prefill.core.memory_plan import MemoryUse, plan_memory
from sgl_prefill.core.packing import StepSize
from sgl_prefill.core.policy import PolicySettings
from sgl_prefill.port.kv.radix_cache import RadixTree, WatchedRadixCache
from sgl_prefill.port.steps import time_stats
from sgl_prefill.port.steps.jobs import SchedulerPort
from sgl_prefill.port.steps.live import LiveScheduling
from sgl_prefill.port.steps.step_state import Answered, EndedStep, StepState
from sgl_prefill.startup.record import StartRecord

JCT = FittedJct(step_ms=8.0, miss_token_ms=0.4, pair_ms=0.00002, cached_token_ms=0.001, request_ms=0.2)
KNEE_TOKENS = 256
VOCABULARY = 32_000


class FilledEngine(SimpleNamespace):
    """What the dashboard's hook gets."""

    state: StepState
    scheduler: Any


def kept_whole(n_tokens: int) -> Any:
    """A request that has run, all of whose KV is durable."""
    req = SimpleNamespace(time_stats=SimpleNamespace())
    time_stats.add_facts(req.time_stats, kept_tokens=n_tokens, evicted_tokens=0)
    return req


def filled_engine(
    n_waiting: int,
    n_prefixes: int,
    *,
    now_s: float,
    n_prompt_tokens: int = 300,
    n_clients: int = 50,
    config: PrefillConfig | None = None,
    first_prefix: list[int] | None = None,
) -> FilledEngine:
    """Makes one whose requests came during the last minute and share the prefixes of twenty users.

    Args:
        now_s: on the clock of `time.perf_counter`.
        first_prefix: tokens that are cached besides, and hit often.
    """
    rng, config = random.Random(0), config or PrefillConfig()
    cache = _cache()
    settings = PolicySettings.of(
        StepSize(KNEE_TOKENS, 64),
        jct_ms=JCT,
        fairness_lambda=config.fairness_lambda,
        max_queue_s=None,
        counts_sharers=True,
    )
    policy = policies.make(config.scheduling, settings, is_fair=config.is_fair)
    live = LiveScheduling(RadixTree(cache), policy)
    cache.connect(live.listener, live.advisor, 1_000_000)
    port = SchedulerPort(live, 0)
    users = [[rng.randrange(VOCABULARY) for _ in range(n_prompt_tokens)] for _ in range(20)]
    for number in range(n_prefixes - len(users)):
        _insert(cache, [*users[number % len(users)], *(rng.randrange(VOCABULARY) for _ in range(3)), number])
    for _ in range(9 if first_prefix else 0):
        _insert(cache, first_prefix or [])
    for number in range(n_waiting):
        tail = [rng.randrange(VOCABULARY) for _ in range(rng.choice((5, 50, 200)))]
        tokens = array("q", [*users[number % len(users)], *tail])
        live.arrive(Job(tokens, now_s - rng.random() * 60, len(tokens) - 1, client=f"client {number % n_clients}"))
    for number in range(200):
        begin_s = now_s - 60 + number * 0.3
        answered = [
            Answered(
                f"{number}-{place}",
                begin_s + 0.2,
                f"client {place}",
                100 + 40 * place,
                60,
                0.1 * place,
                0.1 * place + 0.2,
            )
            for place in range(10)
        ]
        port.recent.on_step_end(
            EndedStep(
                number=number,
                begin_s=begin_s,
                end_s=begin_s + 0.2,
                predicted_ms=190.0 + number % 20,
                policy_s=0.002,
                score=None,
                is_waited_for=True,
                reqs=[kept_whole(one.n_input_tokens) for one in answered],
                answered=answered,
            )
        )
    plan = plan_memory(
        MemoryUse(300 << 20, 3 << 30, 60 << 20, 2000.0, 768, 23_040),
        8000,
        input_limit_tokens=8192,
        min_durable_tokens=1,
        page_size=1,
    )
    state = StepState(StartRecord(config, memory_plan=plan), scheduling=port)
    scheduler = SimpleNamespace(tree_cache=cache, max_total_num_tokens=1_000_000)
    return FilledEngine(state=state, scheduler=scheduler)


def _cache() -> WatchedRadixCache:
    allocator = SimpleNamespace(device="cpu", free_segment=lambda *_, **__: None)
    parameters = CacheInitParams(
        disable=False, req_to_token_pool=None, token_to_kv_pool_allocator=allocator, page_size=1
    )
    return WatchedRadixCache(parameters)


def _insert(cache: WatchedRadixCache, tokens: list[int]) -> None:
    cache.insert(InsertParams(key=RadixKey(token_ids=array("q", tokens)), value=torch.tensor(tokens)))
