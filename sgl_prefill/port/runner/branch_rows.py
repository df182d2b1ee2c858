"""Branches in the forward pass of their prompt (`core.branches`): tokens of labels, questions about one state.

Each branch runs as a further request of the step's batch. Its cached prefix is the prompt and the branches before it, whose KV
the same pass writes: every layer writes all K and V before it attends. So a branch costs no step of its own, and also works where
the prompt's KV is in scratch.

    requests of the pass:    the step's requests             their branches
    KV slots:                SGLang's allocation             scratch, or durable slots that are freed after the pass
    rows of the slot table:  SGLang's                        further rows, which SGLang gives to no request
    logits:                  SGLang's logits processor       in pieces of 32 rows, of which only the wanted tokens are kept
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch

from sgl_prefill.core.branches import Branch, Branches, Tokens
from sgl_prefill.core.kv_plan import ceil_to
from sgl_prefill.core.packing import MOST_BRANCHES
from sgl_prefill.errors import UntraceableModelError
from sgl_prefill.port.kv.allocator import SuffixKVAllocator
from sgl_prefill.port.runner import logits as logits_of
from sgl_prefill.port.runner import model_faults
from sgl_prefill.port.runner.runner_state import RunnerState
from sgl_prefill.port.steps import custom_params, request_state, time_stats

if TYPE_CHECKING:
    from sglang.srt.layers.logits_processor import LogitsProcessor, LogitsProcessorOutput
    from sglang.srt.managers.io_struct import GenerateReqInput
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.managers.tp_worker import TpModelWorker
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

PARAMETER = f"{custom_params.OURS}branches"
FACT = "branch_logprobs"  # in a request's time stats: for each entry of its branches' `asked` the log-probabilities
Logprobs: TypeAlias = list[list[float]]  # the value of that fact
Unread: TypeAlias = list[torch.Tensor]  # the same as tensors on the model's device
LOGIT_ROWS = 32

NO_REQUEST = ""  # request id of all branches
_ATTRIBUTE = "sgl_prefill_branches"


class Size(NamedTuple):
    """What the branches of a prompt add to a step."""

    branches: int
    tokens: int


def attach(obj: GenerateReqInput, of_prompts: Sequence[Branches]) -> None:
    """Keeps the branches of each prompt with a request; `sampling_params_with_branches` passes them to the scheduler."""
    setattr(obj, _ATTRIBUTE, of_prompts)


def sampling_params_with_branches(obj: Any, *, is_batch: bool) -> Any:
    """Returns the sampling parameters of a request with its branches; a list, one per prompt, for a batch."""
    of_prompts: Sequence[Branches] = getattr(obj, _ATTRIBUTE, ())
    if not any(one.branches for one in of_prompts):
        return obj.sampling_params
    given = obj.sampling_params
    each = given if isinstance(given, list) else [given or {}] * len(of_prompts)
    parameters = [
        custom_params.put(params, PARAMETER, [tuple(branch) for branch in one.branches]) if one.branches else params
        for params, one in zip(each, of_prompts, strict=True)
    ]
    return parameters if is_batch else parameters[0]


def size_of(parameters: Any) -> Size:
    """Of the prompt with these sampling parameters: a dict, or SGLang's object."""
    given = parameters.get("custom_params") if isinstance(parameters, dict) else parameters.custom_params
    found = (given or {}).get(PARAMETER) or ()
    return Size(len(found), sum(len(tokens) for tokens, *_ in found))


def branches_of(req: Req) -> list[Branch]:
    return [Branch(*one) for one in custom_params.of(req, PARAMETER) or ()]


def problem(state: RunnerState, runner: ModelRunner) -> str | None:
    """Returns why this engine cannot compute branches; None where it can."""
    from sgl_prefill.port.runner.forward import body_of

    try:
        body_of(runner)
    except UntraceableModelError as error:
        return str(error)
    if state.branch_rows is None:
        return "SGLang has another class for its table of KV slots than ReqToTokenPool"
    if runner.device == "cpu":
        return None
    if state.hybrid is None:
        return "it runs with --hybrid-prefill off, and not every attention backend writes K and V before it reads them"
    if runner.page_size > 1:
        return f"its KV pages have {runner.page_size} tokens: start it with --page-size 1"
    return None


@dataclasses.dataclass
class BranchRows:
    """The further rows of the slot table, and the branches of the running pass."""

    table: ReqToTokenPool
    first_row: int
    of_requests: list[tuple[int, list[Branch]]] | None = None  # (index of the request in the step, its branches)
    slots: torch.Tensor | None = None  # int64 [tokens of branches]
    batch: ForwardBatch | None = None  # the step without its branches
    values: Unread = dataclasses.field(default_factory=list)  # one per entry of the branches' `asked`
    # (time stats of a request, its values), until the step's result is read.
    unread: list[tuple[Any, Unread]] = dataclasses.field(default_factory=list)

    def forget(self) -> None:
        self.of_requests = self.slots = self.batch = None
        self.values = []


def around_build_table(
    state: RunnerState, original: Callable[..., ReqToTokenPool], configurator: KVCacheConfigurator, *, max_num_reqs: int
) -> ReqToTokenPool:
    """Hook: builds the slot table with more rows than SGLang gives to requests."""
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

    if configurator.is_draft_worker or configurator.mambaish_config is not None:  # its rows have a state each
        return original(configurator, max_num_reqs=max_num_reqs)
    table = original(configurator, max_num_reqs=max_num_reqs + MOST_BRANCHES)
    if type(table) is not ReqToTokenPool:
        return original(configurator, max_num_reqs=max_num_reqs)
    table.size -= MOST_BRANCHES
    table._alloc_size -= MOST_BRANCHES
    table.clear()
    state.branch_rows = BranchRows(table, table._alloc_size)
    return table


def around_forward_batch_generation(
    state: RunnerState,
    original: Callable[..., Any],
    worker: TpModelWorker,
    batch: ScheduleBatch,
    *rest: Any,
    **options: Any,
) -> Any:
    """Hook: allocates slots for a step's branches, and keeps their log-probabilities. Raises MemoryError."""
    rows = state.branch_rows
    is_extend = batch.forward_mode.is_extend()
    state.has_followers = is_extend and any(request_state.of(req).leader is not None for req in batch.reqs)
    of_requests = [] if rows is None or not is_extend else _branches_of(batch)
    if rows is None or not of_requests:
        return original(worker, batch, *rest, **options)
    n_branches = sum(len(branches) for _, branches in of_requests)
    if n_branches > MOST_BRANCHES:
        raise MemoryError(f"this step has {n_branches} branches, and {MOST_BRANCHES} are the limit of a step")
    slots, is_borrowed = _lend(batch, sum(len(one.tokens) for _, branches in of_requests for one in branches))
    rows.of_requests, rows.slots = of_requests, slots
    try:
        result = original(worker, batch, *rest, **options)
        n_asked = [sum(len(one.asked) for one in branches) for _, branches in of_requests]
        assert len(rows.values) == sum(n_asked), "the model computes logits without SGLang's logits processor"
        values = iter(rows.values)
        for (place, _), n in zip(of_requests, n_asked, strict=True):
            rows.unread.append((batch.reqs[place].time_stats, list(itertools.islice(values, n))))
        return result
    finally:
        rows.forget()
        if is_borrowed:
            batch.tree_cache.token_to_kv_pool_allocator.free(slots)


def around_move_logprobs(state: RunnerState, original: Callable[..., None], processor: Any, **options: Any) -> None:
    """Hook: copies the branches' log-probabilities to the host when SGLang reads the step's result."""
    rows = state.branch_rows
    if rows is not None and rows.unread:
        of_step = {id(req.time_stats) for req in options["batch"].reqs}  # another step may have been launched
        unread = [one for one in rows.unread if id(one[0]) in of_step]
        rows.unread = [one for one in rows.unread if id(one[0]) not in of_step]
        read = iter(logits_of.on_host([value for _, values in unread for value in values]))
        for stats, values in unread:
            found: Logprobs = [next(read).tolist() for _ in values]
            time_stats.add_facts(stats, **{FACT: found})
    logits_of.around_lists_of_logprobs(original, processor, **options)


def _branches_of(batch: ScheduleBatch) -> list[tuple[int, list[Branch]]]:
    each = [(place, branches_of(req)) for place, req in enumerate(batch.reqs)]
    return [(place, branches) for place, branches in each if branches]


def _lend(batch: ScheduleBatch, n_tokens: int) -> tuple[torch.Tensor, bool]:
    """Returns slots for so many tokens, and whether they must be freed after the pass."""
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    allocator = batch.tree_cache.token_to_kv_pool_allocator
    if isinstance(allocator, SuffixKVAllocator) and allocator.n_scratch_lent + n_tokens <= allocator.scratch_tokens:
        first = (
            allocator.first_scratch_slot + allocator.n_scratch_lent
        )  # scratch is not allocated again before the next step
        return torch.arange(first, first + n_tokens, dtype=torch.int64, device=allocator.device), False
    n_whole = ceil_to(n_tokens, allocator.page_size)
    if (n_missing := n_whole - allocator.available_size()) > 0:
        batch.tree_cache.evict(EvictParams(num_tokens=n_missing))
    slots = allocator.alloc(n_whole)
    if slots is None:
        raise MemoryError(f"there are no free KV slots for the {n_tokens} tokens of this step's branches")
    return slots, True


def around_forward(
    state: RunnerState,
    original: Callable[..., Any],
    runner: ModelRunner,
    forward_batch: ForwardBatch,
    *rest: Any,
    **options: Any,
) -> Any:
    """Hook: adds the step's branches to the batch as further requests, and chooses rotary factors."""
    rows = state.branch_rows
    if rows is not None and rows.of_requests is not None and rows.batch is None:
        rows.batch = forward_batch
        forward_batch = _with_branches(rows, forward_batch)
    return original(runner, model_faults.shifted(state, forward_batch), *rest, **options)


def are_in(batch: ForwardBatch) -> bool:
    """Whether a batch, or SGLang's copy of it, has branches."""
    return bool(batch.rids) and batch.rids[-1] == NO_REQUEST


def reads_own_kv(state: RunnerState, batch: ForwardBatch) -> bool:
    """Whether a sequence of the batch attends to KV that another one of it writes: each layer has to write all of it first."""
    return state.has_followers or are_in(batch)


def _with_branches(rows: BranchRows, batch: ForwardBatch) -> ForwardBatch:
    assert rows.of_requests is not None
    assert rows.slots is not None
    table = rows.table.req_to_token
    device = batch.input_ids.device
    prompt_rows, prompt_tokens = batch.req_pool_indices.tolist(), batch.seq_lens_cpu.tolist()
    tokens: list[int] = []
    before: list[int] = []  # KV tokens before each branch
    new: list[int] = []  # tokens of each branch
    asked: list[int] = []  # of these, the last ones that are asked for anything
    row = rows.first_row
    for place, branches in rows.of_requests:
        n_prompt, n_own = prompt_tokens[place], sum(len(one.tokens) for one in branches)
        own = rows.slots[len(tokens) : len(tokens) + n_own].to(table.dtype)
        mine = table[row : row + len(branches)]
        mine[:, :n_prompt] = table[prompt_rows[place], :n_prompt]
        paths = _paths(branches)
        mine[:, n_prompt : n_prompt + paths.shape[1]] = own[paths.to(device)]
        tokens += itertools.chain.from_iterable(one.tokens for one in branches)
        before += [n_prompt + one.n_before for one in branches]
        new += [len(one.tokens) for one in branches]
        asked += [len(one.asked) for one in branches]
        row += len(branches)

    def more(tensor: torch.Tensor, values: Any) -> torch.Tensor:
        return torch.cat((tensor, torch.as_tensor(values, dtype=tensor.dtype, device=tensor.device)))

    n, n_tokens = len(tokens), batch.extend_num_tokens
    after = [n_kv + n_new for n_kv, n_new in zip(before, new, strict=True)]
    starts = list(itertools.accumulate(new[:-1], initial=n_tokens))
    seq_lens_cpu = more(batch.seq_lens_cpu, after)
    changed: dict[str, Any] = {
        "batch_size": batch.batch_size + len(new),
        "input_ids": more(batch.input_ids, tokens),
        "positions": more(batch.positions, [at for span in zip(before, after, strict=True) for at in range(*span)]),
        "req_pool_indices": more(batch.req_pool_indices, range(rows.first_row, row)),
        "seq_lens": more(batch.seq_lens, after),
        "seq_lens_cpu": seq_lens_cpu,
        "orig_seq_lens": None if batch.orig_seq_lens is None else more(batch.orig_seq_lens, after),
        "seq_lens_sum": int(seq_lens_cpu.sum()),
        "out_cache_loc": more(batch.out_cache_loc, rows.slots[:n]),
        "extend_num_tokens": n_tokens + n,
        "extend_seq_lens": more(batch.extend_seq_lens, new),
        "extend_prefix_lens": more(batch.extend_prefix_lens, before),
        "extend_start_loc": more(batch.extend_start_loc, starts),
        "extend_seq_lens_cpu": [*batch.extend_seq_lens_cpu, *new],
        "extend_prefix_lens_cpu": [*batch.extend_prefix_lens_cpu, *before],
        "rids": None if batch.rids is None else [*batch.rids, *[NO_REQUEST] * len(new)],
        "lora_ids": None if batch.lora_ids is None else [*batch.lora_ids, *[None] * len(new)],
        "global_num_token_non_padded_cpu": n_tokens + n,
        "global_num_token_non_padded": None,
        "max_seq_len_host": None,
        "req_pool_indices_cpu": None,
    }
    if batch.extend_logprob_start_lens_cpu is not None:
        first_asked = [n_new - n_asked for n_new, n_asked in zip(new, asked, strict=True)]
        changed["extend_logprob_start_lens_cpu"] = [*batch.extend_logprob_start_lens_cpu, *first_asked]
    if batch.num_token_non_padded is not None:
        changed["num_token_non_padded"] = batch.num_token_non_padded + n
    return dataclasses.replace(batch, **changed)


def _paths(branches: Sequence[Branch]) -> torch.Tensor:
    """Returns the places of the tokens from the prompt to the end of each branch, int64 [branches, most tokens], filled up with
    zeros.
    """
    paths = torch.zeros(len(branches), max(one.n_before + len(one.tokens) for one in branches), dtype=torch.int64)
    start = 0
    for place, one in enumerate(branches):
        if one.parent >= 0:
            paths[place, : one.n_before] = paths[one.parent, : one.n_before]
        end = start + len(one.tokens)
        paths[place, one.n_before : one.n_before + len(one.tokens)] = torch.arange(start, end)
        start = end
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
    """Hook: SGLang's logits processor gets the step without its branches; of these only the wanted log-probabilities are kept."""
    from sglang.srt.layers.logits_processor import LogitsMetadata

    rows = state.branch_rows
    if rows is None or rows.of_requests is None or not are_in(logits_metadata):
        return original(processor, input_ids, hidden_states, lm_head, logits_metadata, *rest, **options)
    assert rows.batch is not None
    n_tokens = rows.batch.extend_num_tokens
    result = original(processor, input_ids[:n_tokens], hidden_states[:n_tokens], lm_head, rows.batch, *rest, **options)
    asked: list[tuple[int, Tokens]] = []  # (row of the hidden states, tokens)
    for branch in itertools.chain.from_iterable(branches for _, branches in rows.of_requests):
        n_tokens += len(branch.tokens)
        asked += zip(range(n_tokens - len(branch.asked), n_tokens), branch.asked, strict=True)
    metadata = LogitsMetadata.from_forward_batch(rows.batch)
    for start in range(0, len(asked), LOGIT_ROWS):
        piece = asked[start : start + LOGIT_ROWS]
        places = torch.tensor([place for place, _ in piece], device=hidden_states.device)
        logits = processor._get_logits(hidden_states[places], lm_head, metadata, use_logits_buffer=False)
        logprobs = torch.log_softmax(logits.float(), dim=-1)
        found = logits_of.gather(logprobs, [(row, token) for row, (_, wanted) in enumerate(piece) for token in wanted])
        rows.values += torch.split_with_sizes(found, [len(wanted) for _, wanted in piece])
    return result
