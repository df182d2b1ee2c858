"""Checks of requests before they reach the scheduler, where they could cause a wrong answer, a 500 or a crash."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import fastapi
import msgspec
from sglang.srt.managers.io_struct import EmbeddingReqInput, GenerateReqInput, SessionParams
from sglang.srt.sampling.sampling_params import TOP_K_ALL, SamplingParams

from sgl_prefill.errors import BadRequestError
from sgl_prefill.http.token_ids import is_within
from sgl_prefill.port.steps import custom_params

if TYPE_CHECKING:
    from sgl_prefill.http.tokenizer_manager import PrefillTokenizerManager

# Set by SGLang itself; a client that sent them would bypass its checks.
INTERNAL_SAMPLING_FIELDS = {"stop_strs", "stop_regex_strs", "stop_str_max_len", "stop_regex_max_len", "is_normalized"}
SAMPLING_OPTION_TYPES = {
    field.name: field.type | None
    for field in msgspec.structs.fields(SamplingParams)
    if field.name not in INTERNAL_SAMPLING_FIELDS
}
# top_k and the seed become tensors of 32 and 64 bits in the scheduler; n is the number of answers.
SAMPLING_OPTION_RANGES = (("top_k", -1, TOP_K_ALL), ("sampling_seed", -(2**63), 2**63 - 1), ("n", 1, 1024))

# In one request: the event loop writes an answer for each prompt and label.
MOST_PROMPTS, MOST_LABELS = 10_000, 50_000
# The scheduler looks for each stop text in each answer.
MOST_STOPS, MOST_STOP_CHARACTERS = 32, 16_384
MOST_STOPS_OF_PROMPTS, MOST_STOP_CHARACTERS_OF_PROMPTS = 10_000, 300_000
MOST_LOGIT_BIAS = 1e30  # a logit plus a bias must fit float32

# Options of GenerateReqInput that take one value, or a list with one value per prompt.
PER_PROMPT_FIELDS = (
    *("rid", "sampling_params", "return_logprob", "logprob_start_len", "top_logprobs_num", "lora_path", "lora_id"),
    *("extra_key", "custom_logit_processor", "return_hidden_states", "return_sampling_mask", "sampling_logprobs_mode"),
    *("bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_pair_key", "decode_tp_size"),
)
MEDIA = ("image_data", "video_data", "audio_data")
GRAMMARS = ("regex", "json_schema", "ebnf", "structural_tag")

# Longer texts are tokenised in another thread. At some megabytes a second, shorter ones take a few milliseconds.
OFF_LOOP_CHARACTERS = 20_000
# Limit on a text that may be cut, per token of the longest prompt. Prose has some 4.5 characters per token.
CUT_CHARACTERS_PER_TOKEN = 64


def media_of(obj: GenerateReqInput | EmbeddingReqInput) -> list[str]:
    """Returns the names of the fields that hold images, video or audio."""
    values = {name: getattr(obj, name) for name in MEDIA}
    return [
        name
        for name, value in values.items()
        if any(one is not None for one in (value if isinstance(value, list) else [value]))
    ]


def check_session(params: dict[str, Any]) -> None:
    """Raises BadRequestError naming an unknown or wrong option of a session."""
    types = {field.name: field.type for field in msgspec.structs.fields(SessionParams)}
    _check_types(params, types, "session_params", "option of a session")


def _check_types(options: dict[str, Any], types: dict[str, Any], where: str, kind: str) -> None:
    for name, value in options.items():
        if name not in types:
            raise BadRequestError(f"{where} holds {name!r}, which is no {kind}")
        try:
            msgspec.convert(value, types[name])
        except msgspec.ValidationError as error:
            raise BadRequestError(f"{where}: {name} is {value!r}: {error}") from error


def check_metric_labels(labels: Collection[str], allowed: Collection[str]) -> None:
    """Raises BadRequestError for a label unknown to SGLang's metrics, which would stop the server."""
    for label in labels:
        if label not in allowed:
            raise BadRequestError(
                f"custom_labels holds {label!r}, and this server counts its requests by"
                f" {', '.join(allowed) or 'no labels of clients'}: leave it out, or start the server with"
                " --tokenizer-metrics-custom-labels-header and --tokenizer-metrics-allowed-custom-labels"
            )


def count_prompts(obj: GenerateReqInput | EmbeddingReqInput) -> int | None:
    """The number of prompts in the request's list; None for a single prompt outside a list."""
    prompts = obj.text if obj.text is not None else obj.input_ids
    if prompts is None:
        prompts = getattr(obj, "input_embeds", None)  # one list per token
        one_prompt = prompts[0] if isinstance(prompts, list) and prompts else None
        is_batch = isinstance(one_prompt, list) and bool(one_prompt) and isinstance(one_prompt[0], list)
    else:
        is_batch = isinstance(prompts, list) and bool(prompts) and isinstance(prompts[0], str | list)
    return len(prompts) if is_batch and prompts is not None else None


def check_lists_of_embedding(obj: EmbeddingReqInput, *, takes_media: bool) -> None:
    """Raises BadRequestError if lists do not match the prompts. takes_media: a prompt may be media without text."""
    n_prompts = count_prompts(obj)
    if [] in (obj.text, obj.input_ids):
        raise BadRequestError("the prompt is empty: the list holds no prompt")
    if obj.text is None and (obj.is_cross_encoder_request or not (takes_media or obj.input_ids)):
        raise BadRequestError(
            "the request holds no prompt: give text" + ("" if obj.is_cross_encoder_request else " or input_ids")
        )
    _check_adapter_ids(obj)
    if isinstance(obj.rid, list) and len(obj.rid) != n_prompts:
        shown = "one prompt, which is in no list" if n_prompts is None else f"{n_prompts} prompts"
        raise BadRequestError(f"rid has {len(obj.rid)} values, and the request has {shown}")
    if isinstance(obj.sampling_params, list) and len(obj.sampling_params) != n_prompts:
        raise BadRequestError("sampling_params is a list, and has no value for each of the prompts: give one object")
    for name in (*MEDIA, "embed_overrides"):
        value = getattr(obj, name)
        if n_prompts is None or value is None:
            continue
        if not isinstance(value, list) or len(value) != n_prompts:
            raise BadRequestError(f"{name} is no list with one value for each of the {n_prompts} prompts")


def _check_adapter_ids(obj: GenerateReqInput | EmbeddingReqInput) -> None:
    """Unlike for other options, SGLang does not apply a single `lora_id` to all prompts."""
    n_prompts, given = count_prompts(obj), obj.lora_id
    if n_prompts is not None and given is not None and (isinstance(given, str) or len(given) != n_prompts):
        shown = "one value" if isinstance(given, str) else f"{len(given)} values"
        raise BadRequestError(f"lora_id has {shown}, and the request has {n_prompts} prompts")


def check_lists_against_prompts(obj: GenerateReqInput) -> None:
    """Raises BadRequestError if a list of one value per prompt does not match the prompts."""
    if obj.text is not None and obj.input_ids is not None:
        raise BadRequestError("text and input_ids are both given: give the prompt once")
    prompts = obj.text if obj.text is not None else obj.input_ids if obj.input_ids is not None else obj.input_embeds
    if prompts == []:
        raise BadRequestError("the prompt is empty: the list holds no prompt")
    _check_adapter_ids(obj)
    is_batch = count_prompts(obj) is not None
    ids = obj.token_ids_logprob  # one list for all prompts, or one per prompt
    has_lists_of_ids = isinstance(ids, list) and any(isinstance(one, list) for one in ids)
    # A single prompt may have these lists too.
    lists = ("video_data", "audio_data", "modalities", *(["token_ids_logprob"] if has_lists_of_ids else []))
    for field in (*(lists if is_batch else ()), *PER_PROMPT_FIELDS):
        value = getattr(obj, field)
        if not isinstance(value, list):
            continue
        if not is_batch:
            raise BadRequestError(f"{field} is a list, and the request has one prompt: give one value")
        if len(value) != len(prompts):
            raise BadRequestError(f"{field} has {len(value)} values, and the request has {len(prompts)} prompts")


def check_sampling_options(options: dict[str, Any], vocab_size: int, tokenizer: Any) -> None:
    """Raises BadRequestError for an unknown or wrong sampling option, which would stop SGLang's scheduler. `null`: not given."""
    _check_types(options, SAMPLING_OPTION_TYPES, "sampling_params", "sampling option of this server")
    for name, lowest, highest in SAMPLING_OPTION_RANGES:
        value = options.get(name)
        if value is not None and not lowest <= value <= highest:
            raise BadRequestError(f"sampling_params: {name} is {value}: it must be from {lowest} to {highest}")
    stops = stops_of(options)
    n_characters = sum(map(len, stops))
    if len(stops) > MOST_STOPS or n_characters > MOST_STOP_CHARACTERS:
        raise BadRequestError(
            f"sampling_params: stop holds {len(stops)} texts with {n_characters} characters: at most {MOST_STOPS}, and"
            f" {MOST_STOP_CHARACTERS} characters together"
        )
    if stop_ids := options.get("stop_token_ids"):
        check_ids_in_vocabulary(stop_ids, vocab_size, "stop_token_ids")
    deadline_ms = (options.get("custom_params") or {}).get(custom_params.DEADLINE)
    if deadline_ms is not None:
        check_deadline(deadline_ms)
    for token, bias in (options.get("logit_bias") or {}).items():
        if not (token.isascii() and token.isdigit()) or not abs(bias) <= MOST_LOGIT_BIAS:
            raise BadRequestError(
                f"sampling_params: logit_bias holds {token!r}: {bias}: a token id, and a number from {-MOST_LOGIT_BIAS:g} to"
                f" {MOST_LOGIT_BIAS:g}"
            )
    try:
        # SGLang would tokenise each stop text.
        parsed = SamplingParams(**(options if tokenizer is None else {**options, "stop": None}))
        parsed.normalize(tokenizer)
        parsed.verify(vocab_size)
    except (ValueError, re.error) as error:
        raise BadRequestError(f"sampling_params: {error}") from error


def stops_of(options: dict[str, Any]) -> list[str]:
    return [options["stop"]] if isinstance(options.get("stop"), str) else options.get("stop") or []


def check_has_logprobs(meta_info: dict[str, Any]) -> None:
    """Raises HTTPException if an output has no log-probabilities of labels: its request was aborted, or failed."""
    if not meta_info.get("output_token_ids_logprobs"):
        reason = meta_info.get("finish_reason") or {}
        raise fastapi.HTTPException(
            reason.get("status_code") or HTTPStatus.SERVICE_UNAVAILABLE,
            reason.get("message") or "the request was aborted before it was computed: send it again",
        )


def check_deadline(deadline_ms: Any) -> None:
    is_number = isinstance(deadline_ms, int | float) and not isinstance(deadline_ms, bool)
    if not is_number or not 0 < deadline_ms < math.inf:
        raise BadRequestError(f"deadline_ms is {deadline_ms!r}: it must be a positive number of milliseconds")


def check_ids_in_vocabulary(token_ids: list[int], vocab_size: int, where: str) -> None:
    """Raises BadRequestError naming the first id outside [0, vocab_size), a range that includes added tokens."""
    if is_within(token_ids, vocab_size):
        return
    bad = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
    raise BadRequestError(
        f"{where} holds token id {bad}, and the vocabulary has {vocab_size} tokens (0 to {vocab_size - 1})"
    )


def longest_token_characters(tokenizer: Any) -> int | None:
    """The most characters that one token can stand for; None if unlimited.

    It is limited for byte-level BPE without a normalizer (most models since GPT-2). Other tokenizers join blanks, or have one
    token for all unknown text.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    parts = json.loads(backend.to_str())
    if parts["model"]["type"] != "BPE" or parts["normalizer"] is not None or not _is_byte_level(parts["pre_tokenizer"]):
        return None
    added = parts["added_tokens"]
    if any(token["lstrip"] or token["rstrip"] for token in added):  # such a token includes any number of blanks
        return None
    # A character of the vocabulary is one byte of a text, so at most one character.
    return max(map(len, [*parts["model"]["vocab"], *(token["content"] for token in added)]))


def _is_byte_level(pre_tokenizer: dict[str, Any] | None) -> bool:
    if pre_tokenizer is None:
        return False
    if pre_tokenizer["type"] == "Sequence":
        return any(_is_byte_level(part) for part in pre_tokenizer["pretokenizers"])
    return bool(pre_tokenizer["type"] == "ByteLevel")


# --- What depends on how this server was started


def check_request(manager: PrefillTokenizerManager, obj: GenerateReqInput | EmbeddingReqInput) -> None:
    """Raises BadRequestError for what this server never answers."""
    manager.check_count(count_prompts(obj) or 1)
    _check_media(manager, obj)
    if isinstance(obj, GenerateReqInput):
        check_lists_against_prompts(obj)
        if isinstance(obj.session_params, dict):
            check_session(obj.session_params)
        check_metric_labels(obj.custom_labels or {}, manager.server_args.tokenizer_metrics_allowed_custom_labels or ())
        _check_embeddings(manager, obj)
        _check_logprob_options(manager, obj)
    else:
        check_lists_of_embedding(obj, takes_media=manager.mm_processor is not None)
    check_sampling_params(manager, obj)


def _check_media(manager: PrefillTokenizerManager, obj: GenerateReqInput | EmbeddingReqInput) -> None:
    if manager.mm_processor is None and (found := media_of(obj)):
        raise BadRequestError(f"the request holds {found[0]}, and this server's model takes text only")


def _check_embeddings(manager: PrefillTokenizerManager, obj: GenerateReqInput) -> None:
    if manager.packs_weights and (obj.input_embeds is not None or obj.positional_embed_overrides is not None):
        raise BadRequestError(
            "input_embeds and embed overrides need SGLang's own layers, and this server computes prompts of token ids"
            " with packed weights: start it with --hybrid-prefill off"
        )


def check_sampling_params(manager: PrefillTokenizerManager, obj: GenerateReqInput | EmbeddingReqInput) -> None:
    given = obj.sampling_params if isinstance(obj.sampling_params, list) else [obj.sampling_params or {}]
    n_prompts_each = 1 if isinstance(obj.sampling_params, list) else count_prompts(obj) or 1
    n_answers = n_stops = n_stop_characters = 0
    for params in given:
        if not isinstance(params, dict):
            raise BadRequestError(f"sampling_params is {params!r}: it must be an object, or a list of objects")
        options = {**(manager.preferred_sampling_params or {}), **params}
        check_sampling_options(options, manager.model_config.vocab_size, manager.tokenizer)
        stops = stops_of(options)
        n_stops += n_prompts_each * len(stops)
        n_stop_characters += n_prompts_each * sum(map(len, stops))
        n_answers += n_prompts_each * (options.get("n") or 1)
        check_deadline_is_known(manager, options)
        _check_grammar(manager, options)
        if isinstance(obj, GenerateReqInput):
            _check_generation_length(manager, options)
    manager.check_count(n_answers, "answers, n for each prompt")
    for n, most, what in (
        (n_stops, MOST_STOPS_OF_PROMPTS, "stop texts"),
        (n_stop_characters, MOST_STOP_CHARACTERS_OF_PROMPTS, "characters of stop texts"),
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
