"""Chooses the chunk size of hybrid prefilling: the smallest at which matrix products are fast on this machine."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

import torch

from sgl_prefill.core.ranks import ALONE, Ranks
from sgl_prefill.hybrid.split import Argument, Piece, SplitBody
from sgl_prefill.startup import disk_cache
from sgl_prefill.startup.device import Device

if TYPE_CHECKING:
    from sgl_prefill.hybrid.body import HybridBody
    from sgl_prefill.startup.loaded_model import LoadedModel

logger = logging.getLogger(__name__)

TOLERATED_SLOWDOWN = 1.03
# Rounds of timing; after so many seconds no more than `Device.fewest_rounds`.
ROUNDS, ENOUGH_S = 5, 1.0


def choose_chunk_tokens(model: LoadedModel, config_tokens: int | None) -> None:
    """Sets the chunk size: the configured one, that of an earlier start, or one measured now. Pack weights first."""
    hybrid = model.hybrid
    assert hybrid is not None
    hybrid.chunk_tokens = config_tokens or _measured_chunk_tokens(model, hybrid)
    hybrid.plain_tokens = 0 if config_tokens else model.device.plain_tokens
    logger.info(
        "hybrid prefilling: chunks of %d tokens, %d bytes a token kept between layers",
        hybrid.chunk_tokens,
        hybrid.retained_bytes_per_token,
    )


def _measured_chunk_tokens(model: LoadedModel, hybrid: HybridBody) -> int:
    depends_on = model.circumstances
    stored = disk_cache.load_for_all(model.ranks, "chunk size", depends_on, {"chunk_tokens": int})
    if stored is None:
        with model.outside_a_batch():
            stored = {"chunk_tokens": measure_chunk_tokens(hybrid.split, model.device, model.ranks)}
        disk_cache.store("chunk size", depends_on, stored)
    return model.ranks.of_first(max(int(stored["chunk_tokens"]), 1))


def measure_chunk_tokens(split: SplitBody, device: Device, ranks: Ranks = ALONE) -> int:
    """Returns the smallest candidate within 3 % of the fastest: smaller chunks cost time, larger ones memory. Times the middle
    piece of the body, on all ranks together.
    """
    candidates = device.chunk_candidates
    piece = split.pieces[len(split.pieces) // 2]
    for chunk_tokens in candidates * device.warm_up_rounds:
        _time_ms(piece, split, device, chunk_tokens, candidates[-1])
    best_ms = dict.fromkeys(candidates, float("inf"))
    started = time.perf_counter()
    for number in range(ROUNDS):  # candidates take turns, so that a slow moment of the machine affects all
        if number >= device.fewest_rounds and ranks.of_first(time.perf_counter() - started > ENOUGH_S):
            break
        for chunk_tokens in candidates:
            ms = _time_ms(piece, split, device, chunk_tokens, candidates[-1])
            best_ms[chunk_tokens] = min(best_ms[chunk_tokens], ms)
    fast_enough = TOLERATED_SLOWDOWN * min(best_ms.values())
    return next(chunk_tokens for chunk_tokens in candidates if best_ms[chunk_tokens] <= fast_enough)


def _time_ms(piece: Piece, split: SplitBody, device: Device, chunk_tokens: int, n_tokens: int) -> float:
    arguments = [_filler(argument, split, device.name, chunk_tokens) for argument in piece.arguments]

    @torch.no_grad()
    def run() -> None:
        for _ in range(n_tokens // chunk_tokens):
            piece.module(*arguments)

    return device.time_ms(run)


def _filler(argument: Argument, split: SplitBody, device: str, n_rows: int) -> Any:
    if argument.buffer is not None:
        spec = split.buffers[argument.buffer]
        return torch.zeros((n_rows, *spec.row_shape), dtype=spec.dtype, device=device)
    if argument.token_rows is not None:
        return torch.zeros(n_rows, dtype=torch.int64, device=device)
    return n_rows if argument.is_chunk_length else argument.constant
