"""Decision checkpoints, which answer `/v1/systemone` by a head or readout of their own (Kev, Clef, pplx-decider): SGLang encodes
the questions and reads the answers, and this package schedules the requests.
"""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Any

import orjson
from sglang.srt.entrypoints.systemone.joint_schema import REFERENCE_MAX_LENGTH, encode_joint_schema
from sglang.srt.entrypoints.systemone.protocol import SystemOneRequest
from sglang.srt.layers.joint_schema_head import max_joint_prompt_tokens
from sglang.srt.runtime_context import get_schedule

from sgl_prefill.errors import BadRequestError, PromptTooLongError
from sgl_prefill.http import decision_bodies

if TYPE_CHECKING:
    import fastapi
    from fastapi.responses import Response
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.entrypoints.systemone.serving import SystemOneServing

    from sgl_prefill.http.tokenizer_manager import PrefillTokenizerManager


WARM_UP: tuple[str, dict[str, Any]] = (
    "/v1/systemone",
    {"model": "", "state": "warm-up", "questions": {"a": {"type": "noul", "instructions": "Is it so?"}}},
)


def is_one(model: ModelConfig) -> bool:
    return any(head is not None for head in (model.decision_config, model.joint_head_config, model.pointer_head))


async def answer(serving: SystemOneServing, given: Any, raw_request: fastapi.Request) -> Response:
    """Answers a body of `/v1/systemone`. Raises BodyError and BadRequestError."""
    manager: PrefillTokenizerManager = serving.tokenizer_manager
    if isinstance(given, dict) and given.get("x_options"):
        raise BadRequestError(
            "x_options is for models that answer by labels, and this checkpoint has a head of its own: leave it out"
        )
    request = decision_bodies.valid(SystemOneRequest.model_validate, given)
    state = request.state if isinstance(request.state, str) else orjson.dumps(request.state).decode()
    manager.check_text(state, "the state")
    if manager.model_config.joint_head_config is not None:
        await asyncio.to_thread(_check_that_it_fits, manager, request)
    reply: Response = await serving.handle_request(request, raw_request)
    return reply


def _check_that_it_fits(manager: PrefillTokenizerManager, request: SystemOneRequest) -> None:
    """Raises PromptTooLongError where SGLang would cut the state of a Clef checkpoint. Counts an image as one token."""
    tokens, _ = encode_joint_schema(manager.tokenizer, request, max_length=sys.maxsize, image_token_counts=())
    runs = max_joint_prompt_tokens(
        context_len=manager.context_len,
        num_reserved_tokens=manager.num_reserved_tokens,
        max_req_input_len=manager.max_req_input_len,
        max_prefill_tokens=get_schedule().max_prefill_tokens,
    )
    if len(tokens) > (most := min(REFERENCE_MAX_LENGTH, runs)):
        raise PromptTooLongError(
            f"the state and the questions have {len(tokens)} tokens, and this server takes at most {most}: shorten the state"
        )
