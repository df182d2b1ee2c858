"""Reranking with any causal language model: P(yes) that a document answers the query, one prefill a document.

SGLang reranks with a causal model only if its chat template is a reranker's; for others it asks for an embedding model.
Where the query stands before the document, all documents of a call share it in the prefix cache.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

import orjson
import pydantic
from fastapi.responses import Response, StreamingResponse
from sglang.srt.entrypoints.openai.protocol import V1RerankReqInput
from sglang.srt.managers.io_struct import GenerateReqInput

from sgl_prefill.api import reply_options
from sgl_prefill.api.answers import usage
from sgl_prefill.api.error_format import refusal_of, with_nested_error
from sgl_prefill.api.label_scoring import AllowedAnswers, LabelScorer
from sgl_prefill.api.reply_options import PLAIN, ReplyOptions
from sgl_prefill.api.rerank_replies import Reply, Scored, Shape
from sgl_prefill.api.rerank_request import RerankRequest, understood
from sgl_prefill.api.scored_prompt import ScoredPrompt
from sgl_prefill.core import rerank_template
from sgl_prefill.errors import BadRequestError

if TYPE_CHECKING:
    import fastapi

    from sgl_prefill.api.tokenizer_manager import PrefillTokenizerManager
    from sgl_prefill.config import PrefillConfig


class Reranker:
    """Answers rerank requests, by a prompt of ours or by SGLang's own handler.

    Args:
        scorer: made late, as SGLang makes what it needs.
        stock_endpoint: SGLang's.
        reply_options: finds what a request asks for besides a score; the second argument is HTTP's request.
    """

    def __init__(
        self,
        config: PrefillConfig,
        scorer: Callable[[], LabelScorer],
        stock_endpoint: Callable[..., Awaitable[Any]],
        reply_options: Callable[[RerankRequest, Any], Awaitable[ReplyOptions]],
    ) -> None:
        given = config.rerank_template
        self._asked_for = None if given is None else rerank_template.load(given)
        self._template = self._asked_for or rerank_template.PLAIN
        self._answers = AllowedAnswers(list(self._template.labels), None)
        self._scorer, self._stock_endpoint, self._reply_options = scorer, stock_endpoint, reply_options

    async def answer(
        self, serving: Any, request: RerankRequest, raw_request: fastapi.Request, shape: Shape | None
    ) -> Any:
        """Returns the reply, or a stream of it. Raises BadRequestError; what scoring raises passes through.

        Args:
            serving: SGLang's object for its own handler.
            shape: None for /v1/rerank: SGLang's handler answers there as in SGLang, and ours by who asks.
        """
        manager = serving.tokenizer_manager
        reply_options.check(request, has_answers=True)
        if self._asked_for is None and not needs_our_prompt(serving, request):
            return await self._by_sglang(manager, request, raw_request, shape or Shape.SGLANG)
        if not manager.is_generation:
            raise BadRequestError(
                "this server was started with --rerank-template, which asks a causal language model, and its model is none: it"
                " serves without that flag"
            )
        if request.is_multimodal():
            raise BadRequestError("this model reranks text only: give the query and the documents as strings")
        asked = understood(request)
        if asked.instruction is not None and not self._template.takes_instruction:
            raise BadRequestError("this server's --rerank-template has no place for an instruction: leave it out")
        prompts = self._template.prompts(asked.instruction, asked.query, asked.passages)
        reply = Reply(shape or Shape.of_v1(request), request, asked, manager.served_model_name)
        options = await self._reply_options(request, raw_request)
        if request.stream:
            events = self._events(manager, prompts, reply, options, raw_request)
            return StreamingResponse(events, media_type="text/event-stream")
        obj = GenerateReqInput(text=prompts)
        scored = await self._scorer().score(obj, self._answers, raw_request, reply=options)
        return _json(reply.whole([_scored(index, one) for index, one in enumerate(scored)], _usage(scored)))

    async def _by_sglang(
        self, manager: PrefillTokenizerManager, request: RerankRequest, raw_request: fastapi.Request, shape: Shape
    ) -> Any:
        """SGLang scores what it has scores for; of images its own reply is the only one."""
        if names := reply_options.given(request):
            remedy = ", or start the server with --rerank-template" if manager.is_generation else ""
            raise BadRequestError(
                f"{names}: SGLang's own handler, which serves this model, has a score of a document and no more: leave it"
                f" out{remedy}"
            )
        if request.is_multimodal():
            try:
                return await self._stock_endpoint(
                    V1RerankReqInput(**request.model_dump(exclude_none=True)), raw_request
                )
            except pydantic.ValidationError as error:
                raise BadRequestError(str(error)) from error
        asked = understood(request)
        if request.stream:
            raise BadRequestError(
                "stream is true, and SGLang's own handler, which serves this model, scores all documents at once: leave it out,"
                " or start the server with --rerank-template"
            )
        stock = V1RerankReqInput(
            query=asked.query, documents=asked.passages, instruct=asked.instruction, return_documents=False
        )
        found = await self._stock_endpoint(stock, raw_request)
        if isinstance(found, Response):
            return found
        scored = [Scored(one.index, one.score, one.meta_info) for one in found]
        return _json(Reply(shape, request, asked, manager.served_model_name).whole(scored, usage_of_sglangs(scored)))

    async def _events(
        self,
        manager: PrefillTokenizerManager,
        prompts: list[str],
        reply: Reply,
        options: ReplyOptions,
        raw_request: fastapi.Request,
    ) -> AsyncIterator[bytes]:
        """Yields each document as it is scored, then the whole reply. Whoever reads no more ends what is not scored yet."""
        obj = GenerateReqInput(text=prompts)
        found: asyncio.Queue[tuple[int, ScoredPrompt] | Exception] = asyncio.Queue()
        asking = asyncio.create_task(self._ask(obj, options, raw_request, found))
        scored: dict[int, ScoredPrompt] = {}
        try:
            while len(scored) < len(prompts):
                one = await found.get()
                if isinstance(one, Exception):
                    raise one
                place, scored[place] = one
                yield _event(reply._replace(shape=Shape.JINA).result(_scored(*one)))
            in_order = [scored[place] for place in range(len(prompts))]
            yield _event(reply.whole([_scored(*one) for one in enumerate(in_order)], _usage(in_order)))
        except Exception as error:
            if not scored:  # nothing has been sent: the answer is a status
                raise
            yield b"data: " + with_nested_error(orjson.dumps(refusal_of(error).flat)) + b"\n\n"
        finally:
            if asking.done():
                pass
            elif obj.rid is None:  # nothing has been sent to the scheduler
                asking.cancel()
            else:  # not cancelled: SGLang ends what it still knows, and forgets what is cancelled
                manager.abort_request(obj.rid)
        yield b"data: [DONE]\n\n"

    async def _ask(
        self,
        obj: GenerateReqInput,
        options: ReplyOptions,
        raw_request: fastapi.Request,
        found: asyncio.Queue[tuple[int, ScoredPrompt] | Exception],
    ) -> None:
        """Puts what is scored, or why it cannot be, where the stream finds it: a task of its own, which outlives its reader."""
        try:
            async for one in self._scorer().score_each(obj, self._answers, raw_request, options):
                found.put_nowait(one)
        except Exception as error:
            found.put_nowait(error)


def needs_our_prompt(serving: Any, request: RerankRequest) -> bool:
    """Tells whether SGLang's own handler would refuse: a generative model without a reranker's chat template."""
    from sglang.srt.entrypoints.openai.serving_rerank import _detect_rerank_backend

    manager = serving.tokenizer_manager
    template = getattr(manager.tokenizer, "chat_template", None)
    backend = _detect_rerank_backend(
        request=request,
        chat_template=template if isinstance(template, str) else None,
        model_path=manager.model_config.model_path,
    )
    return bool(manager.is_generation) and backend == "cross_encoder"


def usage_of_sglangs(scored: Sequence[Scored]) -> dict[str, Any] | None:
    """Counts what SGLang's own handler has computed, as far as it says so."""
    counts = [(one.meta_info or {}).get("prompt_tokens") for one in scored]
    known = [count for count in counts if count is not None]
    return {"prompt_tokens": sum(known), "total_tokens": sum(known)} if len(known) == len(counts) else None


def _usage(scored: Sequence[ScoredPrompt]) -> dict[str, Any]:
    """Counts prompts alone: a score is no token."""
    counted = usage(list(scored))
    return {**counted, "completion_tokens": 0, "total_tokens": counted["prompt_tokens"]}


def _scored(index: int, one: ScoredPrompt) -> Scored:
    """The first label is the answer of a document that is relevant."""
    score, besides = one.distribution.probabilities[0], dict[str, Any]()
    if one.calibrated is not None:
        besides["probability"], score = score, one.calibrated[0]
    if one.options != PLAIN:
        besides["label_scores"] = one.labels_to_json()
    return Scored(index, score, besides=besides)


def _json(shown: Any) -> Response:
    return Response(orjson.dumps(shown), media_type="application/json")


def _event(shown: Any) -> bytes:
    return b"data: " + orjson.dumps(shown) + b"\n\n"
