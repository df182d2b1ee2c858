"""/v1/rerank with any causal language model: P(yes) that a document answers the query, one prefill a document.

SGLang reranks with a causal model only if its chat template is a reranker's; for others it asks for an embedding model.
The query stands before the document, so that all documents of a call share it in the prefix cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.managers.io_struct import GenerateReqInput

from sgl_prefill.api.label_scoring import AllowedAnswers, LabelScorer
from sgl_prefill.errors import BadRequestError

if TYPE_CHECKING:
    import fastapi
    from sglang.srt.entrypoints.openai.protocol import V1RerankReqInput

DEFAULT_INSTRUCTION = "Given a search query, find the passages that answer it"
PROMPT = """Instruction: {instruction}
Query: {query}
Does the passage below meet the instruction for this query? Answer yes or no.
Passage: {document}
Answer:"""
ANSWERS = AllowedAnswers([" yes", " no"], None)


def needs_our_prompt(serving: Any, request: V1RerankReqInput) -> bool:
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


async def scores(scorer: LabelScorer, request: V1RerankReqInput, raw_request: fastapi.Request) -> list[float]:
    """Returns P(yes | yes or no) of each document, in the order of the request."""
    if request.is_multimodal():
        raise BadRequestError("this model reranks text only: give the query and the documents as strings")
    instruction = request.instruct or DEFAULT_INSTRUCTION
    prompts = [
        PROMPT.format(instruction=instruction, query=request.query, document=document) for document in request.documents
    ]
    scored = await scorer.score(GenerateReqInput(text=prompts), ANSWERS, raw_request)
    return [one.distribution.probabilities[0] for one in scored]
