"""Answers of several tokens in the forward pass of their prompt (`core.answer_tree`).

Each node of a tree runs as a request of one new token in the step's batch. Its cached prefix is the prompt and the node's
ancestors, whose KV the same pass writes: every layer writes all K and V before it attends. So an answer costs no step of its own,
and also works where the prompt's KV is in scratch.

    requests of the pass:    the step's requests             nodes of their trees, one token each
    KV slots:                SGLang's allocation             scratch, or durable slots that are freed after the pass
    rows of the slot table:  SGLang's                        further rows, which SGLang gives to no request
    logits:                  SGLang's logits processor       in pieces of 32 rows, of which only the wanted tokens are kept
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from sgl_prefill.core.answer_tree import AnswerTree, Node
from sgl_prefill.core.kv_plan import ceil_to
from sgl_prefill.core.packing import MOST_ANSWER_TOKENS
from sgl_prefill.errors import UntraceableModelError
from sgl_prefill.port.kv.allocator import SuffixKVAllocator
from sgl_prefill.port.runner import logits as logits_of
from sgl_prefill.port.runner import model_faults
from sgl_prefill.port.runner.runner_state import RunnerState
from sgl_prefill.port.steps import custom_params, time_stats

if TYPE_CHECKING:
    from sglang.srt.layers.logits_processor import LogitsProcessor, LogitsProcessorOutput
    from sglang.srt.managers.io_struct import GenerateReqInput
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.managers.tp_worker import TpModelWorker
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

PARAMETER = f"{custom_params.OURS}answer_tree"
FACT = "answer_logprobs"  # in a request's time stats: for each node the log-probabilities of its `asked_tokens`
Logprobs: TypeAlias = list[list[float]]  # the value of that fact
Unread: TypeAlias = list[torch.Tensor]  # the same as tensors on the model's device
LOGIT_ROWS = 32

NO_REQUEST = ""  # request id of all nodes
_ATTRIBUTE = "sgl_prefill_trees"


def attach(obj: GenerateReqInput, trees: Sequence[AnswerTree]) -> None:
    """Keeps the tree of each prompt with a request; `sampling_params_with_trees` passes them to the scheduler."""
    setattr(obj, _ATTRIBUTE, trees)


def sampling_params_with_trees(obj: Any, *, is_batch: bool) -> Any:
    """Returns the sampling parameters of a request with its trees; a list, one per prompt, for a batch."""
    trees: Sequence[AnswerTree] = getattr(obj, _ATTRIBUTE, ())
    if not any(tree.nodes for tree in trees):
        return obj.sampling_params
    each = obj.sampling_params if isinstance(obj.sampling_params, list) else [obj.sampling_params or {}] * len(trees)
    parameters = [
        custom_params.put(params, PARAMETER, [tuple(node) for node in tree.nodes]) if tree.nodes else params
        for params, tree in zip(each, trees, strict=True)
    ]
    return parameters if is_batch else parameters[0]


def count_nodes(parameters: Any) -> int:
    """Number of answer tokens that the prompt with these sampling parameters computes. parameters: a dict, or SGLang's object."""
    given = parameters.get("custom_params") if isinstance(parameters, dict) else parameters.custom_params
    return len((given or {}).get(PARAMETER) or ())


def nodes_of(req: Req) -> list[Node]:
    return [Node(*node) for node in custom_params.of(req, PARAMETER) or ()]


def problem(state: RunnerState, runner: ModelRunner) -> str | None:
    """Returns why this engine cannot compute answers of several tokens; None where it can."""
    from sgl_prefill.port.runner.forward import body_of

    try:
        body_of(runner)
    except UntraceableModelError as error:
        return str(error)
    if state.answer_rows is None:
        return "SGLang has another class for its table of KV slots than ReqToTokenPool"
    if runner.device == "cpu":
        return None
    if state.hybrid is None:
        return "it runs with --hybrid-prefill off, and not every attention backend writes K and V before it reads them"
    if runner.page_size > 1:
        return f"its KV pages have {runner.page_size} tokens: start it with --page-size 1"
    return None


@dataclasses.dataclass
class AnswerRows:
    """The further rows of the slot table, and the nodes of the running pass."""

    table: ReqToTokenPool
    first_row: int
    trees: list[tuple[int, list[Node]]] | None = None  # (index of the request in the step, its tree)
    slots: torch.Tensor | None = None  # int64 [nodes]
    batch: ForwardBatch | None = None  # the step without its trees
    values: Unread = dataclasses.field(default_factory=list)  # one per node
    # (time stats of a request, values of its nodes), until the step's result is read.
    unread: list[tuple[Any, Unread]] = dataclasses.field(default_factory=list)

    def forget(self) -> None:
        self.trees = self.slots = self.batch = None
        self.values = []


def around_build_table(
    state: RunnerState, original: Callable[..., ReqToTokenPool], configurator: KVCacheConfigurator, *, max_num_reqs: int
) -> ReqToTokenPool:
    """Hook: builds the slot table with more rows than SGLang gives to requests."""
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

    if configurator.is_draft_worker:
        return original(configurator, max_num_reqs=max_num_reqs)
    table = original(configurator, max_num_reqs=max_num_reqs + MOST_ANSWER_TOKENS)
    if type(table) is not ReqToTokenPool:
        return original(configurator, max_num_reqs=max_num_reqs)
    table.size -= MOST_ANSWER_TOKENS
    table._alloc_size -= MOST_ANSWER_TOKENS
    table.clear()
    state.answer_rows = AnswerRows(table, table._alloc_size)
    return table


def around_forward_batch_generation(
    state: RunnerState,
    original: Callable[..., Any],
    worker: TpModelWorker,
    batch: ScheduleBatch,
    *rest: Any,
    **options: Any,
) -> Any:
    """Hook: allocates slots for a step's trees, and keeps their log-probabilities. Raises MemoryError where there are too few."""
    rows = state.answer_rows
    trees = [] if rows is None or not batch.forward_mode.is_extend() else _trees_of(batch)
    if rows is None or not trees:
        return original(worker, batch, *rest, **options)
    n_nodes = sum(len(nodes) for _, nodes in trees)
    if n_nodes > MOST_ANSWER_TOKENS:
        raise MemoryError(
            f"the answers of this step have {n_nodes} tokens, and {MOST_ANSWER_TOKENS} are the limit of a step"
        )
    slots, is_borrowed = _lend(batch, n_nodes)
    rows.trees, rows.slots = trees, slots
    try:
        result = original(worker, batch, *rest, **options)
        assert len(rows.values) == n_nodes, "the model computes logits without SGLang's logits processor"
        values = iter(rows.values)
        for place, nodes in trees:
            rows.unread.append((batch.reqs[place].time_stats, [next(values) for _ in nodes]))
        return result
    finally:
        rows.forget()
        if is_borrowed:
            batch.tree_cache.token_to_kv_pool_allocator.free(slots)


def around_move_logprobs(state: RunnerState, original: Callable[..., None], processor: Any, **options: Any) -> None:
    """Hook: copies the trees' log-probabilities to the host when SGLang reads the step's result."""
    rows = state.answer_rows
    if rows is not None and rows.unread:
        unread, rows.unread = rows.unread, []
        read = iter(logits_of.on_host([value for _, values in unread for value in values]))
        for stats, values in unread:
            found: Logprobs = [next(read).tolist() for _ in values]
            time_stats.add_facts(stats, **{FACT: found})
    logits_of.around_lists_of_logprobs(original, processor, **options)


def _trees_of(batch: ScheduleBatch) -> list[tuple[int, list[Node]]]:
    trees = [(place, nodes_of(req)) for place, req in enumerate(batch.reqs)]
    return [(place, nodes) for place, nodes in trees if nodes]


def _lend(batch: ScheduleBatch, n_nodes: int) -> tuple[torch.Tensor, bool]:
    """Returns slots for so many tokens, and whether they must be freed after the pass."""
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    allocator = batch.tree_cache.token_to_kv_pool_allocator
    if isinstance(allocator, SuffixKVAllocator) and allocator.n_scratch_lent + n_nodes <= allocator.scratch_tokens:
        first = (
            allocator.first_scratch_slot + allocator.n_scratch_lent
        )  # scratch is not allocated again before the next step
        return torch.arange(first, first + n_nodes, dtype=torch.int64, device=allocator.device), False
    n_whole = ceil_to(n_nodes, allocator.page_size)
    if (n_missing := n_whole - allocator.available_size()) > 0:
        batch.tree_cache.evict(EvictParams(num_tokens=n_missing))
    slots = allocator.alloc(n_whole)
    if slots is None:
        raise MemoryError(f"there are no free KV slots for the {n_nodes} tokens of this step's answers")
    return slots, True


def around_forward(
    state: RunnerState,
    original: Callable[..., Any],
    runner: ModelRunner,
    forward_batch: ForwardBatch,
    *rest: Any,
    **options: Any,
) -> Any:
    """Hook: adds the nodes of the step's trees to the batch as further requests, and chooses rotary factors."""
    rows = state.answer_rows
    if rows is not None and rows.trees is not None and rows.batch is None:
        rows.batch = forward_batch
        forward_batch = _with_trees(rows, forward_batch)
    return original(runner, model_faults.shifted(state, forward_batch), *rest, **options)


def are_in(batch: ForwardBatch) -> bool:
    """Whether a batch, or SGLang's copy of it, has trees."""
    return bool(batch.rids) and batch.rids[-1] == NO_REQUEST


def _with_trees(rows: AnswerRows, batch: ForwardBatch) -> ForwardBatch:
    assert rows.trees is not None
    assert rows.slots is not None
    table = rows.table.req_to_token
    device = batch.input_ids.device
    prompt_rows, prompt_tokens = batch.req_pool_indices.tolist(), batch.seq_lens_cpu.tolist()
    tokens: list[int] = []
    kv_tokens: list[int] = []
    row = rows.first_row
    for place, nodes in rows.trees:
        n_prompt = prompt_tokens[place]
        own = rows.slots[len(tokens) : len(tokens) + len(nodes)].to(table.dtype)
        mine = table[row : row + len(nodes)]
        mine[:, :n_prompt] = table[prompt_rows[place], :n_prompt]
        mine[:, n_prompt : n_prompt + max(node.depth for node in nodes) + 1] = own[_paths(nodes).to(device)]
        tokens += [node.token for node in nodes]
        kv_tokens += [n_prompt + node.depth + 1 for node in nodes]
        row += len(nodes)

    def more(tensor: torch.Tensor, values: Any) -> torch.Tensor:
        return torch.cat((tensor, torch.as_tensor(values, dtype=tensor.dtype, device=tensor.device)))

    n, ones = len(tokens), [1] * len(tokens)
    before = [n_kv - 1 for n_kv in kv_tokens]
    n_tokens, seq_lens_cpu = batch.extend_num_tokens, more(batch.seq_lens_cpu, kv_tokens)
    changed: dict[str, Any] = {
        "batch_size": batch.batch_size + n,
        "input_ids": more(batch.input_ids, tokens),
        "positions": more(batch.positions, before),
        "req_pool_indices": more(batch.req_pool_indices, range(rows.first_row, row)),
        "seq_lens": more(batch.seq_lens, kv_tokens),
        "seq_lens_cpu": seq_lens_cpu,
        "orig_seq_lens": None if batch.orig_seq_lens is None else more(batch.orig_seq_lens, kv_tokens),
        "seq_lens_sum": int(seq_lens_cpu.sum()),
        "out_cache_loc": more(batch.out_cache_loc, rows.slots[:n]),
        "extend_num_tokens": n_tokens + n,
        "extend_seq_lens": more(batch.extend_seq_lens, ones),
        "extend_prefix_lens": more(batch.extend_prefix_lens, before),
        "extend_start_loc": more(batch.extend_start_loc, range(n_tokens, n_tokens + n)),
        "extend_seq_lens_cpu": [*batch.extend_seq_lens_cpu, *ones],
        "extend_prefix_lens_cpu": [*batch.extend_prefix_lens_cpu, *before],
        "rids": None if batch.rids is None else [*batch.rids, *[NO_REQUEST] * n],
        "lora_ids": None if batch.lora_ids is None else [*batch.lora_ids, *[None] * n],
        "num_token_non_padded_cpu": n_tokens + n,
    }
    if batch.extend_logprob_start_lens_cpu is not None:
        changed["extend_logprob_start_lens_cpu"] = [*batch.extend_logprob_start_lens_cpu, *ones]
    if batch.num_token_non_padded is not None:
        changed["num_token_non_padded"] = batch.num_token_non_padded + n
    return dataclasses.replace(batch, **changed)


def _paths(nodes: Sequence[Node]) -> torch.Tensor:
    """Returns the path from the root to each node, int64 [nodes, largest depth + 1], filled up with zeros."""
    paths = torch.zeros(len(nodes), max(node.depth for node in nodes) + 1, dtype=torch.int64)
    for place, node in enumerate(nodes):
        if node.parent >= 0:
            paths[place] = paths[node.parent]
        paths[place, node.depth] = place
    return paths


def around_logits(
    state: RunnerState,
    original: Callable[..., LogitsProcessorOutput],
    processor: LogitsProcessor,
    input_ids: torch.Tensor,
    hidden_states: torch.Tensor,
    lm_head: Any,
    logits_metadata: Any,
    *rest: Any,
    **options: Any,
) -> LogitsProcessorOutput:
    """Hook: SGLang's logits processor gets the step without its trees; for their nodes only the wanted log-probabilities are
    kept.
    """
    from sglang.srt.layers.logits_processor import LogitsMetadata

    rows = state.answer_rows
    if rows is None or rows.trees is None or not are_in(logits_metadata):
        return original(processor, input_ids, hidden_states, lm_head, logits_metadata, *rest, **options)
    assert rows.batch is not None
    n_tokens = rows.batch.extend_num_tokens
    result = original(processor, input_ids[:n_tokens], hidden_states[:n_tokens], lm_head, rows.batch, *rest, **options)
    asked = [node.asked_tokens for _, nodes in rows.trees for node in nodes]
    metadata = LogitsMetadata.from_forward_batch(rows.batch)
    for start in range(0, len(asked), LOGIT_ROWS):
        piece = hidden_states[n_tokens + start : n_tokens + min(start + LOGIT_ROWS, len(asked))]
        logits = processor._get_logits(piece, lm_head, metadata, use_logits_buffer=False)
        logprobs = torch.log_softmax(logits.float(), dim=-1)
        of_piece = asked[start : start + LOGIT_ROWS]
        places = [(row, token) for row, tokens in enumerate(of_piece) for token in tokens]
        found = logits_of.gather(logprobs, places)
        rows.values += torch.split_with_sizes(found, [len(tokens) for tokens in of_piece])
    return result
