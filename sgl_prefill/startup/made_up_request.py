"""A forward pass without a client, through SGLang's own request, allocation and model runner."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from sgl_prefill.kv.allocator import SuffixKVAllocator
from sgl_prefill.kv.prefix_cache import plan_of

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.model_executor.model_runner import ModelRunner


class MadeUpStep:
    """Requests that run in one forward pass; `release` gives their slots back."""

    def __init__(
        self,
        model_runner: ModelRunner,
        prompts: Sequence[Sequence[int]],
        cached_slots: torch.Tensor | None = None,
    ) -> None:
        """Runs nothing yet. `cached_slots`: KV slots that hold the same prefix of every prompt already, one a token."""
        self._runner = model_runner
        prefix = torch.empty(0, dtype=torch.int64, device=model_runner.device) if cached_slots is None else cached_slots
        self._reqs = [_request(f"made-up-{index}", token_ids, prefix) for index, token_ids in enumerate(prompts)]

    @torch.inference_mode()
    def run(self) -> torch.Tensor:
        """Float32: logits of each prompt's last token, [prompts, vocabulary]; or embeddings, [prompts, dimensions]."""
        from sglang.srt.managers.schedule_batch import ScheduleBatch
        from sglang.srt.model_executor.forward_batch_info import ForwardBatch

        runner = self._runner
        batch = ScheduleBatch.init_new(
            self._reqs,
            runner.req_to_token_pool,
            runner.token_to_kv_pool_allocator,
            _NoPrefixCache(runner),
            runner.model_config,
            enable_overlap=False,
            spec_algorithm=runner.spec_algorithm,
        )
        batch.prepare_for_extend()
        if batch.input_ids is None:
            batch.input_ids = batch.prefill_input_ids_cpu.to(batch.device)
        forward_batch = ForwardBatch.init_new(batch, runner, return_hidden_states_before_norm=False)
        output = runner.forward(forward_batch).logits_output
        values: torch.Tensor = output.next_token_logits if runner.is_generation else output.embeddings
        return values.float()

    def release(self) -> None:
        allocator = self._runner.token_to_kv_pool_allocator
        for req in self._reqs:
            plan = plan_of(req)
            n_durable = len(req.origin_input_ids) if plan is None else plan.n_durable
            n_cached = len(req.prefix_indices)
            allocator.free_segment(self._slots_of(req)[n_cached:n_durable], start_pos=n_cached)
            if plan is not None and isinstance(allocator, SuffixKVAllocator):
                allocator.give_back_scratch(plan)
            self._runner.req_to_token_pool.free(req)

    def _slots_of(self, req: Req) -> torch.Tensor:
        row: torch.Tensor = self._runner.req_to_token_pool.req_to_token[req.req_pool_idx, : len(req.origin_input_ids)]
        return row.to(torch.int64)


class MadeUpRequest(MadeUpStep):
    """A step of one request, which has run."""

    def __init__(self, model_runner: ModelRunner, token_ids: Sequence[int], cached_slots: torch.Tensor | None = None):
        """Runs at once. `cached_slots`: KV slots that hold the prefix already, one a token."""
        super().__init__(model_runner, [token_ids], cached_slots)
        self.output = self.run()[0]  # float32: logits of the last token, [vocabulary]; or the embedding, [dimensions]

    @property
    def slots(self) -> torch.Tensor:
        """Its KV slots in position order, int64."""
        return self._slots_of(self._reqs[0])


def _request(rid: str, token_ids: Sequence[int], prefix: torch.Tensor) -> Req:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    req = Req(
        rid=rid,
        origin_input_text="",
        origin_input_ids=array("q", token_ids),
        sampling_params=SamplingParams(max_new_tokens=0, temperature=0),
    )
    req.full_untruncated_fill_ids = req.origin_input_ids
    req.prefix_indices = prefix
    req.logprob_start_len = -1
    req.set_extend_range(len(prefix), len(token_ids))
    return req


class _NoPrefixCache:
    """What SGLang's allocation asks of a prefix cache, which does not exist yet at this point of the start."""

    listener = None  # nobody waits

    def __init__(self, runner: Any) -> None:
        self.page_size = runner.page_size
        self.device = runner.device
        self.token_to_kv_pool_allocator = runner.token_to_kv_pool_allocator

    def evictable_size(self) -> int:
        return 0

    def evict(self, params: Any) -> None:
        """There is nothing to evict."""

    def evict_unwanted_first(self, n_tokens: int) -> None:
        """Nor here."""

    def is_chunk_cache(self) -> bool:
        return False

    def is_tree_cache(self) -> bool:
        return True

    def supports_swa(self) -> bool:
        return False

    def supports_mamba(self) -> bool:
        return False
