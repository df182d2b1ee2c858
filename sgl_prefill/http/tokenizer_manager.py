"""SGLang's tokenizer manager with checks in front: what can never be answered gets a 400 instead of a wrong answer.

Every HTTP route and the offline engine pass through `generate_request`, so this is the one place for them.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, TypeVar

import fastapi
from sglang.srt.managers.embed_types import PositionalEmbeds
from sglang.srt.managers.io_struct import (
    AbortReq,
    EmbeddingReqInput,
    GenerateReqInput,
    ShutdownReq,
)
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.sampling.sampling_params import SamplingParams

from sgl_prefill.config import PrefillConfig
from sgl_prefill.errors import BadRequestError
from sgl_prefill.http import parted_requests as prompt_parts
from sgl_prefill.http.request_checks import (
    MEDIA,
    MOST_PROMPTS,
    check_has_logprobs,
    check_ids_in_vocabulary,
    check_lists_against_prompts,
    check_lists_of_embedding,
    check_metric_labels,
    check_sampling_options,
    check_session,
    count_prompts,
)
from sgl_prefill.http.rids import Rids
from sgl_prefill.http.text_limit import CUT_CHARACTERS_PER_TOKEN, OFF_LOOP_CHARACTERS, longest_token_characters
from sgl_prefill.port.kv import namespaces
from sgl_prefill.port.runner import answer_trees
from sgl_prefill.port.steps import clients, custom_params, traces
from sgl_prefill.startup import calibrations
from sgl_prefill.startup.record import ANSWERS_KEY, PACKS_WEIGHTS_KEY
from sgl_prefill.startup.secret import masked

if TYPE_CHECKING:
    from sglang.srt.managers.tokenizer_manager import ReqState
    from sglang.srt.server_args import PortArgs, ServerArgs

    from sgl_prefill.http.shutdown import Ending


logger = logging.getLogger(__name__)

LONGEST_NUMBER = 2**63 - 1  # of JSON as it is written here
LOOK_FOR_CLIENT_S = 2.0
T = TypeVar("T")
GRAMMARS = ("regex", "json_schema", "ebnf", "structural_tag")


class PrefillTokenizerManager(TokenizerManager):  # type: ignore[misc]
    """Refuses generation unless it is allowed, prompts over the limit, and values that would stop the scheduler."""

    def __init__(
        self, server_args: ServerArgs, port_args: PortArgs, *, config: PrefillConfig, ending: Ending | None = None
    ) -> None:
        super().__init__(server_args, port_args)
        self.prefill_config = config
        self.calibrations = calibrations.load(config.calibrations, server_args)
        if getattr(self.tokenizer, "model_max_length", 0) > LONGEST_NUMBER:  # "unknown", which /tokenize cannot answer
            self.tokenizer.model_max_length = self.context_len
        self._ending = ending  # of a server of ours; where a program of a user's runs us, the end is its own
        self.scheduler_info: dict[str, Any] | None = (
            None  # what the scheduler said at its start; of a server, SGLang keeps it
        )
        self._rids = Rids()
        self._watched: set[fastapi.Request] = set()  # with several prompts each

    @property
    def packs_weights(self) -> bool:
        """Says whether the model runs on weights that were packed at the start, in the place of SGLang's own layers."""
        return bool(self._told_at_start[PACKS_WEIGHTS_KEY])

    @property
    def _told_at_start(self) -> dict[str, Any]:
        if self.scheduler_info is None:
            from sglang.srt.entrypoints import http_server

            self.scheduler_info = http_server.get_global_state().scheduler_info
        return self.scheduler_info

    @property
    def no_long_answers(self) -> str | None:
        """Says why answers of several tokens cannot be computed here; None where they can."""
        problem: str | None = self._told_at_start.get(ANSWERS_KEY)
        return problem

    @functools.cached_property
    def end_token_ids(self) -> set[int]:
        """Returns the tokens with which the model ends what it writes."""
        of_tokenizer = getattr(self.tokenizer, "eos_token_id", None)
        return {*(self.model_config.hf_eos_token_id or ()), *([] if of_tokenizer is None else [of_tokenizer])}

    async def generate_request(
        self, obj: GenerateReqInput | EmbeddingReqInput, request: fastapi.Request | None = None
    ) -> AsyncIterator[Any]:
        """Does as SGLang's, after our checks. Raises BadRequestError (a ValueError, which every route answers with 400)."""
        self.check_count(count_prompts(obj) or 1)
        self._check_media(obj)
        if obj.multi_item_delimiter_indices is not None and not self.server_args.enable_mis:
            raise BadRequestError("multi_item_delimiter_indices needs a server started with --enable-mis")
        if isinstance(obj, GenerateReqInput):
            if is_probe(request):
                obj.sampling_params = {"max_new_tokens": 0}
            check_lists_against_prompts(obj)
            if isinstance(obj.session_params, dict):
                check_session(obj.session_params)
            self._check_internal_fields(obj)
            check_metric_labels(obj.custom_labels or {}, self.server_args.tokenizer_metrics_allowed_custom_labels or ())
            self._check_embeddings(obj)
            self._check_logprob_options(obj)
        else:
            check_lists_of_embedding(obj, takes_media=self.mm_processor is not None)
        self._check_sampling_params(obj)
        caller = await self.caller_of(request)
        if caller.is_background:
            self._check_background()
            obj.sampling_params = custom_params.for_each(obj.sampling_params, custom_params.mark_background)
        ours = self._params_of_caller(caller, obj)
        obj.sampling_params = custom_params.for_each(
            obj.sampling_params, functools.partial(custom_params.put_ours, ours=ours)
        )
        obj.sampling_params = answer_trees.sampling_params_with_trees(obj, is_batch=count_prompts(obj) is not None)
        # SGLang knows health probes by their id.
        hidden = [] if is_probe(request) else self._rids.hide(obj, self._owner(clients.current()))
        watch = None
        if request is not None and len(hidden) > 1 and not obj.background:
            watch = asyncio.create_task(self._watch(request, hidden))
            self._watched.add(request)
        try:
            async for output in super().generate_request(obj, request):
                for one in output if isinstance(output, list) else [output]:
                    self._rids.show(one)
                prompt_parts.show(obj, output)
                yield output
        finally:
            for rid in hidden:
                self._rids.forget(rid)
            if watch is not None and request is not None:
                self._watched.discard(request)
                watch.cancel()

    async def _watch(self, request: fastapi.Request, rids: Sequence[str]) -> None:
        """Ends the prompts of a batch whose client has left."""
        while not await request.is_disconnected():
            await asyncio.sleep(LOOK_FOR_CLIENT_S)
        for rid in rids:
            super().abort_request(rid)

    async def caller_of(self, request: fastapi.Request | None) -> clients.Caller:
        """Says who asks, by what HTTP and the body tell; nobody where there is no HTTP."""
        caller = clients.current()
        if caller is None:
            return clients.Caller()
        await caller.read_body(request)
        return caller

    def tenant_of(self, caller: clients.Caller) -> str:
        """Names whose prefixes a caller's requests may find, and what else others must not notice."""
        return namespaces.of_caller(caller, self.prefill_config.isolate_by)

    def _params_of_caller(self, caller: clients.Caller, obj: GenerateReqInput | EmbeddingReqInput) -> dict[str, Any]:
        """Returns what the scheduler hears of who asks; what the body says of prefixes is handed on where the route does not."""
        namespace = self.tenant_of(caller)
        if isinstance(obj, EmbeddingReqInput):
            namespace += caller.salt
        elif obj.extra_key is None:
            obj.extra_key = caller.salt or None
        if namespace and getattr(obj, "session_params", None) is not None:
            raise BadRequestError(
                "session_params goes on with a request that may be another client's, and this server runs with --isolate-by:"
                " send the whole prompt"
            )
        told = {clients.PARAMETER: caller.name(self.prefill_config.fair_by), namespaces.PARAMETER: namespace}
        return {name: value for name, value in told.items() if value}

    async def share_prefix(self, tokens: list[int]) -> dict[str, Any]:
        """Computes a prefix that all may share from now on, whoever they are. Returns SGLang's `meta_info`."""
        public = {namespaces.PUBLIC_PARAMETER: True}
        obj = GenerateReqInput(
            input_ids=tokens, sampling_params={"max_new_tokens": 0, "temperature": 0, "custom_params": public}
        )
        output = await super().generate_request(obj, None).__anext__()
        return output["meta_info"]  # type: ignore[no-any-return]

    def auto_create_handle_loop(self) -> None:
        """Does as SGLang's; how a server of ours ends is ours."""
        is_new, ending = self.event_loop is None, self._ending
        if is_new and ending is not None:
            ending.remember_listener()
        with clients.calling(None):  # the loop serves all, and not who comes first
            super().auto_create_handle_loop()
        if is_new and ending is not None:
            ending.watch(self, self.event_loop)

    async def handle_loop(self) -> None:
        """Does as SGLang's; where it fails, a server of ours ends at once, and tells who waits."""
        try:
            await super().handle_loop()
        except Exception:
            if self._ending is None:
                raise
            logger.exception("the loop that hands out answers has failed")
            self._ending.fail(self)

    async def sigterm_watchdog(self) -> None:
        """Does as SGLang's, which ends the process by SIGKILL, where it is not ours to end."""
        await (super().sigterm_watchdog() if self._ending is None else self._ending.run(self))

    def refuse(self, rid: str, status: HTTPStatus, message: str) -> None:
        """Answers a request that waits; rid: ours."""
        reason = {"type": "abort", "status_code": int(status), "message": message}
        self._handle_abort_req(AbortReq(rid=rid, finished_reason=reason))

    def resolved_config_dict(self, base: dict[str, Any]) -> dict[str, Any]:
        """Does as SGLang's, without the keys: everyone who may ask for an answer may ask for these."""
        return masked(super().resolved_config_dict(base))

    async def get_internal_state(self) -> list[dict[Any, Any]]:
        """Does as SGLang's, without the keys."""
        return [masked(state) for state in await super().get_internal_state()]

    def convert_to_span_attrs(self, state: ReqState, recv_obj: Any, i: int) -> dict[str, Any]:
        """Does as SGLang's, which asks for them where it traces, and adds what was kept and predicted."""
        found: dict[str, Any] = super().convert_to_span_attrs(state, recv_obj, i)
        return found if recv_obj.time_stats is None else found | traces.of_answered(recv_obj.time_stats[i])

    def ask_scheduler_to_end(self) -> None:
        self._dispatch_to_scheduler(ShutdownReq())

    @property
    def longest_input_tokens(self) -> int:
        """Returns how long a prompt may be: SGLang's scheduler needs it to be shorter than its own limit, and one place for the
        answer."""
        return int(min(self.max_req_input_len or self.context_len, self.context_len)) - 1

    @functools.cached_property
    def _longest_token_characters(self) -> int | None:
        return None if self.tokenizer is None else longest_token_characters(self.tokenizer)

    def check_text(self, text: str, name: str = "the prompt", *, may_be_cut: bool = False) -> None:
        """Raises BadRequestError for a text that cannot fit, whatever its tokens are; or that is too long even to be cut."""
        longest = self._longest_token_characters
        if may_be_cut:
            longest = max(longest or 0, CUT_CHARACTERS_PER_TOKEN)
        if longest is not None and len(text) > (most := longest * self.longest_input_tokens):
            if may_be_cut:
                raise BadRequestError(
                    f"{name} has {len(text)} characters, and texts that are to be cut may have {most}, {longest} for each of the"
                    f" {self.longest_input_tokens} tokens that this server takes at most: shorten it"
                )
            raise BadRequestError(
                f"{name} has {len(text)} characters, which are more than {self.longest_input_tokens} tokens, and this server"
                f" takes at most {self.longest_input_tokens} (the model's context length is {self.context_len}): shorten it"
            )

    async def _tokenize_texts(self, texts: Any, is_cross_encoder: bool = False) -> Any:
        """Does as SGLang's; long texts in another thread, since all other requests would wait meanwhile."""
        flat = (
            [texts]
            if isinstance(texts, str)
            else [text for one in texts for text in ([one] if isinstance(one, str) else one)]
        )
        for text in flat:
            self.check_text(text)
        if sum(map(len, flat)) < OFF_LOOP_CHARACTERS:
            return await super()._tokenize_texts(texts, is_cross_encoder)
        stock = TokenizerManager._tokenize_texts
        return await self.run_beside(lambda twin: asyncio.run(stock(twin, texts, is_cross_encoder)))

    async def run_beside(self, work: Callable[[PrefillTokenizerManager], T]) -> T:
        """Runs what tokenises much in another thread; work: gets a manager whose tokenizer is for that thread alone."""
        thread, twin = self._tokenizer_beside
        return await asyncio.get_running_loop().run_in_executor(thread, work, twin)

    @functools.cached_property
    def _tokenizer_beside(self) -> tuple[ThreadPoolExecutor, PrefillTokenizerManager]:
        """A thread, and what SGLang's methods need in it: a tokenizer is not safe for two threads."""
        twin = copy.copy(self)
        twin.tokenizer, twin.async_dynamic_batch_tokenizer = copy.deepcopy(self.tokenizer), None
        return ThreadPoolExecutor(max_workers=1, thread_name_prefix="long-texts"), twin

    def check_count(self, n_prompts: int) -> None:
        """Raises BadRequestError where a request has more prompts than are answered at once."""
        quotas = self.prefill_config.quotas
        for flag, most in (
            ("limit", MOST_PROMPTS),
            ("--max-waiting", quotas.of_all.requests),
            ("--max-client-waiting", quotas.of_client.requests),
        ):
            if most is not None and n_prompts > most:
                raise BadRequestError(
                    f"the request has {n_prompts} prompts, and this server's {flag} is {most}: send fewer in one request"
                )

    def _check_media(self, obj: GenerateReqInput | EmbeddingReqInput) -> None:
        if self.mm_processor is None:
            for name in MEDIA:
                value = getattr(obj, name)
                if any(one is not None for one in (value if isinstance(value, list) else [value])):
                    raise BadRequestError(f"the request holds {name}, and this server's model takes text only")

    def _check_background(self) -> None:
        if not self.prefill_config.has_policy:
            raise BadRequestError(
                f"{custom_params.BACKGROUND_HEADER} or {custom_params.BACKGROUND_FIELD} is set, and this server runs SGLang's own"
                " scheduler, which knows no background jobs: leave it out, or start the server without --scheduling stock"
            )

    def abort_request(self, rid: str | list[str] = "", abort_all: bool = False) -> None:
        """Ends the requests with exactly this id of a client's, of a batch or of one of its prompts, or of our own.

        Where HTTP asks, those of this caller, of which `abort_all` means all; who has the administrator's key ends anybody's.
        """
        if isinstance(rid, list):  # of a batch that was refused before SGLang had looked at it
            for one in rid:
                self.abort_request(one)
            return
        caller = clients.current()
        if caller is None or self._is_administrator(caller):
            for one in self._rids.named(rid):
                super().abort_request(one, abort_all)
            return
        owner = self._owner(caller)
        for one in self._rids.of(owner) if abort_all else self._rids.named(rid):
            if not self._rids.is_anothers(one, owner):
                super().abort_request(one)

    def _process_single_item_scoring_results(self, results: Any, *arguments: Any, **options: Any) -> Any:
        """Does as SGLang's, which fails at an answer without log-probabilities, as that of an aborted request."""
        for result in results if self.is_generation else ():
            check_has_logprobs(result["meta_info"])
        return super()._process_single_item_scoring_results(results, *arguments, **options)

    def _is_administrator(self, caller: clients.Caller) -> bool:
        key = self.server_args.admin_api_key
        return bool(key) and caller.key == clients.key_of(f"Bearer {key}")

    def _owner(self, caller: clients.Caller | None) -> str:
        return "" if caller is None else f"{caller.key}/{self.tenant_of(caller)}"

    async def _handle_abort_finish_reason(
        self, out: dict[str, Any], state: ReqState, is_stream: bool
    ) -> dict[str, Any] | None:
        """Does as SGLang's, which knows no other refusals of the scheduler than 400, 500 and 503."""
        reason = out["meta_info"]["finish_reason"]
        if (
            reason.get("type") == "abort"
            and reason.get("status_code") in custom_params.REFUSAL_STATUSES
            and not is_stream
        ):
            self._remove_req_state(state.obj.rid)
            if self.enable_lora and state.obj.lora_path:
                await self.lora_registry.release(state.obj.lora_id)
            if (caller := clients.current()) is not None:
                caller.refused_for, caller.retry_after_s = reason.get("reason"), reason.get("retry_after_s")
            raise fastapi.HTTPException(status_code=reason["status_code"], detail=reason["message"])
        return await super()._handle_abort_finish_reason(out, state, is_stream)  # type: ignore[no-any-return]

    def _check_internal_fields(self, obj: GenerateReqInput) -> None:
        overrides = obj.positional_embed_overrides
        for override in overrides if isinstance(overrides, list) else [overrides]:
            if override is not None and not isinstance(override, PositionalEmbeds):
                raise BadRequestError(
                    "positional_embed_overrides is an internal field: use the embed overrides of /v1/score"
                )

    def _check_embeddings(self, obj: GenerateReqInput) -> None:
        if self.packs_weights and (obj.input_embeds is not None or obj.positional_embed_overrides is not None):
            raise BadRequestError(
                "input_embeds and embed overrides need SGLang's own layers, and this server computes prompts of token ids"
                " with packed weights: start it with --hybrid-prefill off"
            )

    async def update_weights_from_disk(self, *arguments: Any, **options: Any) -> tuple[bool, str, int]:
        """Does as SGLang's, with the number of paused requests; refuses where the weights are packed, as do the following."""
        if self._refusal is not None:
            return *self._refusal, 0
        return await super().update_weights_from_disk(*arguments, **options)  # type: ignore[no-any-return]

    async def update_weights_from_tensor(self, *arguments: Any, **options: Any) -> tuple[bool, str]:
        return self._refusal or await super().update_weights_from_tensor(*arguments, **options)

    async def update_weights_from_distributed(self, *arguments: Any, **options: Any) -> tuple[bool, str]:
        return self._refusal or await super().update_weights_from_distributed(*arguments, **options)

    async def update_weights_from_ipc(self, *arguments: Any, **options: Any) -> tuple[bool, str]:
        return self._refusal or await super().update_weights_from_ipc(*arguments, **options)

    @property
    def _refusal(self) -> tuple[bool, str] | None:
        if not self.packs_weights:
            return None
        return False, (
            "this server's weights were packed for the processor when it started and cannot be replaced:"
            " start another with the new ones, or this one with --hybrid-prefill off"
        )

    def _check_sampling_params(self, obj: GenerateReqInput | EmbeddingReqInput) -> None:
        given = obj.sampling_params if isinstance(obj.sampling_params, list) else [obj.sampling_params or {}]
        for params in given:
            if not isinstance(params, dict):
                raise BadRequestError(f"sampling_params is {params!r}: it must be an object, or a list of objects")
            asked = {**(self.preferred_sampling_params or {}), **params}
            check_sampling_options(asked, self.model_config.vocab_size, self.tokenizer)
            self._check_deadline_is_known(asked)
            self._check_grammar(asked)
            if isinstance(obj, GenerateReqInput):
                max_new_tokens = asked.get("max_new_tokens", SamplingParams().max_new_tokens)
                self._check_generation_length(max_new_tokens, was_given="max_new_tokens" in asked)

    def _check_grammar(self, options: dict[str, Any]) -> None:
        """SGLang's scheduler refuses these too, and its routes cannot show that in every combination."""
        if self.server_args.grammar_backend != "none":
            return
        for name in GRAMMARS:
            if options.get(name) is not None:
                raise BadRequestError(
                    f"{name} asks for generation by a grammar, and this server runs with --grammar-backend none: leave it out,"
                    " or use allowed_tokens"
                )

    def _check_deadline_is_known(self, options: dict[str, Any]) -> None:
        deadline_ms = (options.get("custom_params") or {}).get(custom_params.DEADLINE)
        if deadline_ms is not None and not self.prefill_config.has_policy:
            raise BadRequestError(
                f"deadline_ms is {deadline_ms}, and this server runs SGLang's own scheduler, which knows no deadlines:"
                " leave it out, or start the server without --scheduling stock"
            )

    def _check_generation_length(self, asked: int | None, was_given: bool) -> None:
        if not self.prefill_config.allow_generation and (asked is None or asked > 1):
            shown = "unlimited" if asked is None else asked
            origin = "" if was_given else " (it was left out, which means that many here)"
            raise BadRequestError(
                f"max_tokens (max_new_tokens) is {shown}{origin}, and this server answers prefill-only requests:"
                " ask for 0 or 1, or start the server with --allow-generation"
            )

    def _check_logprob_options(self, obj: GenerateReqInput) -> None:
        if obj.token_ids_logprob == []:
            raise BadRequestError("token_ids_logprob (label_token_ids) is empty: give at least one token id")
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

    def _wait_one_response(
        self, obj: GenerateReqInput | EmbeddingReqInput, request: fastapi.Request | None = None
    ) -> AsyncIterator[Any]:
        """Does as SGLang's, which looks for a prompt's state only when its answer is asked for: it fails where the answer has
        come before the last prompt of the batch was sent."""
        return self._wait_with(self.rid_to_state[obj.rid], obj, request)

    async def _wait_with(
        self, state: ReqState, obj: GenerateReqInput | EmbeddingReqInput, request: fastapi.Request | None
    ) -> AsyncIterator[Any]:
        if (
            request is None or request in self._watched
        ):  # else ten thousand prompts look for their client, each by itself
            await state.event.wait()
        is_answered = self.rid_to_state.setdefault(obj.rid, state).finished
        try:
            async for output in super()._wait_one_response(obj, request):
                yield output
        finally:
            if is_answered:
                self._remove_req_state(obj.rid, state.lifecycle_id)

    def _validate_one_request(self, obj: GenerateReqInput | EmbeddingReqInput, input_ids: list[int]) -> None:
        """Does as SGLang's, after our own checks of the token ids; called once a prompt, also within batches."""
        n_input = len(input_ids) if input_ids is not None else 0
        if n_input == 0 and obj.input_embeds is None and not obj.contains_mm_input():
            raise BadRequestError("the prompt is empty: it must hold at least one token")
        if obj.input_ids is not None and n_input > 0:
            check_ids_in_vocabulary(input_ids, self.model_config.vocab_size, "the prompt")
        limit = self.longest_input_tokens
        n_answer = answer_trees.count_nodes(obj.sampling_params or {})
        if n_input + n_answer > limit:
            beside = f" and its answers {n_answer} more" if n_answer else ""
            raise BadRequestError(
                f"the prompt has {n_input} tokens{beside}, and this server takes at most {limit} (the model's context length is"
                f" {self.context_len}): shorten it, or start the server with a larger --max-input-length, and more memory or a"
                " larger --context-length where that asks for it"
            )
        super()._validate_one_request(obj, input_ids)


def is_probe(request: fastapi.Request | None) -> bool:
    """Says whether SGLang's own health check asks, on whatever path before it a proxy serves us."""
    return request is not None and request.url.path.removeprefix(request.scope.get("root_path", "")).startswith(
        "/health"
    )
