"""Where a forward pass runs out of memory, its requests run again one by one, one that fails alone gets a 503, and the server
goes on. On a host nothing is compiled in a pass.

SGLang's scheduler ends with any exception of a forward pass. Prefill-only requests hold nothing but their slots, so they can be
freed, and answered or queued again. For a batch that decodes SGLang's behaviour stays.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from contextlib import nullcontext
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import torch

from sgl_prefill.port.steps import request_state
from sgl_prefill.port.steps.waiting_list import WaitingList
from sgl_prefill.startup.device import device_of, is_out_of_memory, this_device

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.scheduler import Scheduler

logger = logging.getLogger(__name__)


class FailedPass:
    """The result of a forward pass whose requests have been answered with 503, or wait again."""


def around_run_batch(original: Callable[..., Any], scheduler: Scheduler, batch: ScheduleBatch, *rest: Any) -> Any:
    """Hook: where memory runs out, queues several requests again, and answers a lone one with the reason.

    A function that SGLang compiles at its first call (a repetition penalty, a seed) runs on a host as it was written, in a
    millisecond for a row of logits: the compilation would stop the scheduler for up to 15 seconds.
    """
    from sglang.srt.runtime_context import get_parallel

    compiles = not this_device().is_host or scheduler.server_args.enable_torch_compile
    try:
        with nullcontext() if compiles else torch.compiler.set_stance("force_eager"):
            return original(scheduler, batch, *rest)
    except (MemoryError, RuntimeError) as error:
        # SGLang's overlap loop and its chunked prefill keep further state of a batch.
        keeps_more = scheduler.enable_overlap or scheduler.chunked_req is not None
        # With several ranks, the others are waiting for this one in the middle of the pass.
        if (
            get_parallel().tp_size > 1
            or keeps_more
            or not batch.forward_mode.is_extend()
            or not is_out_of_memory(error)
        ):
            raise
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    # Outside the handler: the exception's traceback would keep the failed pass's tensors alive.
    gc.collect()
    device_of(scheduler.device).release_unused()
    if len(batch.reqs) > 1 and isinstance(scheduler.waiting_queue, WaitingList):
        _queue_again(scheduler, batch, reason)
    else:
        _fail(scheduler, batch, reason)
    return FailedPass()


def _queue_again(scheduler: Scheduler, batch: ScheduleBatch, reason: str) -> None:
    """Each runs alone: without the others it may fit, and a follower computes its own prefix."""
    from sglang.srt.mem_cache.common import release_kv_cache

    n_tokens = sum(req.extend_len for req in batch.reqs)
    logger.warning(
        "out of memory with %d requests of %d tokens (%s): each runs alone", len(batch.reqs), n_tokens, reason
    )
    for req in batch.reqs:
        release_kv_cache(req, scheduler.tree_cache, checkpoint=False)
        req.reset_for_retract()
        request_state.of(req).runs_alone = True
        scheduler.waiting_queue.append(req)


def _fail(scheduler: Scheduler, batch: ScheduleBatch, reason: str) -> None:
    from sglang.srt.managers.schedule_batch import FINISH_ABORT
    from sglang.srt.mem_cache.common import release_kv_cache

    n_tokens = sum(req.extend_len for req in batch.reqs)
    message = (
        f"the engine ran out of memory while it prefilled {n_tokens} tokens ({reason}): try again, shorten the prompt, or"
        " start the server with a smaller --max-input-length"
    )
    logger.error("%s", message)
    for req in batch.reqs:
        req.finished_reason = FINISH_ABORT(message, HTTPStatus.SERVICE_UNAVAILABLE, "OutOfMemory")
        req.time_stats.set_completion_time()
        release_kv_cache(req, scheduler.tree_cache, checkpoint=False)
    scheduler.output_streamer.stream_output(batch.reqs, return_logprob=False)
