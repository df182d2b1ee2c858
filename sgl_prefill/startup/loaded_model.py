"""The interface by which the start uses the engine; `port.runner.sglang_model` implements it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from sgl_prefill.core.memory_plan import MemoryPlan
    from sgl_prefill.core.ranks import Ranks
    from sgl_prefill.hybrid.body import HybridBody
    from sgl_prefill.hybrid.shared_rows import Exchange
    from sgl_prefill.startup.device import Device


class MadeUpStep(Protocol):
    """A synthetic batch: requests without clients that run in one forward pass."""

    was_replayed: bool  # from a CUDA graph; valid after `run`

    def run(self) -> torch.Tensor:
        """Returns float32 logits of each prompt's last token, [prompts, vocabulary]; or embeddings, [prompts, dimensions]."""

    def slots(self, index: int) -> torch.Tensor:
        """Returns the KV slots of a prompt after `run`, in position order, int64."""

    def release(self) -> None:
        """Frees the slots."""


class LoadedModel(Protocol):
    """A model with its KV pool, before the first request: all slots are free."""

    name: str  # for messages
    device: Device
    exchange: Exchange | None  # between the ranks; None for one rank
    ranks: Ranks  # all ranks take the same steps of the start together
    dtype: torch.dtype
    page_size: int
    context_tokens: int
    vocab_size: int
    is_generation: bool  # else it answers with embeddings
    is_evicting: bool  # suffix-KV eviction: KV beyond the durable slots is in scratch

    @property
    def hybrid(self) -> HybridBody | None:
        """None: the model runs in SGLang's layers."""

    @property
    def circumstances(self) -> dict[str, Any]:
        """Versions, machine and model: what every measurement depends on."""

    @property
    def alike_tokens(self) -> int | None:
        """Longest prompt whose KV is that of the beginning of all prompts up to this length; None: there is no limit."""

    @property
    def most_durable_tokens(self) -> int:
        """Upper limit of the pool's KV slots."""

    @property
    def durable_tokens(self) -> int:
        """The pool's KV slots by the current plan."""

    @property
    def scratch_tokens(self) -> int:
        """Slots whose memory all layers share; 0 without suffix-KV eviction."""

    def weights_bytes(self) -> int:
        """Parameters, buffers and packed weights; shared tensors count once."""

    def kv_bytes_per_token(self) -> tuple[int, int]:
        """Returns bytes (of one layer, of all layers)."""

    def gathered_kv_bytes_per_token(self) -> int:
        """Bytes that attention copies of a batch's own K and V, one layer at a time, where their slots are not consecutive. Those
        of synthetic batches in scratch are."""

    def n_places(self) -> int:
        """Largest number of requests in a step."""

    def step(self, prompts: Sequence[Sequence[int]], cached_slots: torch.Tensor | None = None) -> MadeUpStep:
        """Makes a step without running it. cached_slots: KV slots of a prefix that all prompts share, one per token.

        Raises NoMemoryLeftError where a device has no memory for the scratch of these prompts.
        """

    @property
    def graphed_tokens(self) -> list[int]:
        """Numbers of tokens of a step for which there is a CUDA graph, the largest last; none on a host."""

    def without_graphs(self) -> AbstractContextManager[None]:
        """Within the block no step is replayed from a CUDA graph."""

    def last_slots(self, n_tokens: int) -> torch.Tensor:
        """Returns consecutive KV slots that are allocated last, to stand for a cached prefix."""

    def forget_slots(self) -> None:
        """Marks all slots as free, and frees a device's memory for scratch."""

    def only_durable(self, n_tokens: int) -> AbstractContextManager[None]:
        """Within the block there are at most so many durable slots, if there is scratch."""

    def poison_scratch(self, n_tokens: int) -> None:
        """Fills scratch for so many tokens and a page more with NaN."""

    def clean_scratch(self, n_tokens: int) -> None:
        """Fills the same scratch with zeros."""

    def only_last_block(self) -> AbstractContextManager[None]:
        """Within the block attention on a host computes only its last block, which decides its peak memory."""

    def outside_a_batch(self) -> AbstractContextManager[None]:
        """Within the block pieces of the hybrid body can be run alone."""

    def pack_weights(self) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        """Packs the weights of matrix products for this processor. Returns for the record (native kernels, packed weights), each
        None where there are none."""

    def make_stable(self) -> dict[str, Any]:
        """For `--stable-answers`, once the chunk size is set. Returns the checks for the record. Raises UnsupportedModelError
        with every part of the model whose results depend on the other requests of a step."""

    def room_bytes(self, kv_bytes: int) -> int:
        """Memory for activations and KV. kv_bytes: SGLang's size of its pool. On a device: memory that is free now or behind the
        pool, less a margin."""

    def kv_limit_bytes(self, kv_bytes: int) -> int | None:
        """Memory for KV that --mem-fraction-static leaves beside the weights; None where it sets no limit."""

    def apply(self, plan: MemoryPlan) -> None:
        """Gives the pool the plan's durable slots, and scratch for its longest input. Raises AliasedMemoryError."""
