"""The HTTP routes: endpoints that replace SGLang's, and the list of SGLang's that are kept. Requests without allowed answers go
to SGLang's own endpoint, with `max_tokens` 1 by default."""

from __future__ import annotations

import asyncio
import functools
import pkgutil
import time
import warnings
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson
from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response, StreamingResponse
from fastapi.routing import APIRoute
from sglang.srt.entrypoints import http_server
from sglang.srt.entrypoints.openai.protocol import CompletionRequest, DetokenizeRequest, TokenizeRequest
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.managers.tokenizer_manager import ServerStatus
from sglang.srt.utils.json_response import model_json_response, orjson_response
from starlette.routing import BaseRoute, Match, Route

from sgl_prefill.config import PrefillConfig
from sgl_prefill.errors import BadRequestError, SeamError
from sgl_prefill.http import api_docs, conversations, heads, protocol, scores
from sgl_prefill.http import dashboard_routes as dashboard
from sgl_prefill.http.bodies import Bodies, route_class
from sgl_prefill.http.cut_requests import CutRequests, PartsOfPrompts, with_parts
from sgl_prefill.http.decisions import Decider, DecisionRoutes
from sgl_prefill.http.error_format import Refusal
from sgl_prefill.http.label_scoring import AllowedAnswers, LabelScorer
from sgl_prefill.http.middleware import Middleware
from sgl_prefill.http.parted_requests import attach_parts
from sgl_prefill.http.prefix_handles import MESSAGES, Prefixes, PrefixRequest
from sgl_prefill.http.request_checks import (
    OFF_LOOP_CHARACTERS,
    check_ids_in_vocabulary,
    check_lists_against_prompts,
    count_prompts,
)
from sgl_prefill.http.rerank import Reranker, Serialiser, to_cohere, to_infinity
from sgl_prefill.http.rerank_request import RerankRequest
from sgl_prefill.http.scored_prompt import (
    LAST_EVENT,
    ReplyOptions,
    ScoredPrompt,
    UnscoredPrompt,
    chat_choice,
    check_reply_fields,
    completion_choice,
    envelope,
    event_of,
    generate_output,
    given_reply_fields,
    usage,
)
from sgl_prefill.http.scores import LabelScoringRequest
from sgl_prefill.http.shutdown import Ending
from sgl_prefill.http.text_offsets import with_offsets
from sgl_prefill.http.token_ids import shown
from sgl_prefill.startup import calibrations
from sgl_prefill.startup.secret import masked

if TYPE_CHECKING:
    from starlette.types import Scope

    from sgl_prefill.http.tokenizer_manager import PrefillTokenizerManager

SERVER = "sglang.srt.entrypoints.http_server"


class Replaced(NamedTuple):
    """A route of SGLang's that this package serves."""

    method: str
    path: str
    stock_endpoint: str  # dotted path of SGLang's endpoint function
    reason: str


ROUTES: tuple[Replaced, ...] = tuple(
    Replaced(method, path, f"{SERVER}.{endpoint}", reason)
    for method, path, endpoint, reason in (
        ("POST", "/v1/completions", "openai_v1_completions", "labels and prompt_parts; max_tokens 1 by default"),
        ("POST", "/v1/chat/completions", "openai_v1_chat_completions", "labels and keep; max_tokens 1 by default"),
        ("POST", "/detokenize", "openai_v1_detokenize", "an id outside the vocabulary would be a 500"),
        ("POST", "/v1/detokenize", "openai_v1_detokenize", "an id outside the vocabulary would be a 500"),
        ("POST", "/tokenize", "openai_v1_tokenize", "a long text would stop all other requests"),
        ("POST", "/v1/tokenize", "openai_v1_tokenize", "a long text would stop all other requests"),
        ("POST", "/generate", "generate_request", "labels and prompt_parts"),
        (
            "POST",
            "/v1/rerank",
            "v1_rerank_request",
            "any causal model reranks, not only one with a reranker's template",
        ),
        ("POST", "/v1/score", "v1_score_request", "calibration, raw_scores, top_alternatives"),
        ("GET", "/health", "health_generate", "a probe would wait a second, and longer beside a long step"),
        ("GET", "/server_info", "server_info", "every client may see it, and SGLang shows keys"),
        ("GET", "/get_server_info", "get_server_info", "every client may see it, and SGLang shows keys"),
        ("GET", "/v1/models", "available_models", "TypeSafe's clients read another shape"),
    )
)

# The routes of SGLang that a prefill-only server keeps, besides those that it replaces. Its warm-up, SGLang's frontend, its
# benchmark and the gateway use no others.
KEPT_ROUTES = frozenset(
    {
        *("/v1/embeddings", "/v1/classify", "/classify", "/encode", "/v1/models/{model:path}"),
        *("/health_generate", "/ready", "/ping", "/model_info", "/get_model_info"),
        *("/v1/loads", "/flush_cache", "/abort_request", "/start_profile", "/stop_profile"),
        "/openapi.json",
    }
)
BOUNDED_ROUTES = ("/v1/embeddings", "/v1/classify", "/classify", "/encode")  # kept ones whose bodies hold prompts
CHAT_PATH = "/v1/chat/completions"
# Limits of an error message about a body that does not match the schema.
MOST_PROBLEMS, LONGEST_PROBLEM = 10, 300


class PrefillRoutes:
    """The endpoint functions. SGLang's serving objects are read per request, since it creates them later."""

    def __init__(self, app: Any, config: PrefillConfig) -> None:
        self._app = app  # whose `state` holds SGLang's serving objects
        self._config = config
        self._stock: dict[str, Callable[..., Awaitable[Any]]] = {
            route.path: pkgutil.resolve_name(route.stock_endpoint) for route in ROUTES
        }
        self._scorer: LabelScorer | None = None
        self.prefixes = Prefixes(most_expanded_bytes=config.max_body_bytes)
        self._probe: asyncio.Future[Any] | None = None
        self.decisions = DecisionRoutes(
            lambda: Decider(self._manager, self.scorer), lambda: self._app.state.systemone_serving
        )
        self._reranker = Reranker(config, lambda: self.scorer, self._stock["/v1/rerank"], self._reply_options)

    def stock_endpoint(self, path: str) -> Callable[..., Awaitable[Any]]:
        """SGLang's endpoint of a replaced route."""
        return self._stock[path]

    @property
    def _manager(self) -> PrefillTokenizerManager:
        return http_server._global_state.tokenizer_manager  # type: ignore[no-any-return]

    @property
    def scorer(self) -> LabelScorer:
        if self._scorer is None:
            self._scorer = LabelScorer(self._manager)
        return self._scorer

    @functools.cached_property
    def cuts(self) -> CutRequests:
        return CutRequests(self._manager)

    def _default_max_tokens(self, stock_default: int | None) -> int | None:
        return stock_default if self._config.allow_generation else 1

    def _served(self, model: str) -> str:
        """Returns the name of the served model, whatever name the client gave. An adapter's name after a colon stays."""
        served = self._manager.served_model_name
        _, colon, adapter = model.partition(":")
        return served if model == served or not colon else f"{served}:{adapter}"

    async def completions(self, request: protocol.LabelCompletionRequest, raw_request: Request) -> Any:
        protocol.check_keys(request)
        request.model = self._served(request.model)
        serving = self._app.state.openai_serving_completion
        answers = protocol.allowed_answers(request)
        reply = self._reply_options(request, answers is not None)
        if answers is None:
            if request.max_tokens is None:
                request.max_tokens = self._default_max_tokens(CompletionRequest.model_fields["max_tokens"].default)
            protocol.check_penalties(request, request.max_tokens)
            if request.echo and request.logprobs == 0:
                request.logprobs = 1  # SGLang fails at 0 with echo
            protocol.pass_deadline(request)
            parts = await self.cuts.of_completion(serving, request)
            found = await serving.handle_request(request, raw_request)
            found = found if request.logprobs is None else with_offsets(found)
            return model_json_response(with_parts(found, request, parts))
        protocol.check_label_request(request, request.max_tokens)
        request.max_tokens = 1
        parts = await self.cuts.of_completion(serving, request)
        with _value_errors_are_bad_requests():
            obj = self._request_of(serving, request, raw_request, parts)
            scored = await self.scorer.score_what_fits(obj, answers, raw_request, request.deadline_ms, reply)
        choices = await self.scorer.written(scored, functools.partial(completion_choice, logprobs=request.logprobs))
        return _openai_reply(request, choices, scored)

    async def chat_completions(self, request: protocol.LabelChatCompletionRequest, raw_request: Request) -> Any:
        protocol.check_keys(request)
        request.model = self._served(request.model)
        serving = self._app.state.openai_serving_chat
        self.cuts.check_texts_of_chat(request)
        answers = protocol.allowed_answers(request)
        reply = self._reply_options(request, answers is not None)
        max_tokens = request.max_completion_tokens if request.max_completion_tokens is not None else request.max_tokens
        if answers is None:
            if max_tokens is None:
                request.max_completion_tokens = max_tokens = self._default_max_tokens(None)
            protocol.check_penalties(request, max_tokens)
            protocol.pass_deadline(request)
            parts = await self._fill(serving, request, raw_request)
            found = await serving.handle_request(request, raw_request)
            return model_json_response(with_parts(found, request, parts))
        protocol.check_label_request(request, max_tokens)
        request.max_tokens, request.max_completion_tokens = None, 1
        parts = await self._fill(serving, request, raw_request)
        with _value_errors_are_bad_requests():
            obj = self._request_of(serving, request, raw_request, parts)
            scored = await self.scorer.score(obj, answers, raw_request, request.deadline_ms, reply)
        name = "delta" if request.stream else "message"
        top_logprobs = (request.top_logprobs or 0) if request.logprobs else None
        write = functools.partial(chat_choice, top_logprobs=top_logprobs, message_field=name)
        choices = await self.scorer.written(scored, write)
        return _openai_reply(request, choices, scored)

    async def generate(self, obj: protocol.LabelGenerateReqInput, request: Request) -> Any:
        answers = protocol.allowed_answers(obj)
        reply = self._reply_options(obj, answers is not None)
        attach_parts(obj, await self.cuts.of_generate(obj))
        if answers is None:
            protocol.check_penalties(obj, None)
            protocol.pass_generate_deadline(obj)
            return await http_server.serve_generate_request(obj, request)
        check_lists_against_prompts(obj)
        protocol.check_generate_label_request(obj)
        is_batch, streams = count_prompts(obj) is not None, obj.stream
        with _value_errors_are_bad_requests():
            scored = await self.scorer.score_what_fits(obj, answers, request, obj.deadline_ms, reply)
        outputs = await self.scorer.written(scored, lambda _, one: generate_output(one))
        body: Any = outputs if is_batch else outputs[0]
        return _stream([body]) if streams else orjson_response(body)

    async def score(self, request: LabelScoringRequest, raw_request: Request) -> Any:
        check_reply_fields(request, has_answers=True)
        request.model = self._served(request.model)
        if not given_reply_fields(request) and scores.needs_sglangs(request, self._manager):
            return await self._stock["/v1/score"](request, raw_request)
        with _value_errors_are_bad_requests():
            scores.check(request, self._manager)
            obj, reply = scores.prompts_of(request), self._reply_options(request)
            scored: list[ScoredPrompt | UnscoredPrompt] = []
            if obj is not None:
                answers = AllowedAnswers(None, request.label_token_ids)
                scored = await self.scorer.score_what_fits(obj, answers, raw_request, reply=reply)
            found = scores.reply_of(request, scored, self._manager)
        return Response(orjson.dumps(found), media_type="application/json")

    async def rerank(self, request: RerankRequest, raw_request: Request) -> Any:
        return await self._rerank(request, raw_request, None)

    async def rerank_of_jina(self, request: RerankRequest, raw_request: Request) -> Any:
        """/rerank, which SGLang does not have."""
        return await self._rerank(request, raw_request, to_infinity)

    async def rerank_of_cohere(self, request: RerankRequest, raw_request: Request) -> Any:
        """/v2/rerank, which SGLang does not have."""
        return await self._rerank(request, raw_request, to_cohere)

    async def _rerank(self, request: RerankRequest, raw_request: Request, serialise: Serialiser | None) -> Any:
        with _value_errors_are_bad_requests():
            return await self._reranker.answer(self._app.state.openai_serving_rerank, request, raw_request, serialise)

    async def health(self, raw_request: Request) -> Response:
        """At once, as the last probe of the scheduler found it; SGLang's endpoint, which waits for it, is the next one."""
        manager = self._manager
        if manager.gracefully_exit or manager.server_status == ServerStatus.Starting:
            return Response(status_code=HTTPStatus.SERVICE_UNAVAILABLE)
        if self._probe is None or self._probe.done():
            self._probe = asyncio.ensure_future(self._ask_scheduler(Request(raw_request.scope, _client_stays)))
        is_healthy = manager.server_status != ServerStatus.UnHealthy
        return Response(status_code=HTTPStatus.OK if is_healthy else HTTPStatus.SERVICE_UNAVAILABLE)

    async def _ask_scheduler(self, request: Request) -> None:
        """SGLang's probe, whose time-out is by the wall clock: it would wait for a day where that is set back by one."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._stock["/health"](request), 2 * http_server.HEALTH_CHECK_TIMEOUT)

    async def freeze_gc(self) -> Response:
        """Does nothing: SGLang asks for it after the warm-up, which has frozen all processes. Again it would keep garbage."""
        return Response()

    async def server_info(self) -> Response:
        reply: Response = orjson_response(masked(await self._stock["/server_info"]()))
        return reply

    async def models(self) -> Response:
        """SGLang's list, and the same in TypeSafe's format."""
        found = (await self._stock["/v1/models"]()).model_dump()
        made = (time.strftime("%Y-%m-%d", time.gmtime(one["created"])) for one in found["data"])
        shown = [
            {"name": one["id"], "description": f"served from {one['root']}", "release_date": day}
            for one, day in zip(found["data"], made, strict=True)
        ]
        reply: Response = orjson_response({**found, "models": shown})
        return reply

    async def hold_prefix(self, request: PrefixRequest, raw_request: Request) -> Any:
        """/v1/prefixes, which SGLang does not have: computes a prefix, and gives it an id."""
        kind, value = request.content()
        caller = await self._manager.caller_of(raw_request)
        if kind == MESSAGES:
            value = (await raw_request.json())[MESSAGES]  # as sent
        prefix = self.prefixes.make(self._manager.tenant_of(caller) + caller.salt, kind, value, request.ttl_s)
        if kind == MESSAGES:
            chat = protocol.LabelChatCompletionRequest(model=self._served("default"), messages=value)
            self.cuts.check_texts_of_chat(chat)
            await self._fill(self._app.state.openai_serving_chat, chat, raw_request)
            with _value_errors_are_bad_requests():
                obj = self._request_of(self._app.state.openai_serving_chat, chat, raw_request, None)
        else:
            obj = GenerateReqInput(**{kind: value})
        obj.sampling_params = {"max_new_tokens": 0, "temperature": 0}
        output = await self._manager.generate_request(obj, raw_request).__anext__()
        self.prefixes.hold(prefix)
        facts = {name: output["meta_info"].get(name) for name in ("prompt_tokens", "cached_tokens", "kept_tokens")}
        return orjson_response({"id": prefix.id, "object": "prefix", "made_of": kind, **facts, "ttl_s": request.ttl_s})

    async def detokenize(self, request: DetokenizeRequest, raw_request: Request) -> Any:
        vocab_size = self._manager.model_config.vocab_size
        is_batch = bool(request.tokens) and isinstance(request.tokens[0], list)
        for tokens in request.tokens if is_batch else [request.tokens]:
            if not isinstance(tokens, list):
                raise BadRequestError(f"tokens holds {tokens!r} beside lists: give one list of ids, or a list of lists")
            if tokens:
                check_ids_in_vocabulary(tokens, vocab_size, "tokens")
        return await self._stock["/detokenize"](request, raw_request)

    async def tokenize(self, request: TokenizeRequest, raw_request: Request) -> Any:
        if request.messages is not None:
            chats = self._app.state.openai_serving_tokenize.chat_serving
            await conversations.render_long_chat(chats, request.to_chat_completion_request(), raw_request)
        texts = [request.prompt] if isinstance(request.prompt, str) else request.prompt
        if texts is None or sum(map(len, texts)) < OFF_LOOP_CHARACTERS:
            return await self._stock["/tokenize"](request, raw_request)
        ids = await self._manager.encode_in_thread(texts, add_special_tokens=request.add_special_tokens)
        counts = [len(of_text) for of_text in ids]
        one = isinstance(request.prompt, str)
        return orjson_response(
            {
                "tokens": ids[0] if one else ids,
                "count": counts[0] if one else counts,
                "max_model_len": self._manager.tokenizer.model_max_length,
            }
        )

    async def _fill(
        self, serving: Any, request: protocol.LabelChatCompletionRequest, raw_request: Request
    ) -> PartsOfPrompts:
        with _value_errors_are_bad_requests():
            return await self.cuts.of_chat(serving, request, raw_request)

    def _request_of(self, serving: Any, request: Any, raw_request: Request, parts: PartsOfPrompts) -> GenerateReqInput:
        """Returns SGLang's request for the prompts of an OpenAI request."""
        if problem := serving._validate_request(request):
            raise BadRequestError(problem)
        obj: GenerateReqInput
        obj, _ = serving._convert_to_internal_request(request, raw_request)
        attach_parts(obj, parts)
        return obj

    def _reply_options(self, request: Any, has_answers: bool = True) -> ReplyOptions:
        """Raises BadRequestError for reply fields without answers, wrong values and an unknown calibration."""
        check_reply_fields(request, has_answers)
        calibration = None
        if request.calibration is not None:
            calibration = calibrations.by_name(self._manager.calibrations, request.calibration)
        return ReplyOptions(calibration, request.raw_scores, request.top_alternatives or 0)


def install(app: FastAPI, config: PrefillConfig, ending: Ending) -> None:
    """Replaces SGLang's endpoints in its FastAPI app, and verifies it. Raises SeamError if one is missing."""
    # SGLang answers errors with this class: one warning of 400 characters for each line of code that does.
    warnings.filterwarnings("ignore", "ORJSONResponse is deprecated")
    endpoints = PrefillRoutes(app, config)
    for route in ROUTES:
        found = [r for r in app.router.routes if _serves(r, route.path, endpoints.stock_endpoint(route.path))]
        if len(found) != 1:
            raise SeamError(
                f"SGLang's route {route.method} {route.path} is not where this package replaces it ({route.reason})"
            )
        app.router.routes.remove(found[0])
    app.router.routes[:] = [one for one in app.router.routes if paths_of(one) <= KEPT_ROUTES]
    bounded = [one for one in app.router.routes if isinstance(one, APIRoute) and one.path in BOUNDED_ROUTES]
    app.router.routes[:] = [one for one in app.router.routes if one not in bounded]
    n_stock = len(app.router.routes)
    checked = Bodies(lambda: endpoints._manager, endpoints.prefixes)
    app.router.route_class = route_class(checked, http_server.ORJSONRequest)
    only_json = [Depends(http_server.validate_json_request)]
    for path, endpoint in (
        ("/v1/completions", endpoints.completions),
        ("/v1/chat/completions", endpoints.chat_completions),
        ("/v1/score", endpoints.score),
        ("/rerank", endpoints.rerank_of_jina),
        ("/v2/rerank", endpoints.rerank_of_cohere),
        ("/v1/prefixes", endpoints.hold_prefix),
    ):
        app.post(path, dependencies=only_json, **api_docs.of(path))(endpoint)
    for prefix in ("", "/v1"):
        app.post(f"{prefix}/tokenize", dependencies=only_json)(endpoints.tokenize)
        app.post(f"{prefix}/detokenize", dependencies=only_json)(endpoints.detokenize)
    app.post("/v1/decisions", **api_docs.of("/v1/decisions"))(endpoints.decisions.openai)
    app.post("/v1/systemone", **api_docs.of("/v1/systemone"))(endpoints.decisions.typesafe)
    app.get("/v1/models")(endpoints.models)
    app.get("/health")(endpoints.health)
    app.get("/server_info")(endpoints.server_info)
    app.get("/get_server_info", include_in_schema=False)(endpoints.server_info)
    app.post("/freeze_gc", include_in_schema=False)(endpoints.freeze_gc)
    app.api_route("/generate", methods=["POST", "PUT"], **api_docs.of("/generate"))(endpoints.generate)
    app.api_route("/v1/rerank", methods=["POST", "PUT"], dependencies=only_json, **api_docs.of("/v1/rerank"))(
        endpoints.rerank
    )
    again: Any = app.api_route  # mypy does not know that it takes a route's own values
    for one in bounded:
        again(one.path, methods=one.methods, dependencies=one.dependencies, response_class=one.response_class)(
            one.endpoint
        )
    n_refused: Counter[str] = Counter()
    dashboard.add_routes(
        app, dashboard.Feed(lambda: http_server._global_state.tokenizer_manager, config, ending, n_refused)
    )
    dashboard.add_decisions_route(app, config, lambda: http_server._global_state.tokenizer_manager)
    api_docs.describe(app)
    # Before the kept routes, since requests are matched against one route after another.
    app.router.routes[:] = [*app.router.routes[n_stock:], *app.router.routes[:n_stock]]
    app.add_exception_handler(ValueError, answer_bad_request)
    app.add_exception_handler(RequestValidationError, _answer_invalid)
    heads.install()
    # Outside the middleware that SGLang adds later.
    build = app.build_middleware_stack

    def build_all() -> Middleware:
        return Middleware(dashboard.AskForKey(build()), config, ending, n_refused, Known(app))

    app.build_middleware_stack = build_all  # type: ignore[method-assign]
    for route in ROUTES:
        serving = [r.endpoint for r in app.router.routes if isinstance(r, Route) and r.path == route.path]
        if len(serving) != 1 or getattr(serving[0], "__self__", None) is not endpoints:
            raise SeamError(f"the route {route.method} {route.path} is not served by this package ({route.reason})")


class Known:
    """Tells whether a path is served. SGLang's metrics would count an unknown one under its own name."""

    def __init__(self, app: FastAPI) -> None:
        self._app = app
        self._paths = set().union(*map(paths_of, app.router.routes))  # others are added later, and some hold names

    def __call__(self, scope: Scope) -> bool:
        path: str = scope["path"]
        # Starlette sends a client from one of these to the other.
        paths = {path, path.rstrip("/")} if path.endswith("/") else {path, f"{path}/"}
        if paths & self._paths:
            return True
        return any(
            route.matches({**scope, "path": one})[0] == Match.FULL for route in self._app.router.routes for one in paths
        )


def paths_of(route: Any) -> set[str]:
    """The paths of an entry of FastAPI's list of routes, which may be an included router."""
    included = getattr(route, "original_router", None)
    return {route.path} if included is None else {one.path for one in included.routes}


async def _client_stays() -> dict[str, Any]:
    """Receives the end of an empty body, as often as it is asked."""
    return {"type": "http.request", "body": b"", "more_body": False}


async def _answer_invalid(request: Request, error: Exception) -> Response:
    """Answers a body that does not match the schema with the first problems by field. SGLang's handler names source files."""
    assert isinstance(error, RequestValidationError)
    problems = list(dict.fromkeys(_problem(one) for one in error.errors()))
    left = len(problems) - MOST_PROBLEMS
    text = "; ".join(problems[:MOST_PROBLEMS]) + (f"; and {left} more" if left > 0 else "")
    return await answer_bad_request(request, BadRequestError(text))


def _problem(error: dict[str, Any]) -> str:
    if error["type"] == "json_invalid":
        return f"the body is not JSON: {error['ctx']['error']} at character {error['loc'][-1]}"
    field = ".".join(str(part) for part in error["loc"] if part != "body") or "the request body"
    if error["type"] == "missing":
        return f"{field} is missing: this route needs it (/docs lists the fields)"
    text = f"{field} is {shown(error.get('input'))}: {error['msg']}"
    return text if len(text) <= LONGEST_PROBLEM else f"{text[:LONGEST_PROBLEM]}..."


def _serves(route: BaseRoute, path: str, endpoint: Callable[..., Any]) -> bool:
    return isinstance(route, Route) and route.path == path and route.endpoint is endpoint


async def answer_bad_request(request: Request, error: Exception) -> Response:
    status = error.status if isinstance(error, BadRequestError) else HTTPStatus.BAD_REQUEST
    reply: Response = orjson_response(Refusal(status, "BadRequestError", str(error)).flat, status)
    return reply


@contextmanager
def _value_errors_are_bad_requests() -> Iterator[None]:
    """SGLang's convention: a ValueError of its request path is the client's fault."""
    try:
        yield
    except BadRequestError:
        raise
    except ValueError as error:
        raise BadRequestError(str(error)) from error


def _openai_reply(
    request: Any, choices: list[dict[str, Any]], scored: Sequence[ScoredPrompt | UnscoredPrompt]
) -> Response:
    """The whole reply, or for a stream one chunk with everything (and one with the usage if requested)."""
    head = envelope(request, is_chunk=request.stream)
    if not request.stream:
        reply: Response = orjson_response({**head, "choices": choices, "usage": usage(scored)})
        return reply
    chunks: list[Any] = [{**head, "choices": choices}]
    if request.stream_options is not None and request.stream_options.include_usage:
        chunks.append({**head, "choices": [], "usage": usage(scored)})
    return _stream(chunks)


def _stream(chunks: list[Any]) -> StreamingResponse:
    async def events() -> AsyncIterator[bytes]:
        for chunk in chunks:
            yield event_of(chunk)
        yield LAST_EVENT

    return StreamingResponse(events(), media_type="text/event-stream")
