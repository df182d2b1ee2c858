"""Which steps SGLang replays from CUDA graphs, and which must launch their kernels one by one.

An extend of few tokens is replayed: the layers between two attentions are one graph, and attention runs outside of graphs with
the step's own plan. Tokens are padded to the next recorded size; padding has slot 0, which is free. These work in a replay:

    suffixes in scratch    a layer writes K and V and attends before the next layer's graph begins. The addresses of KV buffers,
                           which are recorded, do not change when memory is committed later
    shared prefixes        they only change the step's attention plan
    label logits           they and their log-probabilities are computed after the graph

Branches (`branch_rows`) and followers (`core.kv_plan`) do not: K and V of other sequences must be written before they attend,
as in a hybrid pass, and a replay's batch has no request ids, which mark the rows of branches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from sgl_prefill.port.runner import branch_rows
from sgl_prefill.port.runner.runner_state import RunnerState

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.model_executor.runner.prefill_cuda_graph_runner import PrefillCudaGraphRunner


def around_can_run_graph(
    state: RunnerState, original: Callable[..., bool], graphs: PrefillCudaGraphRunner, forward_batch: ForwardBatch
) -> bool:
    """Hook: SGLang calls this before each extend to decide whether to replay it."""
    if state.runs_eagerly or branch_rows.reads_own_kv(state, forward_batch):
        return False
    return original(graphs, forward_batch)


@contextmanager
def none(state: RunnerState) -> Iterator[None]:
    """Within the block no step is replayed."""
    before, state.runs_eagerly = state.runs_eagerly, True
    try:
        yield
    finally:
        state.runs_eagerly = before


def graphed_tokens(runner: ModelRunner) -> list[int]:
    """Numbers of tokens for which SGLang has recorded a graph, in order."""
    from sglang.srt.model_executor.runner import PrefillCudaGraphRunner

    graphs = runner.prefill_cuda_graph_runner
    return list(graphs.capture_num_tokens) if isinstance(graphs, PrefillCudaGraphRunner) else []
