"""Checks of a request's options that depend on how this server was started."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from sglang.srt.managers.embed_types import PositionalEmbeds
from sglang.srt.managers.io_struct import EmbeddingReqInput, GenerateReqInput
from sglang.srt.sampling.sampling_params import SamplingParams

from sgl_prefill.errors import BadRequestError
from sgl_prefill.http import request_checks
from sgl_prefill.port.steps import custom_params

if TYPE_CHECKING:
    from sgl_prefill.http.tokenizer_manager import PrefillTokenizerManager

GRAMMARS = ("regex", "json_schema", "ebnf", "structural_tag")


def check(manager: PrefillTokenizerManager, obj: GenerateReqInput | EmbeddingReqInput) -> None:
    """Raises BadRequestError for what this server never answers."""
    manager.check_count(request_checks.count_prompts(obj) or 1)
    _check_media(manager, obj)
    if obj.multi_item_delimiter_indices is not None and not manager.server_args.enable_mis:
        raise BadRequestError("multi_item_delimiter_indices needs a server started with --enable-mis")
    if isinstance(obj, GenerateReqInput):
        request_checks.check_lists_against_prompts(obj)
        if isinstance(obj.session_params, dict):
            request_checks.check_session(obj.session_params)
        request_checks.check_metric_labels(
            obj.custom_labels or {}, manager.server_args.tokenizer_metrics_allowed_custom_labels or ()
        )
        _check_embeddings(manager, obj)
        _check_logprob_options(manager, obj)
    else:
        request_checks.check_lists_of_embedding(obj, takes_media=manager.mm_processor is not None)
    check_sampling_params(manager, obj)


def _check_media(manager: PrefillTokenizerManager, obj: GenerateReqInput | EmbeddingReqInput) -> None:
    if manager.mm_processor is None and (found := request_checks.media_of(obj)):
        raise BadRequestError(f"the request holds {found[0]}, and this server's model takes text only")


def _check_embeddings(manager: PrefillTokenizerManager, obj: GenerateReqInput) -> None:
    overrides = obj.positional_embed_overrides
    for override in overrides if isinstance(overrides, list) else [overrides]:
        if override is not None and not isinstance(override, PositionalEmbeds):
            raise BadRequestError(
                "positional_embed_overrides is an internal field: use the embed overrides of /v1/score"
            )
    if manager.packs_weights and (obj.input_embeds is not None or overrides is not None):
        raise BadRequestError(
            "input_embeds and embed overrides need SGLang's own layers, and this server computes prompts of token ids"
            " with packed weights: start it with --hybrid-prefill off"
        )


def check_sampling_params(manager: PrefillTokenizerManager, obj: GenerateReqInput | EmbeddingReqInput) -> None:
    given = obj.sampling_params if isinstance(obj.sampling_params, list) else [obj.sampling_params or {}]
    n_prompts_each = 1 if isinstance(obj.sampling_params, list) else request_checks.count_prompts(obj) or 1
    n_answers = n_stops = n_stop_characters = 0
    for params in given:
        if not isinstance(params, dict):
            raise BadRequestError(f"sampling_params is {params!r}: it must be an object, or a list of objects")
        options = {**(manager.preferred_sampling_params or {}), **params}
        request_checks.check_sampling_options(options, manager.model_config.vocab_size, manager.tokenizer)
        stops = request_checks.stops_of(options)
        n_stops += n_prompts_each * len(stops)
        n_stop_characters += n_prompts_each * sum(map(len, stops))
        n_answers += n_prompts_each * (options.get("n") or 1)
        check_deadline_is_known(manager, options)
        _check_grammar(manager, options)
        if isinstance(obj, GenerateReqInput):
            _check_generation_length(manager, options)
    manager.check_count(n_answers, "answers, n for each prompt")
    for n, most, what in (
        (n_stops, request_checks.MOST_STOPS_OF_PROMPTS, "stop texts"),
        (n_stop_characters, request_checks.MOST_STOP_CHARACTERS_OF_PROMPTS, "characters of stop texts"),
    ):
        if n > most:
            raise BadRequestError(
                f"the request has {n} {what}, counted for each prompt, and at most {most} are served: send fewer of either"
            )


def _check_grammar(manager: PrefillTokenizerManager, options: dict[str, Any]) -> None:
    """SGLang's scheduler refuses these too, but not all of its routes pass the refusal on."""
    for name in GRAMMARS:
        if options.get(name) is not None and manager.resolved.grammar_backend == "none":
            raise BadRequestError(
                f"{name} asks for generation by a grammar, and this server runs with --grammar-backend none: leave it out,"
                " or use allowed_tokens"
            )


def check_deadline_is_known(manager: PrefillTokenizerManager, options: dict[str, Any]) -> None:
    deadline_ms = (options.get("custom_params") or {}).get(custom_params.DEADLINE)
    if deadline_ms is not None and not manager.prefill_config.has_policy:
        raise BadRequestError(
            f"deadline_ms is {deadline_ms}, and this server runs SGLang's own scheduler, which has no deadlines:"
            " leave it out, or start the server without --scheduling stock"
        )


def _check_generation_length(manager: PrefillTokenizerManager, options: dict[str, Any]) -> None:
    most = options.get("max_new_tokens", SamplingParams().max_new_tokens)
    if not manager.prefill_config.allow_generation and (most is None or most > 1):
        shown = "unlimited" if most is None else most
        origin = "" if "max_new_tokens" in options else " (the default of a field that was left out)"
        raise BadRequestError(
            f"max_tokens (max_new_tokens) is {shown}{origin}, and this server answers prefill-only requests:"
            " ask for 0 or 1, or start the server with --allow-generation"
        )
    # The scheduler tries it on each answer, also of one token, and some expressions take hours for 64 characters.
    if not manager.prefill_config.allow_generation and options.get("stop_regex"):
        raise BadRequestError(
            "stop_regex ends a text that is generated, and this server answers with one token: leave it out, or start the"
            " server with --allow-generation"
        )


def _check_logprob_options(manager: PrefillTokenizerManager, obj: GenerateReqInput) -> None:
    if obj.token_ids_logprob == []:
        raise BadRequestError("token_ids_logprob (label_token_ids) is empty: give at least one token id")
    given = obj.sampling_params if isinstance(obj.sampling_params, list) else [obj.sampling_params]
    samples = all(isinstance(params, dict) and params.get("max_new_tokens") != 0 for params in given)
    if obj.return_sampling_mask and not samples:
        raise BadRequestError(
            "return_sampling_mask asks which tokens could be sampled, and with labels or max_new_tokens 0 no token is: leave"
            " it out"
        )
    size = manager.model_config.vocab_size
    for field, lowest, highest, limit in (
        ("top_logprobs_num", 0, size, f"from 0 to {size}, the vocabulary's size"),
        ("logprob_start_len", -1, math.inf, "at least -1"),
    ):
        value = getattr(obj, field)
        for number in value if isinstance(value, list) else [value]:
            if number is not None and not lowest <= number <= highest:
                raise BadRequestError(f"{field} is {number}: it must be {limit}")
