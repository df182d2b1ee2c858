"""Times prefills at start and fits the JCT model to them (PrefillOnly, section 6.3: the offline profile).

A grid over computed and cached tokens, and steps of several requests. What a cached prefix holds does not matter for time, so
that any KV slots may stand for it: short computations behind long prefixes show what attention costs at any length, and no
long prompt has to run.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch

from sgl_prefill import disk_cache
from sgl_prefill.core.jct import FittedJct, Observation, fit
from sgl_prefill.core.kv_plan import ceil_to, floor_to
from sgl_prefill.hybrid.install import hybrid_of
from sgl_prefill.kv.allocator import SuffixKVAllocator
from sgl_prefill.startup.made_up_request import MadeUpStep

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)

MISS_TOKENS = (4, 16, 64, 256, 1024, 4096)
CACHED_SHARES = (0.0, 0.125, 0.5, 1.0)  # of what the longest input leaves beside the computed tokens
# Steps of so many requests behind one prefix, which is short: what looking it up costs must not hide what a request costs.
SEVERAL = (1, 4, 16)
SEVERAL_CACHED_TOKENS = 64
ROUNDS = 2
# No further column of the grid is begun after so many seconds: a slow machine extrapolates from shorter computations.
ENOUGH_S = 4.0
MIN_COLUMNS = 2


def fitted_model(model_runner: ModelRunner, longest_tokens: int) -> FittedJct:
    """From this model's cached profile, or measured now. `longest_tokens`: of an input."""
    hybrid = hybrid_of(model_runner)
    depends_on = {
        **disk_cache.circumstances(model_runner),
        "chunk_tokens": None if hybrid is None else hybrid.chunk_tokens,
        "longest_tokens": longest_tokens,
        "is_evicting": isinstance(model_runner.token_to_kv_pool_allocator, SuffixKVAllocator),
        "coefficients": FittedJct._fields,
        "steps": (MISS_TOKENS, CACHED_SHARES, SEVERAL, SEVERAL_CACHED_TOKENS),
    }
    if (stored := disk_cache.load("jct model", depends_on)) is not None:
        return FittedJct(**stored)
    started = time.perf_counter()
    observations = measure(model_runner, longest_tokens)
    model = fit(observations)
    logger.info("JCT model %s from %d steps in %.1f s", model, len(observations), time.perf_counter() - started)
    disk_cache.store("jct model", depends_on, model._asdict())
    return model


def measure(model_runner: ModelRunner, longest_tokens: int) -> list[Observation]:
    """The grid's points and the steps of several requests that fit the longest input, each the faster of two runs."""
    observations: list[Observation] = []
    started = time.perf_counter()

    def is_enough() -> bool:
        return time.perf_counter() - started > ENOUGH_S

    for column, n_miss in enumerate(MISS_TOKENS):
        if n_miss > longest_tokens or (column >= MIN_COLUMNS and is_enough()):
            break
        free = longest_tokens - n_miss
        for n_cached in sorted({floor_to(int(share * free), model_runner.page_size) for share in CACHED_SHARES}):
            observations.append(observe(model_runner, 1, n_miss, n_cached))
        if column + 1 == MIN_COLUMNS:
            observations += _observe_several(model_runner, longest_tokens, is_enough)
    return observations


def _observe_several(
    model_runner: ModelRunner, longest_tokens: int, is_enough: Callable[[], bool]
) -> Iterator[Observation]:
    """Steps of more and more requests of a few tokens behind one cached prefix, as far as time, slots and places reach."""
    n_miss, page_size = MISS_TOKENS[0], model_runner.page_size
    n_places = model_runner.req_to_token_pool.available_size()
    for n_requests in SEVERAL:
        n_computed = n_requests * ceil_to(n_miss, page_size)
        if n_computed > longest_tokens or n_requests > n_places or (n_requests > SEVERAL[1] and is_enough()):
            return
        n_cached = min(SEVERAL_CACHED_TOKENS, longest_tokens - n_computed)
        yield observe(model_runner, n_requests, n_miss, floor_to(n_cached, page_size))


def observe(model_runner: ModelRunner, n_requests: int, n_miss: int, n_cached: int) -> Observation:
    """A step of requests that compute `n_miss` tokens each behind the same `n_cached`: the faster of two."""
    ms = min(_time_ms(model_runner, n_requests, n_miss, n_cached) for _ in range(ROUNDS))
    return Observation(((n_cached + n_miss, n_cached),) * n_requests, ms)


def _time_ms(model_runner: ModelRunner, n_requests: int, n_miss: int, n_cached: int) -> float:
    cached_slots = _some_slots(model_runner, n_cached)
    step = MadeUpStep(model_runner, [[1] * (n_cached + n_miss)] * n_requests, cached_slots)
    _synchronize(model_runner.device)
    started = time.perf_counter()
    step.run()
    _synchronize(model_runner.device)
    ms = 1000 * (time.perf_counter() - started)
    step.release()
    return ms


def _some_slots(model_runner: ModelRunner, n_tokens: int) -> torch.Tensor:
    """Consecutive KV slots that the allocator will not hand out to a request of the rest of the longest input."""
    allocator = model_runner.token_to_kv_pool_allocator
    if isinstance(allocator, SuffixKVAllocator):
        end = allocator.first_scratch_slot + allocator.scratch_tokens
    else:
        end = allocator.size + 1  # slot 0 is padding
    return torch.arange(end - n_tokens, end, dtype=torch.int64, device=model_runner.device)


def _synchronize(device: str) -> None:
    if device != "cpu":
        torch.get_device_module(device).synchronize()
