"""`/openapi.json` and `/docs`: replies are what their schemas say, and the page needs no other host."""

from __future__ import annotations

import re
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from pydantic import TypeAdapter
from sglang.srt.entrypoints import http_server

from sgl_prefill.config import PrefillConfig
from sgl_prefill.core.labels import Label, restrict
from sgl_prefill.core.long_labels import ScoredForm, ScoredLabels
from sgl_prefill.core.policy import ScoreParts
from sgl_prefill.http import api_docs, protocol, routes, scored_prompt
from sgl_prefill.http.dashboard_routes import DOCS_PATH, page
from sgl_prefill.http.rerank import Reply, Result, to_cohere, to_infinity, to_jina, to_sglang, to_tei
from sgl_prefill.http.rerank_request import RerankRequest
from sgl_prefill.http.scored_prompt import Alternative, ReplyOptions, ScoredPrompt, UnscoredPrompt
from sgl_prefill.http.shutdown import Ending
from sgl_prefill.port.steps.recent import Step
from sgl_prefill.port.steps.step_state import Answered

META_INFO: dict[str, Any] = {
    "prompt_tokens": 5,
    "cached_tokens": 2,
    "predicted_jct_ms": None,
    "prefill_finished_time": 2.0,
    "forward_entry_time": 1.0,
    "api_server_dispatch_finish_ts": 0.5,
    "prompt_parts": [{"kept_tokens": 5, "cut_tokens": 1}],
}
LABELS, DISTRIBUTION = [Label(" a", 1), Label(" b", 2)], restrict([-0.5, -1.0])
FORMS = [[ScoredForm(label.text, (1, 2), -0.5)] for label in LABELS]
SCORED = [
    ScoredPrompt(LABELS, DISTRIBUTION, META_INFO),
    ScoredPrompt(LABELS, DISTRIBUTION, META_INFO, ScoredLabels(FORMS, DISTRIBUTION, [-0.5, -1.0]), 2),
    ScoredPrompt(LABELS, DISTRIBUTION, META_INFO, None, 0, ReplyOptions(raw_scores=True), [0.3, 0.7]),
    ScoredPrompt(LABELS, DISTRIBUTION, META_INFO, alternatives=[Alternative(3, " c", -0.1, False)]),
    ScoredPrompt(LABELS, DISTRIBUTION, META_INFO, hint="mind the blank"),
]


@pytest.fixture(scope="module")
def app() -> FastAPI:
    """SGLang's routes with ours, in an app of its own: SGLang's is one per process."""
    made = FastAPI()
    made.router.routes += http_server.app.router.routes
    routes.install(made, PrefillConfig(), Ending(0))
    return made


def check(path: str, body: Any) -> None:
    """Raises ValidationError for a field that the schema lacks, or one that is missing."""
    TypeAdapter(api_docs.REPLIES[path][1]).validate_python(body)


@pytest.mark.parametrize("scored", SCORED)
def test_label_replies_are_what_the_schemas_say(scored: ScoredPrompt) -> None:
    head = scored_prompt.envelope(protocol.LabelCompletionRequest(model="m", prompt="p"), is_chunk=False)
    counted = scored_prompt.usage([scored])
    choices = [scored_prompt.completion_choice(0, scored, 1)]
    check("/v1/completions", {**head, "choices": choices, "usage": counted})
    chat = [scored_prompt.chat_choice(0, scored, 1, "message")]
    check("/v1/chat/completions", {**head, "choices": chat, "usage": counted})
    output = scored_prompt.generate_output(scored)
    check("/generate", output)
    check("/generate", [output])
    stock = {"scores": [[0.6, 0.4]], "model": "m", "usage": None, "object": "scoring", "pooled_hidden_states": None}
    check("/v1/score", stock | {"label_scores": [scored.to_json()]})


def test_errors_in_the_place_of_a_prompt_are_what_the_schemas_say() -> None:
    head = scored_prompt.envelope(protocol.LabelCompletionRequest(model="m", prompt="p"), is_chunk=False)
    answers: list[ScoredPrompt | UnscoredPrompt] = [SCORED[0], UnscoredPrompt("prompt 1 has 9 tokens")]
    choices = [scored_prompt.completion_choice(index, one, 1) for index, one in enumerate(answers)]
    check("/v1/completions", {**head, "choices": choices, "usage": scored_prompt.usage(answers)})
    check("/generate", [scored_prompt.generate_output(one) for one in answers])


def test_rerank_replies_and_decisions_are_what_the_schemas_say() -> None:
    extra = {"probability": 0.4, "label_scores": SCORED[2].labels_to_json(), "cut_tokens": 3}
    results = [Result(0, 0.5, "text", None, {}), Result(1, 0.4, {"text": "a"}, {}, extra)]
    reply = Reply(results, {2: "too long"}, 3, "m", {"prompt_tokens": 9, "total_tokens": 9}, True)
    for path, formats in (
        ("/v1/rerank", (to_jina, to_sglang, to_tei)),
        ("/rerank", (to_infinity,)),
        ("/v2/rerank", (to_cohere,)),
    ):
        for shown in formats:
            check(path, shown(reply))
    answered = Answered("r", 1.0, "client", 5, 2, 0.1, 0.2)
    for score in (None, ScoreParts(2.0, 1.0)):
        check("/scheduler/decisions", Step(1, 1.0, None, 2.0, 0.1, 0.0, score, [answered]).shown(0.0))


def test_every_own_request_field_is_explained(app: FastAPI) -> None:
    schemas = app.openapi()["components"]["schemas"]
    for name, fields in (
        ("LabelCompletionRequest", protocol.OWN_FIELDS),
        ("LabelChatCompletionRequest", protocol.OWN_FIELDS),
        ("LabelGenerateReqInput", protocol.OWN_FIELDS),
        ("LabelScoringRequest", scored_prompt.ReplyFields.model_fields),
        ("RerankRequest", set(RerankRequest.model_fields) - {"model"}),
    ):
        properties = schemas[name]["properties"]
        assert [field for field in fields if not properties[field].get("description")] == [], name


def test_the_api_has_a_name_and_each_route_a_reply(app: FastAPI) -> None:
    found = app.openapi()
    assert found["info"]["title"] == "sgl_prefill"
    for path in api_docs.REPLIES:
        for operation in found["paths"][path].values():
            (content,) = operation["responses"]["200"]["content"].values()
            assert re.search(r"'\$ref': '#/components/schemas/\w+'", str(content)), path
            assert set(operation["responses"]) == {"200", "4XX", "5XX"}, path


def test_the_page_needs_no_other_host(app: FastAPI) -> None:
    with TestClient(app, raise_server_exceptions=False) as client:
        shown = client.get(DOCS_PATH)
        assert shown.content == page(DOCS_PATH).html
        assert shown.headers["content-security-policy"] == page(DOCS_PATH).policy
        assert client.get("/redoc").status_code == 404
    assert not re.search(r"https?://|\bsrc=|innerHTML", shown.text)
