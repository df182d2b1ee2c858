"""What the start needs of the engine."""

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
    """Requests without clients that run in one forward pass."""

    was_replayed: bool  # from a CUDA graph; known once it has run

    def run(self) -> torch.Tensor:
        """Runs prompts. Returns, in float32, logits of each prompt's last token, [prompts, vocabulary]; or embeddings,
        [prompts, dimensions].
        """
        ...

    def slots(self, index: int) -> torch.Tensor:
        """Returns the KV slots of a prompt that has run, in position order, int64."""
        ...

    def release(self) -> None:
        """Give the slots back."""
        ...


class LoadedModel(Protocol):
    """A model with its KV pool, before the first request: all slots are free."""

    name: str  # for messages
    device: Device
    exchange: Exchange | None  # between the ranks; None where there is one
    ranks: Ranks  # that hold a part of it each; all take the same steps of the start together
    dtype: torch.dtype
    page_size: int
    context_tokens: int
    vocab_size: int
    is_generation: bool  # else it answers with embeddings
    is_evicting: bool  # of a long input only a prefix is kept; the rest lives in scratch

    @property
    def hybrid(self) -> HybridBody | None:
        """Is None where SGLang's own layers serve."""
        ...

    @property
    def circumstances(self) -> dict[str, Any]:
        """Versions, machine and model: what every measurement depends on."""
        ...

    @property
    def most_durable_tokens(self) -> int:
        """Counts the KV slots that the pool could have at most."""
        ...

    @property
    def durable_tokens(self) -> int:
        """Counts those that it has now, by the plan."""
        ...

    @property
    def scratch_tokens(self) -> int:
        """Counts the slots whose memory all layers share; 0 where the whole KV is kept."""
        ...

    def weights_bytes(self) -> int:
        """Counts the bytes of parameters and buffers, each once; packed weights too."""
        ...

    def kv_bytes_per_token(self) -> tuple[int, int]:
        """Returns the bytes (of one layer, of all layers)."""
        ...

    def gathered_kv_bytes_per_token(self) -> int:
        """Returns what attention copies of a batch's own K and V, one layer at a time, where their slots lie apart. In scratch,
        where made-up inputs lie, they do not."""
        ...

    def n_places(self) -> int:
        """Returns how many requests one step can hold."""
        ...

    def step(self, prompts: Sequence[Sequence[int]], cached_slots: torch.Tensor | None = None) -> MadeUpStep:
        """Runs nothing yet. cached_slots: KV slots that hold the same prefix of every prompt already, one a token.

        Raises NoMemoryLeftError where a device has none for the scratch of these prompts.
        """
        ...

    @property
    def most_replayed_tokens(self) -> int:
        """Returns how many tokens a step has at most that is replayed from a CUDA graph, 0 where there are no graphs."""
        ...

    def without_graphs(self) -> AbstractContextManager[None]:
        """Lets every step launch its kernels one by one while the block runs."""
        ...

    def last_slots(self, n_tokens: int) -> torch.Tensor:
        """Returns consecutive KV slots that no request of the rest of the longest input will be given."""
        ...

    def forget_slots(self) -> None:
        """Called when all of them are free again; takes a device's memory for scratch back."""
        ...

    def only_durable(self, n_tokens: int) -> AbstractContextManager[None]:
        """Leaves so many durable slots while the block runs, where inputs may lie in scratch."""
        ...

    def poison_scratch(self, n_tokens: int) -> None:
        """Fills scratch for so many tokens and a page more: a read of scratch that was not written gives NaN."""
        ...

    def clean_scratch(self, n_tokens: int) -> None:
        """Fills as much with zeros."""
        ...

    def only_last_block(self) -> AbstractContextManager[None]:
        """Lets, on a host, attention compute only what decides its memory while the block runs."""
        ...

    def outside_a_batch(self) -> AbstractContextManager[None]:
        """Pieces of the hybrid body may be run by themselves while the block runs."""
        ...

    def pack_weights(self) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        """Lay the weights of matrix products out for this processor. For the record: (which kernels serve, what was packed);
        None where the native kernels are missing, or where the model runs in SGLang's layers."""
        ...

    def make_stable(self) -> dict[str, Any]:
        """Let the same request get the same bits in any company (`--stable-answers`), the chunk size being known. For the record:
        what was checked. Raises UnsupportedModelError, naming every part of the model that keeps this from holding."""
        ...

    def room_bytes(self, kv_bytes: int) -> int:
        """Returns the memory for activations and KV. kv_bytes: what SGLang found for its pool. On a device: what is free now or
        behind the pool, less a margin.
        """
        ...

    def kv_limit_bytes(self, kv_bytes: int) -> int | None:
        """Returns what --mem-fraction-static leaves for KV beside the weights, None where it sets no limit."""
        ...

    def apply(self, plan: MemoryPlan) -> None:
        """Give the KV pool the plan's durable slots, and scratch for its longest input. Raises AliasedMemoryError."""
        ...
