"""Rerank requests: the fields of SGLang, Jina and Cohere in one model, and the checks of their values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import orjson
from pydantic import ConfigDict

from sgl_prefill.errors import BadRequestError
from sgl_prefill.http.reply_options import ReplyFields

DEFAULT_FIELD = "text"  # scored of a document that is an object
LONGEST_SHOWN = 60  # characters of a value in an error message
NEVER_CUT = "documents are never cut here, and one that is too long is refused: leave it out"
# Fields of Jina and Cohere that would change the answer, and why each is refused.
UNSERVED = {
    "max_tokens_per_doc": NEVER_CUT,
    "max_chunks_per_doc": NEVER_CUT,
    "truncation": NEVER_CUT,
    "relevant_spans": "a document has one score here, and no spans: leave it out",
    "return_embeddings": "a causal language model scores a document without an embedding: leave it out",
}
STOP_EARLY = (
    "stop_early is true: each document has a score of its own, up to 1.0, so that no bound proves of one which is not scored yet"
    " that it cannot matter; leave it out: top_n and min_score choose among all, and stream shows each as it is scored"
)


class RerankRequest(ReplyFields):
    """The body of /v1/rerank, /rerank and /v2/rerank. `understood` checks the values, so that its errors can show them."""

    model_config = ConfigDict(extra="allow")

    query: Any = None
    documents: Any = None
    model: Any = None
    instruct: Any = None
    instruction: Any = None  # the same field by another name
    top_n: Any = None
    rank_fields: Any = None
    return_documents: bool | None = None
    min_score: Any = None
    stop_early: bool | None = None
    stream: bool | None = None

    def is_multimodal(self) -> bool:
        """True if the query or a document is a list of parts, such as images. Works on an unchecked request."""
        documents = self.documents if isinstance(self.documents, list) else []
        return isinstance(self.query, list) or any(isinstance(document, list) for document in documents)


class Asked(NamedTuple):
    """The checked values of a request."""

    query: str
    instruction: str | None
    passages: list[str]  # the text of each document
    top_n: int | None
    min_score: float | None


def understood(request: RerankRequest) -> Asked:
    """Checks a request. Raises BadRequestError naming the field, its value and the remedy."""
    if request.stop_early:
        raise BadRequestError(STOP_EARLY)
    if request.model is not None and not isinstance(request.model, str):
        raise BadRequestError(f"model is {_shown(request.model)}: it must be a text")
    for name, why in UNSERVED.items():
        if (value := (request.model_extra or {}).get(name)) not in (None, False):
            raise BadRequestError(f"{name} is {_shown(value)}: {why}")
    if not _is_text(request.query):
        raise BadRequestError(f"query is {_shown(request.query)}: it must be a text that is not empty")
    return Asked(
        request.query, _instruction(request), _passages(request), _top_n(request.top_n), _min_score(request.min_score)
    )


def _instruction(request: RerankRequest) -> str | None:
    given = {name: value for name in ("instruct", "instruction") if (value := getattr(request, name)) is not None}
    for name, value in given.items():
        if not isinstance(value, str):
            raise BadRequestError(f"{name} is {_shown(value)}: it must be a text")
    if len(set(given.values())) > 1:
        shown = " and ".join(f"{name} is {_shown(value)}" for name, value in given.items())
        raise BadRequestError(f"{shown}: they are two names for the same, give one of them")
    return next(iter(given.values()), None) or None


def _passages(request: RerankRequest) -> list[str]:
    documents = request.documents
    if not isinstance(documents, list) or not documents:
        raise BadRequestError(
            f"documents is {'empty' if documents == [] else _shown(documents)}: give a list with at least one document"
        )
    fields = _rank_fields(request.rank_fields)
    return [_passage(document, f"documents[{index}]", fields) for index, document in enumerate(documents)]


def _rank_fields(fields: Any) -> list[str] | None:
    if fields is None:
        return None
    if not isinstance(fields, list) or not fields or not all(map(_is_text, fields)) or len(set(fields)) < len(fields):
        raise BadRequestError(
            f"rank_fields is {_shown(fields)}: it must be a list of different names of fields, at least one"
        )
    return fields


def _passage(document: Any, name: str, fields: Sequence[str] | None) -> str:
    if isinstance(document, dict):
        return "\n".join(_value(document, field, name, fields) for field in fields or [DEFAULT_FIELD])
    if not isinstance(document, str):
        raise BadRequestError(f"{name} is {_shown(document)}: it must be a text, or an object with texts")
    if fields is not None:
        raise BadRequestError(
            f"{name} is a text, and rank_fields is {_shown(fields)}: give an object with these fields, or leave rank_fields out"
        )
    if not _is_text(document):
        raise BadRequestError(f"{name} is empty: a document must hold a text")
    return document


def _value(document: dict[str, Any], field: str, name: str, fields: Sequence[str] | None) -> str:
    if field not in document:
        has = _shown(list(document))
        remedy = "name fields that it has" if fields else "give it, or name others in rank_fields"
        which = "of rank_fields " if fields else ""
        raise BadRequestError(f"{name} has no field {_shown(field)} {which}among {has}: {remedy}")
    if not _is_text(value := document[field]):
        raise BadRequestError(f"{name}.{field} is {_shown(value)}: it must be a text that is not empty")
    return str(value)


def _top_n(top_n: Any) -> int | None:
    if top_n is not None and (not isinstance(top_n, int) or isinstance(top_n, bool) or top_n < 1):
        raise BadRequestError(
            f"top_n is {_shown(top_n)}: it must be a whole number of at least 1; left out, it means all"
        )
    return top_n


def _min_score(min_score: Any) -> float | None:
    is_number = isinstance(min_score, int | float) and not isinstance(min_score, bool)
    if min_score is not None and not (is_number and 0 <= min_score <= 1):
        raise BadRequestError(
            f"min_score is {_shown(min_score)}: it must be a number from 0 to 1; documents below it are left out"
        )
    return None if min_score is None else float(min_score)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _shown(value: Any) -> str:
    text = orjson.dumps(value, default=repr).decode()
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}..."
