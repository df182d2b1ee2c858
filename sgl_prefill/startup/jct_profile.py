"""Times prefills at start and fits the JCT model to them (PrefillOnly, section 6.3: the offline profile).

Times a grid over computed and cached tokens, and steps of several requests. Any KV slots can stand for a cached prefix, since its
values do not change the time. So a few computed tokens behind a long prefix measure attention at that length.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator

from sgl_prefill.core.jct import FittedJct, Observation, fit
from sgl_prefill.core.kv_plan import ceil_to, floor_to
from sgl_prefill.startup import disk_cache
from sgl_prefill.startup.loaded_model import LoadedModel

logger = logging.getLogger(__name__)

MISS_TOKENS = (4, 16, 64, 256, 1024, 4096)
CACHED_SHARES = (0.0, 0.125, 0.5, 1.0)  # of the longest input less the computed tokens
SEVERAL = (1, 4, 16)  # requests in a step
SEVERAL_CACHED_TOKENS = 64  # a short prefix, so that the cost of attention does not hide the cost per request
ROUNDS = 2
ENOUGH_S = 4.0  # no column of the grid begins after this: a slow machine extrapolates from shorter computations
MIN_COLUMNS = 2


def fitted_model(model: LoadedModel, longest_tokens: int) -> FittedJct:
    """Returns the JCT model of this machine, from a cached profile or measured now. longest_tokens: of an input."""
    depends_on = {
        **model.circumstances,
        "chunk_tokens": None if model.hybrid is None else model.hybrid.chunk_tokens,
        "longest_tokens": longest_tokens,
        "is_evicting": model.is_evicting,
        "most_replayed_tokens": max(model.graphed_tokens, default=0),
        "coefficients": FittedJct._fields,
        "steps": (MISS_TOKENS, CACHED_SHARES, SEVERAL, SEVERAL_CACHED_TOKENS),
    }
    fields = dict.fromkeys(FittedJct._fields, float)
    stored = disk_cache.load_for_all(
        model.ranks, "jct model", depends_on, fields, lambda one: is_plausible(FittedJct(**one))
    )
    if stored is not None:
        logger.info("JCT model %s from an earlier start", FittedJct(**stored))
        return FittedJct(**stored)
    started = time.perf_counter()
    observations = measure(model, longest_tokens)
    jct_ms = fit(observations)
    logger.info("JCT model %s from %d steps in %.1f s", jct_ms, len(observations), time.perf_counter() - started)
    if is_plausible(jct_ms):
        disk_cache.store("jct model", depends_on, jct_ms._asdict())
    else:
        logger.warning(
            "the timed steps of this start do not grow with their tokens, as on a busy machine: not kept for the next"
        )
    return jct_ms


def is_plausible(jct_ms: FittedJct) -> bool:
    """Whether more tokens take longer. Noise of a busy machine can hide that."""
    return jct_ms.miss_token_ms > 0


def measure(model: LoadedModel, longest_tokens: int) -> list[Observation]:
    """Times the grid's points and the steps of several requests that fit the longest input."""
    observations: list[Observation] = []
    started = time.perf_counter()

    def is_enough() -> bool:
        return model.ranks.of_first(time.perf_counter() - started > ENOUGH_S)

    for column, n_miss in enumerate(MISS_TOKENS):
        if n_miss > longest_tokens or (column >= MIN_COLUMNS and is_enough()):
            break
        free = longest_tokens - n_miss
        for n_cached in sorted({floor_to(int(share * free), model.page_size) for share in CACHED_SHARES}):
            observations.append(observe(model, 1, n_miss, n_cached))
        if column + 1 == MIN_COLUMNS:
            observations += _observe_several(model, longest_tokens, is_enough)
    return observations


def _observe_several(model: LoadedModel, longest_tokens: int, is_enough: Callable[[], bool]) -> Iterator[Observation]:
    """Times steps of increasing numbers of requests behind one cached prefix, within the limits of time, slots and requests."""
    n_miss, n_places = MISS_TOKENS[0], model.n_places()
    for n_requests in SEVERAL:
        n_computed = n_requests * ceil_to(n_miss, model.page_size)
        if n_computed > longest_tokens or n_requests > n_places or (n_requests > SEVERAL[1] and is_enough()):
            return
        n_cached = min(SEVERAL_CACHED_TOKENS, longest_tokens - n_computed)
        yield observe(model, n_requests, n_miss, floor_to(n_cached, model.page_size))


def observe(model: LoadedModel, n_requests: int, n_miss: int, n_cached: int) -> Observation:
    """Times a step of requests that compute `n_miss` tokens each behind the same `n_cached`: the faster of two runs."""
    ms = min(_time_ms(model, n_requests, n_miss, n_cached) for _ in range(ROUNDS))
    return Observation(((n_cached + n_miss, n_cached),) * n_requests, ms)


def _time_ms(model: LoadedModel, n_requests: int, n_miss: int, n_cached: int) -> float:
    step = model.step([[1] * (n_cached + n_miss)] * n_requests, model.last_slots(n_cached))
    ms = model.device.time_ms(step.run)
    step.release()
    return ms
