"""The shapes of reranked documents: SGLang's list, Jina's object, which Cohere's older clients read too, and Cohere's."""

from __future__ import annotations

import enum
import math
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from sgl_prefill.api.rerank_request import Asked, RerankRequest

DOCUMENTS_OF_A_SEARCH_UNIT = 100  # of Cohere's


class Shape(enum.Enum):
    """What a reply looks like."""

    SGLANG = enum.auto()
    JINA = enum.auto()
    COHERE = enum.auto()

    @classmethod
    def of_v1(cls, request: RerankRequest) -> Shape:
        """Decides for /v1/rerank, which SGLang and Jina share: Jina's clients name a model. So does SGLang's gateway, which
        reads the list alone; it also sends `rid`, always."""
        is_jinas = request.model is not None and "rid" not in (request.model_extra or {})
        return cls.JINA if is_jinas else cls.SGLANG


class Scored(NamedTuple):
    """One document's score."""

    place: int  # of the document in the request, from 0
    score: float
    meta_info: dict[str, Any] | None = None  # SGLang's; None where nobody asks for it
    besides: dict[str, Any] | None = None  # what else the request asked for


class Reply(NamedTuple):
    """How one request is answered."""

    shape: Shape
    request: RerankRequest
    asked: Asked
    model: str  # what it is called where the request does not say

    def whole(self, scored: Sequence[Scored], usage: dict[str, Any] | None) -> Any:
        """Returns the best documents first, of equals the first one. usage: None where nobody has counted."""
        best = sorted(scored, key=lambda one: -one.score)
        if (lowest := self.asked.min_score) is not None:
            best = [one for one in best if one.score >= lowest]
        results = [self.result(one) for one in best[: self.asked.top_n]]
        if self.shape is Shape.SGLANG:
            return results
        prompt_tokens = None if usage is None else usage["prompt_tokens"]
        units = {"search_units": math.ceil(len(self.asked.passages) / DOCUMENTS_OF_A_SEARCH_UNIT)}
        meta = {"billed_units": units, "tokens": {"input_tokens": prompt_tokens, "output_tokens": 0}}
        if self.shape is Shape.COHERE:
            meta["api_version"] = {"version": "2"}
            return {"id": str(uuid.uuid4()), "results": results, "meta": meta}
        named = {"id": f"rerank-{uuid.uuid4().hex}", "object": "list", "model": self.request.model or self.model}
        return {**named, "usage": usage, "results": results, "meta": meta}

    def result(self, one: Scored) -> dict[str, Any]:
        """Returns one document's part of the reply."""
        document, besides = self._document(one.place), one.besides or {}
        if self.shape is Shape.SGLANG:
            return {"score": one.score, **document, "index": one.place, "meta_info": one.meta_info, **besides}
        shown = {"index": one.place, "relevance_score": one.score}
        return {**shown, **({} if self.shape is Shape.COHERE else {"score": one.score}), **document, **besides}

    def _document(self, index: int) -> dict[str, Any]:
        asked = self.request.return_documents
        if not (self.shape is not Shape.COHERE if asked is None else asked):
            return {}
        document = self.request.documents[index]
        is_object = isinstance(document, dict) or self.shape is Shape.SGLANG
        return {"document": document if is_object else {"text": document}}
