"""`shared_prefix_attention` outside the attention backends: the order of a step's requests, the switch, and what was shared.

On a GPU only neighbours read a prefix together. So a step's requests stand in the order of a walk through the radix tree, depth
first, by which sharers at every depth are neighbours. Permuting a plan instead would permute the queries and the output of every
layer.
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
COUNTS_KEY = "shared_prefix_attention"  # of an internal state in /server_info

logger = logging.getLogger(__name__)


@dataclasses.dataclass
class Counts:
    """What a GPU has attended in two parts since the start."""

    steps: int = 0
    requests: int = 0  # in groups, of those steps
    saved_tokens: int = 0  # cached positions that need not be read, since a step read them once for several requests


def stays_apart(switch: str, why: str) -> None:
    """Says why each request attends to its whole prefix alone. Raises ConfigurationError where `on` asks for something else."""
    if switch == "on":
        raise ConfigurationError(
            f"--set shared_prefix_attention is on, and here each request attends to its whole prefix alone: {why}. {WHAT_CAN}."
            " Leave it out to serve this as SGLang does"
        )
    logger.info("each request attends to its whole prefix alone: %s", why)


def around_init_new(
    original: Callable[..., ScheduleBatch], cls: type, reqs: Sequence[Req], *rest: Any, **options: Any
) -> Any:
    """Hook: SGLang has admitted and matched these, and makes their batch. All of them run, so their order is free.

    A batch of requests that have written something already is another one, beside which SGLang keeps lists in its own order.
    """
    is_of_prompts = not any(req.output_ids for req in reqs)
    return original(cls, in_prefix_order(reqs) if is_of_prompts else reqs, *rest, **options)


def in_prefix_order(reqs: Sequence[Req]) -> list[Req]:
    """Returns the requests depth first, the subtree first that comes first in `reqs`: ranks whose trees are alike agree."""
    first_seen: dict[Any, int] = {}
    paths = {req: [first_seen.setdefault(node, len(first_seen)) for node in _nodes_of(req)] for req in reqs}
    return sorted(reqs, key=paths.__getitem__)


def _nodes_of(req: Req) -> list[Any]:
    """Returns the nodes of the tree from the root to where the request's cached prefix ends; none without a tree."""
    nodes = []
    node = req.last_node
    while node is not None:
        nodes.append(node)
        node = node.parent
    return nodes[::-1]


def set_up(switch: str, runner: ModelRunner) -> None:
    """Switches the CPU kernel under `off`. Raises ConfigurationError under `on` where no kernel shares prefixes."""
    backends = _backends_of(runner.attn_backend)
    if switch == "off":
        for one in backends:
            if hasattr(one, "shares_prefixes"):
                one.shares_prefixes = False
    elif switch == "on" and not _can_share(backends[0]):
        stays_apart(switch, f"{type(backends[0]).__name__} attends, which reads the prefix of one request at a time")


def _backends_of(backend: Any) -> list[Any]:
    """Returns the backend of prefills, and behind it that of decoding where it is another."""
    from sglang.srt.layers.attention.hybrid_attn_backend import HybridAttnBackend

    return [backend.prefill_backend, backend.decode_backend] if isinstance(backend, HybridAttnBackend) else [backend]


def _can_share(backend: Any) -> bool:
    is_cpu_kernel = getattr(backend, "shares_prefixes", False) and backend.kernels is not None
    return is_cpu_kernel or hasattr(backend, "sharing")


def counts_of(runner: ModelRunner) -> dict[str, int] | None:
    """Returns what was shared since the start, for /server_info; None where no device shares prefixes."""
    backend = _backends_of(runner.attn_backend)[0]
    return dataclasses.asdict(backend.sharing.counts) if hasattr(backend, "sharing") else None
