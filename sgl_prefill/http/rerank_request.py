"""Rerank requests: the fields of SGLang, Jina, Cohere, vLLM, infinity and TEI in one model, and the checks of their values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple

import orjson
from annotated_types import Predicate
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from sgl_prefill.errors import BadRequestError
from sgl_prefill.http.rerank_cuts import Cuts
from sgl_prefill.http.scored_prompt import ReplyFields

DEFAULT_FIELD = "text"  # scored of a document that is an object
LONGEST_SHOWN = 60  # characters of a value in an error message
TOKENS_PER_CHUNK = 510  # of Cohere's max_chunks_per_doc
# Fields of Jina and Cohere that would change the answer, and why each is refused.
UNSERVED = {
    "relevant_spans": "a document has one score here, and no spans: leave it out",
    "return_embeddings": "a causal language model scores a document without an embedding: leave it out",
}
STOP_EARLY = (
    "stop_early is true: scores are independent and reach up to 1.0, so that no bound proves an unscored document irrelevant;"
    " leave it out: top_n and min_score choose among all documents, and stream shows each as it is scored"
)
# What each field of `_Values` must be, for error messages.
IS_TEXT = "it must be a text"
IS_COUNT = "it must be a whole number of at least 1"
EXPECTED = {
    "model": IS_TEXT,
    "query": "it must be a text that is not empty",
    "instruct": IS_TEXT,
    "instruction": IS_TEXT,
    "rank_fields": "it must be a list of different names of fields, at least one",
    "top_n": f"{IS_COUNT}; left out, it means all",
    "top_k": f"{IS_COUNT}; left out, it means all",
    "max_tokens_per_doc": IS_COUNT,
    "max_chunks_per_doc": IS_COUNT,
    "max_tokens_per_query": IS_COUNT,
    "truncate_prompt_tokens": f"{IS_COUNT}, or -1 for the longest prompt of this server",
    "truncation_direction": 'it must be "right": the beginning of a document stays',
    "min_score": "it must be a number from 0 to 1; documents below it are left out",
}
Text = Annotated[str, Predicate(str.strip)]
Count = Annotated[int, Field(ge=1)]


class RerankRequest(ReplyFields):
    """The body of /v1/rerank, /rerank and /v2/rerank. `checked` checks the values: its error messages show them."""

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
    top_k: Any = None  # top_n by another name
    texts: Any = None  # TEI's name for documents; its replies have another shape
    return_text: bool | None = None
    truncate: bool | None = None
    truncation: bool | None = None
    truncation_direction: Any = None
    max_tokens_per_doc: Any = None
    max_chunks_per_doc: Any = None
    max_tokens_per_query: Any = None
    truncate_prompt_tokens: Any = None

    @property
    def is_of_tei(self) -> bool:
        return self.texts is not None

    @model_validator(mode="after")
    def _texts_are_documents(self) -> RerankRequest:
        if self.texts is not None and self.documents is not None:
            raise ValueError("texts and documents are both given: give the documents once")
        if self.texts is not None:
            self.documents, self.return_documents = self.texts, bool(self.return_text)
        return self

    def is_multimodal(self) -> bool:
        """True if the query or a document is a list of parts, such as images. Works on an unchecked request."""
        documents = self.documents if isinstance(self.documents, list) else []
        return isinstance(self.query, list) or any(isinstance(document, list) for document in documents)


class _Values(BaseModel):
    model_config = ConfigDict(strict=True)

    model: str | None
    query: Text
    instruct: str | None
    instruction: str | None
    rank_fields: (
        Annotated[list[Text], Field(min_length=1), Predicate(lambda names: len(set(names)) == len(names))] | None
    )
    top_n: Count | None
    top_k: Count | None
    max_tokens_per_doc: Count | None
    max_chunks_per_doc: Count | None
    max_tokens_per_query: Count | None
    truncate_prompt_tokens: Count | Literal[-1] | None
    truncation_direction: Annotated[str, Predicate(lambda name: name.lower() == "right")] | None
    min_score: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None


class CheckedRerank(NamedTuple):
    query: str
    instruction: str | None
    passages: list[str]  # the text of each document
    top_n: int | None
    min_score: float | None
    cuts: Cuts


def checked(request: RerankRequest) -> CheckedRerank:
    """Raises BadRequestError naming the field, its value and the remedy."""
    if request.stop_early:
        raise BadRequestError(STOP_EARLY)
    for name, why in UNSERVED.items():
        if (value := (request.model_extra or {}).get(name)) not in (None, False):
            raise BadRequestError(f"{name} is {_shown(value)}: {why}")
    try:
        values = _Values(**{name: getattr(request, name) for name in EXPECTED})
    except ValidationError as error:
        name = str(error.errors(include_url=False, include_context=False)[0]["loc"][0])
        raise BadRequestError(f"{name} is {_shown(getattr(request, name))}: {EXPECTED[name]}") from error
    instruct, instruction = values.instruct, values.instruction
    if instruct is not None and instruction not in (None, instruct):
        raise BadRequestError(
            f"instruct is {_shown(instruct)} and instruction is {_shown(instruction)}: they are two names for the same, give"
            " one of them"
        )
    instruction = (instruction if instruct is None else instruct) or None
    documents = request.documents
    if not isinstance(documents, list) or not documents:
        raise BadRequestError(
            f"documents is {'empty' if documents == [] else _shown(documents)}: give a list with at least one document"
        )
    if values.top_n is not None and values.top_k not in (None, values.top_n):
        raise BadRequestError(f"top_n is {values.top_n} and top_k is {values.top_k}: they are two names for the same")
    passages = [_passage(one, f"documents[{index}]", values.rank_fields) for index, one in enumerate(documents)]
    top_n = values.top_k if values.top_n is None else values.top_n
    return CheckedRerank(values.query, instruction, passages, top_n, values.min_score, _cuts(request, values))


def _cuts(request: RerankRequest, values: _Values) -> Cuts:
    of_chunks = None if values.max_chunks_per_doc is None else values.max_chunks_per_doc * TOKENS_PER_CHUNK
    of_document = min((n for n in (values.max_tokens_per_doc, of_chunks) if n is not None), default=None)
    of_prompt = values.truncate_prompt_tokens
    to_fit = bool(request.truncate or request.truncation or of_prompt == -1)
    return Cuts(values.max_tokens_per_query, of_document, None if of_prompt == -1 else of_prompt, to_fit)


def _passage(document: Any, name: str, fields: Sequence[str] | None) -> str:
    if isinstance(document, dict):
        return "\n".join(_value(document, field, name, fields) for field in fields or [DEFAULT_FIELD])
    if not isinstance(document, str):
        raise BadRequestError(f"{name} is {_shown(document)}: it must be a text, or an object with texts")
    if fields is not None:
        raise BadRequestError(
            f"{name} is a text, and rank_fields is {_shown(fields)}: give an object with these fields, or leave rank_fields out"
        )
    return document


def _value(document: dict[str, Any], field: str, name: str, fields: Sequence[str] | None) -> str:
    if field not in document:
        remedy = "name fields that it has" if fields else "give it, or name others in rank_fields"
        which = "of rank_fields " if fields else ""
        raise BadRequestError(f"{name} has no field {_shown(field)} {which}among {_shown(list(document))}: {remedy}")
    value = document[field]
    if not isinstance(value, str):
        raise BadRequestError(f"{name}.{field} is {_shown(value)}: {IS_TEXT}")
    return value


def _shown(value: Any) -> str:
    text = orjson.dumps(value, default=repr).decode()
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}..."
