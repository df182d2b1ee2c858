"""Rerank replies: one model, and three JSON formats of it: SGLang's list, Jina's object and Cohere's (API version 2).

Cohere's older client reads Jina's object, which carries Cohere's `id` and `meta` for it.
"""

from __future__ import annotations

import dataclasses
import math
import uuid
from collections.abc import Callable
from typing import Any, NamedTuple

DOCUMENTS_PER_SEARCH_UNIT = 100  # Cohere's unit of billing


@dataclasses.dataclass(frozen=True)
class Result:
    """The score of one document."""

    index: int  # in the request's documents
    score: float
    document: str | dict[str, Any]  # as the client sent it
    meta_info: dict[str, Any] | None  # from SGLang's own handler
    extra: dict[str, Any]  # further fields that the request asks for


class Reply(NamedTuple):
    """A whole reply."""

    results: list[Result]  # best first
    n_documents: int  # in the request
    model: str
    usage: dict[str, Any] | None  # None: not counted
    return_documents: bool | None  # None: the format's default


Serialiser = Callable[[Reply], Any]


def to_sglang(reply: Reply) -> list[dict[str, Any]]:
    shows = reply.return_documents is not False
    documents = [{"document": one.document} if shows else {} for one in reply.results]
    return [
        {"score": one.score, **document, "index": one.index, "meta_info": one.meta_info, **one.extra}
        for one, document in zip(reply.results, documents, strict=True)
    ]


def to_jina(reply: Reply) -> dict[str, Any]:
    results = [jina_result(one, reply.return_documents) for one in reply.results]
    named = {"id": f"rerank-{uuid.uuid4().hex}", "object": "list", "model": reply.model}
    return {**named, "usage": reply.usage, "results": results, "meta": _cohere_meta(reply)}


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
    return {"id": str(uuid.uuid4()), "results": results, "meta": meta}


def _document(one: Result, is_shown: bool | None) -> dict[str, Any]:
    document = one.document if isinstance(one.document, dict) else {"text": one.document}
    return {"document": document} if is_shown else {}


def _cohere_meta(reply: Reply) -> dict[str, Any]:
    prompt_tokens = None if reply.usage is None else reply.usage["prompt_tokens"]
    units = {"search_units": math.ceil(reply.n_documents / DOCUMENTS_PER_SEARCH_UNIT)}
    return {"billed_units": units, "tokens": {"input_tokens": prompt_tokens, "output_tokens": 0}}
