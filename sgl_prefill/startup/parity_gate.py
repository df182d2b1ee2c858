"""Before the first request: hybrid against plain, cache hit against miss, scratch against durable slots.

Each pair runs the same made-up prompt. Nothing is served where two log-probability rows differ by more than the tolerance.
The plain path is SGLang's own layers; with native kernels it runs before their weights are packed, and then never again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from sgl_prefill.errors import ParityError
from sgl_prefill.hybrid.shared_rows import share_equal_buffers
from sgl_prefill.startup.loaded_model import LoadedModel, MadeUpStep

logger = logging.getLogger(__name__)

GATE_TOKENS = 60
GATE_CHUNK_TOKENS = 16
# Log-probabilities of the 100 likeliest tokens. Chunks change the row count of each matrix product, and with it the order
# of its sums: bfloat16 keeps 8 bits, and a logit of 16 moves by 2^-4 where one of 30 layers rounds the other way. A wrong
# K or V row moves them by whole units.
TOLERANCE = {torch.float32: 0.01, torch.float16: 0.25, torch.bfloat16: 0.5}
COMPARED_TOKENS = 100
SEED = 0


def reference(model: LoadedModel) -> torch.Tensor:
    """Asks SGLang's own layers, for `run`."""
    with _plain_path(model):
        return answer(model)


def share_rows(model: LoadedModel) -> None:
    """Lets the ranks hold together what is the same on all of them, by what the gate's prompt leaves in chunks."""
    if model.exchange is None or model.hybrid is None:
        return
    with _chunks_of(model, GATE_CHUNK_TOKENS), _room_for_two(model, GATE_TOKENS):
        share_equal_buffers(model.hybrid, lambda: _run_made_up(model), model.ranks, model.exchange)


def _run_made_up(model: LoadedModel) -> None:
    step = model.step([_token_ids(model)])
    step.run()
    step.release()


def answer(model: LoadedModel) -> torch.Tensor:
    """Asks the engine as it stands for its answer to the gate's prompt: log-probabilities, or the embedding of a model without
    a vocabulary to answer from.
    """
    return _answer(model, model.step([_token_ids(model)]))


def run(model: LoadedModel, reference: torch.Tensor) -> dict[str, float]:
    """Returns the largest difference of each pair that this engine has. Raises ParityError above the tolerance."""
    started = time.perf_counter()
    differences = dict(_pairs(model, reference))
    tolerance = TOLERANCE.get(model.dtype, TOLERANCE[torch.bfloat16])
    if wrong := {pair: difference for pair, difference in differences.items() if not difference <= tolerance}:
        shown = ", ".join(f"{pair} differ by {difference:.3g}" for pair, difference in wrong.items())
        raise ParityError(
            f"the paths of this engine disagree on a made-up prompt: {shown} in a log-probability, and {tolerance} is"
            f" the limit for {model.dtype}. Nothing is served. Start with --hybrid-prefill off or --suffix-kv"
            " keep to find the part, and please report it; --skip-parity-gate serves in spite of it"
        )
    logger.info("parity gate passed in %.2f s: %s", time.perf_counter() - started, differences)
    return differences


def _token_ids(model: LoadedModel) -> list[int]:
    generator = torch.Generator().manual_seed(SEED)
    token_ids: list[int] = torch.randint(0, model.vocab_size, (GATE_TOKENS,), generator=generator).tolist()
    return token_ids


def _pairs(model: LoadedModel, reference: torch.Tensor) -> Iterator[tuple[str, float]]:
    token_ids, hybrid = _token_ids(model), model.hybrid
    if hybrid is not None and hybrid.serves_short:
        with _chunks_of(model, 2 * GATE_TOKENS), _room_for_two(model, GATE_TOKENS):
            yield "native kernels and plain", _difference(reference, answer(model))
    if hybrid is not None:
        with _chunks_of(model, GATE_CHUNK_TOKENS), _room_for_two(model, GATE_TOKENS):
            yield "hybrid and plain", _difference(reference, answer(model))
    with _chunks_of(model, GATE_CHUNK_TOKENS), _room_for_two(model, GATE_TOKENS):
        n_cached = GATE_TOKENS // 2 // model.page_size * model.page_size
        if n_cached > 0:
            first = model.step([token_ids[:n_cached]])
            first.run()
            again = model.step([token_ids], cached_slots=first.slots(0))
            yield "cache hit and miss", _difference(reference, _answer(model, again))
            first.release()
    if model.is_evicting:
        # A layer that reads scratch which it has not written must show.
        model.poison_scratch(GATE_TOKENS)
        with _chunks_of(model, GATE_CHUNK_TOKENS), model.only_durable(0):
            yield "scratch and durable slots", _difference(reference, answer(model))


def _answer(model: LoadedModel, step: MadeUpStep) -> torch.Tensor:
    output = step.run()[0]
    step.release()
    return output.log_softmax(-1) if model.is_generation else output


def _difference(reference: torch.Tensor, other: torch.Tensor) -> float:
    likeliest = reference.topk(min(COMPARED_TOKENS, len(reference))).indices
    return float((reference[likeliest] - other[likeliest]).abs().max())


def _room_for_two(model: LoadedModel, n_tokens: int) -> AbstractContextManager[None]:
    """Counts durable slots for two prompts of so many tokens, in whole pages."""
    return model.only_durable(2 * (n_tokens + model.page_size))


@contextmanager
def _plain_path(model: LoadedModel) -> Iterator[None]:
    hybrid = model.hybrid
    if hybrid is None:
        yield
        return
    kept, hybrid.serves_short = hybrid.serves_short, False
    try:
        with _chunks_of(model, 2 * GATE_TOKENS):
            yield
    finally:
        hybrid.serves_short = kept


@contextmanager
def _chunks_of(model: LoadedModel, chunk_tokens: int) -> Iterator[None]:
    hybrid = model.hybrid
    if hybrid is None:
        yield
        return
    kept, hybrid.chunk_tokens = hybrid.chunk_tokens, chunk_tokens
    try:
        yield
    finally:
        hybrid.chunk_tokens = kept
