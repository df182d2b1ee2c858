"""What `/openapi.json` and `/docs` say of this package's routes: schemas of replies, and the meaning of request fields.

The schemas are for documentation: replies are not validated against them.
"""

from __future__ import annotations

import importlib.metadata
import warnings
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field

TITLE = "sgl_prefill"
ABOUT = "Prefill-only LLM engine on SGLang: probabilities of allowed answers, reranking, scheduling by predicted time."
TAG = "sgl_prefill"  # of routes that this package serves


def _optional(text: str) -> Any:
    return Field(None, description=text)


def _always(text: str) -> Any:
    return Field(description=text)


class Schema(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Form(Schema):
    text: str
    token_ids: list[int] = _always("with the tokens of `answer_end`")
    logprob: float = _always("natural logarithm of the form's probability")


class LabelScore(Schema):
    label: str
    token_id: int | None = _optional("of labels of one token")
    score: float | None = _optional("with allowed_answers: the value that `normalise` makes of log P(label)")
    forms: list[Form] | None = _optional("with allowed_answers: the surface forms")
    probability: float | None = _optional("over the labels; sums to 1. Not with raw_scores")
    raw_score: float | None = _optional("with raw_scores: log-probability over the vocabulary")
    calibrated_probability: float | None = _optional("with calibration: its highest value is the answer")
    logprob: float = _always("natural logarithm, over the vocabulary, at temperature 1")


class Alternative(Schema):
    token_id: int
    text: str
    logprob: float = _always("natural logarithm, over the vocabulary")
    is_label: bool


class Labels(Schema):
    labels: list[LabelScore] = _always("in the order of the request")
    label_mass: float = _always("the labels' share of the vocabulary's probability, 0 to 1")
    calibration: str | None = _optional("name of the calibration, if one was asked for")
    top_alternatives: list[Alternative] | None = _optional("the likeliest tokens of the vocabulary, if asked for")
    hint: str | None = _optional(
        "there if labels with a blank before them, or without theirs, hold more of the probability"
    )


class PromptPart(Schema):
    kept_tokens: int | None = _optional("of a part of prompt_parts")
    cut_tokens: int | None = _optional("of a part of prompt_parts")
    message: int | None = _optional("index of a message with `keep`")
    dropped: bool | None = _optional("whether that message was dropped")


class LabelScores(Labels):
    prompt_tokens: int
    answer_tokens: int | None = _optional("with allowed_answers: label tokens computed after the prompt")
    cached_tokens: int = _always("prompt tokens found in the prefix cache")
    kept_tokens: int = _always("prompt tokens kept in the prefix cache afterwards")
    evicted_tokens: int = _always("prompt tokens not kept")
    queue_ms: float = _always("milliseconds until the request's step started")
    predicted_jct_ms: float | None = _optional("predicted milliseconds of the step")
    actual_ms: float = _always("milliseconds of the step's forward pass, which other requests may share")
    prompt_parts: list[PromptPart] | None = _optional("what was kept and cut, if the prompt came in parts")


class CachedTokens(Schema):
    cached_tokens: int


class Usage(Schema):
    prompt_tokens: int = _always("of all prompts, cached ones included")
    completion_tokens: int = _always("tokens of the best labels")
    total_tokens: int
    prompt_tokens_details: CachedTokens


class OpenAIError(Schema):
    message: str
    type: str | None
    param: str | None
    code: int | None


class ItemError(Schema):
    index: int
    message: str


class Choice(Schema):
    index: int
    logprobs: Any = _optional("OpenAI's format: the likeliest labels, if asked for")
    finish_reason: str
    label_scores: LabelScores


class CompletionChoice(Choice):
    text: str = _always("the best label")
    label_scores: LabelScores | None = _optional("missing for a prompt that is too long")  # type: ignore[assignment]
    error: OpenAIError | None = _optional("of a batch's prompt that is too long: finish_reason is then error")


class Message(Schema):
    role: str
    content: str = _always("the best label")


class ChatChoice(Choice):
    message: Message


class OpenAIReply(Schema):
    id: str
    object: str
    created: int = _always("Unix time in seconds")
    model: str = _always("the model that answered")
    usage: Usage


class CompletionReply(OpenAIReply):
    choices: list[CompletionChoice] = _always("one per prompt")


class ChatReply(OpenAIReply):
    choices: list[ChatChoice]


class MetaInfo(BaseModel):
    label_scores: LabelScores


class GenerateReply(Schema):
    text: str = _always("the best label")
    output_ids: list[int] | None = _optional("its tokens")
    meta_info: MetaInfo | None = _optional("SGLang's facts about the request, and label_scores")
    error: OpenAIError | None = _optional(
        "why this prompt of a batch was too long; output_ids and meta_info are then missing"
    )


class ScoreReply(Schema):
    scores: list[list[float] | None] = _always(
        "one list per item: a score per label; null for an item that is too long"
    )
    model: str
    usage: Any = _optional("token counts")
    object: str
    pooled_hidden_states: Any = _optional("SGLang's, for models that pool")
    label_scores: list[LabelScores | None] | None = _optional(
        "per item, with calibration, raw_scores or top_alternatives"
    )
    errors: list[ItemError] | None = _optional("items that are too long")


class RerankedDocument(Schema):
    index: int = _always("of the document in the request")
    document: Any = _optional("as sent, with return_documents")
    probability: float | None = _optional("with calibration: the score before it")
    label_scores: Labels | None = _optional("with raw_scores or top_alternatives")
    cut_tokens: int | None = _optional("tokens left out of a document that was cut")


class RerankResult(RerankedDocument):
    relevance_score: float = _always("P(relevant), calibrated if asked for; the best document first")
    score: float | None = _optional("the same number")


class CohereReply(Schema):
    id: str
    results: list[RerankResult]
    meta: Any = _always("billed units and token counts in Cohere's format")
    errors: list[ItemError] | None = _optional("documents that are too long")


class RerankReply(CohereReply):
    object: str
    model: str
    created: int | None = _optional("Unix time in seconds")
    usage: Any = _optional("token counts")


class SGLangResult(RerankedDocument):
    score: float | None = _always("null for a document that is too long")
    text: Any = _optional("the document, in text-embeddings-inference's format")
    meta_info: Any = None
    error: str | None = _optional("why a document has no score")


class PrefixReply(Schema):
    id: str = _always("for the field prefix of later requests")
    object: str
    made_of: str = _always("text, messages or input_ids")
    prompt_tokens: int
    cached_tokens: int = _always("found in the prefix cache")
    kept_tokens: int | None = _always("in the prefix cache now")
    ttl_s: float | None = _always("seconds that it will not be forgotten; null: until others need its memory")


class DecisionFacts(Schema):
    model: str
    usage: Any = _always("input_tokens: the state once, and each question in all of its orders")
    x_wording: int = _always("version of the prompts")
    x_shared_tokens: int = _always("that all questions begin with, the state among them")
    x_cached_tokens: int = _always("input tokens found in the prefix cache")
    x_predicted_ms: float | None = _always("sum over the prompts")
    x_actual_ms: float = _always("from the first step's beginning to the last one's end")


class DecisionsReply(DecisionFacts):
    answers: list[Any] = _always("in the order of the questions; x_label_mass, x_orders are this server's")


class SystemOneReply(DecisionFacts):
    answers: dict[str, Any] = _always("by the questions' ids; x_label_mass, x_orders are this server's")


class DecidedRequest(Schema):
    id: str
    client: str
    waited_ms: float
    input_tokens: int
    cached_tokens: int = _always("found in the prefix cache")


class Decision(Schema):
    step: int
    ended_unix_s: float
    predicted_ms: float | None = _always("predicted before the step ran")
    actual_ms: float
    cost: float | None = _optional("of the first request, where the policy has scores")
    credit: float | None = _optional("of the first request for its waiting; the smallest cost - credit runs")
    requests: list[DecidedRequest] = _always("the first was chosen, the others shared its step")


class ErrorReply(BaseModel):
    """OpenAI's nested error and SGLang's flat one in one object."""

    message: str = _always("names the field, its value and the limit")
    type: str
    code: int
    error: OpenAIError


class JsonLines(Response):
    media_type = "application/x-ndjson"


# Meaning of request fields; SGLang's keep their own descriptions.
LABEL_FIELDS = {
    "prompt": "one text or list of token ids, or several",
    "allowed_tokens": "labels as literal text, each one token after this prompt: `Yes` and ` Yes` differ",
    "allowed_token_ids": "labels as token ids",
    "allowed_answers": "labels of any length: a list, or an object with the surface forms of each",
    "answer_end": 'what must follow a form: nothing (default), "end_token" or {"text": ...}',
    "normalise": "score of a label of several tokens: sum (default), mean or pmi",
    "baseline_prompt": "for pmi: the prompt without its subject, as text or token ids",
    "guided_choice": "vLLM's name for allowed_answers",
    "structured_outputs": "vLLM's: `choice` means allowed_answers",
    "calibration": "name of a calibration of this server (--calibrations)",
    "raw_scores": "true: raw_score replaces probability",
    "top_alternatives": "1 to 100 likeliest tokens of the vocabulary",
    "deadline_ms": "429 if it cannot be met, 504 if it passes in the queue",
    "prompt_parts": "instead of the prompt: [{text, keep}, ...], joined; keep is true, start, end or middle",
    "on_overflow": "refuse (default) or cut, for prompt_parts and messages with keep: false",
    "max_prompt_tokens": "a limit below the server's",
    "prefix": "id of /v1/prefixes: its text, messages or token ids come first",
    "cache_salt": "prefix hits only among requests with the same value",
}
RERANK_FIELDS = {
    **{name: LABEL_FIELDS[name] for name in ("calibration", "raw_scores", "top_alternatives")},
    "query": "a text",
    "documents": "a list of texts or objects",
    "texts": "documents in text-embeddings-inference's format, which the reply then has too",
    "instruct": "the task",
    "instruction": "another name of instruct",
    "top_n": "only the best n documents",
    "top_k": "another name of top_n",
    "rank_fields": "the fields of each object to score; default: text",
    "return_documents": "default true, false on /v2/rerank",
    "return_text": "return_documents, for texts",
    "min_score": "0 to 1: documents below it are left out",
    "stop_early": "only false: every document is scored",
    "stream": "true: an event per scored document, then the whole reply",
    "truncate": "true: documents are cut at the longest prompt of this server",
    "truncation": "another name of truncate",
    "truncation_direction": "right: the beginning of a document stays",
    "max_tokens_per_doc": "documents are cut at so many tokens",
    "max_chunks_per_doc": "as max_tokens_per_doc, in chunks of 510 tokens",
    "max_tokens_per_query": "the query is cut at so many tokens",
    "truncate_prompt_tokens": "documents are cut until the prompt has so many tokens; -1: the longest of this server",
}
REPLIES: dict[str, tuple[str, Any]] = {
    "/v1/completions": ("Label probabilities after prompts", CompletionReply),
    "/v1/chat/completions": ("Label probabilities after a conversation", ChatReply),
    "/generate": ("Label probabilities in SGLang's own format", GenerateReply | list[GenerateReply]),
    "/v1/score": ("Scores of label tokens for each item after a query", ScoreReply),
    "/v1/rerank": ("Rerank: Jina's format with `model`, else SGLang's", RerankReply | list[SGLangResult]),
    "/rerank": ("Rerank: Jina's and infinity's format, or a list for `texts`", RerankReply | list[SGLangResult]),
    "/v2/rerank": ("Rerank: Cohere's format", CohereReply),
    "/v1/decisions": ("Decisions: questions about one input, in OpenAI's format", DecisionsReply),
    "/v1/systemone": ("Decisions: questions about one state, in TypeSafe's format", SystemOneReply),
    "/v1/prefixes": ("Computes a prefix and holds it, for requests that name it", PrefixReply),
    "/scheduler/decisions": ("The requests of the last steps, one JSON object a line", Decision),
}
ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorReply, "description": "400: wrong field; 429: overload, or a deadline that cannot be met"},
    "5XX": {"model": ErrorReply, "description": "503: the server ends or is out of memory; 504: the deadline passed"},
}


def of(path: str) -> dict[str, Any]:
    """Arguments of FastAPI's route decorators."""
    summary, model = REPLIES[path]
    with_labels = path in ("/v1/completions", "/v1/chat/completions", "/generate")
    description = "With allowed answers; without them the reply is SGLang's." if with_labels else ""
    responses = {200: {"model": model, "description": "The answer"}, **ERRORS}
    return {"summary": summary, "description": description, "responses": responses, "tags": [TAG]}


def describe(app: FastAPI) -> None:
    """Names the API, and adds the meanings of request fields to its schema."""
    app.title, app.version, app.description = TITLE, importlib.metadata.version("sgl-prefill"), ABOUT
    make: Callable[[], dict[str, Any]] = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            with warnings.catch_warnings():
                # One endpoint with two methods, as SGLang has several, counts as a duplicate.
                warnings.filterwarnings("ignore", "Duplicate Operation ID")
                schemas = make()["components"]["schemas"]
            for name, schema in schemas.items():
                if name == "RerankRequest" or name.startswith("Label"):
                    meanings = RERANK_FIELDS if name == "RerankRequest" else LABEL_FIELDS
                    for field, text in meanings.items():
                        if field in schema["properties"]:
                            schema["properties"][field].setdefault("description", text)
        return make()

    app.openapi = openapi  # type: ignore[method-assign]
