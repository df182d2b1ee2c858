"""`--shared-prefix-attention` outside the attention backends: the order of a step's requests, and the switch of the CPU kernel.

On a GPU only neighbours read a prefix together. So a step's requests stand in the order of a walk through the radix tree, depth
first, by which sharers at every depth are neighbours. Permuting a plan instead would permute the queries and the output of every
layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


def around_init_new(
    original: Callable[..., ScheduleBatch], cls: type, reqs: Sequence[Req], *rest: Any, **options: Any
) -> Any:
    """Hook: SGLang has admitted and matched these, and makes their batch. All of them run, so their order is free."""
    return original(cls, in_prefix_order(reqs), *rest, **options)


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


def after_init_attention_backends(result: None, runner: ModelRunner) -> None:
    """Hook: on a CPU each request attends to its whole prefix alone."""
    backend = runner.attn_backend
    for one in (getattr(backend, "prefill_backend", backend), getattr(backend, "decode_backend", backend)):
        if hasattr(one, "shares_prefixes"):
            one.shares_prefixes = False
