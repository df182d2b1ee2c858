"""Where a forward pass runs out of memory, its requests get a 503 and the server goes on.

SGLang's scheduler ends with any exception of a forward pass. Prefill-only requests hold nothing but their slots, so they can be
answered and freed. For a batch that decodes SGLang's behaviour stays.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from sgl_prefill.startup.device import device_of, is_out_of_memory

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.scheduler import Scheduler

logger = logging.getLogger(__name__)


class FailedPass:
    """The result of a forward pass whose requests have been answered with 503."""


def around_run_batch(original: Callable[..., Any], scheduler: Scheduler, batch: ScheduleBatch, *rest: Any) -> Any:
    """Hook: where memory runs out, answers the batch's requests with the reason."""
    try:
        return original(scheduler, batch, *rest)
    except (MemoryError, RuntimeError) as error:
        # SGLang's overlap loop and its chunked prefill keep further state of a batch.
        keeps_more = scheduler.enable_overlap or scheduler.chunked_req is not None
        # With several ranks, the others are waiting for this one in the middle of the pass.
        if scheduler.ps.tp_size > 1 or keeps_more or not batch.forward_mode.is_extend() or not is_out_of_memory(error):
            raise
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    # Outside the handler: the exception's traceback would keep the failed pass's tensors alive.
    _fail(scheduler, batch, reason)
    return FailedPass()


def _fail(scheduler: Scheduler, batch: ScheduleBatch, reason: str) -> None:
    from sglang.srt.managers.schedule_batch import FINISH_ABORT
    from sglang.srt.mem_cache.common import release_kv_cache

    n_tokens = sum(req.extend_range.length for req in batch.reqs)
    message = (
        f"the engine ran out of memory while it prefilled {n_tokens} tokens ({reason}): try again, shorten the prompt, or"
        " start the server with a smaller --max-input-length"
    )
    logger.error("%s", message)
    gc.collect()
    device_of(scheduler.device).release_unused()
    for req in batch.reqs:
        req.finished_reason = FINISH_ABORT(message, HTTPStatus.SERVICE_UNAVAILABLE, "OutOfMemory")
        req.time_stats.set_completion_time()
        release_kv_cache(req, scheduler.tree_cache, is_insert=False)
    scheduler.output_streamer.stream_output(batch.reqs, return_logprob=False)
