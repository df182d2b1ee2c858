"""Before the first request: hybrid against plain, cache hit against miss, scratch against durable slots.

Each pair runs the same made-up prompt. Nothing is served where two log-probability rows differ by more than the tolerance.
The plain path is SGLang's own layers; with native kernels it runs before their weights are packed, and then never again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from sgl_prefill.errors import ParityError
from sgl_prefill.hybrid.install import hybrid_of
from sgl_prefill.kv.allocator import SuffixKVAllocator
from sgl_prefill.startup.made_up_request import MadeUpRequest

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)

GATE_TOKENS = 60
GATE_CHUNK_TOKENS = 16
# Log-probabilities of the 100 likeliest tokens. Chunks change the row count of each matrix product, and with it the order
# of its sums: bfloat16 keeps 8 bits, and a logit of 16 moves by 2^-4 where one of 30 layers rounds the other way. A wrong
# K or V row moves them by whole units.
TOLERANCE = {torch.float32: 0.01, torch.float16: 0.25, torch.bfloat16: 0.5}
COMPARED_TOKENS = 100
SEED = 0


def reference(model_runner: ModelRunner) -> torch.Tensor:
    """What SGLang's own layers answer, for `run`."""
    with _plain_path(model_runner):
        return answer(model_runner)


def answer(model_runner: ModelRunner) -> torch.Tensor:
    """What the engine as it stands answers to the gate's prompt."""
    return _result(MadeUpRequest(model_runner, _token_ids(model_runner)), model_runner)


def run(model_runner: ModelRunner, reference: torch.Tensor) -> dict[str, float]:
    """The largest difference of each pair that this engine has. Raises ParityError above the tolerance."""
    started = time.perf_counter()
    differences = dict(_pairs(model_runner, reference))
    tolerance = TOLERANCE.get(model_runner.dtype, TOLERANCE[torch.bfloat16])
    if wrong := {pair: difference for pair, difference in differences.items() if not difference <= tolerance}:
        shown = ", ".join(f"{pair} differ by {difference:.3g}" for pair, difference in wrong.items())
        raise ParityError(
            f"the paths of this engine disagree on a made-up prompt: {shown} in a log-probability, and {tolerance} is"
            f" the limit for {model_runner.dtype}. Nothing is served. Start with --hybrid-prefill off or --suffix-kv"
            " keep to find the part, and please report it; --skip-parity-gate serves in spite of it"
        )
    logger.info("parity gate passed in %.2f s: %s", time.perf_counter() - started, differences)
    return differences


def _token_ids(model_runner: ModelRunner) -> list[int]:
    generator = torch.Generator().manual_seed(SEED)
    token_ids: list[int] = torch.randint(
        0, model_runner.model_config.vocab_size, (GATE_TOKENS,), generator=generator
    ).tolist()
    return token_ids


def _pairs(model_runner: ModelRunner, reference: torch.Tensor) -> Iterator[tuple[str, float]]:
    token_ids = _token_ids(model_runner)
    hybrid = hybrid_of(model_runner)
    allocator = model_runner.token_to_kv_pool_allocator
    if hybrid is not None and hybrid.serves_short:
        with _chunks_of(model_runner, 2 * GATE_TOKENS), _durable_slots(allocator, GATE_TOKENS):
            at_once = _result(MadeUpRequest(model_runner, token_ids), model_runner)
            yield "native kernels and plain", _difference(reference, at_once)
    if hybrid is not None:
        with _chunks_of(model_runner, GATE_CHUNK_TOKENS), _durable_slots(allocator, GATE_TOKENS):
            yield (
                "hybrid and plain",
                _difference(reference, _result(MadeUpRequest(model_runner, token_ids), model_runner)),
            )
    with _chunks_of(model_runner, GATE_CHUNK_TOKENS), _durable_slots(allocator, GATE_TOKENS):
        n_cached = GATE_TOKENS // 2 // model_runner.page_size * model_runner.page_size
        if n_cached > 0:
            first = MadeUpRequest(model_runner, token_ids[:n_cached])
            again = MadeUpRequest(model_runner, token_ids, cached_slots=first.slots)
            yield "cache hit and miss", _difference(reference, _result(again, model_runner))
            first.release()
    if isinstance(allocator, SuffixKVAllocator):
        # A layer that reads scratch which it has not written must show.
        model_runner.token_to_kv_pool.fill_scratch(float("nan"), GATE_TOKENS)
        with _chunks_of(model_runner, GATE_CHUNK_TOKENS), _durable_slots(allocator, 0):
            yield (
                "scratch and durable slots",
                _difference(reference, _result(MadeUpRequest(model_runner, token_ids), model_runner)),
            )


def _result(request: MadeUpRequest, model_runner: ModelRunner) -> torch.Tensor:
    """Log-probabilities, or the embedding of a model without a vocabulary to answer from."""
    request.release()
    return request.output.log_softmax(-1) if model_runner.is_generation else request.output


def _difference(reference: torch.Tensor, other: torch.Tensor) -> float:
    likeliest = reference.topk(min(COMPARED_TOKENS, len(reference))).indices
    return float((reference[likeliest] - other[likeliest]).abs().max())


@contextmanager
def _plain_path(model_runner: ModelRunner) -> Iterator[None]:
    hybrid = hybrid_of(model_runner)
    if hybrid is None:
        yield
        return
    kept, hybrid.serves_short = hybrid.serves_short, False
    try:
        with _chunks_of(model_runner, 2 * GATE_TOKENS):
            yield
    finally:
        hybrid.serves_short = kept


@contextmanager
def _chunks_of(model_runner: ModelRunner, chunk_tokens: int) -> Iterator[None]:
    hybrid = hybrid_of(model_runner)
    if hybrid is None:
        yield
        return
    kept, hybrid.chunk_tokens = hybrid.chunk_tokens, chunk_tokens
    try:
        yield
    finally:
        hybrid.chunk_tokens = kept


@contextmanager
def _durable_slots(allocator: object, n_tokens: int) -> Iterator[None]:
    """Let the suffix allocator own so many durable slots (in whole pages, and room for two prompts), then as before."""
    if not isinstance(allocator, SuffixKVAllocator):
        yield
        return
    before = allocator.size
    allocator.resize_durable(min(before, 2 * (n_tokens + allocator.page_size)) if n_tokens else 0)
    try:
        yield
    finally:
        allocator.resize_durable(before)
