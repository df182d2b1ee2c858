"""An engine in this process, stepped by its caller: SGLang's tokenizer manager, scheduler and detokenizer with our routes, and
neither HTTP nor sockets nor other processes between them.

One thread does everything, one after the other: on a host a step uses all cores, and a second thread of Python beside it would
only take turns with the one that starts its kernels.
"""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import functools
import gc
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import fastapi
import orjson
import pydantic
import torch
from fastapi.encoders import jsonable_encoder
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from sglang.srt.entrypoints import http_server
from sglang.srt.entrypoints.engine import init_tokenizer_manager
from sglang.srt.entrypoints.openai import protocol as openai
from sglang.srt.entrypoints.openai.serving_completions import OpenAIServingCompletion
from sglang.srt.entrypoints.openai.serving_embedding import OpenAIServingEmbedding
from sglang.srt.entrypoints.openai.serving_rerank import OpenAIServingRerank
from sglang.srt.entrypoints.openai.serving_score import OpenAIServingScore
from sglang.srt.managers.detokenizer_manager import DetokenizerManager
from sglang.srt.managers.io_struct import (
    BatchEmbeddingOutput,
    BatchStrOutput,
    BatchTokenIDOutput,
    sock_recv,
    sock_send,
)

from sgl_prefill.answer import Answer
from sgl_prefill.config import PrefillConfig
from sgl_prefill.core.job import PlannedRow
from sgl_prefill.entry import activation, scheduler_alone
from sgl_prefill.errors import BadRequestError
from sgl_prefill.http.error_format import with_nested_error
from sgl_prefill.http.protocol import LabelChatCompletionRequest, LabelCompletionRequest, LabelGenerateReqInput
from sgl_prefill.http.rerank_request import RerankRequest
from sgl_prefill.http.routes import PrefillRoutes, answer_bad_request
from sgl_prefill.http.scores import LabelScoringRequest
from sgl_prefill.http.tokenizer_manager import PrefillTokenizerManager
from sgl_prefill.port.steps import silent_metrics
from sgl_prefill.startup.record import PACKS_WEIGHTS_KEY, StartRecord

if TYPE_CHECKING:
    from sglang.srt.server_args import PortArgs, ServerArgs

logger = logging.getLogger(__name__)

# Of the event loop, from a prompt being sent to its answer being awaited. One that failed in between is never awaited.
MOST_TURNS = 10
WARM_UP_TOKENS = [10, 11, 12]


class Prompt(NamedTuple):
    """What a request makes the model read, and how much it may write."""

    tokens: Sequence[int]
    max_new_tokens: int | None


class _PromptsAreKnown(BaseException):
    """Ends a request that was sent for its prompts alone; nothing that answers an Exception sees it."""


@dataclasses.dataclass
class _Request:
    """What the current task is about."""

    prompts: list[Prompt] | None  # to be found; None: the request runs
    planned: Iterator[PlannedRow]  # of its prompts


_request: contextvars.ContextVar[_Request] = contextvars.ContextVar("request")


class _Wire:
    """In the place of a socket, for either of SGLang's encodings. Python objects are handed over as they are: nobody changes a
    message after it was sent, and what a message holds of a request's state is read before the next step.
    """

    def __init__(self) -> None:
        self._messages: deque[Any] = deque()

    def __len__(self) -> int:
        return len(self._messages)

    def send(self, data: bytes, flags: int = 0) -> None:
        self._messages.append(data)

    def recv(self, flags: int = 0) -> Any:
        return self._messages.popleft()

    def send_pyobj(self, obj: Any, flags: int = 0, protocol: int = 0) -> None:
        self._messages.append(obj)

    recv_pyobj = recv


class SteppedTokenizerManager(PrefillTokenizerManager):
    """Hands requests to a scheduler in this process, or finds out what their prompts are."""

    def __init__(self, server_args: ServerArgs, port_args: PortArgs, *, config: PrefillConfig) -> None:
        self.sent = _Wire()
        self.n_not_awaited = 0  # prompts that were sent, and whose answers nobody waits for yet
        self.planned: dict[str, PlannedRow] = {}  # by the id of a request, until the scheduler has taken it in
        super().__init__(server_args, port_args, config=config)
        self.scheduler_info = {PACKS_WEIGHTS_KEY: False}  # until there is a scheduler
        if config.max_input_length is not None:
            self.max_req_input_len = config.max_input_length + 1

    def init_ipc_channels(self, port_args: PortArgs) -> None:
        """Opens no sockets."""
        self.tokenizer_ipc_name = self.load_snapshot_reader = None

    def auto_create_handle_loop(self) -> None:
        """Starts no task and takes no signals: `InProcessEngine.step` hands the answers over."""

    def _dispatch_to_scheduler(self, obj: Any) -> None:
        sock_send(self.sent, obj)

    def _send_one_request(self, tokenized_obj: Any) -> None:
        if self._runs(tokenized_obj):
            super()._send_one_request(tokenized_obj)

    def _send_batch_request(self, tokenized_objs: list[Any]) -> None:
        run = [one for one in tokenized_objs if self._runs(one)]
        if run:
            super()._send_batch_request(tokenized_objs)

    def _runs(self, tokenized: Any) -> bool:
        """Takes down what the plan says of a request that runs, or its prompt where only that is asked for."""
        current = _request.get()
        if current.prompts is not None:
            current.prompts.append(Prompt(tokenized.input_ids, tokenized.sampling_params.max_new_tokens))
            return False
        self.n_not_awaited += 1
        if (planned := next(current.planned, None)) is not None:
            self.planned[tokenized.rid] = planned
        return True

    async def _wait_one_response(self, obj: Any, request: fastapi.Request | None = None) -> AsyncIterator[Any]:
        if _request.get().prompts is not None:
            raise _PromptsAreKnown
        self.n_not_awaited -= 1
        async for output in super()._wait_one_response(obj, request):
            yield output


class SteppedDetokenizer(DetokenizerManager):  # type: ignore[misc]
    """SGLang's detokenizer without sockets."""

    def init_ipc_channels(self, port_args: PortArgs, server_args: ServerArgs) -> None:
        """Opens no sockets."""

    def detokenize(self, output: Any) -> Any:
        """Does what SGLang's does with a message of the scheduler's; what is not for it passes through."""
        is_for_it = isinstance(output, BatchTokenIDOutput) and self.tokenizer is not None
        return self._request_dispatcher(output) if is_for_it else output


class InProcessEngine:
    """Answers requests as our server does, in one thread and one event loop. At most one a process.

    `prompts_of` needs no model and works from the beginning; `answer` and `step` work once `start` has loaded it.
    """

    def __init__(self, config: PrefillConfig, server_args: ServerArgs) -> None:
        from sglang.srt.server_args import PortArgs

        activation.activate(config, "http")
        server_args.override(source="sgl_prefill", stat_loggers=silent_metrics.COLLECTORS)
        self._config, self._server_args = config, server_args
        self._port_args = PortArgs.init_new(server_args)
        make = functools.partial(SteppedTokenizerManager, config=config)
        self._manager, templates = init_tokenizer_manager(server_args, self._port_args, make)
        http_server.set_global_state(http_server._GlobalState(self._manager, templates, {}))
        serving = SimpleNamespace(
            openai_serving_completion=OpenAIServingCompletion(self._manager, templates),
            openai_serving_chat=self._manager.serving_chat_class(self._manager, templates),
            openai_serving_embedding=OpenAIServingEmbedding(self._manager, templates),
            openai_serving_score=OpenAIServingScore(self._manager),
            openai_serving_rerank=OpenAIServingRerank(self._manager, templates),
        )
        self._app = SimpleNamespace(state=serving)
        routes = PrefillRoutes(self._app, config)
        self._endpoints: dict[str, tuple[pydantic.TypeAdapter[Any], Callable[..., Awaitable[Any]]]] = {
            url: (pydantic.TypeAdapter(request), endpoint)
            for url, request, endpoint in (
                ("/v1/completions", LabelCompletionRequest, routes.completions),
                ("/v1/chat/completions", LabelChatCompletionRequest, routes.chat_completions),
                ("/generate", LabelGenerateReqInput, routes.generate),
                ("/v1/score", LabelScoringRequest, routes.score),
                ("/v1/rerank", RerankRequest, routes.rerank),
                ("/v2/rerank", RerankRequest, routes.rerank_of_cohere),
                ("/v1/embeddings", openai.EmbeddingRequest, http_server.openai_v1_embeddings),
            )
        }
        self._scheduler: Any = None
        self._detokenizer: Any = None
        self._answered = _Wire()
        self.n_prompt_tokens = self.n_cached_tokens = 0  # of all prompts that were answered

    @property
    def urls(self) -> list[str]:
        return list(self._endpoints)

    def start(self) -> StartRecord:
        """Loads the model, and does everything else that a server's start does. Raises what that raises."""
        activation.activate(self._config, "detokenizer")
        # With metrics it would register a second time what the tokenizer manager has registered.
        without_metrics = SimpleNamespace(**{**vars(self._server_args), "enable_metrics": False})
        self._detokenizer = SteppedDetokenizer(without_metrics, self._port_args)
        parts, self._scheduler = scheduler_alone.build(self._config, self._server_args)
        channels = self._scheduler.ipc_channels
        channels.send_to_detokenizer.socket = channels.send_to_tokenizer.socket = self._answered
        info = self._scheduler.get_init_info()
        self._manager.scheduler_info, self._manager.max_req_input_len = info, info["max_req_input_len"]
        if parts.steps.scheduling is not None:
            parts.steps.scheduling.planned = self._manager.planned
        asyncio.run(self._warm_up())
        gc.collect()
        gc.freeze()  # as a server does once it has warmed up: full collections pass over what has been loaded
        return parts.record

    async def _warm_up(self) -> None:
        """Answers one request, as a server does before it is healthy: what is made at first use is there from now on."""
        body: dict[str, Any] = {"input_ids": WARM_UP_TOKENS, "allowed_token_ids": WARM_UP_TOKENS}
        url = "/generate"
        if not self._manager.is_generation:
            url, body = "/v1/embeddings", {"model": "default", "input": WARM_UP_TOKENS}
        answering = asyncio.ensure_future(self.answer(url, body))
        while not answering.done():
            await asyncio.sleep(0)
            await self.step()
        assert answering.result().is_ok, answering.result().body
        self.n_prompt_tokens = self.n_cached_tokens = 0

    async def prompts_of(self, url: str, body: dict[str, Any]) -> list[Prompt] | Answer:
        """Returns what a request makes the model read, in the order in which it sends its prompts; the answer where it would
        be refused."""
        request = _Request([], iter(()))
        try:
            answer = await self._answer(url, body, request)
        except _PromptsAreKnown:
            assert request.prompts
            return request.prompts
        assert not answer.is_ok, "a request was answered without a prompt"
        return answer

    async def answer(self, url: str, body: dict[str, Any], planned: Sequence[PlannedRow] = ()) -> Answer:
        """Returns the answer to one request, while others call `step`. planned: of its prompts, in their order."""
        return await self._answer(url, body, _Request(None, iter(planned)))

    async def _answer(self, url: str, body: dict[str, Any], current: _Request) -> Answer:
        token = _request.set(current)
        raw_request = fastapi.Request(_scope(url, self._app), _receive_nothing)
        try:
            adapter, endpoint = self._endpoints[url]
            result = await endpoint(adapter.validate_python(body), raw_request)
            if not isinstance(result, Response):
                return Answer(200, orjson.dumps(jsonable_encoder(result)))
        except pydantic.ValidationError as error:
            problems = [{**problem, "loc": ("body", *problem["loc"])} for problem in error.errors()]
            result = await _handled(RequestValidationError(problems, body=body), raw_request)
        except BadRequestError as error:
            result = await answer_bad_request(raw_request, error)
        except fastapi.HTTPException as error:
            result = await _handled(error, raw_request)
        except Exception as error:  # of this request alone: the others go on, as they do in a server
            logger.exception("a request failed")
            result = await _handled(fastapi.HTTPException(500, f"{type(error).__name__}: {error}"), raw_request)
        finally:
            _request.reset(token)
        body_bytes = bytes(result.body)
        return Answer(result.status_code, with_nested_error(body_bytes) if result.status_code >= 400 else body_bytes)

    @torch.inference_mode()
    def _take_in(self) -> None:
        scheduler, sent = self._scheduler, self._manager.sent
        requests = [sock_recv(sent) for _ in range(len(sent))]
        scheduler.request_receiver.unwrap_pickle_wrapper(requests)
        scheduler.process_input_requests(requests)

    async def step(self) -> bool:
        """Takes in what was sent, runs one step and hands out its answers. Returns whether there was anything to run."""
        # SGLang forgets a request with its answer: who has sent several prompts must have asked for all of them by then.
        for _ in range(MOST_TURNS):
            if self._manager.n_not_awaited <= 0:
                break
            await asyncio.sleep(0)
        self._manager.n_not_awaited = 0
        self._take_in()
        has_run = scheduler_alone.step(self._scheduler)
        while self._answered:
            output = self._detokenizer.detokenize(sock_recv(self._answered))
            if isinstance(output, (BatchStrOutput, BatchTokenIDOutput, BatchEmbeddingOutput)):
                for n_prompt, n_cached, reason in zip(
                    output.prompt_tokens, output.cached_tokens, output.finished_reasons, strict=True
                ):
                    if reason is not None:  # a generation tells of itself meanwhile
                        self.n_prompt_tokens += n_prompt
                        self.n_cached_tokens += n_cached
                await self._manager._handle_batch_output(output)
            else:
                self._manager._result_dispatcher(output)
        return has_run


async def _handled(error: Exception, raw_request: fastapi.Request) -> Response:
    """Answers an error as SGLang's HTTP server does."""
    handler: Any = http_server.app.exception_handlers[type(error)]
    response: Response = await handler(raw_request, error)
    return response


def _scope(url: str, app: Any) -> dict[str, Any]:
    return {
        "type": "http",
        "method": "POST",
        "path": url,
        "root_path": "",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        "server": ("127.0.0.1", 0),
        "scheme": "http",
        "app": app,
    }


async def _receive_nothing() -> dict[str, Any]:
    return {"type": "http.request", "body": b"", "more_body": False}
