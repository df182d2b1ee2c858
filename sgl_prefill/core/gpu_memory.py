"""What a model takes of a GPU's memory, calculated from its shape: for the table in GPU.md, and for what a start says
where a model does not fit.

Nothing here is measured. A start measures activations and what is free, and divides the memory by the same `memory_plan`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any, NamedTuple

from sgl_prefill.core.kv_plan import ceil_to
from sgl_prefill.core.memory_plan import InputDoesNotFitError, MemoryPlan, MemoryUse, plan_memory

GIB = 1 << 30
DENSE = ("llama", "qwen2", "qwen3", "mistral")  # kinds of models whose layers are attention and a gated MLP
# What a plan leaves alone: rounding and pieces of torch's allocator, kernels that are loaded later, and the logits of a step of
# many requests, of which the profile run has measured one.
MARGIN_BYTES, MARGIN_SHARE = GIB // 2, 0.01  # of the card

# Of a calculation; a start measures them.
CONTEXT_BYTES = GIB // 2  # CUDA's own, and the kernels of SGLang and torch
WORKSPACE_BYTES = 384 << 20  # flashinfer's, which SGLang makes; other backends take less
CHUNK_TOKENS = 8192  # the longest chunk that a start may choose on a device
INDEX_BYTES = 36  # of a token: its id, position and slot, and the page tables of an attention backend
MIN_DURABLE_TOKENS = 64
ANSWER_MARGIN_TOKENS = 7


class Card(NamedTuple):
    """A kind of GPU."""

    gb: int  # as it is sold
    name: str
    total_bytes: int  # that CUDA shows, somewhat less


CARDS = (
    Card(24, "L4", int(22.0 * GIB)),
    Card(40, "A100", int(39.4 * GIB)),
    Card(80, "H100", int(79.1 * GIB)),
    Card(141, "H200", int(139.7 * GIB)),
)


class ModelShape(NamedTuple):
    """What decides the memory of a dense model in SGLang, on one card."""

    name: str
    weights_bytes: int
    kv_bytes_per_token: int  # of one layer
    n_layers: int
    retained_bytes_per_token: int  # between two layers of hybrid prefilling, apart from K and V
    chunk_bytes_per_token: int  # within one layer
    context_tokens: int


def shape_of(name: str, config: Mapping[str, Any]) -> ModelShape:
    """Reads a model's config.json. Raises KeyError where it is not that of a kind in `DENSE`, in two bytes a number or FP8."""
    quantization = config.get("quantization_config", {}).get("quant_method")
    if config["model_type"] not in DENSE or quantization not in (None, "fp8"):
        raise KeyError(config["model_type"])
    number_bytes = 2 if quantization is None else 1  # of a weight of a matrix product
    hidden, mlp, n_layers = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
    n_heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // n_heads
    query, kv = n_heads * head_dim, config.get("num_key_value_heads", n_heads) * head_dim
    products = hidden * (query + 2 * kv) + query * hidden + 3 * hidden * mlp
    n_tables = 1 if config.get("tie_word_embeddings") else 2
    others = 2 * hidden * n_layers + hidden + n_tables * config["vocab_size"] * hidden
    rotary = config["max_position_embeddings"] * head_dim * 4  # cosines and sines in float32
    return ModelShape(
        name=name,
        weights_bytes=n_layers * products * number_bytes + 2 * others + rotary,
        kv_bytes_per_token=2 * kv * 2,
        n_layers=n_layers,
        # The residual stream, the query, and the output of attention, each in a buffer of full length.
        retained_bytes_per_token=2 * (hidden + 2 * query) + INDEX_BYTES,
        # The MLP: its input, what comes out of both of its first products, and the product of these; in FP8 the inputs of its
        # products once more.
        chunk_bytes_per_token=2 * (hidden + 3 * mlp) + (hidden + mlp if number_bytes == 1 else 0),
        context_tokens=config["max_position_embeddings"],
    )


def margin_bytes(total_bytes: int) -> int:
    """Returns what a plan leaves alone of a card."""
    return MARGIN_BYTES + int(MARGIN_SHARE * total_bytes)


def memory_use(model: ModelShape, free_bytes: int, total_bytes: int) -> MemoryUse:
    """Returns what a plan would have to know, with the attention backend that copies most. free_bytes: before the weights."""
    return MemoryUse(
        weights_bytes=model.weights_bytes,
        budget_bytes=free_bytes - model.weights_bytes - WORKSPACE_BYTES - margin_bytes(total_bytes),
        fixed_bytes=CHUNK_TOKENS * model.chunk_bytes_per_token,
        activation_bytes_per_token=float(model.retained_bytes_per_token + model.kv_bytes_per_token),
        scratch_bytes_per_token=model.kv_bytes_per_token,
        durable_bytes_per_token=model.n_layers * model.kv_bytes_per_token,
    )


def plan(model: ModelShape, card: Card) -> MemoryPlan:
    """Plans as a start does where no option is given. Raises InputDoesNotFitError."""
    use = memory_use(model, card.total_bytes - CONTEXT_BYTES, card.total_bytes)
    limit = model.context_tokens - ANSWER_MARGIN_TOKENS
    return plan_memory(use, None, input_limit_tokens=limit, min_durable_tokens=MIN_DURABLE_TOKENS, page_size=1)


def what_fits(needed_bytes: int) -> str:
    """Names the smallest card that has so much memory for a model and all that it needs, or how many of the largest have."""
    for card in CARDS:
        if needed_bytes <= card.total_bytes:
            return f"a card of {card.gb} GB"
    largest = CARDS[-1]
    n_cards = 1 << math.ceil(math.log2(needed_bytes / largest.total_bytes))
    return f"{n_cards} cards of {largest.gb} GB with --tp-size {n_cards}"


def too_small(model: str, card: str, total_bytes: int, weights_bytes: int, missing_bytes: int) -> str:
    """Says what a start says where not even a short input fits beside the weights."""
    missing = ceil_to(missing_bytes, GIB // 10)
    return (
        f"{model} does not fit this {card} of {total_bytes / GIB:.1f} GiB: its weights take {weights_bytes / GIB:.1f} GiB, and"
        f" with what a short input needs {missing / GIB:.1f} GiB are missing; {what_fits(total_bytes + missing)} would do, or a"
        " smaller or quantized model, or more cards with --tp-size"
    )


def model_name(path: str) -> str:
    """Returns what people call the model at this path, or of this name on a hub."""
    return PurePath(path).name or path


def markdown(models: Sequence[ModelShape]) -> str:
    """Returns the table of each model on each card."""
    head = "| model | card | weights, GiB | all else but durable KV, GiB | durable KV, tokens | longest input, auto | at most |"
    rows = [f"| {' | '.join((model.name, *_row(model, card)))} |" for model in models for card in CARDS]
    return "\n".join([head, "|" + " --- |" * (head.count("|") - 1), *rows])


def _row(model: ModelShape, card: Card) -> tuple[str, ...]:
    name, weights = f"{card.gb} GB ({card.name})", f"{model.weights_bytes / GIB:.1f}"
    try:
        found = plan(model, card)
    except InputDoesNotFitError as error:
        missing = ceil_to(error.missing_bytes, GIB // 10)
        fits = what_fits(card.total_bytes + missing)
        return name, weights, f"{missing / GIB:.1f} are missing: {fits} would do", "", "", ""
    held = card.total_bytes - found.use.weights_bytes - found.durable_bytes
    tokens = (found.durable_tokens, found.max_input_tokens, found.largest_input_tokens)
    return name, weights, f"{held / GIB:.1f}", *(f"{n:,}" for n in tokens)
