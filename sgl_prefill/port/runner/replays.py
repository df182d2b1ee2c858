"""Which steps SGLang replays from CUDA graphs, and which must launch their kernels one by one.

An extend of few tokens is replayed: norms and matrix products between two attentions are one graph, and attention runs between
two of them with the plan of its own step. Tokens are padded to the next size that was recorded; the rows that pad have slot 0,
which is nobody's. Right in a replay, so:

    suffixes in scratch    a layer writes K and V to the slots of its step, and attends, before the next layer's graph begins.
                           Addresses are recorded, and those of KV buffers stay when memory is put behind them later
    shared prefixes        are a matter of a step's own plan of attention
    labels' logits         and their log-probabilities are computed behind the graph

Not right: answers of several tokens (`answer_trees`). Their rows would be taken for requests by the logits processor, to which a
replay hands a batch that does not name them, and K and V must be written before attention, as the hybrid pass does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from sgl_prefill.port.runner import answer_trees
from sgl_prefill.port.runner.runner_state import RunnerState

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.model_executor.runner.prefill_cuda_graph_runner import PrefillCudaGraphRunner


def around_can_run_graph(
    state: RunnerState,
    original: Callable[..., bool],
    graphs: PrefillCudaGraphRunner,
    forward_batch: ForwardBatch,
) -> bool:
    """Hook: SGLang asks before each extend whether it may be replayed."""
    if state.runs_eagerly or answer_trees.are_in(forward_batch):
        return False
    return original(graphs, forward_batch)


@contextmanager
def none(state: RunnerState) -> Iterator[None]:
    """No step is replayed while the block runs."""
    before, state.runs_eagerly = state.runs_eagerly, True
    try:
        yield
    finally:
        state.runs_eagerly = before


def most_tokens(runner: ModelRunner) -> int:
    """Returns how many tokens a step has at most that is replayed; 0 where nothing was recorded."""
    from sglang.srt.model_executor.runner import PrefillCudaGraphRunner

    graphs = runner.prefill_cuda_graph_runner
    return int(graphs.max_num_tokens) if isinstance(graphs, PrefillCudaGraphRunner) else 0
