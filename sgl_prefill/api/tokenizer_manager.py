"""SGLang's tokenizer manager with checks in front: what can never be answered gets a 400 instead of a wrong answer.

Every HTTP route and the offline engine pass through `generate_request`, so this is the one place for them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX
from sglang.srt.managers.io_struct import EmbeddingReqInput, GenerateReqInput
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.sampling.sampling_params import SamplingParams

from sgl_prefill.config import PrefillConfig
from sgl_prefill.errors import BadRequestError

if TYPE_CHECKING:
    import fastapi
    from sglang.srt.server_args import PortArgs, ServerArgs


class PrefillTokenizerManager(TokenizerManager):  # type: ignore[misc]
    """Refuses generation unless it is allowed, prompts over the limit, and values that would stop the scheduler."""

    def __init__(self, server_args: ServerArgs, port_args: PortArgs, *, config: PrefillConfig) -> None:
        super().__init__(server_args, port_args)
        self.prefill_config = config

    async def generate_request(
        self, obj: GenerateReqInput | EmbeddingReqInput, request: fastapi.Request | None = None
    ) -> AsyncIterator[Any]:
        """As SGLang's. Raises BadRequestError (a ValueError, which every route answers with 400)."""
        if isinstance(obj, GenerateReqInput):
            if isinstance(obj.rid, str) and obj.rid.startswith(HEALTH_CHECK_RID_PREFIX):
                obj.sampling_params = {"max_new_tokens": 0}
            self._check_sampling_params(obj)
            self._check_logprob_options(obj)
        async for output in super().generate_request(obj, request):
            yield output

    def _check_sampling_params(self, obj: GenerateReqInput) -> None:
        given = obj.sampling_params if isinstance(obj.sampling_params, list) else [obj.sampling_params or {}]
        for params in given:
            if not isinstance(params, dict):
                raise BadRequestError(f"sampling_params is {params!r}: it must be an object, or a list of objects")
            asked = params.get("max_new_tokens")
            if asked is not None and (not isinstance(asked, int) or isinstance(asked, bool)):
                raise BadRequestError(f"max_new_tokens is {asked!r}: it must be a whole number")
            try:
                parsed = SamplingParams(**{**(self.preferred_sampling_params or {}), **params})
                parsed.normalize(self.tokenizer)
                parsed.verify(self.model_config.vocab_size)
            except (TypeError, ValueError) as error:
                raise BadRequestError(f"sampling_params: {error}") from error
            self._check_generation_length(parsed.max_new_tokens, was_given="max_new_tokens" in params)

    def _check_generation_length(self, asked: int | None, was_given: bool) -> None:
        if not self.prefill_config.allow_generation and (asked is None or asked > 1):
            origin = "" if was_given else " (it was left out, which means that many here)"
            raise BadRequestError(
                f"max_tokens (max_new_tokens) is {asked}{origin}, and this server answers prefill-only requests:"
                " ask for 0 or 1, or start the server with --allow-generation"
            )

    def _check_logprob_options(self, obj: GenerateReqInput) -> None:
        vocab_size = self.model_config.vocab_size
        for field, lowest, highest in (
            ("top_logprobs_num", 0, vocab_size),
            ("logprob_start_len", -1, None),
        ):
            value = getattr(obj, field)
            for number in value if isinstance(value, list) else [value]:
                if number is not None and (number < lowest or (highest is not None and number > highest)):
                    limit = (
                        f"at least {lowest}"
                        if highest is None
                        else f"from {lowest} to {highest}, the vocabulary's size"
                    )
                    raise BadRequestError(f"{field} is {number}: it must be {limit}")

    def _validate_one_request(self, obj: GenerateReqInput | EmbeddingReqInput, input_ids: list[int]) -> None:
        """As SGLang's, after our own checks of the token ids; called once a prompt, also within batches."""
        n_input = len(input_ids) if input_ids is not None else 0
        if n_input == 0 and obj.input_embeds is None and not obj.contains_mm_input():
            raise BadRequestError("the prompt is empty: it must hold at least one token")
        if obj.input_ids is not None and n_input > 0:
            check_ids_in_vocabulary(input_ids, self.model_config.vocab_size, "the prompt")
        # SGLang's scheduler needs the input to be shorter than its own limit, and one place for the answer.
        limit = min(self.max_req_input_len or self.context_len, self.context_len) - 1
        if n_input > limit:
            raise BadRequestError(
                f"the prompt has {n_input} tokens, and this server takes at most {limit}"
                f" (context length {self.context_len}, KV pool input limit {self.max_req_input_len}):"
                " shorten it, or start the server with a larger --context-length or more memory"
            )
        super()._validate_one_request(obj, input_ids)


def check_ids_in_vocabulary(token_ids: list[int], vocab_size: int, where: str) -> None:
    """Raise BadRequestError naming the first id outside [0, vocab_size). Added tokens are inside."""
    if min(token_ids) >= 0 and max(token_ids) < vocab_size:
        return
    bad = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
    raise BadRequestError(
        f"{where} holds token id {bad}, and the vocabulary has {vocab_size} tokens (0 to {vocab_size - 1})"
    )
