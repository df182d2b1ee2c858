"""SGLang's tokenizer manager with request checks. Every HTTP route and the offline engine call its `generate_request`."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import copy
import functools
import logging
import os
from collections.abc import AsyncIterator, Callable, Iterator
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, TypeVar

import fastapi
from sglang.srt.managers.io_struct import AbortReq, EmbeddingReqInput, GenerateReqInput, ShutdownReq
from sglang.srt.managers.tokenizer_manager import TokenizerManager

from sgl_prefill.config import PrefillConfig
from sgl_prefill.core import metric_list
from sgl_prefill.core.quotas import Quotas
from sgl_prefill.errors import BadRequestError, PromptTooLongError
from sgl_prefill.http import request_checks, text_cache
from sgl_prefill.http.bodies import path_of
from sgl_prefill.http.fair_threads import FairThreads
from sgl_prefill.http.parted_requests import show_parts
from sgl_prefill.http.rids import Rids
from sgl_prefill.http.text_cache import TextCache
from sgl_prefill.http.token_ids import TokenIds
from sgl_prefill.port.kv import namespaces
from sgl_prefill.port.runner import branch_rows
from sgl_prefill.port.steps import clients, custom_params, traces
from sgl_prefill.startup import calibrations
from sgl_prefill.startup.record import ANSWERS_KEY, PACKS_WEIGHTS_KEY
from sgl_prefill.startup.secret import masked

if TYPE_CHECKING:
    from sglang.srt.managers.tokenizer_manager import ReqState
    from sglang.srt.server_args import PortArgs, ServerArgs

    from sgl_prefill.http.shutdown import Ending


logger = logging.getLogger(__name__)

LARGEST_JSON_INTEGER = 2**63 - 1  # that orjson writes
LOOK_FOR_CLIENT_S = 2.0  # between two checks whether the client of a batch has disconnected
TEXT_CACHE_BYTES = 64 << 20  # some 14 million characters and their tokens
ENCODERS = 4  # threads that tokenise texts, if there are so many cores
# Prompts of one request that the event loop handles without a pause, some 5 ms of work; and the pause.
AT_ONCE, PAUSE_S = 32, 0.005
KNOWN_STOPS = 16  # lists of stop texts whose tokens were counted last
MOST_UNANSWERED_SAMPLES = 256  # of one request: several steps of them
ENCODE_AT_ONCE = 50_000  # characters of several texts for one turn of a thread, some 30 ms
T = TypeVar("T")


class PrefillTokenizerManager(TokenizerManager):  # type: ignore[misc]
    """Refuses generation unless it is allowed, prompts over the limit, and values that would stop the scheduler."""

    _text_cache: TextCache | None = None  # without a tokenizer

    def __init__(
        self, server_args: ServerArgs, port_args: PortArgs, *, config: PrefillConfig, ending: Ending | None = None
    ) -> None:
        from sglang.srt.arg_groups.overrides import resolving_view

        super().__init__(server_args, port_args)
        self.resolved = resolving_view(server_args)  # what SGLang has made of the arguments
        self.prefill_config = config
        self.calibrations = calibrations.load(config.calibrations, self.resolved)
        if getattr(self.tokenizer, "model_max_length", 0) > LARGEST_JSON_INTEGER:  # transformers' value for "unknown"
            self.tokenizer.model_max_length = self.context_len
        self._ending = ending  # None in the offline engine
        self.scheduler_info: dict[str, Any] | None = None  # set by the offline engine; in a server SGLang holds it
        self._rids = Rids()
        if self.tokenizer is not None:
            self._text_cache = TextCache(self.tokenizer, TEXT_CACHE_BYTES)
        self._encoders = FairThreads(min(ENCODERS, os.cpu_count() or 1), "encoders")

    @property
    def packs_weights(self) -> bool:
        """Whether the model runs on packed weights instead of SGLang's layers."""
        return bool(self._scheduler_facts[PACKS_WEIGHTS_KEY])

    @property
    def _scheduler_facts(self) -> dict[str, Any]:
        if self.scheduler_info is None:
            from sglang.srt.entrypoints import http_server

            self.scheduler_info = http_server.get_global_state().scheduler_info
        return self.scheduler_info

    @property
    def no_long_answers(self) -> str | None:
        """Why this engine cannot compute labels of several tokens; None if it can."""
        return self._scheduler_facts.get(ANSWERS_KEY)

    @functools.cached_property
    def end_token_ids(self) -> set[int]:
        of_tokenizer = getattr(self.tokenizer, "eos_token_id", None)
        return {*(self.model_config.hf_eos_token_id or ()), *([] if of_tokenizer is None else [of_tokenizer])}

    async def generate_request(
        self, obj: GenerateReqInput | EmbeddingReqInput, request: fastapi.Request | None = None
    ) -> AsyncIterator[Any]:
        """Raises BadRequestError (a ValueError, which every route answers with 400) for what can never be answered."""
        if is_probe(request) and isinstance(obj, GenerateReqInput):
            obj.sampling_params = {"max_new_tokens": 0}
        request_checks.check_request(self, obj)
        caller = await self.caller_of(request)
        caller.n_logprobs = 0  # some HTTP requests call this several times
        if caller.is_background:
            if not self.prefill_config.has_policy:
                raise BadRequestError(
                    f"{custom_params.BACKGROUND_HEADER} or {custom_params.BACKGROUND_FIELD} is set, and this server runs SGLang's"
                    " own scheduler, which has no background jobs: leave it out, or start the server without --scheduling stock"
                )
            obj.sampling_params = custom_params.for_each(obj.sampling_params, custom_params.mark_background)
        put = functools.partial(custom_params.put_ours, ours=self._params_of_caller(caller, obj))
        obj.sampling_params = custom_params.for_each(obj.sampling_params, put)
        obj.sampling_params = branch_rows.sampling_params_with_branches(
            obj, is_batch=request_checks.count_prompts(obj) is not None
        )
        # SGLang knows health probes by their id.
        hidden = [] if is_probe(request) else self._rids.hide(obj, self._owner(clients.current()))
        watch = None
        options = obj.sampling_params if isinstance(obj.sampling_params, list) else [obj.sampling_params or {}]
        has_samples = any(one.get("n") not in (None, 1) for one in options)
        if request is not None and (len(hidden) > 1 or has_samples) and not obj.background:
            caller.sent = clients.Sent(has_samples)
            watch = asyncio.create_task(self._watch(request, caller.sent))
        try:
            async for output in super().generate_request(obj, request):
                for one in output if isinstance(output, list) else [output]:
                    self._rids.show(one)
                show_parts(obj, output)
                yield output
        except BadRequestError as error:
            if isinstance(obj.rid, list) and len(obj.rid) > 1 and error.rid in obj.rid:
                named = str(error).replace("the prompt", f"prompt {obj.rid.index(error.rid)}", 1)
                raise type(error)(named) from error
            raise
        finally:
            for rid in hidden:
                self._rids.forget(rid)
            caller.sent = None
            if watch is not None:
                watch.cancel()

    async def _watch(self, request: fastapi.Request, sent: clients.Sent) -> None:
        """Aborts the prompts and samples of a request when its client has disconnected, until they have ended."""
        while True:
            await asyncio.sleep(LOOK_FOR_CLIENT_S)
            if not await request.is_disconnected():
                continue
            sent.client_has_left = True
            for start in range(0, len(sent.rids), AT_ONCE):
                for rid in sent.rids[start : start + AT_ONCE]:
                    super().abort_request(rid)
                await asyncio.sleep(0)

    async def caller_of(self, request: fastapi.Request | None) -> clients.Caller:
        """The client by headers and body; an anonymous one outside HTTP."""
        caller = clients.current()
        if caller is None:
            return clients.Caller()
        await caller.read_body(request)
        return caller

    def tenant_of(self, caller: clients.Caller) -> str:
        """The namespace of a client's prefixes and label look-ups (`--isolate-by`)."""
        return namespaces.of_caller(caller, self.prefill_config.isolate_by)

    def _params_of_caller(self, caller: clients.Caller, obj: GenerateReqInput | EmbeddingReqInput) -> dict[str, Any]:
        """Returns the client and its namespace for the scheduler. Sets `extra_key` where SGLang's route drops the body's salt."""
        namespace = self.tenant_of(caller)
        for name in clients.SALTS:
            given = getattr(obj, name, None)
            if isinstance(given, str):
                setattr(obj, name, clients.short(given))
            elif isinstance(given, list):
                setattr(obj, name, [clients.short(one) if isinstance(one, str) else one for one in given])
        if isinstance(obj, EmbeddingReqInput):
            namespace += caller.salt
        elif obj.extra_key is None and obj.cache_salt is None:
            obj.extra_key = caller.salt or None
        if namespace and getattr(obj, "session_params", None) is not None:
            raise BadRequestError(
                "session_params goes on with a request that may be another client's, and this server runs with --isolate-by:"
                " send the whole prompt"
            )
        found = {clients.PARAMETER: caller.name(self.prefill_config.fair_by), namespaces.PARAMETER: namespace}
        return {name: value for name, value in found.items() if value}

    async def share_prefix(self, tokens: list[int]) -> dict[str, Any]:
        """Computes a prefix that all tenants share. Returns SGLang's `meta_info`."""
        public = {namespaces.PUBLIC_PARAMETER: True}
        obj = GenerateReqInput(
            input_ids=tokens, sampling_params={"max_new_tokens": 0, "temperature": 0, "custom_params": public}
        )
        output = await super().generate_request(obj, None).__anext__()
        return output["meta_info"]  # type: ignore[no-any-return]

    def auto_create_handle_loop(self) -> None:
        """Also installs the graceful shutdown of a server."""
        is_new, ending = self.event_loop is None, self._ending
        if is_new:
            asyncio.get_running_loop().set_default_executor(_Threads())
        if is_new and ending is not None:
            ending.remember_listener()
        with clients.calling(None):  # the loop must not inherit the first caller
            super().auto_create_handle_loop()
        if is_new and ending is not None:
            ending.watch(self, self.event_loop)
            _ = self._text_metrics  # shown from the start

    async def handle_loop(self) -> None:
        """If it fails, a server refuses all waiting requests and ends."""
        try:
            await super().handle_loop()
        except Exception:
            if self._ending is None:
                raise
            logger.exception("the loop that hands out answers has failed")
            self._ending.fail(self)

    async def sigterm_watchdog(self) -> None:
        """Runs the graceful shutdown of a server; SGLang's would end the process by SIGKILL."""
        await (super().sigterm_watchdog() if self._ending is None else self._ending.run(self))

    def refuse(self, rid: str, status: HTTPStatus, message: str) -> None:
        """Refuses a waiting request, given its internal id."""
        reason = {"type": "abort", "status_code": int(status), "message": message}
        self._handle_abort_req(AbortReq(rid=rid, finished_reason=reason))

    def resolved_config_dict(self, base: dict[str, Any]) -> dict[str, Any]:
        """Masks keys, as does the following: every client may request these."""
        return masked(super().resolved_config_dict(base))

    async def get_internal_state(self) -> list[dict[Any, Any]]:
        found = {} if self._text_cache is None else {"text_cache": self._text_cache.state()}
        found["tokenizer_threads"] = {"threads": self._encoders.n_threads, "waiting": self._encoders.n_waiting}
        return [masked({**state, **found}) for state in await super().get_internal_state()]

    def convert_to_span_attrs(self, state: ReqState, recv_obj: Any, i: int) -> dict[str, Any]:
        """Adds kept tokens and predicted time to the attributes of a trace."""
        found: dict[str, Any] = super().convert_to_span_attrs(state, recv_obj, i)
        return found if recv_obj.time_stats is None else found | traces.of_answered(recv_obj.time_stats[i])

    def ask_scheduler_to_end(self) -> None:
        self._dispatch_to_scheduler(ShutdownReq())

    @property
    def longest_input_tokens(self) -> int:
        """Limit of a prompt: SGLang's scheduler needs one token less than its own limit, for the answer."""
        return int(min(self.max_req_input_len or self.context_len, self.context_len)) - 1

    @functools.cached_property
    def _longest_token_characters(self) -> int | None:
        return None if self.tokenizer is None else request_checks.longest_token_characters(self.tokenizer)

    def check_text(self, text: str, name: str = "the prompt", *, may_be_cut: bool = False) -> None:
        """Raises BadRequestError for a text that cannot fit, whatever its tokens are; or, may_be_cut: is too long to be cut."""
        longest = self._longest_token_characters
        if may_be_cut:
            longest = max(longest or 0, request_checks.CUT_CHARACTERS_PER_TOKEN)
        if longest is not None and len(text) > (most := longest * self.longest_input_tokens):
            if may_be_cut:
                raise BadRequestError(
                    f"{name} has {len(text)} characters, and texts to be cut may have {most}, {longest} for each of the"
                    f" {self.longest_input_tokens} tokens that this server takes at most: shorten it"
                )
            raise PromptTooLongError(
                f"{name} has {len(text)} characters, which are more than {self.longest_input_tokens} tokens, and this server"
                f" takes at most {self.longest_input_tokens} (the model's context length is {self.context_len}): shorten it"
            )

    async def _tokenize_texts(self, texts: Any, is_cross_encoder: bool = False) -> Any:
        """Tokenises long texts in other threads, so that the event loop serves other requests meanwhile, and what begins as an
        earlier text only from there on.
        """
        given = [texts] if isinstance(texts, str) else texts
        flat = [text for one in given for text in ([one] if isinstance(one, str) else one)]
        for text in flat:
            self.check_text(text)
        tenant = self._tenant_of_texts()
        if tenant is not None and self._may_be_cached(flat) and not is_cross_encoder:
            ids = await self._encode_cached(flat, tenant)
            return (ids[0] if isinstance(texts, str) else ids), None
        n_characters = sum(map(len, flat))
        if n_characters < request_checks.OFF_LOOP_CHARACTERS:
            return await super()._tokenize_texts(texts, is_cross_encoder)
        stock = TokenizerManager._tokenize_texts
        return await self.run_in_thread(lambda twin: asyncio.run(stock(twin, texts, is_cross_encoder)), n_characters)

    @property
    def _turn(self) -> int:
        """Whose turn it must be in a thread that tokenises."""
        caller = clients.current()
        return 0 if caller is None else caller.turn_of(self.prefill_config.fair_by)

    def _may_be_cached(self, texts: list[str]) -> bool:
        is_cached = self._text_cache is not None and self._text_cache.why_not is None and self.is_generation
        return is_cached and any(len(text) >= text_cache.LEAST for text in texts)

    async def _encode_cached(self, texts: list[str], tenant: str) -> list[list[int]]:
        cache = self._text_cache
        assert cache is not None

        def encode(some: list[str]) -> list[list[int]]:
            return [cache.encode(text, tenant) for text in some]

        slices = list(_slices(texts, ENCODE_AT_ONCE))
        turns = [(sum(map(len, some)), functools.partial(encode, some)) for some in slices]
        found = await asyncio.gather(*(self._encoders.run(self._turn, *one) for one in turns))
        if self._text_metrics is not None:
            tokens, waiting = self._text_metrics
            for cached, n_tokens in cache.take_new().items():
                tokens.labels(cached=cached).inc(n_tokens)
            waiting.set(self._encoders.n_waiting)
        return [ids for of_slice in found for ids in of_slice]

    @functools.cached_property
    def _text_metrics(self) -> tuple[Any, Any] | None:
        """Of a server, whose metrics' directory SGLang has set by the first request."""
        if self._ending is None:
            return None
        tokens, waiting = (metric_list.BY_NAME[name].make([]) for name in ("text_tokens", "text_queue_requests"))
        for cached in ("yes", "no"):
            tokens.labels(cached=cached)
        waiting.set(0)
        return tokens, waiting

    async def encode_in_thread(self, texts: list[str], *, add_special_tokens: bool) -> list[TokenIds]:
        """Tokenises texts in the thread for long ones: what begins as an earlier text only from there on."""
        found = list[TokenIds]()
        for some in _slices(texts, ENCODE_AT_ONCE):

            def encode(twin: PrefillTokenizerManager, some: list[str] = some) -> list[TokenIds]:
                ids = [twin.tokenizer.encode(text, add_special_tokens=add_special_tokens) for text in some]
                return [one if isinstance(one, TokenIds) else TokenIds(one) for one in ids]

            found += await self.run_in_thread(encode, sum(map(len, some)))
        return found

    def _tenant_of_texts(self) -> str | None:
        """Whose texts may have been tokenised before, which the time of a request tells; None where that is not known, or
        differs between the prompts of a request."""
        caller = clients.current()
        if caller is None:
            return ""
        is_known = caller.is_read and not caller.has_several_salts
        return self.tenant_of(caller) + caller.salt if is_known else None

    def _create_tokenized_object(
        self, obj: Any, input_text: str, input_ids: Any, *arguments: Any, **options: Any
    ) -> Any:
        """Passes the array of ids that were converted already; SGLang may have shortened the list."""
        if isinstance(input_ids, TokenIds) and len(input_ids) == len(input_ids.array):
            input_ids = input_ids.array
        stops = request_checks.stops_of(obj.sampling_params)
        if not stops or self.tokenizer is None:
            return super()._create_tokenized_object(obj, input_text, input_ids, *arguments, **options)
        given, obj.sampling_params = obj.sampling_params, {**obj.sampling_params, "stop": None}
        try:
            made = super()._create_tokenized_object(obj, input_text, input_ids, *arguments, **options)
        finally:
            obj.sampling_params = given
        made.sampling_params.stop_strs = stops
        made.sampling_params.stop_str_max_len = self._longest_stop_tokens(tuple(stops))
        return made

    @functools.cached_property
    def _longest_stop_tokens(self) -> Callable[[tuple[str, ...]], int]:
        """Counts the tokens of stop texts once, and not again for each prompt that they go with."""

        @functools.lru_cache(maxsize=KNOWN_STOPS)
        def count(stops: tuple[str, ...]) -> int:
            return max(len(self.tokenizer.encode(stop, add_special_tokens=False)) for stop in stops)

        return count

    async def run_in_thread(self, work: Callable[[PrefillTokenizerManager], T], n_characters: int) -> T:
        """Runs `work` in the thread for long texts, with a copy of this manager whose tokenizer only that thread uses.

        n_characters: of the texts. Clients take turns by them.
        """
        thread, twin = self._tokenizer_thread
        context = contextvars.copy_context()  # names the caller
        return await thread.run(self._turn, n_characters, lambda: context.run(work, twin))

    @functools.cached_property
    def _tokenizer_thread(self) -> tuple[FairThreads, PrefillTokenizerManager]:
        """The thread for long texts, and the copy of this manager in it: tokenizers are not thread-safe."""
        twin = copy.copy(self)
        twin.tokenizer, twin.async_dynamic_batch_tokenizer = copy.deepcopy(self.tokenizer), None
        if self._text_cache is not None and self._text_cache.why_not is None:
            twin.tokenizer.encode = self._encode_of_twin(self._text_cache, twin.tokenizer.encode)
        return FairThreads(1, "long-texts"), twin

    def _encode_of_twin(self, cache: TextCache, original: Callable[..., list[int]]) -> Callable[..., list[int]]:
        """Rendered conversations are tokenised by `encode`."""

        def encode(text: Any, add_special_tokens: bool = True, **options: Any) -> list[int]:
            tenant = self._tenant_of_texts()
            if tenant is None or not isinstance(text, str) or options:
                return original(text, add_special_tokens=add_special_tokens, **options)
            return cache.encode(text, tenant, add_special_tokens)

        return encode

    def check_count(self, n: int, things: str = "prompts") -> None:
        quotas = self.prefill_config.quotas
        for flag, most in (
            ("limit", request_checks.MOST_PROMPTS),
            ("--max-waiting", quotas.of_all.requests),
            ("--max-client-waiting", quotas.of_client.requests),
        ):
            if most is not None and n > most:
                raise BadRequestError(
                    f"the request has {n} {things}, and this server's {flag} is {most}: send fewer in one request"
                )

    def abort_request(self, rid: str | list[str] = "", abort_all: bool = False) -> None:
        """Aborts requests with exactly this id: a client's of a batch or prompt, or an internal one.

        Through HTTP only the caller's own requests, all of them with `abort_all`; with the administrator's key any client's.
        """
        if isinstance(rid, list):  # a batch that was refused before SGLang read it
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
            if not self._rids.belongs_to_another(one, owner):
                super().abort_request(one)

    def _process_single_item_scoring_results(self, results: Any, *arguments: Any, **options: Any) -> Any:
        """Refuses answers without log-probabilities, such as those of aborted requests, where SGLang's would fail."""
        for result in results if self.is_generation else ():
            request_checks.check_has_logprobs(result["meta_info"])
        return super()._process_single_item_scoring_results(results, *arguments, **options)

    def _is_administrator(self, caller: clients.Caller) -> bool:
        key = self.server_args.admin_api_key
        return bool(key) and caller.key == clients.key_of(f"Bearer {key}")

    def _owner(self, caller: clients.Caller | None) -> str:
        return "" if caller is None else f"{caller.key}/{self.tenant_of(caller)}"

    async def _handle_abort_finish_reason(
        self, out: dict[str, Any], state: ReqState, is_stream: bool
    ) -> dict[str, Any] | None:
        """Also notes why, and for how long, the scheduler has refused a caller."""
        reason = out["meta_info"]["finish_reason"]
        is_refusal = reason.get("type") == "abort" and reason.get("status_code") in custom_params.REFUSAL_STATUSES
        if is_refusal and (caller := clients.current()) is not None:
            caller.refused_for, caller.retry_after_s = reason.get("reason"), reason.get("retry_after_s")
        return await super()._handle_abort_finish_reason(out, state, is_stream)  # type: ignore[no-any-return]

    async def update_weights_from_disk(self, *arguments: Any, **options: Any) -> tuple[bool, str, int]:
        """Refuses if the weights are packed, as do the following three. Also returns the number of paused requests."""
        refusal = self._packed_weights_refusal
        return (*refusal, 0) if refusal else await super().update_weights_from_disk(*arguments, **options)

    async def update_weights_from_tensor(self, *arguments: Any, **options: Any) -> tuple[bool, str]:
        return self._packed_weights_refusal or await super().update_weights_from_tensor(*arguments, **options)

    async def update_weights_from_distributed(self, *arguments: Any, **options: Any) -> tuple[bool, str]:
        return self._packed_weights_refusal or await super().update_weights_from_distributed(*arguments, **options)

    async def update_weights_from_ipc(self, *arguments: Any, **options: Any) -> tuple[bool, str]:
        return self._packed_weights_refusal or await super().update_weights_from_ipc(*arguments, **options)

    @property
    def _packed_weights_refusal(self) -> tuple[bool, str] | None:
        if not self.packs_weights:
            return None
        return False, (
            "this server's weights were packed for the processor when it started and cannot be replaced:"
            " start another with the new ones, or this one with --hybrid-prefill off"
        )

    def _count_logprobs(self, obj: GenerateReqInput | EmbeddingReqInput, n_input: int) -> None:
        """Raises BadRequestError where all prompts of a request ask for too many log-probabilities of several tokens. The event
        loop writes each of them.
        """
        if not isinstance(obj, GenerateReqInput) or not obj.return_logprob:
            return
        n_each = (obj.top_logprobs_num or 0) + len(obj.token_ids_logprob or ())
        start = obj.logprob_start_len
        n = n_each * (1 if start is None or start < 0 else max(n_input - start, 1))
        if (caller := clients.current()) is not None:
            caller.n_logprobs += n
            n = caller.n_logprobs
        if n > (most := request_checks.MOST_LABELS):
            raise BadRequestError(
                f"the request asks for {n} log-probabilities or more, {n_each} at each place, and {most} are the limit of one"
                " request: ask for fewer of them (top_logprobs_num, token_ids_logprob), for fewer tokens of the prompt"
                " (logprob_start_len), or send fewer prompts"
            )

    async def _tokenize_one_request(self, obj: GenerateReqInput | EmbeddingReqInput) -> Any:
        """Lets other requests go on between the prompts of one, as does the next: the scheduler reads all that was sent before it
        runs a step.
        """
        await self._pause()
        return await super()._tokenize_one_request(obj)

    async def _send_one_request(self, tokenized_obj: Any) -> Any:
        await self._pause()
        await self._wait_for_samples()
        return await super()._send_one_request(tokenized_obj)

    async def _wait_for_samples(self) -> None:
        """Keeps samples back while many of their request are unanswered: the policy needs to know of no more of them, and the
        scheduler takes in all that was sent before it runs a step. A server that generates may run more of them at once.
        Raises HTTPException where the client has left.
        """
        caller = clients.current()
        sent = None if caller is None or self.prefill_config.allow_generation else caller.sent
        if sent is None or not sent.has_samples:
            return
        while True:
            sent.rids = [rid for rid in sent.rids if rid in self.rid_to_state]
            if len(sent.rids) < MOST_UNANSWERED_SAMPLES:
                return
            if sent.client_has_left:
                raise fastapi.HTTPException(
                    HTTPStatus.BAD_REQUEST, "the client has left, and its other samples with it"
                )
            await asyncio.sleep(PAUSE_S)

    def _should_use_batch_tokenization(self, batch_size: int, requests: Any) -> bool:
        """SGLang sends a list of token ids in one message, which the scheduler reads at once."""
        is_divided = self._paused_caller is not None and batch_size > AT_ONCE
        return not is_divided and bool(super()._should_use_batch_tokenization(batch_size, requests))

    @property
    def _paused_caller(self) -> clients.Caller | None:
        """The sender of this HTTP request; None for a request that is sent without pauses: of an engine without HTTP, or where
        limits of what waits refuse a request whole. Two requests whose prompts come in turns would both be refused.
        """
        return clients.current() if self.prefill_config.quotas == Quotas() else None

    async def _pause(self) -> None:
        """Pauses after every AT_ONCE prompts of an HTTP request."""
        if (caller := self._paused_caller) is None:
            return
        caller.n_prompts += 1
        if caller.n_prompts > AT_ONCE:
            caller.n_prompts = 1
            await asyncio.sleep(PAUSE_S)

    def _wait_one_response(
        self, obj: GenerateReqInput | EmbeddingReqInput, request: fastapi.Request | None = None
    ) -> AsyncIterator[Any]:
        """`_watch` checks the client once for all prompts and samples; SGLang would for each, all at the same moment."""
        caller = clients.current()
        if request is not None and caller is not None and caller.sent is not None:
            caller.sent.rids.append(obj.rid)
            request = None
        found: AsyncIterator[Any] = super()._wait_one_response(obj, request)
        return found

    def _validate_one_request(self, obj: GenerateReqInput | EmbeddingReqInput, input_ids: list[int]) -> None:
        """Called once per prompt, also within batches, where `generate_request` names the prompt of an error."""
        try:
            self._check_prompt(obj, input_ids)
        except BadRequestError as error:
            error.rid = obj.rid
            raise
        super()._validate_one_request(obj, input_ids)

    def _check_prompt(self, obj: GenerateReqInput | EmbeddingReqInput, input_ids: list[int]) -> None:
        n_input = len(input_ids) if input_ids is not None else 0
        if n_input == 0 and obj.input_embeds is None and not obj.contains_mm_input():
            raise BadRequestError("the prompt is empty: it must hold at least one token")
        if obj.input_ids is not None and n_input > 0:
            request_checks.check_ids_in_vocabulary(input_ids, self.model_config.vocab_size, "the prompt")
        self.check_length(n_input, n_branches=branch_rows.size_of(obj.sampling_params or {}).tokens)
        self._count_logprobs(obj, n_input)

    def check_length(self, n_input: int, n_branches: int = 0) -> None:
        """Raises PromptTooLongError. n_branches: tokens of its branches, beyond the prompt."""
        limit = self.longest_input_tokens
        if n_input + n_branches > limit:
            beside = f" and what is asked behind it {n_branches} more" if n_branches else ""
            raise PromptTooLongError(
                f"the prompt has {n_input} tokens{beside}, and this server takes at most {limit} (the model's context length is"
                f' {self.context_len}): shorten it, send prompt_parts with on_overflow "cut", or start the server with a larger'
                " --max-input-length, and more memory or a larger --context-length where that asks for it"
            )


class _Threads(concurrent.futures.ThreadPoolExecutor):
    """SGLang converts requests here: in the context of the task that asks, which knows its caller and rendered templates."""

    def submit(
        self, function: Callable[..., Any], /, *arguments: Any, **options: Any
    ) -> concurrent.futures.Future[Any]:
        return super().submit(contextvars.copy_context().run, function, *arguments, **options)


def _slices(texts: list[str], n_characters: int) -> Iterator[list[str]]:
    """Consecutive texts, of so many characters together, or one that is longer."""
    some, n = list[str](), 0
    for text in texts:
        if some and n + len(text) > n_characters:
            yield some
            some, n = [], 0
        some.append(text)
        n += len(text)
    yield some


def is_probe(request: fastapi.Request | None) -> bool:
    """Whether this is SGLang's health check, also below a proxy's root path."""
    if request is None:
        return False
    return path_of(request).startswith("/health")
