"""How decisions leave the scheduler process: into `--decision-log`, and to the HTTP process, which asks by SGLang's question for
the internal state, under a name of ours, and is answered between two steps."""

from __future__ import annotations

import importlib.metadata
import itertools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sgl_prefill.core.policy import PolicySettings
from sgl_prefill.engine_state import EngineState
from sgl_prefill.scheduling.decision_log import DecisionLog
from sgl_prefill.scheduling.decision_record import header
from sgl_prefill.scheduling.decisions import DecisionRecorder
from sgl_prefill.scheduling.metrics import PolicyMetrics

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import GetInternalStateReq, GetInternalStateReqOutput
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

NAME = "sgl_prefill:decisions"  # of the question, a number behind it; and of the answer in its dictionary


def recorder_of(state: EngineState, settings: PolicySettings, metrics: PolicyMetrics | None) -> DecisionRecorder:
    """Makes what writes decisions down. Raises ConfigurationError for a log that cannot be written."""
    config, log = state.config, None
    if config.decision_log is not None:
        log = (
            DecisionLog(config.decision_log)
            if metrics is None
            else DecisionLog(config.decision_log, metrics.count_lost_line)
        )
    recorder = DecisionRecorder(log, shows_prompts=config.show_prompts)
    version = importlib.metadata.version("sgl-prefill")
    recorder.begin(header(config, state.jct_ms, settings, engine_version=version, unix_s=time.time()))
    return recorder


def around_get_internal_state(
    state: EngineState,
    original: Callable[..., GetInternalStateReqOutput],
    scheduler: Scheduler,
    recv_req: GetInternalStateReq,
) -> GetInternalStateReqOutput:
    """Hook: answers with the last decisions where it is asked for them."""
    name, _, n_last = (recv_req.rid or "").rpartition(":")
    if name != NAME:
        return original(scheduler, recv_req)
    from sglang.srt.managers.io_struct import GetInternalStateReqOutput

    lines = last_lines(state, int(n_last))
    return GetInternalStateReqOutput(internal_state={NAME: "".join(line.decode() + "\n" for line in lines)})


def last_lines(state: EngineState, n_last: int) -> list[bytes]:
    """Returns the last decisions of this process, the oldest first; none where it decides nothing."""
    recorder = None if state.scheduling is None else state.scheduling.live.recorder
    if recorder is None:
        return []
    return list(itertools.islice(recorder.lines, max(len(recorder.lines) - n_last, 0), None))


async def ask(manager: TokenizerManager, n_last: int) -> str:
    """Asks the scheduler, which answers once the step that runs has ended. Returns its lines."""
    from sglang.srt.managers.io_struct import GetInternalStateReq

    manager.auto_create_handle_loop()
    replies: list[Any] = await manager.get_internal_state_communicator(GetInternalStateReq(rid=f"{NAME}:{n_last}"))
    return "".join(reply.internal_state[NAME] for reply in replies)
