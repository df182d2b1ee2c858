"""Requests are taken in while a step computes: after its launch, and before anybody waits for its result.

    launch of step n | receive, match, order what has come | result of step n, its prefix enters the cache | choice of step n + 1

A device computes meanwhile: of what it waits for between two steps, this part costs nothing. The choice itself waits for the
result and is made with the running step's prefix in the cache; SGLang's overlap loop, which hides more, chooses before.

What else a client may send (weights, flushing the cache, cancelling) is left for SGLang's own turn: it takes an engine for idle
whose batch has been launched, and clears what that batch uses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sgl_prefill.engine_state import EngineState
from sgl_prefill.port import scheduler as policy_port

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.scheduler_components.request_receiver import SchedulerRequestReceiver


def around_recv_requests(
    state: EngineState, original: Callable[..., list[Any]], receiver: SchedulerRequestReceiver
) -> list[Any]:
    """Hook: what was left for SGLang's turn comes first."""
    return [*policy_port.of(state).take_left(), *original(receiver)]


def around_process_batch_result(
    state: EngineState, original: Callable[..., None], scheduler: Scheduler, batch: ScheduleBatch, *rest: Any
) -> None:
    """Hook: before SGLang waits for the result of a step that was launched, take in who has come; then learn from it."""
    take_in(state, scheduler)
    original(scheduler, batch, *rest)
    policy_port.learn(state, batch)


def take_in(state: EngineState, scheduler: Scheduler) -> None:
    """Hands requests to SGLang and to the policy, up to the first message that is none."""
    received = scheduler.request_receiver.recv_requests()
    n_requests = next((place for place, message in enumerate(received) if not _is_request(message)), len(received))
    policy_port.of(state).leave(received[n_requests:])
    for message in received[:n_requests]:
        answer = scheduler._request_dispatcher(message)
        assert answer is None, message
    if n_requests:
        policy_port.follow(state, scheduler)


def _is_request(message: Any) -> bool:
    """Tells whether taking a message in means no more than that it waits. A health check asks what is idle, and a session's
    request what the one before it has become."""
    from sglang.srt.managers.io_struct import (
        BatchTokenizedEmbeddingReqInput,
        BatchTokenizedGenerateReqInput,
        TokenizedEmbeddingReqInput,
        TokenizedGenerateReqInput,
    )
    from sglang.srt.managers.scheduler import is_health_check_generate_req

    if isinstance(message, (BatchTokenizedGenerateReqInput, BatchTokenizedEmbeddingReqInput)):
        return all(map(_is_request, message.batch))
    if not isinstance(message, (TokenizedGenerateReqInput, TokenizedEmbeddingReqInput)):
        return False
    return getattr(message, "session_params", None) is None and not is_health_check_generate_req(message)
