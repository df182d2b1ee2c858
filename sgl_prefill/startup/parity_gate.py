"""Compares the engine's paths before the first request: hybrid against plain, cache hit against miss, scratch against durable
slots, replay against plain. Nothing is served where log-probabilities of the same made-up prompts differ beyond a tolerance.

The plain path is SGLang's layers without CUDA graphs. With native kernels it runs before weights are packed, and never again. All
pairs but the last run without graphs, from which short prompts would be replayed instead of running as hybrid passes.
"""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TypeAlias

import torch

from sgl_prefill.core.kv_plan import floor_to
from sgl_prefill.errors import ParityError
from sgl_prefill.hybrid.shared_rows import share_equal_buffers
from sgl_prefill.startup.loaded_model import LoadedModel, MadeUpStep

logger = logging.getLogger(__name__)

SHORT_TOKENS = 60
# A device chooses kernels by the number of rows: `_three_chunks` makes chunks of up to 2,048 tokens of this, as in service. With
# more tokens the plain path, which runs all of them at once, would need more memory.
DEVICE_TOKENS = 5_120
# Chunks change the row count of each matrix product, and with it the order of its sums: bfloat16 keeps 8 bits, and a logit of 16
# changes by 2^-4 where one of 30 layers rounds the other way. A wrong K or V row changes log-probabilities by whole units.
TOLERANCE = {torch.float32: 0.01, torch.float16: 0.25, torch.bfloat16: 0.5}
COMPARED_TOKENS = 100  # the likeliest tokens
# Rounding may make a router of experts choose another one for a prompt; a wrong path is wrong for all prompts.
SEEDS = (0, 1, 2)

References: TypeAlias = Mapping[int, Sequence[torch.Tensor]]  # by prompt length: the answer to the prompt of each seed


def reference(model: LoadedModel, longest_tokens: int) -> References:
    """Returns the answers of SGLang's layers, for `run`. longest_tokens: of an input."""
    lengths = {SHORT_TOKENS} if model.device.is_host else {SHORT_TOKENS, DEVICE_TOKENS}
    with _plain_path(model):
        return {
            n: [answer(model, seed, n) for seed in SEEDS] for n in sorted({min(n, longest_tokens) for n in lengths})
        }


def share_rows(model: LoadedModel) -> None:
    """Divides buffers that are equal on all ranks among the ranks. Which ones are equal, a prompt of the gate shows."""
    if model.exchange is None or model.hybrid is None:
        return
    with model.without_graphs(), _three_chunks(model, SHORT_TOKENS), _room_for_two(model, SHORT_TOKENS):
        share_equal_buffers(model.hybrid, lambda: _run_made_up(model), model.ranks, model.exchange)


def _run_made_up(model: LoadedModel) -> None:
    step = model.step([_token_ids(model, SEEDS[0], SHORT_TOKENS)])
    step.run()
    step.release()


def answer(model: LoadedModel, seed: int, n_tokens: int) -> torch.Tensor:
    """Returns the engine's answer to the prompt of a seed: log-probabilities, or the embedding of an embedding model."""
    return _answer(model, model.step([_token_ids(model, seed, n_tokens)]))


def run(model: LoadedModel, references: References, longest_tokens: int) -> dict[str, float]:
    """Returns the difference of each pair of paths: the median over prompts of the largest difference of a log-probability.

    Raises ParityError above the tolerance, and where a prompt has not run on the path to be checked.
    """
    started = time.perf_counter()
    n_tokens = max((n for n in references if n <= longest_tokens), default=min(references))
    found: defaultdict[str, list[float]] = defaultdict(list)
    for number, seed in enumerate(SEEDS):
        for pair, difference in _pairs(model, seed, n_tokens, references[n_tokens][number]):
            found[pair].append(difference)
        of_replay = _replay_and_plain(model, seed, references, number)
        if of_replay is not None:
            found["replay and plain"].append(of_replay)
    differences = {pair: _median(of_seeds) for pair, of_seeds in found.items()}
    tolerance = TOLERANCE.get(model.dtype, TOLERANCE[torch.bfloat16])
    if wrong := {pair: difference for pair, difference in differences.items() if not difference <= tolerance}:
        shown = ", ".join(f"{pair} differ by {difference:.3g}" for pair, difference in wrong.items())
        raise ParityError(
            f"the paths of this engine disagree on most of {len(SEEDS)} made-up prompts: {shown} in a log-probability, and"
            f" {tolerance} is the limit for {model.dtype}. Nothing is served. Start with --hybrid-prefill off, --suffix-kv keep"
            " or --disable-prefill-cuda-graph to find the part, and please report it;"
            " --set skip_parity_gate=true serves in spite of it"
        )
    shown = ", ".join(f"{pair} {difference:.2g}" for pair, difference in differences.items())
    took_s = time.perf_counter() - started
    logger.info(
        "parity gate passed in %.2f s: between two ways to compute a made-up prompt, the token of the vocabulary that moves most"
        " moves by %.2g in log-probability, which is rounding (nothing is served above %g): %s",
        took_s,
        max(differences.values()),
        tolerance,
        shown,
    )
    return differences


def _median(differences: Sequence[float]) -> float:
    """NaN if any difference is: a row was never written."""
    return math.nan if any(map(math.isnan, differences)) else statistics.median(differences)


def _token_ids(model: LoadedModel, seed: int, n_tokens: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    token_ids: list[int] = torch.randint(0, model.vocab_size, (n_tokens,), generator=generator).tolist()
    return token_ids


def _pairs(model: LoadedModel, seed: int, n_tokens: int, reference: torch.Tensor) -> Iterator[tuple[str, float]]:
    """Yields (pair of paths, difference), for all pairs without graphs."""
    token_ids, hybrid = _token_ids(model, seed, n_tokens), model.hybrid
    if hybrid is not None and hybrid.serves_short:
        with model.without_graphs(), _chunks_of(model, n_tokens), _room_for_two(model, n_tokens):
            yield "native kernels and plain", _difference(reference, _hybrid_answer(model, model.step([token_ids])))
    with model.without_graphs(), _three_chunks(model, n_tokens):
        if hybrid is not None:
            with _room_for_two(model, n_tokens):
                yield "hybrid and plain", _difference(reference, _hybrid_answer(model, model.step([token_ids])))
        with _room_for_two(model, n_tokens):
            n_cached = floor_to(min(n_tokens // 2, model.durable_tokens), model.page_size)
            if n_cached > 0:
                first = model.step([token_ids[:n_cached]])
                first.run()
                again = model.step([token_ids], cached_slots=first.slots(0))
                yield "cache hit and miss", _difference(reference, _answer(model, again))
                first.release()
        if model.is_evicting:
            # A layer that reads scratch before writing it gets NaN.
            model.poison_scratch(n_tokens)
            with model.only_durable(0):
                yield "scratch and durable slots", _difference(reference, _answer(model, model.step([token_ids])))
            model.clean_scratch(n_tokens)


def _replay_and_plain(model: LoadedModel, seed: int, references: References, number: int) -> float | None:
    """Returns the difference for the shortest prompt; None where it is not replayed from a CUDA graph."""
    n_tokens = min(references)
    if n_tokens > max(model.graphed_tokens, default=0):
        return None
    with _room_for_two(model, n_tokens):
        step = model.step([_token_ids(model, seed, n_tokens)])
        found = _answer(model, step)
    return _difference(references[n_tokens][number], found) if step.was_replayed else None


def _answer(model: LoadedModel, step: MadeUpStep) -> torch.Tensor:
    output = step.run()[0]
    step.release()
    return output.log_softmax(-1) if model.is_generation else output


def _hybrid_answer(model: LoadedModel, step: MadeUpStep) -> torch.Tensor:
    assert model.hybrid is not None
    before = model.hybrid.n_passes
    found = _answer(model, step)
    if model.hybrid.n_passes == before:
        raise ParityError(
            "a made-up prompt that was to run chunk by chunk has run in SGLang's own layers: the hybrid pass would serve without"
            " having been checked. Nothing is served. Start with --hybrid-prefill off, and please report it;"
            " --set skip_parity_gate=true serves in spite of it"
        )
    return found


def _difference(reference: torch.Tensor, other: torch.Tensor) -> float:
    likeliest = reference.topk(min(COMPARED_TOKENS, len(reference))).indices
    return float((reference[likeliest] - other[likeliest]).abs().max())


def _room_for_two(model: LoadedModel, n_tokens: int) -> AbstractContextManager[None]:
    """Within the block there are durable slots for two such prompts."""
    return model.only_durable(2 * (n_tokens + model.page_size))


@contextmanager
def _plain_path(model: LoadedModel) -> Iterator[None]:
    hybrid = model.hybrid
    with model.without_graphs(), _chunks_of(model, max(SHORT_TOKENS, DEVICE_TOKENS)):
        if hybrid is None:
            yield
            return
        kept, hybrid.serves_short = hybrid.serves_short, False
        try:
            yield
        finally:
            hybrid.serves_short = kept


def _three_chunks(model: LoadedModel, n_tokens: int) -> AbstractContextManager[None]:
    """Within the block such a prompt runs in two chunks and a shorter one, or more if the engine's chunks are smaller."""
    served = n_tokens if model.hybrid is None else model.hybrid.chunk_tokens
    return _chunks_of(model, max(min(served, n_tokens * 2 // 5), 1))


@contextmanager
def _chunks_of(model: LoadedModel, chunk_tokens: int) -> Iterator[None]:
    hybrid = model.hybrid
    if hybrid is None:
        yield
        return
    kept = hybrid.chunk_tokens, hybrid.plain_tokens
    hybrid.chunk_tokens, hybrid.plain_tokens = chunk_tokens, 0
    try:
        yield
    finally:
        hybrid.chunk_tokens, hybrid.plain_tokens = kept
