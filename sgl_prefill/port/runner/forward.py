"""Hybrid prefilling inside SGLang's model runner: records the model's body at load, and chooses the path of each forward pass."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from sgl_prefill.cpu import fused
from sgl_prefill.errors import UntraceableModelError
from sgl_prefill.hybrid.body import HybridBody
from sgl_prefill.hybrid.split import split_body
from sgl_prefill.hybrid.trace import trace_body
from sgl_prefill.port.runner import branch_rows
from sgl_prefill.port.runner.runner_state import RunnerState
from sgl_prefill.startup.device import device_of, this_device
from sgl_prefill.startup.quiet import unlogged

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)

HOST_LOGPROB_ROWS = 32
SUM_OVER_RANKS = "sglang.inplace_all_reduce"  # the name of an operation in a recorded body


def trace_model(state: RunnerState, model_runner: ModelRunner) -> None:
    """Records the model's body, through which long extends run from now on. Raises UntraceableModelError under `on`."""
    try:
        body = body_of(model_runner)
        hybrid = _build(model_runner, body)
    except UntraceableModelError as error:
        name = model_runner.model_config.hf_config.architectures[0]
        if state.record.config.hybrid_prefill == "on":
            raise UntraceableModelError(
                f"--hybrid-prefill on: {name} cannot be prefilled in a hybrid way: {error}."
                " Start with --hybrid-prefill auto to serve it on the plain path"
            ) from error
        logger.warning("hybrid prefilling is off, the plain path serves %s: %s", name, error)
        return
    state.hybrid = hybrid
    backend = prefill_backend(model_runner.attn_backend)
    reads_last_rows = model_runner.is_generation and (hybrid.serves_short or attends_for_rows(backend))
    context = ExpertContext(body, quant_config_of(model_runner))
    _route(state, body, hybrid, context, reads_last_rows=reads_last_rows)


def use_small_logprob_chunks() -> None:
    """On a host, computes input log-probabilities (`logprob_start_len`) for 32 rows at a time: with a vocabulary of 49,152 their
    logits take 19 MiB. SGLang's 2,048 rows would take 1.2 GiB.
    """
    from sglang.srt.environ import envs

    if this_device().is_host:
        envs.SGLANG_ENABLE_LOGPROB_CHUNK.set(True)
        envs.SGLANG_LOGPROB_CHUNK_SIZE.set(HOST_LOGPROB_ROWS)


def body_of(model_runner: ModelRunner) -> torch.nn.Module:
    """Returns the module from embedding to final norm. Raises UntraceableModelError where hybrid prefilling cannot serve it."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
    from sglang.srt.model_loader.utils import resolve_language_model
    from sglang.srt.runtime_context import get_lora, get_parallel

    if get_parallel().pp_size > 1:
        raise UntraceableModelError("its layers are spread over several ranks (--pp-size)")
    if get_lora().enable_lora:
        raise UntraceableModelError("it applies LoRA adapters, which differ from request to request")
    if model_runner.is_multimodal:
        raise UntraceableModelError("it takes images, video or audio")
    pool = model_runner.token_to_kv_pool
    if not isinstance(pool, MHATokenToKVPool) or isinstance(pool, SWAKVPool):
        raise UntraceableModelError(f"its KV cache is SGLang's {type(pool).__name__}, not one of plain K and V heads")
    backend = prefill_backend(model_runner.attn_backend)
    if pool.dtype != model_runner.dtype and gathers_kv(backend):
        raise UntraceableModelError(
            f"its KV cache holds {pool.dtype}, and {type(backend).__name__} wants K and V of a batch in {model_runner.dtype}:"
            " a hybrid pass has them in the cache alone (--attention-backend fa3 reads them from there)"
        )
    body = getattr(model_runner.model, "model", None)
    if not isinstance(body, torch.nn.Module):
        try:
            body = resolve_language_model(model_runner.model)
        except AttributeError:  # GPT-2 and others have another name
            body = None
    if not isinstance(body, torch.nn.Module) or not hasattr(body, "layers"):
        raise UntraceableModelError("it has no `model` with `layers`")
    return body


def quant_config_of(model_runner: ModelRunner) -> Any:
    """Returns SGLang's object for the quantization of the weights, or None."""
    return getattr(model_runner.model, "quant_config", None)


class _Recorded:
    """Stands for SGLang's attention backend while a body is recorded: attention is one operation, with nothing of its inside."""

    def __init__(self, backend: Any) -> None:
        self.token_to_kv_pool = backend.token_to_kv_pool
        self.req_to_token_pool = backend.req_to_token_pool

    def get_fused_kv_write_buffers(self, *_: Any) -> None:
        return None

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        output = torch.empty_like(q)
        torch.ops.sgl_prefill_hybrid.attention(q, k, v, output, save_kv_cache, layer.layer_id)
        return output


@contextmanager
def _plain_structs() -> Iterator[None]:
    """Dynamo cannot make a struct of msgspec's, and SGLang's residual stream makes one at each boundary between layers (2.14):
    while a body is recorded, plain classes of the same fields and methods stand for those.
    """
    from sglang.srt.layers.layer_boundary import exit as exits
    from sglang.srt.layers.layer_boundary import output
    from sglang.srt.layers.layer_boundary.residual import stream

    made = (stream.Contribution, stream.OwedOutput, stream.DeclaredSum, output.UnreducedOutput, exits.ExitDecision)
    stand_ins = {struct: _plain_class(struct) for struct in made}
    places = [
        (module, name, value)
        for module in list(sys.modules.values())
        if (getattr(module, "__name__", None) or "").startswith("sglang.srt.layers.")
        for name, value in list(vars(module).items())
        if isinstance(value, type) and value in stand_ins
    ]
    for module, name, value in places:
        setattr(module, name, stand_ins[value])
    try:
        yield
    finally:
        for module, name, value in places:
            setattr(module, name, value)


def _make_exits(body: torch.nn.Module) -> None:
    """Does what SGLang does at first use and Dynamo cannot: it takes a lock (Python 3.11's `cached_property`), and looks who asks
    for a group of ranks."""
    from sglang.srt.distributed import parallel_state
    from sglang.srt.layers.layer_boundary.stage import StageBoundary

    parallel_state._ALREADY_WARNED.update(parallel_state._CONTEXT_NAME_OF)
    for module in body.modules():
        for value in list(vars(module).values()):
            if isinstance(value, StageBoundary):
                _ = value.plan.output


def _plain_class(struct: Any) -> type:
    names, defaults = struct.__struct_fields__, struct.__struct_defaults__
    n_required = len(names) - len(defaults)
    fields: list[Any] = [(name, Any) for name in names[:n_required]]
    fields += [
        (name, Any, dataclasses.field(default=value)) for name, value in zip(names[n_required:], defaults, strict=True)
    ]
    methods = {
        name: value
        for name, value in vars(struct).items()
        if isinstance(value, types.FunctionType | property | staticmethod | classmethod)
    }
    return dataclasses.make_dataclass(struct.__name__, fields, namespace=methods, eq=False)


def _build(model_runner: ModelRunner, body: torch.nn.Module) -> HybridBody:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
    from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

    device = model_runner.device

    def make_batch(input_ids: torch.Tensor) -> ForwardBatch:
        n_tokens = len(input_ids)
        return ForwardBatch(
            forward_mode=ForwardMode.EXTEND,
            batch_size=1,
            input_ids=input_ids,
            req_pool_indices=torch.zeros(1, dtype=torch.int64, device=device),
            seq_lens=torch.full((1,), n_tokens, dtype=torch.int64, device=device),
            out_cache_loc=torch.arange(n_tokens, dtype=torch.int64, device=device),
            seq_lens_sum=n_tokens,
        )

    backend = prefill_backend(model_runner.attn_backend)
    kernels = getattr(backend, "kernels", None)  # native kernels of `cpu.attention_backend`
    recorded: AbstractContextManager[None] = nullcontext()
    if kernels is not None:
        recorded = fused.recorded_as_operations(body, model_runner.dtype, model_runner.model_config.context_len)
    _make_exits(body)
    with forward_context(ForwardContext(attn_backend=_Recorded(backend))), _plain_structs(), recorded:
        quant_config = quant_config_of(model_runner)
        traces = functools.partial(sglang_traces, quant_config=quant_config)
        traced = trace_body(body, make_batch, device, traces, sequence_mixing())
    products = [] if kernels is None else fused.lower(traced, kernels)
    split = split_body(traced, attention_in_place=_attends_in_place(backend))
    # A preliminary chunk size: `choose_chunk_tokens` measures with packed weights.
    return HybridBody(split, chunk_tokens=device_of(device).chunk_candidates[0], products=products)


@contextmanager
def sglang_traces(forward_batch: ForwardBatch, quant_config: Any = None) -> Iterator[None]:
    """Sets SGLang's switches for tracing: attention and experts become opaque operations, and no kernel is chosen by size."""
    from sglang.srt.model_executor.runner_backend_utils.tc_piecewise_cuda_graph import (
        context_manager,
        set_tc_piecewise_forward_context,
    )

    with (
        unlogged(context_manager.__name__),  # on an error it gives a hint on CUDA graphs, which would mislead
        context_manager.enable_tc_piecewise_cuda_graph(),
        set_tc_piecewise_forward_context(forward_batch, [], quant_config, [], []),
    ):
        yield


def sequence_mixing() -> frozenset[str]:
    """Returns SGLang's operations, besides attention, in which tokens see each other: Mamba, sparse attention."""
    from sglang.srt.compilation.compilation_config import SPLIT_OPS

    return frozenset(SPLIT_OPS) - {SUM_OVER_RANKS}


class ExpertContext:
    """The context in which SGLang's opaque operations for experts and AWQ products find their layers and batch."""

    def __init__(self, body: torch.nn.Module, quant_config: Any = None) -> None:
        from sglang.srt.model_executor.model_runner_components.layer_setup import compute_attention_and_moe_layers

        self._layers = compute_attention_and_moe_layers(body)
        self._quant_config = quant_config

    def of(self, forward_batch: ForwardBatch | None) -> AbstractContextManager[None]:
        from sglang.srt.model_executor.runner_backend_utils.tc_piecewise_cuda_graph import (
            set_tc_piecewise_forward_context,
        )

        layers = self._layers
        context: AbstractContextManager[None] = set_tc_piecewise_forward_context(
            forward_batch, layers.attention_layers, self._quant_config, layers.moe_layers, layers.moe_fusions
        )
        return context


def _is_captured() -> bool:
    """Whether SGLang records or replays a CUDA graph, which a hybrid pass cannot be part of."""
    from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph import is_in_breakable_cuda_graph
    from sglang.srt.model_executor.runner_backend_utils.tc_piecewise_cuda_graph import is_in_tc_piecewise_cuda_graph
    from sglang.srt.model_executor.runner_utils.capture_mode import get_is_capture_mode
    from sglang.srt.model_executor.runner_utils.prefill_graph import is_in_prefill_graph_scope

    return bool(
        is_in_prefill_graph_scope()
        or get_is_capture_mode()
        or is_in_breakable_cuda_graph()
        or is_in_tc_piecewise_cuda_graph()
    )


def _route(
    state: RunnerState, body: torch.nn.Module, hybrid: HybridBody, context: ExpertContext, *, reads_last_rows: bool
) -> None:
    """Replaces `body.forward` by a dispatcher. Short extends run in SGLang's layers, unless native kernels serve the body.
    reads_last_rows: SGLang reads the last hidden state of each request only.
    """
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    layers = {module.layer_id: module for module in body.modules() if isinstance(module, RadixAttention)}
    plain_forward: Callable[..., Any] = body.forward

    def forward(
        input_ids: torch.Tensor, positions: torch.Tensor, forward_batch: ForwardBatch, *args: Any, **kwargs: Any
    ) -> Any:
        mode = forward_batch.forward_mode
        is_short = input_ids is not None and len(input_ids) <= max(hybrid.chunk_tokens, hybrid.plain_tokens)
        is_plain = (
            input_ids is None
            or (is_short and not hybrid.serves_short and not branch_rows.reads_own_kv(state, forward_batch))
            or not (mode == ForwardMode.EXTEND or (hybrid.serves_short and mode.is_decode()))
            or any(value is not None for value in (*args, *kwargs.values()))  # e.g. input embeddings
            or _is_captured()
        )
        if is_plain:
            return plain_forward(input_ids, positions, forward_batch, *args, **kwargs)
        token_rows = {"input_ids": input_ids, "positions": positions, "out_cache_loc": forward_batch.out_cache_loc}
        n_read = _n_read(forward_batch, hybrid.chunk_tokens) if reads_last_rows else None
        read_rows = None if n_read is None else last_rows(forward_batch, n_read)
        hybrid.n_passes += 1
        with context.of(forward_batch):
            return hybrid.run(token_rows, BatchIO(forward_batch, layers, n_read), read_rows)

    body.forward = forward


def _n_read(forward_batch: ForwardBatch, most_rows: int) -> list[int] | None:
    """Returns how many of the last rows of each request of an extend are read: one, or more for log-probabilities of its input
    and behind branches. None where they are more than `most_rows`, or all (hidden states for the client).
    """
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    if forward_batch.forward_mode != ForwardMode.EXTEND or forward_batch.capture_hidden_mode.need_capture():
        return None
    if forward_batch.multi_item_delimiter_indices is not None:
        return None
    lens = forward_batch.extend_seq_lens_cpu
    if not forward_batch.return_logprob:
        return [1] * len(lens)
    starts = forward_batch.extend_logprob_start_lens_cpu
    counts = [max(n_new - start, 1) for start, n_new in zip(starts, lens, strict=True)]
    return counts if sum(counts) <= most_rows else None


def last_rows(forward_batch: ForwardBatch, counts: Sequence[int]) -> torch.Tensor:
    """Returns the indices of so many last rows of each request, int64."""
    ends = itertools.accumulate(forward_batch.extend_seq_lens_cpu)
    rows = [row for end, n in zip(ends, counts, strict=True) for row in range(end - n, end)]
    return _to_device(rows, torch.int64, forward_batch.input_ids.device)


def _to_device(numbers: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A copy that does not wait for what the device has been given before."""
    is_host = device.type == "cpu"
    return torch.tensor(numbers, dtype=dtype, pin_memory=not is_host).to(device, non_blocking=True)


class BatchIO:
    """`hybrid.body.LayerIO` over SGLang's KV pool and attention backend, for one batch."""

    def __init__(
        self, forward_batch: ForwardBatch, layers: dict[int, RadixAttention], n_read: Sequence[int] | None = None
    ) -> None:
        from sglang.srt.model_executor.forward_context import get_attn_backend, get_token_to_kv_pool

        self._batch = forward_batch
        self._layers = layers
        self._n_read = n_read
        backend = get_attn_backend()
        picks_other = forward_batch.forward_mode.is_decode() and _picks(backend)
        self._backend = backend.decode_backend if picks_other else prefill_backend(backend)
        self._pool = get_token_to_kv_pool()
        self._slots = forward_batch.out_cache_loc
        self._kernels: Any = getattr(self._backend, "kernels", None)  # native kernels of `cpu.attention_backend`

    def write_kv(self, layer_id: int, start: int, end: int, key: torch.Tensor, value: torch.Tensor) -> None:
        from sglang.srt.mem_cache.memory_pool import KVWriteLoc

        layer = self._layers[layer_id]
        slots = self._slots[start:end]
        is_native = self._kernels is not None and slots.dtype == torch.int64
        if is_native and key.dtype == value.dtype == self._pool.store_dtype:
            pools = self._pool.get_key_buffer(layer_id), self._pool.get_value_buffer(layer_id)
            self._kernels.store(*pools, slots, _in_rows(key), _in_rows(value))
            return
        self._pool.set_kv_buffer(layer, KVWriteLoc(slots, None), key, value, layer.k_scale, layer.v_scale)

    def attend(self, layer_id: int, query: torch.Tensor, output: torch.Tensor, *, only_read_rows: bool = False) -> None:
        layer = self._layers[layer_id]
        if _attends_in_place(self._backend):
            self._backend.attend_into(output, query, layer, self._n_read if only_read_rows else None)
            return
        with self._rows_of_metadata() if only_read_rows else nullcontext():
            self._attend_by_sglang(layer_id, query, output)

    @contextmanager
    def _rows_of_metadata(self) -> Iterator[None]:
        """Within the block SGLang's FlashAttention computes the last rows of each request that are read: its mask is aligned to
        the end of the keys.
        """
        assert self._n_read is not None
        metadata = self._backend.forward_metadata
        starts = _to_device([0, *itertools.accumulate(self._n_read)], torch.int32, metadata.cu_seqlens_q.device)
        self._backend.forward_metadata = dataclasses.replace(
            metadata, cu_seqlens_q=starts, max_seq_len_q=max(self._n_read)
        )
        try:
            yield
        finally:
            self._backend.forward_metadata = metadata

    def _attend_by_sglang(self, layer_id: int, query: torch.Tensor, output: torch.Tensor) -> None:
        layer = self._layers[layer_id]
        key = value = None
        if gathers_kv(self._backend):
            key = self._own_rows(self._pool.get_key_buffer(layer_id))
            value = self._own_rows(self._pool.get_value_buffer(layer_id))
        self._batch._attn_output = output  # SGLang's FlashAttention backend writes there, without a copy
        result = self._backend.forward(query, key, value, layer, self._batch, save_kv_cache=False)
        if result.data_ptr() != output.data_ptr():
            output.view(result.shape).copy_(result)

    def _own_rows(self, pool: torch.Tensor) -> torch.Tensor:
        """Returns K or V of the batch's tokens: a view where their slots are consecutive (scratch), else a copy."""
        run = self._consecutive
        return pool[run] if run is not None else pool.index_select(0, self._slots)

    @functools.cached_property
    def _consecutive(self) -> slice | None:
        """The batch's slots, where they are consecutive. Cached, since it synchronizes with the device."""
        first, n_tokens = int(self._slots[0]), len(self._slots)
        is_run = bool((self._slots[1:] - self._slots[:-1] == 1).all())
        return slice(first, first + n_tokens) if is_run else None


def _in_rows(x: torch.Tensor) -> torch.Tensor:
    """Returns x with contiguous rows. x: [tokens, heads, head_dim], or [tokens, heads * head_dim]."""
    is_in_rows = x.stride(-1) == 1 and (x.dim() == 2 or x.stride(1) == x.shape[2])
    return x if is_in_rows else x.contiguous()


def prefill_backend(backend: Any) -> Any:
    """Returns the backend for prefills where SGLang has another one for decoding."""
    return backend.prefill_backend if _picks(backend) else backend


def _picks(backend: Any) -> bool:
    """By class: FlashInfer's backend has an attribute `prefill_backend` too, a string."""
    from sglang.srt.layers.attention.hybrid_attn_backend import HybridAttnBackend

    return isinstance(backend, HybridAttnBackend)


def _attends_in_place(backend: Any) -> bool:
    """Whether the backend may write its output over the queries: `cpu.attention_backend` may."""
    return hasattr(prefill_backend(backend), "attend_into")


def attends_for_rows(backend: Any) -> bool:
    """Whether `BatchIO` can have a backend compute rows of its choice: SGLang's FlashAttention, which reads all K and V from the
    pool, without layers that see only their part of the prompt (Llama 4).
    """
    return not gathers_kv(backend) and not _attends_in_place(backend) and not backend.has_local_attention


def gathers_kv(backend: Any) -> bool:
    """Whether a backend takes the batch's own K and V as arguments, which costs a copy where their slots are not consecutive.
    The CPU backend and SGLang's FlashAttention read all K and V from the pool.
    """
    if _attends_in_place(backend):
        return False
    # By name: importing its module needs a CUDA device.
    is_flash = any(kind.__name__ == "FlashAttentionBackend" for kind in type(backend).__mro__)
    return not is_flash or bool(backend.fa_skip_kv_cache)
