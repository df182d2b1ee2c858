"""/v1/score: prompts are scored as on the label routes, and SGLang's arithmetic computes `scores` from the outputs.

What only SGLang's handler knows (embeddings as tokens, items in one sequence, models without a vocabulary) and what it
refuses goes to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sglang.srt.entrypoints.openai.protocol import ScoringRequest, ScoringResponse, UsageInfo
from sglang.srt.managers.io_struct import GenerateReqInput

from sgl_prefill.core.labels import check_distinct
from sgl_prefill.errors import BadRequestError
from sgl_prefill.http.request_checks import check_ids_in_vocabulary
from sgl_prefill.http.scored_prompt import ReplyFields, ScoredPrompt, UnscoredPrompt, given_reply_fields

if TYPE_CHECKING:
    from sgl_prefill.http.tokenizer_manager import PrefillTokenizerManager

# Fields of SGLang's that label scoring cannot serve.
UNSERVED = (
    "embed_override_token_id",
    "query_embed_overrides",
    "item_embed_overrides",
    "return_pooled_hidden_states",
    "score_extraction_token",
)


class LabelScoringRequest(ReplyFields, ScoringRequest):  # type: ignore[misc]
    """The body of /v1/score."""


def needs_sglangs(request: LabelScoringRequest, manager: PrefillTokenizerManager) -> bool:
    """Whether only SGLang's handler serves a request without reply fields, or refuses it."""
    is_mis = manager.server_args.enable_mis
    return not manager.is_generation or is_mis or any(getattr(request, name) for name in UNSERVED)


def check(request: LabelScoringRequest, manager: PrefillTokenizerManager) -> None:
    """Raises BadRequestError for a request with label options that this server or route cannot serve."""
    names = given_reply_fields(request)
    if not manager.is_generation:
        raise BadRequestError(
            f"{names} on /v1/score needs a causal language model, and this server's model has scores without a vocabulary:"
            " leave it out"
        )
    if manager.server_args.enable_mis:
        raise BadRequestError(
            f"{names} on /v1/score needs a prompt for each item, and this server joins them into one (--enable-mis): leave it"
            " out, or start the server without that flag"
        )
    if others := [name for name in UNSERVED if getattr(request, name) not in (None, False)]:
        raise BadRequestError(f"{names} and {', '.join(others)} cannot be combined on /v1/score: leave one of them out")
    if request.label_token_ids is None:
        raise BadRequestError("label_token_ids is missing: give the token ids of the labels")
    if any(isinstance(label, list) for label in request.label_token_ids):
        raise BadRequestError(
            f"{names} on /v1/score takes one list of label_token_ids for all items: leave {names} out"
        )
    if isinstance(request.items, list):
        manager.check_count(len(request.items))  # before they are joined
    check_distinct(request.label_token_ids, "label_token_ids")
    check_ids_in_vocabulary(request.label_token_ids, manager.model_config.vocab_size, "label_token_ids")


def prompts_of(request: LabelScoringRequest) -> GenerateReqInput | None:
    """Joins the query with each item as SGLang does, as texts or as token ids; None for an empty list."""
    query, items = request.query, request.items
    if items is None:
        raise BadRequestError("items is missing: give a text, a list of texts or a list of lists of token ids")
    if not items:
        return None
    if isinstance(items, str):
        items = [items]
    are_texts = isinstance(items[0], str)
    if query is None or isinstance(query, str) != are_texts:
        given = "missing" if query is None else "a text" if isinstance(query, str) else "token ids"
        raise BadRequestError(
            f"query is {given}, and items holds {'texts' if are_texts else 'token ids'}: give both in the same way"
        )
    joined = [item + query if request.item_first else query + item for item in items]
    return GenerateReqInput(text=joined) if are_texts else GenerateReqInput(input_ids=joined)


def reply_of(
    request: LabelScoringRequest, answers: Sequence[ScoredPrompt | UnscoredPrompt], manager: PrefillTokenizerManager
) -> dict[str, Any]:
    """Returns SGLang's reply, with the label scores of each item where reply fields are given. An item that is too long has null
    in both and an entry of `errors`.
    """
    scored = [one for one in answers if isinstance(one, ScoredPrompt)]
    outputs = [{"meta_info": one.meta_info} for one in scored]
    labels = [request.label_token_ids] * len(outputs)
    found = manager._process_single_item_scoring_results(
        outputs, labels, request.apply_softmax, temperature=request.temperature
    )
    usage = UsageInfo(prompt_tokens=found.prompt_tokens, total_tokens=found.prompt_tokens)
    reply: dict[str, Any] = ScoringResponse(scores=found.scores, model=request.model, usage=usage).model_dump()
    if given_reply_fields(request):
        reply["label_scores"] = [one.to_json() if isinstance(one, ScoredPrompt) else None for one in answers]
    if len(scored) < len(answers):
        of_scored = iter(found.scores)
        reply["scores"] = [next(of_scored) if isinstance(one, ScoredPrompt) else None for one in answers]
        reply["errors"] = [
            {"index": index, "message": one.message}
            for index, one in enumerate(answers)
            if isinstance(one, UnscoredPrompt)
        ]
    return reply
