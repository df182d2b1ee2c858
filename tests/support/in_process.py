"""A real SGLang scheduler with our hooks inside this process, without HTTP: requests go in and answers come out.

The scheduler is SGLang's own object with its model, KV pool and prefix cache; only the sockets' far ends are missing. A
process may start several, one after the other, with other models and options; hooks once applied stay, so a process has
either all of our features or none.
"""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import prometheus_client

from sgl_prefill.config import PrefillConfig
from sgl_prefill.core.jct import FittedJct
from sgl_prefill.entry import in_process
from sgl_prefill.entry.engine import sglang_defaults
from sgl_prefill.hybrid.body import HybridBody
from sgl_prefill.port.runner import branch_rows
from sgl_prefill.port.runner.sglang_model import SglangModel
from sgl_prefill.port.steps import custom_params, time_stats
from sgl_prefill.port.steps.live import LiveScheduling
from sgl_prefill.startup import jct_profile


class Answer(NamedTuple):
    """What the scheduler sent to the detokenizer for one finished request."""

    label_logprobs: list[float]
    input_logprobs: list[float]  # of the tokens from logprob_start_len on; empty where none were asked for
    cached_tokens: int
    finish_reason: dict[str, Any]
    meta: dict[str, Any]  # what our cache says of this request: kept_tokens, evicted_tokens


class InProcessScheduler:
    """Starts at once; `ask` runs requests to their end.

    Args:
        jct_ms: what the start would measure of this machine, for runs that must not depend on it; None: it is measured.
    """

    def __init__(
        self, config: PrefillConfig, model_folder: Path, *, jct_ms: FittedJct | None = None, **server_options: Any
    ) -> None:
        from sglang.srt.plugins import load_plugins
        from sglang.srt.server_args import ServerArgs

        load_plugins()
        _forget_earlier_scheduler()
        options = {
            **sglang_defaults(config),
            "model_path": str(model_folder),
            "max_running_requests": 8,
            "log_level": "error",
            "skip_tokenizer_init": True,
            "random_seed": 1,
            **server_options,
        }
        told = mock.patch.object(jct_profile, "fitted_model", return_value=jct_ms)
        with nullcontext() if jct_ms is None else told, _kept_contexts():
            self.parts, self.scheduler = in_process.build_scheduler(config, ServerArgs(**options))
        self._numbers = itertools.count()
        self._outputs: dict[str, Any] = {}
        self.answered: list[str] = []  # in the order in which they finished; `flush` forgets them
        self.refusals: dict[
            str, dict[str, Any]
        ] = {}  # what the scheduler sent to the HTTP process instead of an answer
        self.scheduler.output_streamer.send_to_detokenizer = self
        self.scheduler.ipc_channels.send_to_tokenizer.send_output = self._refused

    # SGLang's output streamer calls this.
    def send_output(self, output: Any, *_: Any) -> None:
        for index, rid in enumerate(output.rids):
            self._outputs[rid] = (output, index)
            self.answered.append(rid)

    def _refused(self, output: Any, *_: Any) -> None:
        if getattr(output, "finished_reason", None):
            self.refusals[output.rid] = output.finished_reason

    def submit(self, token_ids: Sequence[int], label_ids: Sequence[int] = (5, 6, 7), **options: Any) -> str:
        """Queue a prefill-only request; its id."""
        request = self.message(token_ids, label_ids, **options)
        self.scheduler.process_input_requests([request])
        rid: str = request.rid
        return rid

    def message(
        self,
        token_ids: Sequence[int],
        label_ids: Sequence[int] = (5, 6, 7),
        *,
        logprob_start_len: int = -1,
        **options: Any,
    ) -> Any:
        """What the HTTP process sends for a prefill-only request."""
        from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
        from sglang.srt.observability.req_time_stats import APIServerReqTimeStats
        from sglang.srt.sampling.sampling_params import SamplingParams

        deadline_ms = options.pop("deadline_ms", None)
        custom = custom_params.with_deadline(deadline_ms)
        if (branches := options.pop("branches", None)) is not None:
            custom = {**(custom or {}), branch_rows.PARAMETER: [tuple(one) for one in branches.branches]}
        params = SamplingParams(
            max_new_tokens=options.pop("max_new_tokens", 0),
            temperature=0,
            custom_params=custom,
        )
        params.normalize(None)
        return TokenizedGenerateReqInput(
            rid=f"request-{next(self._numbers)}",
            input_text=None,
            input_ids=array("q", token_ids),
            input_embeds=None,
            mm_inputs=None,
            token_type_ids=None,
            sampling_params=params,
            return_logprob=True,
            logprob_start_len=logprob_start_len,
            top_logprobs_num=0,
            token_ids_logprob=list(label_ids),
            stream=False,
            time_stats=APIServerReqTimeStats(),
            **options,
        )

    def embed(self, token_ids: Sequence[int]) -> list[float]:
        """The embedding of a prompt, from a model that was started with `is_embedding`."""
        from sglang.srt.managers.io_struct import TokenizedEmbeddingReqInput
        from sglang.srt.observability.req_time_stats import APIServerReqTimeStats
        from sglang.srt.sampling.sampling_params import SamplingParams

        params = SamplingParams(max_new_tokens=0)
        params.normalize(None)
        rid = f"request-{next(self._numbers)}"
        request = TokenizedEmbeddingReqInput(
            rid=rid,
            input_text=None,
            input_ids=array("q", token_ids),
            mm_inputs=None,
            token_type_ids=None,
            sampling_params=params,
            time_stats=APIServerReqTimeStats(),
        )
        self.scheduler.process_input_requests([request])
        self.run_all()
        output, index = self._outputs.pop(rid)
        embedding: list[float] = output.embeddings[index]
        return embedding

    def cancel(self, rid: str) -> None:
        from sglang.srt.managers.io_struct import AbortReq

        self.scheduler.process_input_requests([AbortReq(rid=rid)])

    def step(self) -> bool:
        """One turn of SGLang's event loop; whether a batch ran."""
        return in_process.step_scheduler(self.scheduler)

    def run_all(self) -> None:
        while self.step() or self.scheduler.waiting_queue:
            pass

    def answer(self, rid: str) -> Answer:
        from sglang.srt.managers.io_struct import unwrap_from_pickle

        output, index = self._outputs.pop(rid)
        labels = output.output_token_ids_logprobs_val
        inputs = output.input_token_logprobs_val
        return Answer(
            label_logprobs=list(labels[index][0]) if labels and labels[index] else [],
            input_logprobs=[x for x in (inputs[index] if inputs else []) if x is not None and not math.isnan(x)],
            cached_tokens=output.cached_tokens[index],
            finish_reason=output.finished_reasons[index],
            meta=time_stats.facts_of(unwrap_from_pickle(output.time_stats)[index]),
        )

    def has_answer(self, rid: str) -> bool:
        return rid in self._outputs

    def ask(self, token_ids: Sequence[int], **options: Any) -> Answer:
        rid = self.submit(token_ids, **options)
        self.run_all()
        return self.answer(rid)

    def flush(self) -> None:
        self.answered.clear()
        assert self.scheduler.flush_cache(empty_cache=False)  # half a second of garbage collection otherwise

    @property
    def hybrid(self) -> HybridBody:
        assert self.parts.runner.hybrid is not None
        return self.parts.runner.hybrid

    @property
    def live(self) -> LiveScheduling:
        assert self.parts.steps.scheduling is not None
        return self.parts.steps.scheduling.live

    @property
    def model(self) -> SglangModel:
        """As the start sees it."""
        return SglangModel(self.parts.runner, self.scheduler.tp_worker.model_runner)

    @property
    def allocator(self) -> Any:
        return self.scheduler.token_to_kv_pool_allocator

    def set_durable(self, n_tokens: int) -> None:
        """Empty the cache and go on with so many durable slots, at most those of the start."""
        self.flush()
        self.allocator.resize_durable(n_tokens)
        self.scheduler.max_total_num_tokens = n_tokens
        if self.parts.steps.scheduling is not None:
            self.live.policy.settings = self.live.policy.settings._replace(kv_tokens=n_tokens)
        self.scheduler.invariant_checker.max_total_num_tokens = n_tokens
        object.__setattr__(self.scheduler.pool_stats_observer, "max_total_num_tokens", n_tokens)

    def poison_scratch(self) -> None:
        """A layer that reads scratch which it has not written gives NaN."""
        self.allocator.get_kvcache().fill_scratch(math.nan)

    def check_slots(self) -> None:
        """SGLang's own invariant, free + cached + in use = total, and ours. Raises AssertionError."""
        self.scheduler.invariant_checker.self_check_during_busy()
        assert self.allocator.n_scratch_lent == 0
        if self.scheduler.tree_cache.total_size() > 0:
            assert int(self.scheduler.tree_cache.all_values_flatten().max()) < self.allocator.first_scratch_slot


_contexts: list[Any] = []  # of ZeroMQ: collected with its sockets, one waits for ever


@contextmanager
def _kept_contexts() -> Iterator[None]:
    import zmq

    def kept(*arguments: Any) -> Any:
        _contexts.append(made(*arguments))
        return _contexts[-1]

    made = zmq.Context
    with mock.patch.object(zmq, "Context", kept):
        yield


def _forget_earlier_scheduler() -> None:
    from sglang.srt.distributed import parallel_state
    from sglang.srt.eplb import expert_location

    expert_location.set_global_expert_location_metadata(None, allow_overwrite=True)
    for collector in list(prometheus_client.REGISTRY._collector_to_names):
        prometheus_client.REGISTRY.unregister(collector)
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()
