"""`shared_prefix_attention` outside the attention backends: the order of a step's requests, the switch, and counts.

On a GPU only neighbours in a step read a prefix together. So a step's requests are sorted depth first along the radix tree, which
makes the sharers of any node neighbours. Permuting the plan instead would permute queries and output in every layer.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from sgl_prefill.errors import ConfigurationError

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

WHAT_CAN = (
    "It works with the attention backends flashinfer, fa3 and triton on a GPU, for models with one KV cache in the type of their"
    " queries (no latent attention, no cache for windows, no FP8 KV, no drafts), and with the native kernels on a CPU"
)
COUNTS_KEY = "shared_prefix_attention"  # in the internal state of /server_info

logger = logging.getLogger(__name__)


@dataclasses.dataclass
class Counts:
    """Steps that a GPU has attended in two parts since the start."""

    steps: int = 0
    requests: int = 0  # of those steps, that shared a prefix
    saved_tokens: int = 0  # cached positions that were not read again for a further request


def stays_apart(switch: str, why: str) -> None:
    """Logs why no prefixes are shared. Raises ConfigurationError under `on`."""
    if switch == "on":
        raise ConfigurationError(
            f"--set shared_prefix_attention is on, and here each request attends to its whole prefix alone: {why}. {WHAT_CAN}."
            " Leave it out to serve this as SGLang does"
        )
    logger.info("each request attends to its whole prefix alone: %s", why)


def around_init_new(
    original: Callable[..., ScheduleBatch], cls: type, reqs: Sequence[Req], *rest: Any, **options: Any
) -> Any:
    """Hook: sorts the requests of a new prefill batch. All of them run, so their order is free. With output tokens it is not a
    new batch: SGLang keeps lists in its order.
    """
    is_of_prompts = not any(req.output_ids for req in reqs)
    return original(cls, in_prefix_order(reqs) if is_of_prompts else reqs, *rest, **options)


def in_prefix_order(reqs: Sequence[Req]) -> list[Req]:
    """Sorts requests depth first along the radix tree, siblings by their order in `reqs`: equal on all ranks."""
    first_seen: dict[Any, int] = {}
    paths = {req: [first_seen.setdefault(node, len(first_seen)) for node in _nodes_of(req)] for req in reqs}
    return sorted(reqs, key=paths.__getitem__)


def _nodes_of(req: Req) -> list[Any]:
    """Returns the radix tree's nodes from the root to the end of the request's cached prefix."""
    nodes = []
    node = req.last_node
    while node is not None:
        nodes.append(node)
        node = node.parent
    return nodes[::-1]


def set_up(switch: str, runner: ModelRunner) -> None:
    """`off`: the CPU kernel shares no prefixes. `on`: raises ConfigurationError where no kernel shares prefixes."""
    backends = _backends_of(runner.attn_backend)
    if switch == "off":
        for one in backends:
            if hasattr(one, "shares_prefixes"):
                one.shares_prefixes = False
    elif switch == "on" and not _can_share(backends[0]):
        stays_apart(switch, f"{type(backends[0]).__name__} attends, which reads the prefix of one request at a time")


def _backends_of(backend: Any) -> list[Any]:
    """Returns the backend of prefills, then that of decoding where SGLang has two."""
    from sglang.srt.layers.attention.hybrid_attn_backend import HybridAttnBackend

    return [backend.prefill_backend, backend.decode_backend] if isinstance(backend, HybridAttnBackend) else [backend]


def _can_share(backend: Any) -> bool:
    is_cpu_kernel = getattr(backend, "shares_prefixes", False) and backend.kernels is not None
    return is_cpu_kernel or hasattr(backend, "sharing")


def counts_of(runner: ModelRunner) -> dict[str, int] | None:
    """Returns the counts for /server_info; None where no GPU backend shares prefixes."""
    backend = _backends_of(runner.attn_backend)[0]
    return dataclasses.asdict(backend.sharing.counts) if hasattr(backend, "sharing") else None
