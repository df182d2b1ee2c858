"""Reranking with any causal language model: P(yes) that a document answers the query, one prefill per document.

SGLang reranks with a causal model only if its chat template is a reranker's; for others it requires an embedding model.
Where the query stands before the document, all documents of a call share it in the prefix cache.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson
import pydantic
from fastapi.responses import Response, StreamingResponse
from sglang.srt.entrypoints.openai.protocol import V1RerankReqInput
from sglang.srt.managers.io_struct import GenerateReqInput

from sgl_prefill.core import rerank_template
from sgl_prefill.errors import BadRequestError
from sgl_prefill.http.error_format import refusal_of, with_nested_error
from sgl_prefill.http.label_scoring import AllowedAnswers, LabelScorer
from sgl_prefill.http.rerank_cuts import Fitted, fit
from sgl_prefill.http.rerank_request import CheckedRerank, RerankRequest, checked
from sgl_prefill.http.scored_prompt import (
    LAST_EVENT,
    PLAIN,
    ReplyOptions,
    ScoredPrompt,
    check_reply_fields,
    event_of,
    given_reply_fields,
    usage,
)

if TYPE_CHECKING:
    import fastapi

    from sgl_prefill.config import PrefillConfig
    from sgl_prefill.http.tokenizer_manager import PrefillTokenizerManager


DOCUMENTS_PER_SEARCH_UNIT = 100  # Cohere's unit of billing


@dataclasses.dataclass(frozen=True)
class Result:
    index: int  # in the request's documents
    score: float
    document: str | dict[str, Any]  # as the client sent it
    meta_info: dict[str, Any] | None  # from SGLang's own handler
    extra: dict[str, Any]  # additional fields by request


class Reply(NamedTuple):
    results: list[Result]  # best first
    too_long: dict[int, str]  # by document: why it is not scored
    n_documents: int  # in the request
    model: str
    usage: dict[str, Any] | None  # None: not counted
    return_documents: bool | None  # None: the format's default


Serialiser = Callable[[Reply], Any]


class Reranker:
    """Answers rerank requests, with a template's prompts or by SGLang's own handler.

    Args:
        scorer: called per request, since SGLang creates its tokenizer manager late.
        stock_endpoint: SGLang's handler of /v1/rerank.
        reply_options: reads the reply fields of a request.
    """

    def __init__(
        self,
        config: PrefillConfig,
        scorer: Callable[[], LabelScorer],
        stock_endpoint: Callable[..., Awaitable[Any]],
        reply_options: Callable[[RerankRequest], ReplyOptions],
    ) -> None:
        self._replaces_sglangs = config.rerank_template is not None
        self._template = rerank_template.load(config.rerank_template or rerank_template.DEFAULT)
        self._answers = AllowedAnswers(list(self._template.labels), None)
        self._scorer, self._stock_endpoint, self._reply_options = scorer, stock_endpoint, reply_options

    async def answer(
        self, serving: Any, request: RerankRequest, raw_request: fastapi.Request, serialise: Serialiser | None
    ) -> Any:
        """Returns the reply, or a stream of it. Raises BadRequestError; errors of scoring pass through.

        Args:
            serving: SGLang's object for its own handler.
            serialise: None for /v1/rerank, in SGLang's format or, if this package scores, that of `format_of_v1`.
        """
        manager = serving.tokenizer_manager
        check_reply_fields(request, has_answers=True)
        if not self._replaces_sglangs and not sglang_would_refuse(serving, request):
            return await self._by_sglang(manager, request, raw_request, serialise or to_sglang)
        if not manager.is_generation:
            raise BadRequestError(
                "this server was started with --rerank-template, which needs a causal language model, and its model is none:"
                " start it without that flag"
            )
        if request.is_multimodal():
            raise BadRequestError("this model reranks text only: give the query and the documents as strings")
        values = checked(request)
        if values.instruction is not None and not self._template.takes_instruction:
            raise BadRequestError("this server's --rerank-template has no place for an instruction: leave it out")
        fitted = await self._fitted(manager, values)
        obj = GenerateReqInput(text=fitted.prompts)
        options = self._reply_options(request)
        to_json = to_tei if request.is_of_tei else serialise or format_of_v1(request)

        def whole(scored: list[ScoredPrompt]) -> Any:
            results = [_result(request, fitted, place, one) for place, one in enumerate(scored)]
            return to_json(_reply(manager, request, values, results, _usage(scored), fitted.too_long))

        if request.stream:
            results = self._scorer().score_each(obj, self._answers, raw_request, options)
            events = _events(results, obj, request, fitted, whole, manager)
            return StreamingResponse(events, media_type="text/event-stream")
        return _json(whole(await self._scorer().score(obj, self._answers, raw_request, reply=options)))

    async def _fitted(self, manager: PrefillTokenizerManager, values: CheckedRerank) -> Fitted:
        """Makes the prompts. Raises BadRequestError if no document can be scored."""
        longest, template = manager.longest_input_tokens, self._template

        def prompts_of(query: str, passages: Sequence[str]) -> list[str]:
            return template.prompts(values.instruction, query, passages)

        prompts = prompts_of(values.query, values.passages)
        if not values.cuts.are_asked_for and all(len(one.encode(errors="replace")) <= longest for one in prompts):
            return Fitted(prompts, list(range(len(prompts))), {}, {})
        fitted = await manager.run_in_thread(
            lambda twin: fit(twin.tokenizer, prompts_of, values.query, values.passages, values.cuts, longest),
            sum(map(len, prompts)),
        )
        if not fitted.prompts:
            index, why = next(iter(fitted.too_long.items()))
            raise BadRequestError(f"documents[{index}]: {why}")
        return fitted

    async def _by_sglang(
        self,
        manager: PrefillTokenizerManager,
        request: RerankRequest,
        raw_request: fastapi.Request,
        serialise: Serialiser,
    ) -> Any:
        """Lets SGLang's handler score the texts. Requests with images get its own reply."""
        if names := given_reply_fields(request):
            remedy = ", or start the server with --rerank-template" if manager.is_generation else ""
            raise BadRequestError(
                f"{names}: SGLang's own handler, which serves this model, returns only a score per document: leave it out{remedy}"
            )
        if request.is_multimodal():
            try:
                stock = V1RerankReqInput(**request.model_dump(exclude_none=True))
                return await self._stock_endpoint(stock, raw_request)
            except pydantic.ValidationError as error:
                raise BadRequestError(str(error)) from error
        values = checked(request)
        if values.cuts.are_asked_for:
            raise BadRequestError(
                "SGLang's own handler, which serves this model, cuts no documents: leave max_tokens_per_doc and the like out, or"
                " start the server with --rerank-template"
            )
        if request.stream:
            raise BadRequestError(
                "stream is true, and SGLang's own handler, which serves this model, scores all documents at once: leave it out,"
                " or start the server with --rerank-template"
            )
        stock = V1RerankReqInput(
            query=values.query, documents=values.passages, instruct=values.instruction, return_documents=False
        )
        found = await self._stock_endpoint(stock, raw_request)
        if isinstance(found, Response):
            return found
        results = [Result(one.index, one.score, request.documents[one.index], one.meta_info, {}) for one in found]
        shape = to_tei if request.is_of_tei else serialise
        return _json(shape(_reply(manager, request, values, results, usage_from_sglang(results), {})))


async def _events(
    results: AsyncIterator[tuple[int, ScoredPrompt]],
    obj: GenerateReqInput,
    request: RerankRequest,
    fitted: Fitted,
    whole: Callable[[list[ScoredPrompt]], Any],
    manager: PrefillTokenizerManager,
) -> AsyncIterator[bytes]:
    """Yields each document as it is scored, then the reply. Aborts the remaining documents if the client disconnects."""
    queue: asyncio.Queue[tuple[int, ScoredPrompt] | Exception] = asyncio.Queue()

    async def read_results() -> None:
        try:
            async for one in results:
                queue.put_nowait(one)
        except Exception as error:
            queue.put_nowait(error)

    task = asyncio.create_task(read_results())  # must outlive this stream if the client disconnects
    scored: dict[int, ScoredPrompt] = {}
    try:
        while len(scored) < len(fitted.prompts):
            one = await queue.get()
            if isinstance(one, Exception):
                raise one
            index, scored[index] = one
            yield event_of(jina_result(_result(request, fitted, *one), request.return_documents))
        yield event_of(whole([scored[index] for index in range(len(scored))]))
    except Exception as error:
        if not scored:  # nothing has been sent: the answer is a status
            raise
        yield b"data: " + with_nested_error(orjson.dumps(refusal_of(error).flat)) + b"\n\n"
    finally:
        if not task.done():
            if obj.rid is None:  # nothing has been sent to the scheduler
                task.cancel()
            else:  # SGLang would forget a cancelled task's requests without aborting them in the scheduler
                manager.abort_request(obj.rid)
    yield LAST_EVENT


def to_sglang(reply: Reply) -> list[dict[str, Any]]:
    shows = reply.return_documents is not False
    documents = [{"document": one.document} if shows else {} for one in reply.results]
    scored = [
        {"score": one.score, **document, "index": one.index, "meta_info": one.meta_info, **one.extra}
        for one, document in zip(reply.results, documents, strict=True)
    ]
    return scored + _not_scored(reply)


def to_tei(reply: Reply) -> list[dict[str, Any]]:
    """The list of Hugging Face's text-embeddings-inference."""
    shows = bool(reply.return_documents)
    texts = [{"text": one.document} if shows else {} for one in reply.results]
    scored = [
        {"index": one.index, "score": one.score, **text, **one.extra}
        for one, text in zip(reply.results, texts, strict=True)
    ]
    return scored + _not_scored(reply)


def _not_scored(reply: Reply) -> list[dict[str, Any]]:
    """The entries of documents that are too long: an error and no score."""
    return [{"index": index, "score": None, "error": why} for index, why in reply.too_long.items()]


def to_infinity(reply: Reply) -> dict[str, Any]:
    """As Jina's. infinity's client checks the name of the object."""
    return {**to_jina(reply), "object": "rerank", "created": int(time.time())}


def to_jina(reply: Reply) -> dict[str, Any]:
    results = [jina_result(one, reply.return_documents) for one in reply.results]
    named = {"id": f"rerank-{uuid.uuid4().hex}", "object": "list", "model": reply.model}
    return {**named, "usage": reply.usage, "results": results, "meta": _cohere_meta(reply), **_errors(reply)}


def _errors(reply: Reply) -> dict[str, Any]:
    """Documents that are not scored, if there are any."""
    found = [{"index": index, "message": why} for index, why in reply.too_long.items()]
    return {"errors": found} if found else {}


def jina_result(one: Result, return_documents: bool | None) -> dict[str, Any]:
    """One element of `results`, and one event of a stream in any format."""
    scores = {"index": one.index, "relevance_score": one.score, "score": one.score}
    return {**scores, **_document(one, return_documents is not False), **one.extra}


def to_cohere(reply: Reply) -> dict[str, Any]:
    results = [
        {"index": one.index, "relevance_score": one.score, **_document(one, reply.return_documents), **one.extra}
        for one in reply.results
    ]
    meta = {**_cohere_meta(reply), "api_version": {"version": "2"}}
    return {"id": str(uuid.uuid4()), "results": results, "meta": meta, **_errors(reply)}


def _document(one: Result, is_shown: bool | None) -> dict[str, Any]:
    document = one.document if isinstance(one.document, dict) else {"text": one.document}
    return {"document": document} if is_shown else {}


def _cohere_meta(reply: Reply) -> dict[str, Any]:
    prompt_tokens = None if reply.usage is None else reply.usage["prompt_tokens"]
    units = {"search_units": math.ceil(reply.n_documents / DOCUMENTS_PER_SEARCH_UNIT)}
    return {"billed_units": units, "tokens": {"input_tokens": prompt_tokens, "output_tokens": 0}}


def format_of_v1(request: RerankRequest) -> Serialiser:
    """/v1/rerank is SGLang's and Jina's. Jina's clients name a model; SGLang's gateway does too, but always sends `rid`."""
    is_jinas = request.model is not None and "rid" not in (request.model_extra or {})
    return to_jina if is_jinas else to_sglang


def sglang_would_refuse(serving: Any, request: RerankRequest) -> bool:
    """True for a generative model without a reranker's chat template."""
    from sglang.srt.entrypoints.openai.serving_rerank import _detect_rerank_backend

    manager = serving.tokenizer_manager
    template = getattr(manager.tokenizer, "chat_template", None)
    backend = _detect_rerank_backend(
        request=request,
        chat_template=template if isinstance(template, str) else None,
        model_path=manager.model_config.model_path,
    )
    return bool(manager.is_generation) and backend == "cross_encoder"


def usage_from_sglang(results: Sequence[Result]) -> dict[str, Any] | None:
    """The prompt tokens that SGLang's own handler reports; None if a document has no count."""
    counts = [(one.meta_info or {}).get("prompt_tokens") for one in results]
    known = [count for count in counts if count is not None]
    return {"prompt_tokens": sum(known), "total_tokens": sum(known)} if len(known) == len(counts) else None


def _usage(scored: list[ScoredPrompt]) -> dict[str, Any]:
    """As `usage`, without completion tokens."""
    counted = usage(scored)
    return {**counted, "completion_tokens": 0, "total_tokens": counted["prompt_tokens"]}


def _reply(
    manager: PrefillTokenizerManager,
    request: RerankRequest,
    values: CheckedRerank,
    results: Sequence[Result],
    usage: dict[str, Any] | None,
    too_long: dict[int, str],
) -> Reply:
    """Keeps the best documents by `top_n` and `min_score`; equal scores stay in the request's order."""
    best = sorted(results, key=lambda one: -one.score)
    if (lowest := values.min_score) is not None:
        best = [one for one in best if one.score >= lowest]
    return Reply(
        best[: values.top_n], too_long, len(values.passages), manager.served_model_name, usage, request.return_documents
    )


def _result(request: RerankRequest, fitted: Fitted, place: int, one: ScoredPrompt) -> Result:
    """The score is the probability of the template's first label, calibrated if requested. place: of the prompt."""
    index = fitted.documents[place]
    score, extra = one.distribution.probabilities[0], dict[str, Any]()
    if one.calibrated is not None:
        extra["probability"], score = score, one.calibrated[0]
    if one.options != PLAIN:
        extra["label_scores"] = one.labels_to_json()
    if n_cut := fitted.cut_tokens.get(index):
        extra["cut_tokens"] = n_cut
    return Result(index, score, request.documents[index], None, extra)


def _json(shown: Any) -> Response:
    return Response(orjson.dumps(shown), media_type="application/json")
