"""An engine in one thread of this process, stepped by its caller: SGLang's tokenizer manager, scheduler and detokenizer with this
package's routes, without HTTP, sockets or further processes. On a host a step uses all cores: a second Python thread would only
delay it.
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
from http import HTTPStatus
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
from sglang.srt.entrypoints.systemone.serving import SystemOneServing
from sglang.srt.managers.detokenizer_manager import DetokenizerManager
from sglang.srt.managers.io_struct import BatchEmbeddingOutput, BatchStrOutput, BatchTokenIDOutput, sock_recv, sock_send

from sgl_prefill.answer import Answer
from sgl_prefill.config import PrefillConfig
from sgl_prefill.core.job import PlannedRow
from sgl_prefill.entry import activation
from sgl_prefill.errors import BadRequestError, ConfigurationError
from sgl_prefill.http import decision_checkpoints
from sgl_prefill.http.error_format import as_the_path_has_it
from sgl_prefill.http.protocol import LabelChatCompletionRequest, LabelCompletionRequest, LabelGenerateReqInput
from sgl_prefill.http.rerank_request import RerankRequest
from sgl_prefill.http.routes import PrefillRoutes, answer_bad_request
from sgl_prefill.http.scores import LabelScoringRequest
from sgl_prefill.http.tokenizer_manager import PrefillTokenizerManager
from sgl_prefill.port.runner import at_start
from sgl_prefill.port.steps import silent_metrics
from sgl_prefill.startup.record import PACKS_WEIGHTS_KEY, StartRecord

if TYPE_CHECKING:
    from sglang.srt.server_args import PortArgs, ServerArgs

logger = logging.getLogger(__name__)

# Iterations of the event loop that `step` waits until a sent prompt is awaited. A prompt that fails in between never is.
MOST_TURNS = 10
WARM_UP_TOKENS = [10, 11, 12]


class Prompt(NamedTuple):
    tokens: Sequence[int]
    max_new_tokens: int | None


class _PromptsAreKnown(BaseException):
    """Ends a request that only tokenizes its prompts. A BaseException, so that no error handler catches it."""


@dataclasses.dataclass
class _Request:
    """State of the current task."""

    prompts: list[Prompt] | None  # collects the prompts of a request that does not run; None: the request runs
    planned: Iterator[PlannedRow]  # rows of the job's plan for its prompts


_request: contextvars.ContextVar[_Request] = contextvars.ContextVar("request")


class _Wire:
    """Queue with the interface of a socket, for both of SGLang's encodings. Objects are passed by reference: senders do not
    change them, and receivers read a request's state before the next step.
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
    """Sends requests to a scheduler in this process, or only tokenizes them."""

    def __init__(self, server_args: ServerArgs, port_args: PortArgs, *, config: PrefillConfig) -> None:
        self.sent = _Wire()
        self.n_not_awaited = 0  # sent prompts whose answers no task awaits yet
        self.planned: dict[str, PlannedRow] = {}  # by request id, until the scheduler reads it
        super().__init__(server_args, port_args, config=config)
        self.scheduler_info = {PACKS_WEIGHTS_KEY: False}  # until there is a scheduler
        most = config.max_input_length  # as far as is known before the start
        self.max_req_input_len = self.context_len if most is None else most + 1

    def init_ipc_channels(self, port_args: PortArgs) -> None:
        self.tokenizer_ipc_name = self.load_snapshot_reader = None

    def auto_create_handle_loop(self) -> None:
        """Starts no task and no signal handlers: `InProcessEngine.step` delivers the answers."""

    def _dispatch_to_scheduler(self, obj: Any) -> None:
        sock_send(self.sent, obj)

    async def _send_one_request(self, tokenized_obj: Any) -> None:
        if self._runs(tokenized_obj):
            await super()._send_one_request(tokenized_obj)

    async def _send_batch_request(self, tokenized_objs: list[Any]) -> None:
        run = [one for one in tokenized_objs if self._runs(one)]
        if run:
            await super()._send_batch_request(tokenized_objs)

    def _runs(self, tokenized: Any) -> bool:
        """Records the plan's row of a request that runs, else its prompt. Returns whether the request runs."""
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
        pass

    def detokenize(self, output: Any) -> Any:
        """Detokenizes a message of the scheduler's; messages without tokens pass through."""
        has_tokens = isinstance(output, BatchTokenIDOutput) and self.tokenizer is not None
        return self._request_dispatcher(output) if has_tokens else output


class InProcessEngine:
    """Answers requests as a server does. At most one per process.

    `prompts_of` needs no model. `answer` and `step` work after `start`, which loads it.
    """

    def __init__(self, config: PrefillConfig, server_args: ServerArgs) -> None:
        from sglang.srt.arg_groups.overrides import declare_resolution
        from sglang.srt.runtime_context import SpawnRanks, publish
        from sglang.srt.server_args import PortArgs

        activation.activate(config, "http")
        declare_resolution(server_args, "sgl_prefill", stat_loggers=silent_metrics.COLLECTORS)
        self._config, self._server_args = config, server_args
        # Its processes' parts are all here, and read one context; the scheduler's has ranks.
        publish(server_args, role="tokenizer", ranks=SpawnRanks(world_rank=0, gpu_id=0))
        self._port_args = PortArgs.init_new(server_args)
        make = functools.partial(SteppedTokenizerManager, config=config)
        self._manager, templates = init_tokenizer_manager(server_args, self._port_args, make)
        http_server.set_global_state(http_server._GlobalState(self._manager, templates, {}))
        serving = SimpleNamespace(
            openai_serving_completion=OpenAIServingCompletion(self._manager, templates),
            openai_serving_chat=(chats := self._manager.serving_chat_class(self._manager, templates)),
            systemone_serving=SystemOneServing(chats),
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
                ("/v1/decisions", Any, routes.decisions.answer_openai),
                ("/v1/systemone", Any, routes.decisions.answer_typesafe),
                ("/v1/embeddings", openai.EmbeddingRequest, http_server.openai_v1_embeddings),
            )
        }
        self._scheduler: Any = None
        self._detokenizer: Any = None
        self._answered = _Wire()
        self.n_prompt_tokens = self.n_cached_tokens = 0  # of all answered prompts

    @property
    def urls(self) -> list[str]:
        return list(self._endpoints)

    def start(self) -> StartRecord:
        """Loads the model and does the checks of a server's start. Raises SglPrefillError."""
        activation.activate(self._config, "detokenizer")
        # With metrics it would register the tokenizer manager's metrics again.
        from sglang.srt.runtime_context import get_observability

        with get_observability().override(enable_metrics=False):
            self._detokenizer = SteppedDetokenizer(self._server_args, self._port_args)
        parts, self._scheduler = build_scheduler(self._config, self._server_args)
        channels = self._scheduler.ipc_channels
        channels.send_to_detokenizer.socket = channels.send_to_tokenizer.socket = self._answered
        info = at_start.with_record(parts.runner, self._scheduler.get_init_info())
        self._manager.scheduler_info, self._manager.max_req_input_len = info, info["max_req_input_len"]
        if parts.steps.scheduling is not None:
            parts.steps.scheduling.planned = self._manager.planned
        asyncio.run(self._warm_up())
        gc.collect()
        gc.freeze()  # as a server after its warm-up: full collections skip all objects of the start
        return parts.record

    async def _warm_up(self) -> None:
        """Answers one request, for everything that is loaded at first use."""
        body: dict[str, Any] = {"input_ids": WARM_UP_TOKENS, "allowed_token_ids": WARM_UP_TOKENS}
        url = "/generate"
        if decision_checkpoints.is_one(self._manager.model_config):
            url, body = decision_checkpoints.WARM_UP
        elif not self._manager.is_generation:
            url, body = "/v1/embeddings", {"model": "default", "input": WARM_UP_TOKENS}
        answering = asyncio.ensure_future(self.answer(url, body))
        while not answering.done():
            await asyncio.sleep(0)
            await self.step()
        assert answering.result().is_ok, answering.result().body
        self.n_prompt_tokens = self.n_cached_tokens = 0

    async def prompts_of(self, url: str, body: dict[str, Any]) -> list[Prompt] | Answer:
        """Returns the prompts of a request in the order in which it sends them, or the answer of a refused request."""
        request = _Request([], iter(()))
        try:
            answer = await self._answer(url, body, request)
        except _PromptsAreKnown:
            assert request.prompts
            return request.prompts
        assert not answer.is_ok, "a request was answered without a prompt"
        return answer

    async def answer(self, url: str, body: dict[str, Any], planned: Sequence[PlannedRow] = ()) -> Answer:
        """Answers one request; another task must call `step` meanwhile. planned: the plan's row of each prompt, in order."""
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
        except Exception as error:  # fails this request only, as in a server
            logger.exception("a request failed")
            result = await _handled(fastapi.HTTPException(500, f"{type(error).__name__}: {error}"), raw_request)
        finally:
            _request.reset(token)
        body_bytes = bytes(result.body)
        if result.status_code >= HTTPStatus.BAD_REQUEST:
            body_bytes = as_the_path_has_it(url, result.status_code, body_bytes)
        return Answer(result.status_code, body_bytes)

    @torch.inference_mode()
    def _take_in(self) -> None:
        scheduler, sent = self._scheduler, self._manager.sent
        requests = [sock_recv(sent) for _ in range(len(sent))]
        scheduler.request_receiver.unwrap_pickle_wrapper(requests)
        scheduler.process_input_requests(requests)

    async def step(self) -> bool:
        """Passes sent requests to the scheduler, runs one step and delivers its answers. Returns whether a batch ran."""
        # SGLang drops a request's state with its answer: a task that sends several prompts must await all of them first.
        for _ in range(MOST_TURNS):
            if self._manager.n_not_awaited <= 0:
                break
            await asyncio.sleep(0)
        self._manager.n_not_awaited = 0
        self._take_in()
        has_run = step_scheduler(self._scheduler)
        while self._answered:
            output = self._detokenizer.detokenize(sock_recv(self._answered))
            if isinstance(output, (BatchStrOutput, BatchTokenIDOutput, BatchEmbeddingOutput)):
                for n_prompt, n_cached, reason in zip(
                    output.prompt_tokens, output.cached_tokens, output.finished_reasons, strict=True
                ):
                    if reason is not None:  # else a part of a generation
                        self.n_prompt_tokens += n_prompt
                        self.n_cached_tokens += n_cached
                await self._manager._handle_batch_output(output)
            else:
                self._manager._result_dispatcher(output)
        return has_run


def build_scheduler(config: PrefillConfig, server_args: ServerArgs) -> tuple[activation.Parts, Any]:
    """Returns (state of the hooks, SGLang's scheduler) after loading the model and the checks of a server's start.

    Raises SglPrefillError: ConfigurationError for more than one rank.
    """
    if server_args.tp_size > 1:
        raise ConfigurationError(
            f"--tp-size is {server_args.tp_size}, and here one process computes: leave it out, or start a server with it"
            " (sgl_prefill.batch asks servers with --base-url)"
        )
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import PortArgs

    parts = activation.activate(config, "scheduler")
    publish(server_args, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    return parts, Scheduler(server_args, PortArgs.init_new(server_args))


@torch.inference_mode()
def step_scheduler(scheduler: Any) -> bool:
    """Runs one turn of SGLang's event loop, without receiving requests. Returns whether a batch ran."""
    plan = scheduler.get_next_batch_to_run(running_batch=scheduler.running_batch, last_batch=scheduler.last_batch)
    scheduler.running_batch = plan.running_batch
    batch = plan.batch_to_run
    if batch:
        scheduler.process_batch_result(batch, scheduler.run_batch(batch))
    scheduler.last_batch = batch
    return bool(batch)


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
