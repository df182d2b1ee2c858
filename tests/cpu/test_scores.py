"""/v1/score with raw scores, alternatives and calibrations: the prompts and scores of SGLang's own handler, and more beside them;
and the same options where prompts are scored one by one."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.entrypoints import http_server
from sglang.srt.entrypoints.openai.serving_score import OpenAIServingScore
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.managers.tokenizer_manager_score_mixin import TokenizerManagerScoreMixin

from sgl_prefill.config import PrefillConfig
from sgl_prefill.core.label_calibration import Calibration
from sgl_prefill.errors import BadRequestError
from sgl_prefill.http import label_scoring
from sgl_prefill.http.label_scoring import AllowedAnswers, LabelScorer
from sgl_prefill.http.routes import PrefillRoutes
from sgl_prefill.http.scored_prompt import ReplyOptions, ScoredPrompt
from sgl_prefill.http.scores import LabelScoringRequest
from sgl_prefill.port.steps.clients import Caller
from sgl_prefill.startup.calibrations import ModelName, StoredCalibration

YES, NO = ord("y"), ord("n")
VOCABULARY = 128
TIMES = {"prefill_finished_time": 2.0, "forward_entry_time": 1.0, "api_server_dispatch_finish_ts": 0.5}
CALIBRATION = StoredCalibration(
    "shifted", "vector", ModelName("m", "f", None), ["n", "y"], Calibration([1.0, 1.0], [0.0, 2.0]), 20, None, {}
)


class Characters:
    """A tokenizer whose tokens are characters."""

    vocab_size = VOCABULARY

    def __deepcopy__(self, _: Any) -> Characters:
        return self

    def decode(self, token_ids: list[int], **_: Any) -> str:
        return "".join(map(chr, token_ids))


class Manager(TokenizerManagerScoreMixin):  # type: ignore[misc]
    """SGLang's own scoring, before a model whose log-probabilities depend on the prompt; it notes what it is asked."""

    is_generation = True
    served_model_name = "served"
    tokenizer = Characters()
    model_config = SimpleNamespace(vocab_size=VOCABULARY)
    request_logger = SimpleNamespace(log_requests=False)

    def __init__(self, config: PrefillConfig) -> None:
        self.prefill_config, self.server_args = config, SimpleNamespace(enable_mis=False)
        self.asked: list[list[Any]] = []

    async def caller_of(self, _: Any) -> Caller:
        return Caller()

    def tenant_of(self, _: Any) -> str:
        return ""

    def check_count(self, n_prompts: int) -> None:
        if n_prompts > 8:
            raise BadRequestError(f"the request has {n_prompts} prompts")

    async def generate_request(self, obj: GenerateReqInput, _: Any) -> AsyncIterator[Any]:
        prompts = obj.text if obj.text is not None else obj.input_ids
        self.asked.append(prompts)
        outputs = [self._output(obj, index, prompt) for index, prompt in enumerate(prompts)]
        if not obj.stream:
            yield outputs
        for output in reversed(outputs):
            yield output

    def _output(self, obj: GenerateReqInput, index: int, prompt: Any) -> dict[str, Any]:
        ids = [ord(one) for one in prompt] if isinstance(prompt, str) else prompt
        logits = [
            math.sin(1.0 + token * sum(place * one for place, one in enumerate(ids, 1))) for token in range(VOCABULARY)
        ]
        total = math.log(sum(map(math.exp, logits)))
        logs = [(logit - total, token, None) for token, logit in enumerate(logits)]
        asked = obj.token_ids_logprob
        asked = asked[index] if isinstance(asked[0], list) else asked
        meta: dict[str, Any] = {"prompt_tokens": len(ids), "cached_tokens": 0, **TIMES}
        meta["output_token_ids_logprobs"] = [[logs[token] for token in asked]]
        if obj.top_logprobs_num:
            meta["output_top_logprobs"] = [sorted(logs, reverse=True)[: obj.top_logprobs_num]]
        return {"index": index, "meta_info": meta}


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> Iterator[Manager]:
    found = Manager(PrefillConfig())
    monkeypatch.setattr(label_scoring, "MOST_LABELS", 20)
    monkeypatch.setattr(http_server, "_global_state", SimpleNamespace(tokenizer_manager=found))
    return found


def ask(manager: Manager, **body: Any) -> dict[str, Any]:
    app: Any = SimpleNamespace(state=SimpleNamespace(openai_serving_score=OpenAIServingScore(manager)))
    routes = PrefillRoutes(app, manager.prefill_config)

    manager.calibrations = {CALIBRATION.name: CALIBRATION}
    raw_request: Any = SimpleNamespace(app=app)
    response = asyncio.run(routes.score(LabelScoringRequest(**body), raw_request))
    assert response.status_code == 200, response.body
    return json.loads(response.body)  # type: ignore[no-any-return]


BODIES: tuple[dict[str, Any], ...] = (
    {"query": "Is it? ", "items": ["one", "two"]},
    {"query": "Is it? ", "items": ["one", "two"], "item_first": True, "model": "m"},
    {"query": "Is it? ", "items": "one", "apply_softmax": True},
    {"query": [5, 6], "items": [[7], [8, 9]], "apply_softmax": True},
    {"query": [5, 6], "items": [[7], [8, 9]], "item_first": True},
    {"query": "q", "items": []},
)


@pytest.mark.filterwarnings("ignore:ORJSONResponse is deprecated")  # which SGLang's handler answers with
@pytest.mark.parametrize("body", BODIES)
def test_prompts_and_scores_are_those_of_sglangs_handler_bit_for_bit(manager: Manager, body: dict[str, Any]) -> None:
    """Whatever else is asked for; usage, model and order of the fields too."""
    stock = ask(manager, label_token_ids=[YES, NO], **body)
    assert "label_scores" not in stock
    for fields in ({"raw_scores": True}, {"top_alternatives": 3}, {"calibration": "shifted"}):
        ours = ask(manager, label_token_ids=[YES, NO], **body, **fields)
        label_scores = ours.pop("label_scores")
        assert list(ours.items()) == list(stock.items())
        assert len(label_scores) == len(ours["scores"])
    assert all(asked == manager.asked[0] for asked in manager.asked)


def test_each_item_has_the_objects_of_the_label_routes(manager: Manager) -> None:
    body = {"query": "Is it? ", "items": ["one", "two"], "label_token_ids": [YES, NO]}
    found = ask(manager, **body, raw_scores=True, top_alternatives=2, calibration="shifted")
    assert len(found["label_scores"]) == 2
    for scores, one in zip(found["scores"], found["label_scores"], strict=True):
        assert [entry["label"] for entry in one["labels"]] == ["y", "n"]
        assert [math.exp(entry["raw_score"]) for entry in one["labels"]] == scores
        (yes, no), (raw_yes, raw_no) = (
            [entry[name] for entry in one["labels"]] for name in ("calibrated_probability", "raw_score")
        )
        assert math.log(yes / no) == pytest.approx(raw_yes - raw_no + 2.0)
        logs = [entry["logprob"] for entry in one["top_alternatives"]]
        assert len(logs) == 2
        assert logs == sorted(logs, reverse=True)
        assert one["calibration"] == "shifted"
        assert one["actual_ms"] == 1000.0


BAD: tuple[tuple[dict[str, Any], str], ...] = (
    (
        {"item_embed_overrides": [[[0.5]]], "embed_override_token_id": 1},
        "embed_override_token_id, item_embed_overrides cannot",
    ),
    ({"return_pooled_hidden_states": True}, "top_alternatives and return_pooled_hidden_states cannot be combined"),
    ({"score_extraction_token": "<|score|>"}, "top_alternatives and score_extraction_token cannot be combined"),
    ({"label_token_ids": None}, "label_token_ids is missing: give"),
    ({"label_token_ids": []}, "label_token_ids is empty"),
    ({"label_token_ids": [5, 5]}, "label_token_ids holds 5 more than once"),
    ({"label_token_ids": [128]}, "label_token_ids holds token id 128, and the vocabulary has 128"),
    ({"items": None}, "items is missing: give"),
    ({"query": None}, "query is missing, and items holds texts: give both in the same way"),
    ({"query": [5]}, "query is token ids, and items holds texts"),
    ({"items": [[5]]}, "query is a text, and items holds token ids"),
    ({"items": ["a"] * 9}, "9 prompts"),
    (
        {"items": ["a"] * 4, "top_alternatives": 4},
        "top_alternatives 4 after 4 prompts makes, with the labels, 24 prob.*20 are the limit",
    ),
    ({"top_alternatives": 0}, "top_alternatives is 0: ask for 1 to 100"),
    ({"calibration": "shifted", "label_token_ids": [YES, 5]}, "'shifted' is for the labels"),
)


@pytest.mark.parametrize(("wrong", "told"), BAD)
def test_what_cannot_be_answered_is_named_before_the_model_is_asked(
    manager: Manager, wrong: dict[str, Any], told: str
) -> None:
    good = {"query": "q", "items": ["a"], "label_token_ids": [YES, NO], "top_alternatives": 1}
    with pytest.raises(BadRequestError, match=told):
        ask(manager, **{**good, **wrong})
    assert manager.asked == []


@pytest.mark.parametrize("field", [{"raw_scores": True}, {"top_alternatives": 1}, {"calibration": "shifted"}])
def test_a_model_without_a_vocabulary_and_joined_items_refuse_each_field_by_name(
    manager: Manager, field: dict[str, Any]
) -> None:
    (name,) = field
    body = {"query": "q", "items": ["a"], "label_token_ids": [YES, NO], **field}
    manager.server_args.enable_mis = True
    with pytest.raises(BadRequestError, match=f"{name} on /v1/score needs a prompt for each item.*--enable-mis"):
        ask(manager, **body)
    manager.is_generation = False
    with pytest.raises(BadRequestError, match=f"{name} on /v1/score needs a causal language model.*leave it out"):
        ask(manager, **body)


def scored_one_by_one(manager: Manager, prompts: list[str], reply: ReplyOptions) -> dict[int, ScoredPrompt]:
    async def run() -> dict[int, ScoredPrompt]:
        scorer: Any = LabelScorer(manager)
        each = scorer.score_each(GenerateReqInput(text=prompts), AllowedAnswers(None, [YES, NO]), None, reply)
        return {place: one async for place, one in each}

    return asyncio.run(run())


def test_prompts_that_are_scored_one_by_one_get_the_same_reply(manager: Manager) -> None:
    """Of each prompt its own alternatives, and its own calibrated distribution."""
    reply = ReplyOptions(CALIBRATION, True, 2)
    prompts = ["one", "two", "three"]
    together = asyncio.run(
        LabelScorer(manager).score(GenerateReqInput(text=prompts), AllowedAnswers(None, [YES, NO]), reply=reply)
    )
    each = scored_one_by_one(manager, prompts, reply)
    assert [each[place].labels_to_json() for place in range(3)] == [one.labels_to_json() for one in together]
    assert len({json.dumps(one.labels_to_json()) for one in together}) == 3


def test_too_many_alternatives_of_a_stream_are_refused_before_it_begins(manager: Manager) -> None:
    with pytest.raises(BadRequestError, match="top_alternatives 5 after 3 prompts makes, with the labels, 21"):
        scored_one_by_one(manager, ["one", "two", "three"], ReplyOptions(top_alternatives=5))
    assert manager.asked == []
