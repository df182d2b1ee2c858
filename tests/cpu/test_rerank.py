"""Rerank requests: which are refused and how, the shapes of replies, and streams whose client leaves."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import HTTPException
from fastapi.responses import StreamingResponse
from sglang.srt.entrypoints.openai.protocol import RerankResponse
from sglang.srt.managers.io_struct import GenerateReqInput

from sgl_prefill.config import PrefillConfig
from sgl_prefill.core.label_calibration import Calibration
from sgl_prefill.core.labels import Label, restrict
from sgl_prefill.errors import BadRequestError, ConfigurationError
from sgl_prefill.http.rerank import (
    Reranker,
    Result,
    Serialiser,
    _reply,
    format_of_v1,
    to_cohere,
    to_infinity,
    to_jina,
    to_sglang,
)
from sgl_prefill.http.rerank_cuts import Cuts, fit
from sgl_prefill.http.rerank_request import RerankRequest, checked
from sgl_prefill.http.scored_prompt import ReplyOptions, ScoredPrompt, with_reply
from sgl_prefill.startup import arguments
from sgl_prefill.startup.calibrations import ModelName, StoredCalibration

GOOD: dict[str, Any] = {"query": "q", "documents": ["a", "b", "c"]}
CUTS = ("max_tokens_per_doc", "max_chunks_per_doc", "max_tokens_per_query", "truncate_prompt_tokens")
OBJECTS = [{"title": "t", "text": "a", "year": 5}, {"title": "u"}]


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"query": "", "documents": ["a"]}, 'query is "": it must be a text that is not empty'),
        ({"query": 5, "documents": ["a"]}, "query is 5"),
        ({"documents": ["a"]}, "query is null"),
        ({"query": "q"}, "documents is null: give a list"),
        ({"query": "q", "documents": []}, "documents is empty: give a list with at least one"),
        ({"query": "q", "documents": "a"}, 'documents is "a"'),
        ({"query": "q", "documents": ["a", 7]}, r"documents\[1\] is 7: it must be a text, or an object"),
        (
            {"query": "q", "documents": OBJECTS},
            r'documents\[1\] has no field "text" among \["title"\]: give it, or name',
        ),
        (
            {"query": "q", "documents": OBJECTS, "rank_fields": ["title", "body"]},
            r'documents\[0\] has no field "body" of rank_fields among \["title","text","year"\]: name fields that it has',
        ),
        ({"query": "q", "documents": OBJECTS, "rank_fields": ["year"]}, r"documents\[0\].year is 5: it must be a text"),
        ({"query": "q", "documents": [{"text": 5}]}, r"documents\[0\].text is 5: it must be a text"),
        ({**GOOD, "rank_fields": ["title"]}, r"documents\[0\] is a text, and rank_fields is .* leave rank_fields out"),
        *(
            ({"query": "q", "documents": OBJECTS, "rank_fields": wrong}, "rank_fields is .* different names of fields")
            for wrong in ([], "title", [5], ["title", "title"], [""])
        ),
        *(({**GOOD, "top_n": wrong}, "top_n is .*: it must be a whole number") for wrong in (0, -1, 1.5, "2", True)),
        *(
            ({**GOOD, "min_score": wrong}, "min_score is .*: it must be a number from 0 to 1")
            for wrong in (-0.1, 2, "a")
        ),
        ({**GOOD, "instruct": "a", "instruction": "b"}, 'instruct is "a" and instruction is "b": they are two names'),
        ({**GOOD, "instruct": ["a"]}, "instruct is .*: it must be a text"),
        ({**GOOD, "model": 5}, "model is 5"),
        ({**GOOD, "stop_early": True, "top_n": 1}, "no bound proves"),
        *(({**GOOD, name: 0}, f"{name} is 0: it must be a whole number") for name in CUTS),
        ({**GOOD, "truncation_direction": "left"}, 'truncation_direction is "left": it must be "right"'),
        ({**GOOD, "top_n": 1, "top_k": 2}, "top_n is 1 and top_k is 2"),
        ({**GOOD, "relevant_spans": {"mode": "enabled"}}, "relevant_spans is .*no spans"),
    ],
)
def test_a_wrong_request_is_refused_with_field_value_and_remedy(body: dict[str, Any], told: str) -> None:
    with pytest.raises(BadRequestError, match=told):
        checked(RerankRequest(**body))


def test_passages_are_texts_or_the_named_fields_of_objects() -> None:
    documents = ["a", {"text": "b", "n": 1}]
    assert checked(RerankRequest(query="q", documents=documents)).passages == ["a", "b"]
    fields = checked(RerankRequest(query="q", documents=OBJECTS[:1], rank_fields=["text", "title"]))
    assert fields.passages == ["a\nt"]
    both = checked(RerankRequest(**GOOD, instruct="find", instruction="find", top_n=9, min_score=0, stop_early=False))
    assert both[1:] == ("find", ["a", "b", "c"], 9, 0.0, Cuts())
    assert checked(RerankRequest(query="q", documents=["", {"text": ""}])).passages == ["", ""]


def reply(serialise: Serialiser, **fields: Any) -> Any:
    """To three documents with the scores 0.2, 0.9 and 0.5."""
    request = RerankRequest(**{**GOOD, **fields})
    results = [Result(index, score, request.documents[index], None, {}) for index, score in enumerate([0.2, 0.9, 0.5])]
    usage = {"prompt_tokens": 30, "completion_tokens": 0, "total_tokens": 30}
    manager: Any = Manager()
    return serialise(_reply(manager, request, checked(request), results, usage, {}))


def test_the_shape_is_that_of_who_asks() -> None:
    """SGLang's clients read a list; its gateway, which names a model too, sends `rid` with it."""
    assert format_of_v1(RerankRequest(**GOOD)) is to_sglang
    assert format_of_v1(RerankRequest(**GOOD, model="m")) is to_jina
    assert format_of_v1(RerankRequest(**{**GOOD, "model": "m", "rid": None})) is to_sglang
    assert reply(to_sglang, top_n=1) == [{"score": 0.9, "document": "b", "index": 1, "meta_info": None}]
    jina = reply(to_jina, top_n=1)
    assert jina["results"] == [{"index": 1, "relevance_score": 0.9, "score": 0.9, "document": {"text": "b"}}]
    assert (jina["model"], jina["usage"]["total_tokens"], jina["object"]) == ("served", 30, "list")
    cohere = reply(to_cohere, model="m", top_n=1)
    assert set(cohere) == {"id", "results", "meta"}
    assert cohere["results"] == [{"index": 1, "relevance_score": 0.9}]
    assert cohere["meta"]["billed_units"] == {"search_units": 1}


def test_documents_are_returned_as_they_were_given() -> None:
    objects = {"documents": [{"text": "a", "id": 7}, "b", "c"]}
    assert [one["document"] for one in reply(to_jina, **objects)["results"]] == [
        {"text": "b"},
        {"text": "c"},
        {"text": "a", "id": 7},
    ]
    for serialise in (to_jina, to_cohere):
        assert all("document" not in one for one in reply(serialise, return_documents=False)["results"])
    assert "document" in reply(to_cohere, return_documents=True)["results"][0]
    assert "document" not in reply(to_sglang, return_documents=False)[0]


def test_top_n_and_min_score_choose_among_all() -> None:
    def places(**fields: Any) -> list[int]:
        return [one["index"] for one in reply(to_sglang, **fields)]

    assert places() == [1, 2, 0]
    assert places(top_n=5) == [1, 2, 0]
    assert places(top_n=2) == [1, 2]
    assert places(min_score=0.5) == [1, 2]
    assert places(min_score=0.5, top_n=1) == [1]
    assert places(min_score=1) == []


class Scorer:
    """Scores a document by the number that it ends with; of a stream each when the test says so."""

    def __init__(self) -> None:
        self.prompts: list[str] = []
        self.next: asyncio.Queue[int] = asyncio.Queue()  # places of documents

    async def score(
        self, obj: GenerateReqInput, answers: Any, raw_request: Any, *, reply: ReplyOptions
    ) -> list[ScoredPrompt]:
        assert isinstance(obj.text, list)
        self.prompts += obj.text
        return [self._scored(text, answers.tokens, reply) for text in obj.text]

    async def score_each(
        self, obj: GenerateReqInput, answers: Any, raw_request: Any, reply: ReplyOptions
    ) -> AsyncIterator[tuple[int, ScoredPrompt]]:
        assert isinstance(obj.text, list)
        obj.rid = ["inside"]
        for _ in obj.text:
            place = await self.next.get()
            yield place, self._scored(obj.text[place], answers.tokens, reply)

    def _scored(self, text: str, labels: list[str], reply: ReplyOptions) -> ScoredPrompt:
        if "wrong" in text:
            raise HTTPException(429, "too much waits")
        score = int(text.removesuffix("\nAnswer:")[-1]) / 10
        logs = restrict([score, 1 - score])
        distribution = logs._replace(probabilities=[score, 1 - score])
        found = [Label(label, index) for index, label in enumerate(labels)]
        meta_info = {
            "prompt_tokens": 7,
            "cached_tokens": 3,
            "output_top_logprobs": [[(score, 0, None), (-9.0, 5, None)]],
        }
        return with_reply(ScoredPrompt(found, distribution, meta_info), reply, {0: labels[0], 5: "?"})


class Words:
    """A tokenizer whose tokens are words."""

    is_fast = True

    def __call__(self, text: str, **options: Any) -> dict[str, list[tuple[int, int]]]:
        return {"offset_mapping": [word.span() for word in re.finditer(r"\S+", text)]}

    def encode(self, text: str, **options: Any) -> list[int]:
        return [0] * len(self(text)["offset_mapping"])


class Manager:
    """What a reranker asks of SGLang's tokenizer manager."""

    is_generation = True
    tokenizer = SimpleNamespace(chat_template=None)
    model_config = SimpleNamespace(model_path="m")
    served_model_name = "served"

    def __init__(self, longest_input_tokens: int = 1000) -> None:
        self.told: list[Any] = []
        self.longest_input_tokens = longest_input_tokens

    async def run_in_thread(self, work: Any, n_characters: int) -> Any:
        return work(SimpleNamespace(tokenizer=Words()))

    def abort_request(self, rid: Any) -> None:
        self.told.append(rid)


RAW: Any = SimpleNamespace()
TURNED = StoredCalibration(  # P(yes) and P(no) change places; the labels stand in another order than the template's
    *("turned", "vector", ModelName("m", "f", None), [" no", " yes"], Calibration([-1.0, -1.0], [0.0, 0.0])),
    *(20, None, {}),
)


async def asked(
    scorer: Scorer,
    manager: Manager,
    body: dict[str, Any],
    config: PrefillConfig | None = None,
    found: Any = None,
    serialise: Serialiser | None = to_jina,
) -> Any:
    """found: what SGLang's own handler answers."""

    async def stock_endpoint(request: Any, raw_request: Any) -> Any:
        manager.told.append(f"SGLang was asked for {request.documents} with {request.instruct}")
        return found

    def reply_options(request: RerankRequest) -> ReplyOptions:
        found = None if request.calibration is None else TURNED
        return ReplyOptions(found, request.raw_scores, request.top_alternatives or 0)

    reranker = Reranker(config or PrefillConfig(), lambda: scorer, stock_endpoint, reply_options)  # type: ignore[arg-type,return-value]
    serving = SimpleNamespace(tokenizer_manager=manager)
    return await reranker.answer(serving, RerankRequest(**body), RAW, serialise)


async def read(stream: Any) -> list[Any]:
    assert isinstance(stream, StreamingResponse)
    events = [str(bytes(event), "utf-8") async for event in stream.body_iterator]  # type: ignore[arg-type]
    assert events.pop() == "data: [DONE]\n\n"
    return [json.loads(event.removeprefix("data: ")) for event in events]


def test_a_stream_shows_each_document_when_it_is_scored_and_then_the_whole() -> None:
    """The last document is done first; what is above min_score is a question of the whole."""

    async def run() -> None:
        scorer, manager = Scorer(), Manager()
        body = {"query": "q", "documents": ["doc 2", "doc 9", "doc 5"], "stream": True, "min_score": 0.5}
        for place in (2, 1, 0):
            scorer.next.put_nowait(place)
        *documents, whole = await read(await asked(scorer, manager, body))
        assert [(one["index"], one["relevance_score"]) for one in documents] == [(2, 0.5), (1, 0.9), (0, 0.2)]
        assert documents[0]["document"] == {"text": "doc 5"}
        assert [one["index"] for one in whole["results"]] == [1, 2]
        assert whole["usage"]["prompt_tokens"] == whole["usage"]["total_tokens"] == 21
        assert manager.told == []

    asyncio.run(run())


def test_who_leaves_a_stream_ends_what_is_not_scored_yet() -> None:
    async def run() -> None:
        scorer, manager = Scorer(), Manager()
        body = {"query": "q", "documents": ["doc 2", "doc 9", "doc 5"], "stream": True}
        events: Any = (await asked(scorer, manager, body)).body_iterator
        scorer.next.put_nowait(2)
        assert b'"index":2' in await anext(events)
        await events.aclose()
        assert manager.told == [["inside"]]

    asyncio.run(run())


def test_a_stream_that_cannot_begin_has_a_status_and_a_later_failure_is_an_event() -> None:
    async def run() -> None:
        scorer = Scorer()
        body = {"query": "q", "documents": ["wrong", "doc 1"], "stream": True}
        scorer.next.put_nowait(0)
        with pytest.raises(HTTPException, match="too much waits"):
            await read(await asked(scorer, Manager(), body))
        for place in (1, 0):
            scorer.next.put_nowait(place)
        first, failure = await read(await asked(scorer, Manager(), body))
        assert first["index"] == 1
        assert failure["error"]["message"] == "too much waits"

    asyncio.run(run())


def test_sglangs_own_handler_serves_models_that_are_no_causal_ones() -> None:
    """It gets the texts, and its scores are shown in the shape that was asked for."""

    async def run() -> None:
        manager = Manager()
        manager.is_generation = False
        found = [RerankResponse(score=0.7, index=1, meta_info={"prompt_tokens": 4}), RerankResponse(score=-3, index=0)]
        body = {"query": "q", "documents": [{"text": "a"}, "b"], "instruction": "find", "min_score": 0.5}
        shown = json.loads((await asked(Scorer(), manager, body, found=found)).body)
        assert manager.told == ["SGLang was asked for ['a', 'b'] with find"]
        assert [one["index"] for one in shown["results"]] == [1]
        assert shown["usage"] is None
        of_v1 = await asked(Scorer(), manager, {**body, "model": "m"}, found=found, serialise=None)
        assert json.loads(of_v1.body) == [
            {"score": 0.7, "document": "b", "index": 1, "meta_info": {"prompt_tokens": 4}}
        ]
        with pytest.raises(BadRequestError, match="start the server with --rerank-template"):
            await asked(Scorer(), manager, {**body, "stream": True}, found=found)
        with pytest.raises(BadRequestError, match="its model is none"):
            await asked(Scorer(), manager, body, PrefillConfig(rerank_template="yes-no"))

    asyncio.run(run())


BODY: dict[str, Any] = {"query": "q", "documents": ["doc 2", "doc 9", "doc 5"]}


@pytest.mark.parametrize("serialise", [to_sglang, to_jina, to_cohere, None])
def test_calibrated_scores_order_and_choose_the_documents(serialise: Serialiser | None) -> None:
    """In every shape, with P(yes) as it was beside them; this calibration makes of each score one minus it."""
    shown = json.loads(
        asyncio.run(
            asked(Scorer(), Manager(), {**BODY, "calibration": "turned", "min_score": 0.4}, serialise=serialise)
        ).body
    )
    results = shown if isinstance(shown, list) else shown["results"]
    name = "score" if isinstance(shown, list) else "relevance_score"
    assert [one["index"] for one in results] == [0, 2]
    assert [one[name] for one in results] == pytest.approx([0.8, 0.5])
    assert [one["probability"] for one in results] == [0.2, 0.5]
    scores = results[0]["label_scores"]
    assert scores["calibration"] == "turned"
    assert [entry["label"] for entry in scores["labels"]] == [" yes", " no"]
    assert [entry["calibrated_probability"] for entry in scores["labels"]] == pytest.approx([0.8, 0.2])


def test_raw_scores_and_alternatives_change_nothing_of_the_scores() -> None:
    """And a request without them has no field more than before."""

    def results(**fields: Any) -> list[dict[str, Any]]:
        reply = asyncio.run(asked(Scorer(), Manager(), {**BODY, **fields}, serialise=to_cohere))
        return json.loads(reply.body)["results"]  # type: ignore[no-any-return]

    plain, more = results(), results(raw_scores=True, top_alternatives=2)
    assert [set(one) for one in plain] == [{"index", "relevance_score"}] * 3
    scores = [one.pop("label_scores") for one in more]
    assert more == plain
    raw = [[entry["raw_score"] for entry in one["labels"]] for one in scores]
    assert raw == [[score, 1 - score] for score in (0.9, 0.5, 0.2)]
    assert [one["top_alternatives"][0]["logprob"] for one in scores] == [0.9, 0.5, 0.2]
    assert [one["top_alternatives"][1]["text"] for one in scores] == ["?"] * 3


def test_a_stream_shows_of_each_document_what_was_asked_for() -> None:
    """As the whole does, which is ordered by the calibrated scores."""

    async def run() -> None:
        scorer, fields = Scorer(), {"calibration": "turned", "top_alternatives": 2, "stream": True}
        for place in (2, 1, 0):
            scorer.next.put_nowait(place)
        *documents, whole = await read(await asked(scorer, Manager(), {**BODY, **fields}))
        assert [one["index"] for one in documents] == [2, 1, 0]
        assert [one["relevance_score"] for one in documents] == pytest.approx([0.5, 0.1, 0.8])
        assert [one["probability"] for one in documents] == [0.5, 0.9, 0.2]
        assert sorted(documents, key=lambda one: -one["relevance_score"]) == whole["results"]
        assert all(len(one["label_scores"]["top_alternatives"]) == 2 for one in documents)

    asyncio.run(run())


@pytest.mark.parametrize("field", [{"calibration": "turned"}, {"raw_scores": True}, {"top_alternatives": 1}])
def test_sglangs_own_handler_refuses_each_of_the_fields_by_name(field: dict[str, Any]) -> None:
    """With the remedy that there is; a false `raw_scores` asks for nothing."""

    async def run() -> None:
        (name,), manager = field, Manager()
        manager.tokenizer = SimpleNamespace(chat_template='the answer can only be "yes" or "no"')
        for documents in (["a"], [[{"type": "text", "text": "a"}]]):
            with pytest.raises(
                BadRequestError, match=f"{name}: SGLang's own .* start the server with --rerank-template"
            ):
                await asked(Scorer(), manager, {"query": "q", "documents": documents, **field})
        manager.is_generation = False
        with pytest.raises(BadRequestError, match=f"{name}: SGLang's own .* leave it out$"):
            await asked(Scorer(), manager, {**GOOD, **field})
        assert manager.told == []
        await asked(Scorer(), manager, {**GOOD, "raw_scores": False}, found=[])
        assert len(manager.told) == 1

    asyncio.run(run())


def test_a_number_of_alternatives_that_is_not_served_is_refused() -> None:
    with pytest.raises(BadRequestError, match="top_alternatives is 0: ask for 1 to 100"):
        asyncio.run(asked(Scorer(), Manager(), {**BODY, "top_alternatives": 0}))


def test_the_template_of_the_flag_is_what_the_model_is_asked(tmp_path: Any) -> None:
    """Also where its chat template is a reranker's, which SGLang's own handler would serve."""

    async def run() -> None:
        own = tmp_path / "own.jinja"
        own.write_text('{%- set labels = ["good", "bad"] -%}\n{{ query }}? {{ document }}\n')
        scorer, manager = Scorer(), Manager()
        manager.tokenizer = SimpleNamespace(chat_template='the answer can only be "yes" or "no"')
        config = PrefillConfig(rerank_template=str(own))
        await asked(scorer, manager, {"query": "{x}", "documents": ["doc 1"]}, config)
        assert scorer.prompts == ["{x}? doc 1"]
        with pytest.raises(BadRequestError, match="has no place for an instruction"):
            await asked(scorer, manager, {**GOOD, "instruct": "find"}, config)

    asyncio.run(run())


def test_a_template_that_cannot_be_used_is_refused_before_anything_starts(tmp_path: Any) -> None:
    (problem,) = arguments.check_argv(PrefillConfig(rerank_template="qwen"), [], listens=False)
    assert "--rerank-template qwen is none of yes-no, qwen3-reranker" in problem
    assert arguments.check_argv(PrefillConfig(rerank_template="qwen3-reranker"), [], listens=False) == []
    with pytest.raises(ConfigurationError):
        Reranker(PrefillConfig(rerank_template=str(tmp_path)), lambda: None, None, None)  # type: ignore[arg-type,return-value]


def test_each_engine_reads_its_own_shape() -> None:
    """TEI names the documents `texts` and reads a list, infinity's client checks `object`."""

    async def run() -> None:
        texts = {"query": "q", "texts": ["doc 2", "doc 9"], "raw_scores": False, "truncate": False}
        found = json.loads((await asked(Scorer(), Manager(), texts, serialise=to_infinity)).body)
        assert found == [{"index": 1, "score": 0.9}, {"index": 0, "score": 0.2}]
        found = json.loads((await asked(Scorer(), Manager(), {**texts, "return_text": True}, serialise=None)).body)
        assert found[0] == {"index": 1, "score": 0.9, "text": "doc 9"}

    asyncio.run(run())
    infinity = reply(to_infinity, top_k=1, return_documents=False)
    assert (infinity["object"], [one["index"] for one in infinity["results"]]) == ("rerank", [1])
    assert infinity["created"] > 1e9
    with pytest.raises(ValueError, match="texts and documents are both given"):
        RerankRequest(**GOOD, texts=["a"])


def test_documents_are_cut_at_tokens_and_the_reply_says_so() -> None:
    async def run(body: dict[str, Any], longest: int = 1000) -> tuple[list[str], Any]:
        scorer = Scorer()
        answer = await asked(scorer, Manager(longest), {"query": "one two three", **body})
        return scorer.prompts, json.loads(answer.body)

    body = {"documents": ["5 5 5 5", "4"]}
    prompts, found = asyncio.run(run({**body, "max_tokens_per_doc": 3, "max_tokens_per_query": 2}))
    assert "one two\n" in prompts[0]
    assert "three" not in prompts[0]
    assert prompts[0].endswith("5 5 5\nAnswer:")
    assert [(one["index"], one["cut_tokens"]) for one in found["results"]] == [(0, 2), (1, 1)]
    whole, _ = asyncio.run(run(body))
    n_rest = len(Words().encode(whole[0])) - 4
    for limit in ({"truncate_prompt_tokens": n_rest + 2}, {"truncate": True}):
        prompts, found = asyncio.run(run({**body, **limit}, longest=n_rest + 2))
        assert prompts[0].endswith("5 5\nAnswer:")
        assert [one.get("cut_tokens") for one in found["results"]] == [2, None]
    with pytest.raises(BadRequestError, match=r"leave no room for documents\[0\]"):
        asyncio.run(run({**body, "truncate": True}, longest=n_rest))


@pytest.mark.parametrize("serialise", [to_jina, to_cohere, to_sglang])
def test_a_document_that_is_too_long_has_an_error_in_its_place(serialise: Serialiser) -> None:
    async def run(documents: list[str]) -> Any:
        return json.loads(
            (await asked(Scorer(), Manager(40), {**GOOD, "documents": documents}, serialise=serialise)).body
        )

    long = "word " * 41 + "7"
    found = asyncio.run(run(["5", long, "9"]))
    entries = found if isinstance(found, list) else found["results"]
    assert [one["index"] for one in entries if one.get("error") is None] == [2, 0]
    (wrong,) = [one for one in found if one.get("error")] if isinstance(found, list) else found["errors"]
    assert wrong["index"] == 1
    assert "this server takes at most 40: shorten it, or give max_tokens_per_doc" in str(wrong)
    with pytest.raises(BadRequestError, match=r"documents\[0\]: its prompt has"):
        asyncio.run(run([long]))


def test_a_tokenizer_without_offsets_cuts_by_decoding() -> None:
    slow: Any = SimpleNamespace(encode=lambda text, **_: list(text), decode="".join)
    found = fit(
        slow, lambda query, passages: [f"{query}|{one}" for one in passages], "q", ["abcdef"], Cuts(document=4), 100
    )
    assert (found.prompts, found.cut_tokens) == (["q|abcd"], {0: 2})
