"""How many tokens a chunk should have: as few as the machine's matrix products allow."""

from __future__ import annotations

import time
from typing import Any

import torch

from sgl_prefill.hybrid.split import Argument, Piece, SplitBody

CANDIDATES = {"cpu": (256, 512, 1024, 2048), "cuda": (1024, 2048, 4096, 8192)}
TOLERATED_SLOWDOWN = 1.03
ROUNDS, ENOUGH_S = 5, 1.0  # rounds, fewer where they have taken so long


def measure_chunk_tokens(split: SplitBody, device: str) -> int:
    """The smallest candidate within 3 % of the fastest: smaller chunks cost time, larger ones memory.

    Times one middle piece, which stands for all.
    """
    candidates = CANDIDATES["cpu" if device == "cpu" else "cuda"]
    piece = split.pieces[len(split.pieces) // 2]
    seconds = dict.fromkeys(candidates, float("inf"))
    started = time.perf_counter()
    for number in range(ROUNDS):  # in turn, so that a slow moment of the machine hits all
        if number > 1 and time.perf_counter() - started > ENOUGH_S:
            break
        for chunk_tokens in candidates:
            seconds[chunk_tokens] = min(
                seconds[chunk_tokens], _seconds(piece, split, device, chunk_tokens, candidates[-1])
            )
    fast_enough = TOLERATED_SLOWDOWN * min(seconds.values())
    return next(chunk_tokens for chunk_tokens in candidates if seconds[chunk_tokens] <= fast_enough)


def _seconds(piece: Piece, split: SplitBody, device: str, chunk_tokens: int, n_tokens: int) -> float:
    arguments = [_filler(argument, split, device, chunk_tokens) for argument in piece.arguments]
    _synchronize(device)
    started = time.perf_counter()
    for _ in range(n_tokens // chunk_tokens):
        with torch.no_grad():
            piece.module(*arguments)
    _synchronize(device)
    return time.perf_counter() - started


def _filler(argument: Argument, split: SplitBody, device: str, n_rows: int) -> Any:
    if argument.buffer is not None:
        spec = split.buffers[argument.buffer]
        return torch.zeros((n_rows, *spec.row_shape), dtype=spec.dtype, device=device)
    if argument.token_rows is not None:
        return torch.zeros(n_rows, dtype=torch.int64, device=device)
    return n_rows if argument.is_chunk_length else argument.constant


def _synchronize(device: str) -> None:
    if device != "cpu":
        torch.get_device_module(device).synchronize()
