"""`startup.loaded_model` over SGLang's model runner: synthetic batches run through SGLang's own requests and allocation."""

from __future__ import annotations

import importlib.metadata
import logging
from array import array
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch

from sgl_prefill.core.gpu_memory import margin_bytes, model_name
from sgl_prefill.core.kv_plan import ceil_to
from sgl_prefill.core.memory_plan import MemoryPlan
from sgl_prefill.cpu import experts, fused
from sgl_prefill.cpu.native.build import digest
from sgl_prefill.cpu.native.library import native
from sgl_prefill.port.kv.allocator import SuffixKVAllocator
from sgl_prefill.port.runner import replays
from sgl_prefill.port.runner.forward import ExpertContext, body_of, gathers_kv, prefill_backend, quant_config_of
from sgl_prefill.port.runner.rank_group import tensor_exchange, these_ranks
from sgl_prefill.port.runner.runner_state import RunnerState
from sgl_prefill.port.runner.stable_answers import make_stable
from sgl_prefill.port.steps import request_state
from sgl_prefill.startup.arguments import DEVICE_MEMORY_FRACTION
from sgl_prefill.startup.device import device_of

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.model_executor.model_runner import ModelRunner

    from sgl_prefill.hybrid.body import HybridBody
    from sgl_prefill.hybrid.shared_rows import Exchange

logger = logging.getLogger(__name__)


def weights_bytes(model: torch.nn.Module) -> int:
    """Bytes of parameters and buffers; shared ones count once."""
    tensors = {t.data_ptr(): t.nbytes for t in (*model.parameters(), *model.buffers())}
    return sum(tensors.values())


def pool_bytes(pool: Any) -> int:
    """Bytes of a KV pool of any of SGLang's classes, its indices and scales included."""
    if hasattr(pool, "get_kv_size_bytes"):
        sizes = pool.get_kv_size_bytes()
        return int(sum(sizes) if isinstance(sizes, tuple) else sizes)
    tensors = {t.data_ptr(): t.nbytes for t in _tensors_of(pool)}  # a pool of several parts
    return sum(tensors.values())


def _tensors_of(part: Any) -> Iterator[torch.Tensor]:
    from sglang.srt.mem_cache.memory_pool import KVCache

    if isinstance(part, torch.Tensor):
        yield part
    elif isinstance(part, (list, tuple, dict)):
        for each in part.values() if isinstance(part, dict) else part:
            yield from _tensors_of(each)
    elif isinstance(part, KVCache):
        yield from _tensors_of(vars(part))


class SglangModel:
    """Implements `LoadedModel`."""

    def __init__(self, state: RunnerState, runner: ModelRunner) -> None:
        self.runner = runner
        self._state = state
        self.device = device_of(runner.device)
        self.ranks = these_ranks()
        self.exchange: Exchange | None = tensor_exchange() if self.ranks.count > 1 else None
        self.dtype: torch.dtype = runner.dtype
        self.page_size: int = runner.page_size
        self.context_tokens: int = runner.model_config.context_len
        self.vocab_size: int = runner.model_config.vocab_size
        self.is_generation: bool = runner.is_generation
        self.name: str = model_name(runner.model_config.model_path)
        self.is_evicting = isinstance(runner.token_to_kv_pool_allocator, SuffixKVAllocator)

    @property
    def hybrid(self) -> HybridBody | None:
        return self._state.hybrid

    @property
    def circumstances(self) -> dict[str, Any]:
        return {
            "versions": {name: importlib.metadata.version(name) for name in ("sgl-prefill", "sglang", "torch")},
            "device": self.device.model(),
            "threads": torch.get_num_threads(),
            "model": self.runner.model_config.hf_config.to_dict(),
            "dtype": str(self.dtype),
            "rank": (self.ranks.index, self.ranks.count),
            "attention": self.runner.prefill_attention_backend_str,
            "kernels": (digest(), native().shown()) if self.device.has_native_kernels else None,
        }

    @property
    def alike_tokens(self) -> int | None:
        return self._state.long_rope_tokens

    @property
    def most_durable_tokens(self) -> int:
        pool = self.runner.token_to_kv_pool
        return int(pool.most_durable_tokens if self.is_evicting else self.runner.max_total_num_tokens)

    @property
    def durable_tokens(self) -> int:
        allocator = self.runner.token_to_kv_pool_allocator
        return int(allocator.size if isinstance(allocator, SuffixKVAllocator) else self.runner.max_total_num_tokens)

    @property
    def scratch_tokens(self) -> int:
        allocator = self.runner.token_to_kv_pool_allocator
        return allocator.scratch_tokens if isinstance(allocator, SuffixKVAllocator) else 0

    def weights_bytes(self) -> int:
        packed = 0 if self.hybrid is None else fused.packed_bytes(self.hybrid.products)
        return weights_bytes(self.runner.model) + packed

    def kv_bytes_per_token(self) -> tuple[int, int]:
        pool = self.runner.token_to_kv_pool
        if self.is_evicting:
            one_layer = sum(pool.row_bytes())
            return one_layer, one_layer * pool.layer_num
        all_layers = -(-pool_bytes(pool) // (self.runner.max_total_num_tokens + self.page_size))
        n_layers = getattr(pool, "full_kv_pool", pool).layer_num  # the others have a state
        return -(-all_layers // n_layers), all_layers

    def n_places(self) -> int:
        return int(self.runner.req_to_token_pool.available_size())

    def gathered_kv_bytes_per_token(self) -> int:
        gathers = self.hybrid is not None and gathers_kv(prefill_backend(self.runner.attn_backend))
        return self.kv_bytes_per_token()[0] if gathers else 0

    def step(self, prompts: Sequence[Sequence[int]], cached_slots: torch.Tensor | None = None) -> MadeUpStep:
        if self.is_evicting:
            n_cached = 0 if cached_slots is None else len(cached_slots)
            n_new = sum(ceil_to(len(prompt) - n_cached, self.page_size) for prompt in prompts)
            self.runner.token_to_kv_pool.commit_scratch(min(n_new, self.scratch_tokens))
        return MadeUpStep(self.runner, prompts, cached_slots)

    @property
    def graphed_tokens(self) -> list[int]:
        return replays.graphed_tokens(self.runner)

    def without_graphs(self) -> AbstractContextManager[None]:
        return replays.none(self._state)

    def last_slots(self, n_tokens: int) -> torch.Tensor:
        allocator = self.runner.token_to_kv_pool_allocator
        if isinstance(allocator, SuffixKVAllocator):
            end = allocator.first_scratch_slot + allocator.scratch_tokens
        else:
            end = allocator.size + 1  # slot 0 is padding
        return torch.arange(end - n_tokens, end, dtype=torch.int64, device=self.device.name)

    def forget_slots(self) -> None:
        self.runner.token_to_kv_pool_allocator.clear()
        if self.is_evicting:
            self.runner.token_to_kv_pool.release_scratch()

    @contextmanager
    def only_durable(self, n_tokens: int) -> Iterator[None]:
        allocator = self.runner.token_to_kv_pool_allocator
        if not isinstance(allocator, SuffixKVAllocator):
            yield
            return
        before = allocator.size
        allocator.resize_durable(min(before, n_tokens))
        try:
            yield
        finally:
            allocator.resize_durable(before)

    def poison_scratch(self, n_tokens: int) -> None:
        self._fill_scratch(float("nan"), n_tokens)

    def clean_scratch(self, n_tokens: int) -> None:
        self._fill_scratch(0.0, n_tokens)

    def _fill_scratch(self, value: float, n_tokens: int) -> None:
        pool = self.runner.token_to_kv_pool
        pool.fill_scratch(value, min(n_tokens + self.page_size, pool.backed_scratch_tokens))

    @contextmanager
    def only_last_block(self) -> Iterator[None]:
        backend = prefill_backend(self.runner.attn_backend)
        backend.only_last_block = True
        try:
            yield
        finally:
            backend.only_last_block = False

    def outside_a_batch(self) -> AbstractContextManager[None]:
        return ExpertContext(body_of(self.runner), quant_config_of(self.runner)).of(None)

    def pack_weights(self) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        if not self.device.has_native_kernels:
            return None, None
        kernel = {**native().shown(), "pytorch_layers": self._pytorch_layers()}
        hybrid = self.hybrid
        if hybrid is None or not hybrid.serves_short:
            return kernel, None
        problem = fused.pack(hybrid.products)
        of_experts, problem_of_experts = experts.pack_experts(self.runner.model)
        hybrid.products = [*hybrid.products, *of_experts]
        problem = problem or problem_of_experts
        if problem is not None:
            logger.warning("%s", problem)
        return kernel, {"bytes": fused.packed_bytes(hybrid.products), "problem": problem}

    def make_stable(self) -> dict[str, Any]:
        return make_stable(self._state, self.runner)

    def _pytorch_layers(self) -> list[int]:
        """Returns the layers whose attention PyTorch computes request by request, since native kernels cannot."""
        find = getattr(prefill_backend(self.runner.attn_backend), "pytorch_layers", None)  # of `cpu.attention_backend`
        layers: list[int] = [] if find is None else find(self.runner.model, self.dtype)
        if layers:
            logger.warning(
                "PyTorch computes the attention of layers %s: their heads are not for the native kernels", layers
            )
        return layers

    def apply(self, plan: MemoryPlan) -> None:
        from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator

        runner = self.runner
        allocator = runner.token_to_kv_pool_allocator
        if isinstance(allocator, SuffixKVAllocator):
            pool = runner.token_to_kv_pool
            # Returns the memory of the profile run to the driver, which commits it to the pool below.
            self.forget_slots()
            self.device.release_unused()
            pool.commit_scratch(min(ceil_to(plan.max_input_tokens, self.page_size), pool.scratch_tokens))
            pool.commit(plan.durable_tokens)
            allocator.resize_scratch(pool.backed_scratch_tokens)
            allocator.resize_durable(plan.durable_tokens)
        elif type(allocator) in (PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator):
            # SGLang's `resize` does not change the number of pages where a page is one token.
            allocator.size, allocator.num_pages = plan.durable_tokens, plan.durable_tokens // allocator.page_size
            allocator.clear()
        else:
            return  # a pool of several parts keeps SGLang's sizes: the plan only limits the input
        runner.max_total_num_tokens = plan.durable_tokens

    def close(self) -> None:
        """Frees the KV pool after a failed start."""
        if self.is_evicting:
            self.runner.token_to_kv_pool.close()

    def room_bytes(self, kv_bytes: int) -> int:
        if self.device.budget_holds_activations:
            return kv_bytes
        self.device.synchronize()
        self.device.release_unused()
        free_bytes = self.device.free_bytes() - margin_bytes(self.device.total_bytes())
        if not self.is_evicting:
            return free_bytes
        pool = self.runner.token_to_kv_pool
        return free_bytes + int(pool.backed_bytes - pool.rounding_bytes)

    def kv_limit_bytes(self, kv_bytes: int) -> int | None:
        from sglang.srt.runtime_context import get_schedule

        if self.device.budget_holds_activations or get_schedule().mem_fraction_static >= DEVICE_MEMORY_FRACTION:
            return None
        return kv_bytes


class MadeUpStep:
    """Implements `startup.loaded_model.MadeUpStep`."""

    def __init__(
        self, runner: ModelRunner, prompts: Sequence[Sequence[int]], cached_slots: torch.Tensor | None = None
    ) -> None:
        self._runner = runner
        self.was_replayed = False
        self._prefix = torch.empty(0, dtype=torch.int64, device=runner.device) if cached_slots is None else cached_slots
        n_cached = len(self._prefix)
        model = runner.model_config
        decides = model.joint_head_config is not None or model.pointer_head is not None
        self._reqs = [_request(f"made-up-{index}", one, n_cached, decides) for index, one in enumerate(prompts)]

    @torch.inference_mode()
    def run(self) -> torch.Tensor:
        from sglang.srt.managers.schedule_batch import ScheduleBatch
        from sglang.srt.model_executor.forward_batch_info import ForwardBatch

        runner = self._runner
        batch = ScheduleBatch.init_new(
            self._reqs,
            runner.req_to_token_pool,
            runner.token_to_kv_pool_allocator,
            _NoPrefixCache(runner, self._prefix),
            runner.model_config,
            enable_overlap=False,
            spec_algorithm=runner.spec_algorithm,
        )
        batch.prepare_for_extend()
        if batch.input_ids is None:
            batch.input_ids = batch.prefill_input_ids_cpu.to(batch.device)
        forward_batch = ForwardBatch.init_new(batch, runner, return_hidden_states_before_norm=False)
        result = runner.forward(forward_batch)
        self.was_replayed = bool(result.can_run_graph)
        output = result.logits_output
        values: Any = output.next_token_logits if runner.is_generation else output.embeddings
        found: torch.Tensor = (torch.stack(values) if isinstance(values, list) else values).float()
        return found

    def slots(self, index: int) -> torch.Tensor:
        return self._slots_of(self._reqs[index])

    def release(self) -> None:
        allocator = self._runner.token_to_kv_pool_allocator
        for req in self._reqs:
            if req.kv.holds_mamba:
                self._runner.req_to_token_pool.free_mamba_cache(req)
            if not req.kv.holds_kv:  # memory ran out before the allocation
                continue
            plan = request_state.of(req).kv_plan
            n_durable = len(req.origin_input_ids) if plan is None else plan.n_durable
            n_cached = req.prefix_len
            allocator.free_segment(self._slots_of(req)[n_cached:n_durable], start_pos=n_cached)
            if plan is not None and isinstance(allocator, SuffixKVAllocator):
                allocator.give_back_scratch(plan)
            self._runner.req_to_token_pool.free(req)

    def _slots_of(self, req: Req) -> torch.Tensor:
        row: torch.Tensor = self._runner.req_to_token_pool.req_to_token[
            req.kv.req_pool_idx, : len(req.origin_input_ids)
        ]
        return row.to(torch.int64)


def _request(rid: str, token_ids: Sequence[int], n_cached: int, decides: bool) -> Req:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    req = Req(
        rid=rid,
        origin_input_text="",
        origin_input_ids=array("q", token_ids),
        sampling_params=SamplingParams(max_new_tokens=0, temperature=0),
        # One question, at the last token, of two options: all tokens and the last.
        decision_layout=[n := len(token_ids), 1, 1, n - 1, n, 2, 0, n, n - 1, n] if decides else None,
    )
    req.full_untruncated_fill_ids = req.origin_input_ids
    req.logprob_start_len = -1
    req.prefix_len, req.extend_end = n_cached, len(token_ids)
    return req


class _NoPrefixCache:
    """Null object for the prefix cache, which does not exist yet: the attributes that SGLang's allocation reads."""

    advisor = of_background = None

    def __init__(self, runner: Any, prefix: torch.Tensor) -> None:
        self.page_size = runner.page_size
        self.device = runner.device
        self.token_to_kv_pool_allocator = runner.token_to_kv_pool_allocator
        self._prefix = prefix

    def prefix_device_indices(self, req: Req) -> torch.Tensor:
        return self._prefix[: req.prefix_len]

    def lend_scratch(self, req: Req, plan: Any) -> None:
        request_state.of(req).kv_plan = plan

    def maybe_hand_to_session(self, req: Req) -> None:
        """Does nothing: there are no sessions."""

    def supports_prefix_sharing(self) -> bool:
        return False

    def evictable_size(self) -> int:
        return 0

    def evict(self, params: Any) -> None:
        pass

    def evict_tokens(self, n_tokens: int, *, for_background: bool = False) -> None:
        pass

    def is_tree_cache(self) -> bool:
        return True

    def is_chunk_cache(self) -> bool:
        return False

    supports_swa = supports_mamba = is_chunk_cache
