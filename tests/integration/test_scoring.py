"""Label scoring over HTTP on the demo model."""

from __future__ import annotations

import gzip
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cohere
import httpx
import jina_cli.api
import jina_cli.main
import pytest
import requests
from click.testing import CliRunner

from sgl_prefill.entry import fingerprints
from sgl_prefill.http.tokenizer_manager import MOST_UNANSWERED_SAMPLES
from tests.integration.conftest import Server

FRANCE, ITALY = "The capital of France is", "The capital of Italy is"
CITIES = [" Paris", " Rome"]


def best(scores: dict[str, Any]) -> str:
    return str(max(scores["labels"], key=lambda entry: entry["probability"])["label"])


def test_completions_give_restricted_probabilities_ids_and_times(server: Server, tokenizer: Any) -> None:
    """One prompt: the right answer, a distribution, the ids used, the whole set of measurements."""
    reply = server.post("/v1/completions", {"model": "demo", "prompt": FRANCE, "allowed_tokens": CITIES}).json()
    (choice,) = reply["choices"]
    scores = choice["label_scores"]
    assert (choice["text"], choice["finish_reason"]) == (" Paris", "stop")
    assert [entry["label"] for entry in scores["labels"]] == CITIES
    assert [entry["token_id"] for entry in scores["labels"]] == [tokenizer.encode(city)[0] for city in CITIES]
    assert sum(entry["probability"] for entry in scores["labels"]) == pytest.approx(1.0, abs=1e-9)
    assert 0.5 < scores["label_mass"] <= 1.0
    assert scores["predicted_jct_ms"] > 0
    assert scores["actual_ms"] > 0
    assert scores["queue_ms"] >= 0
    n_tokens = len(tokenizer.encode(FRANCE))
    usage = reply["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (n_tokens, 1, n_tokens + 1)


def test_a_stop_text_ends_an_answer_of_one_token(server: Server) -> None:
    """Which SGLang finds in the answer's last tokens, as many as the longest stop text has."""
    for stop, left in ((" Paris", ""), ([" longer than one token", "aris"], " P"), (" Rome", " Paris")):
        options = {"max_new_tokens": 1, "temperature": 0, "stop": stop}
        (reply,) = server.post("/generate", {"text": [FRANCE], "sampling_params": options}).json()
        assert reply["text"] == left


def test_more_samples_than_wait_at_a_time_are_all_answered(server: Server) -> None:
    options = {"max_new_tokens": 1, "temperature": 1.0, "n": MOST_UNANSWERED_SAMPLES}
    replies = server.post("/generate", {"text": [FRANCE, ITALY], "sampling_params": options}).json()
    assert len({reply["meta_info"]["id"] for reply in replies}) == 2 * MOST_UNANSWERED_SAMPLES
    assert {len(reply["output_ids"]) for reply in replies} == {1}


def test_a_batch_is_answered_in_order_and_its_usage_is_the_sum(server: Server, tokenizer: Any) -> None:
    """Two prompts as text, and the same as token ids, give the same scores."""
    prompts = [FRANCE, ITALY]
    as_text = server.post("/v1/completions", {"model": "demo", "prompt": prompts, "allowed_tokens": CITIES}).json()
    assert [choice["text"] for choice in as_text["choices"]] == CITIES
    assert as_text["usage"]["prompt_tokens"] == sum(len(tokenizer.encode(prompt)) for prompt in prompts)
    assert as_text["usage"]["completion_tokens"] == 2
    as_ids = server.scores([tokenizer.encode(prompt) for prompt in prompts], allowed_tokens=CITIES)
    for choice, scores in zip(as_text["choices"], as_ids, strict=True):
        for left, right in zip(choice["label_scores"]["labels"], scores["labels"], strict=True):
            assert left["token_id"] == right["token_id"]
            assert left["probability"] == pytest.approx(right["probability"], abs=0.02)


def test_a_repeated_prompt_hits_the_cache_and_says_so(server: Server, tokenizer: Any) -> None:
    """All but the last token of a prompt that was just computed is reused; usage and scores agree on it."""
    prompt = "A sentence that no other test of this file uses, about the harbour of Reykjavik. It is"
    body = {"model": "demo", "prompt": prompt, "allowed_tokens": [" a", " the"]}
    server.post("/v1/completions", body)
    reply = server.post("/v1/completions", body).json()
    cached = len(tokenizer.encode(prompt)) - 1
    assert reply["choices"][0]["label_scores"]["cached_tokens"] == cached
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == cached


def test_chat_and_generate_score_too(server: Server) -> None:
    """The same answers on all three routes; ids or text."""
    messages = [{"role": "user", "content": "What is the capital of France? Answer with one word."}]
    chat = server.post(
        "/v1/chat/completions", {"model": "demo", "messages": messages, "allowed_tokens": ["Paris", "Rome"]}
    )
    assert chat.json()["choices"][0]["message"] == {"role": "assistant", "content": "Paris"}
    native = server.post("/generate", {"text": [FRANCE, ITALY], "allowed_tokens": CITIES}).json()
    assert [output["text"] for output in native] == CITIES
    ids = [entry["token_id"] for entry in native[0]["meta_info"]["label_scores"]["labels"]]
    single = server.post("/generate", {"text": FRANCE, "allowed_token_ids": ids}).json()
    assert single["text"] == " Paris"
    assert [entry["label"] for entry in single["meta_info"]["label_scores"]["labels"]] == CITIES


def test_a_label_is_resolved_after_this_prompt(server: Server, tokenizer: Any) -> None:
    """`Yes` and ` Yes` are different tokens, and both can be asked for; each keeps its text."""
    (scores,) = server.scores("Is it so? Answer:", allowed_tokens=["Yes", " Yes"])
    assert [entry["token_id"] for entry in scores["labels"]] == [
        tokenizer.convert_tokens_to_ids("Yes"),
        tokenizer.convert_tokens_to_ids("ĠYes"),
    ]


def test_label_mass_tells_a_wanted_answer_from_an_unwanted_one(server: Server) -> None:
    """Cities after `is` hold most of the probability, colours next to none, though both sum to 1."""
    cities, colours = (
        server.scores(FRANCE, allowed_tokens=CITIES)[0],
        server.scores(FRANCE, allowed_tokens=[" red", " blue"])[0],
    )
    assert cities["label_mass"] > 100 * colours["label_mass"]
    assert sum(entry["probability"] for entry in colours["labels"]) == pytest.approx(1.0)


def test_a_reply_hints_at_the_blank_before_labels_that_the_model_would_not_write(server: Server) -> None:
    """After `is` comes ` Paris`, not `Paris`."""
    without, with_blank = (
        server.scores(FRANCE, allowed_tokens=["Paris", "Rome"])[0],
        server.scores(FRANCE, allowed_tokens=CITIES)[0],
    )
    assert "' Paris', ' Rome'" in without["hint"]
    assert "hint" not in with_blank
    assert [entry["label"] for entry in without["labels"]] == ["Paris", "Rome"]


def longest_input(server: Server) -> int:
    memory = requests.get(f"{server.url}/server_info", timeout=60).json()["sgl_prefill"]["memory"]
    return int(memory["max_input_tokens"])


def test_an_error_of_a_batch_names_the_prompt(server: Server, tokenizer: Any) -> None:
    longest, ids = longest_input(server), tokenizer.encode(FRANCE)
    for prompts in ([ids, ids, [ids[0]] * (longest + 1)], [FRANCE, FRANCE, "a " * (longest + 1)]):
        reply = server.post("/v1/completions", {"model": "demo", "prompt": prompts, "max_tokens": 1})
        assert reply.status_code == 400
        assert "prompt 2 has" in reply.json()["message"], reply.text


def test_a_prompt_that_is_too_long_has_an_error_in_its_place(server: Server, tokenizer: Any) -> None:
    """As text and as ids, on each route of batches; the others are answered as alone."""
    longest, ids = longest_input(server), tokenizer.encode(FRANCE)
    alone = server.scores(FRANCE, allowed_tokens=CITIES)[0]["labels"]
    for prompts in ([ids, [ids[0]] * (longest + 1), ids], [FRANCE, "a " * (longest + 1), FRANCE]):
        body = {"model": "demo", "prompt": prompts, "allowed_tokens": CITIES, "logprobs": 2}
        reply = server.post("/v1/completions", body).json()
        assert [choice["finish_reason"] for choice in reply["choices"]] == ["stop", "error", "stop"]
        assert "prompt 1 has 818" in reply["choices"][1]["error"]["message"]
        assert [one["label_scores"]["labels"] for one in (reply["choices"][0], reply["choices"][2])] == [alone, alone]
        assert reply["usage"]["prompt_tokens"] == 2 * len(ids)
        field = "text" if isinstance(prompts[0], str) else "input_ids"
        outputs = server.post("/generate", {field: prompts, "allowed_tokens": CITIES}).json()
        assert ["error" in output for output in outputs] == [False, True, False]
        assert outputs[2]["meta_info"]["label_scores"]["labels"] == alone
        query: Any = "" if isinstance(prompts[0], str) else []
        labels = [entry["token_id"] for entry in alone]
        asked = {"model": "demo", "query": query, "items": prompts, "label_token_ids": labels, "apply_softmax": True}
        for more in ({}, {"raw_scores": True}):
            scored = server.post("/v1/score", {**asked, **more}).json()
            assert scored["scores"][0] == scored["scores"][2] == pytest.approx([one["probability"] for one in alone])
            assert scored["scores"][1] is None
            assert [one["index"] for one in scored["errors"]] == [1]
            assert ("label_scores" in scored) == bool(more)


def test_a_text_that_begins_as_an_earlier_one_has_the_tokens_of_the_whole(server: Server, tokenizer: Any) -> None:
    """Its beginning comes from the cache of texts, on the routes of prompts and of long conversations."""

    def cached() -> dict[str, int]:
        found = requests.get(f"{server.url}/server_info", timeout=60).json()["internal_states"][0]["text_cache"]
        return dict(found)

    beginning = "The cafe\u0301 on the corner serves 12,345 guests a day; it isn't large.\n" * 60
    before = cached()
    for end in ("Is it large? Answer:", "Is it small? Answer:"):
        ids = tokenizer.encode(beginning + end)
        whole, of_ids = (
            server.scores([beginning + end] * 2, allowed_tokens=CITIES),
            server.scores(ids, allowed_tokens=CITIES),
        )
        assert whole[0]["prompt_tokens"] == len(ids)
        assert whole[0]["labels"] == whole[1]["labels"] == of_ids[0]["labels"]
    after = cached()
    assert after["hits"] - before["hits"] == 3
    assert after["mismatches"] == before["mismatches"]
    messages = [{"role": "system", "content": beginning * 5}, {"role": "user", "content": "Is it large?"}]
    body = {"model": "demo", "messages": messages, "allowed_tokens": ["Yes", "No"], "logprobs": True}
    first, second = (server.post("/v1/chat/completions", body).json() for _ in range(2))
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert first["usage"]["prompt_tokens"] == len(rendered)
    assert first["choices"][0]["logprobs"] == second["choices"][0]["logprobs"]
    assert cached()["hits"] - after["hits"] == 1


def test_text_offsets_say_where_tokens_begin_in_the_text(server: Server) -> None:
    for more in ({}, {"allowed_tokens": CITIES}):
        body = {"model": "demo", "prompt": [FRANCE, "a"], "max_tokens": 1, "logprobs": 1, **more}
        reply = server.post("/v1/completions", body).json()
        assert [choice["logprobs"]["text_offset"] for choice in reply["choices"]] == [[0], [0]]
        streamed = server.post("/v1/completions", {**body, "stream": True}).text
        assert '"text_offset":[0]' in streamed
        assert '"text_offset":[-1]' not in streamed


def test_prompts_that_are_all_too_long_are_refused(server: Server) -> None:
    body = {"model": "demo", "prompt": ["a " * (longest_input(server) + 1)] * 2, "allowed_tokens": CITIES}
    reply = server.post("/v1/completions", body)
    assert reply.status_code == 400
    assert "prompt 0 has" in reply.json()["message"]


def test_a_field_that_would_be_ignored_is_refused(server: Server) -> None:
    reply = server.post("/v1/completions", {"model": "demo", "prompt": FRANCE, "max_tokens": 1, "prompt_logprobs": 1})
    assert reply.status_code == 400
    assert "prompt_logprobs is a field of vLLM's" in reply.json()["message"]


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions", "/generate"])
def test_a_streaming_client_gets_one_chunk(server: Server, route: str) -> None:
    """One data event with the whole answer, the usage if it was asked for, then [DONE]."""
    prompts: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": FRANCE},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": FRANCE}]},
        "/generate": {"text": FRANCE},
    }
    options: dict[str, Any] = {}
    if route != "/generate":
        options = {"model": "demo", "stream_options": {"include_usage": True}}
    reply = server.post(route, {**prompts[route], **options, "allowed_tokens": CITIES, "stream": True}, stream=True)
    events = [line[len(b"data: ") :] for line in reply.iter_lines() if line]
    assert events.pop() == b"[DONE]"
    if route != "/generate":
        last = json.loads(events.pop())
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == 1
    (chunk,) = [json.loads(event) for event in events]
    holder = chunk["meta_info"] if route == "/generate" else chunk["choices"][0]
    assert best(holder["label_scores"]) == " Paris"


def test_max_tokens_left_out_means_one_and_zero_is_accepted(server: Server) -> None:
    """Without labels the OpenAI routes go to SGLang with one token; 0 gives none."""
    one = server.post("/v1/completions", {"model": "demo", "prompt": FRANCE}).json()["usage"]
    zero = server.post("/v1/completions", {"model": "demo", "prompt": FRANCE, "max_tokens": 0}).json()["usage"]
    chat = server.post(
        "/v1/chat/completions", {"model": "demo", "messages": [{"role": "user", "content": "Hi"}]}
    ).json()
    assert (one["completion_tokens"], zero["completion_tokens"], chat["usage"]["completion_tokens"]) == (1, 0, 1)


def test_logprobs_of_the_labels_are_shown_where_asked_for(server: Server) -> None:
    """In OpenAI's shape, over the whole vocabulary."""
    body = {"model": "demo", "prompt": FRANCE, "allowed_tokens": CITIES, "logprobs": 2}
    choice = server.post("/v1/completions", body).json()["choices"][0]
    by_label = {entry["label"]: entry["logprob"] for entry in choice["label_scores"]["labels"]}
    assert choice["logprobs"]["top_logprobs"] == [by_label]
    assert choice["logprobs"]["token_logprobs"] == [by_label[" Paris"]]


def test_score_route_agrees_with_label_scoring(server: Server, tokenizer: Any) -> None:
    """SGLang's own /v1/score, on the same server, with softmax over the labels."""
    ids = [tokenizer.encode(city)[0] for city in CITIES]
    body = {
        "model": "demo",
        "query": "The capital of",
        "items": [" France is", " Italy is"],
        "label_token_ids": ids,
        "apply_softmax": True,
    }
    rows = server.post("/v1/score", body).json()["scores"]
    ours = server.scores([FRANCE, ITALY], allowed_token_ids=ids)
    for row, scores in zip(rows, ours, strict=True):
        assert row == pytest.approx([entry["probability"] for entry in scores["labels"]], abs=0.02)


def test_rerank_orders_documents_with_a_causal_model(server: Server) -> None:
    """Every document once, best first, at most top_n, each with a probability."""
    documents = ["Bananas are yellow.", "Paris is the capital of France.", "The moon is far away."]
    body = {"query": "What is the capital of France?", "documents": documents}
    ranked = server.post("/v1/rerank", body).json()
    assert sorted(entry["index"] for entry in ranked) == [0, 1, 2]
    scores = [entry["score"] for entry in ranked]
    assert scores == sorted(scores, reverse=True)
    assert all(0 < score < 1 for score in scores)
    assert all(entry["document"] == documents[entry["index"]] for entry in ranked)
    assert len(server.post("/v1/rerank", {**body, "top_n": 1}).json()) == 1


RERANKED = ["Bananas are yellow.", "Paris is the capital of France.", "The moon is far away."]
QUESTION = "What is the capital of France?"


def scores_of(server: Server) -> dict[int, float]:
    """By /v1/rerank as SGLang has it."""
    found = server.post("/v1/rerank", {"query": QUESTION, "documents": RERANKED}).json()
    return {entry["index"]: entry["score"] for entry in found}


def test_coheres_clients_rerank_unchanged(server: Server) -> None:
    """Both of its versions, with the scores of SGLang's route."""
    scores = scores_of(server)
    objects: list[Any] = [{"title": text, "text": "-"} for text in RERANKED]
    with httpx.Client() as connections:
        address: Any = {"api_key": "none", "base_url": server.url, "httpx_client": connections}
        client = cohere.ClientV2(**address)
        whole = client.rerank(model="m", query=QUESTION, documents=RERANKED)
        best = client.rerank(model="m", query=QUESTION, documents=RERANKED, top_n=1)
        with pytest.raises(cohere.BadRequestError, match="top_n is 0"):
            client.rerank(model="m", query=QUESTION, documents=RERANKED, top_n=0)
        of_older = cohere.Client(**address).rerank(
            model="m", query=QUESTION, documents=objects, rank_fields=["title"], return_documents=True, top_n=2
        )
    assert {one.index: one.relevance_score for one in whole.results} == pytest.approx(scores, abs=0.02)
    assert len(best.results) == 1
    assert best.meta is not None
    assert best.meta.billed_units is not None
    assert best.meta.billed_units.search_units == 1
    assert [one.relevance_score for one in of_older.results] == pytest.approx(sorted(scores.values())[:0:-1], abs=0.02)
    assert all(one.document is not None and one.document.text == "-" for one in of_older.results)


def test_jinas_client_reranks_unchanged(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own command line, with nothing but its address set."""
    monkeypatch.setattr(jina_cli.api, "API_BASE", server.url)
    monkeypatch.setenv("JINA_API_KEY", "none")
    found = jina_cli.api.rerank(QUESTION, RERANKED, top_n=2)
    scores = scores_of(server)
    assert [one["relevance_score"] for one in found] == pytest.approx(sorted(scores.values())[:0:-1], abs=0.02)
    assert all(one["document"] == {"text": RERANKED[one["index"]]} for one in found)
    said = CliRunner().invoke(jina_cli.main.cli, ["rerank", QUESTION], input="\n".join(RERANKED))
    assert said.exit_code == 0, said.output
    assert all(text in said.output for text in RERANKED)


def test_a_stream_shows_each_reranked_document(server: Server) -> None:
    """And then the whole reply, of which min_score leaves nothing."""
    body = {"query": QUESTION, "documents": RERANKED, "stream": True, "min_score": 1}
    reply = server.post("/rerank", body, stream=True)
    events = [line[len(b"data: ") :] for line in reply.iter_lines() if line]
    assert events.pop() == b"[DONE]"
    *documents, whole = map(json.loads, events)
    found = {one["index"]: one["relevance_score"] for one in documents}
    assert found == pytest.approx(scores_of(server), abs=0.02)
    assert whole["results"] == []
    too_long = server.post("/rerank", {**body, "documents": ["word " * 9000]})
    assert too_long.status_code == 400
    assert "this server takes at most 8185" in too_long.json()["error"]["message"]


def test_a_reply_says_what_was_kept_and_what_the_request_was_predicted_to_take(server: Server) -> None:
    """The facts come from the scheduler, through the detokenizer, which once lost them; defaults stood in for them."""
    prompt = list(range(2000, 2300))
    reply = server.post("/generate", {"input_ids": prompt, "allowed_token_ids": [5, 6]}).json()["meta_info"]
    assert (reply["kept_tokens"], reply["evicted_tokens"]) == (300, 0)
    scores = reply["label_scores"]
    assert scores["predicted_jct_ms"] == reply["predicted_jct_ms"] > 0
    assert scores["kept_tokens"] == 300


def test_server_info_shows_the_activation_record(server: Server) -> None:
    """What benchmarks look for before they count a run."""
    record = requests.get(server.url + "/server_info", timeout=30).json()["sgl_prefill"]
    assert record["sglang_version"] == fingerprints.SUPPORTED_SGLANG_VERSION
    assert record["config"]["scheduling"] == "calibrated-srjf"
    assert "sglang.srt.managers.scheduler.Scheduler.get_new_batch_prefill" in record["hooks"]


def test_health_generate_is_answered_without_generation(server: Server) -> None:
    """SGLang's health probe asks for one token by default; here it is a prefill."""
    assert requests.get(server.url + "/health_generate", timeout=60).status_code == 200


def test_a_profile_of_the_server_shows_its_operators(server: Server, tmp_path: Path) -> None:
    """/start_profile as SGLang has it, with its default activities; on our platform it once ended the scheduler."""
    assert server.post("/start_profile", {"output_dir": str(tmp_path)}).status_code == 200
    server.scores(FRANCE, allowed_tokens=CITIES)
    assert server.post("/stop_profile", {}).status_code == 200
    (trace,) = tmp_path.glob("*.trace.json.gz")
    with gzip.open(trace) as file:
        names = {event.get("name", "") for event in json.load(file)["traceEvents"]}
    assert "aten::empty" in names
    assert "sgl_prefill::attention" in names or any("scaled_dot_product" in name for name in names)


def values_of(reply: Any) -> list[float]:
    """All scores of a reply, in the order of labels, items or documents."""
    if isinstance(reply, list):
        return [one["score"] for one in sorted(reply, key=lambda one: one["index"])]
    if "results" in reply:
        return [one["relevance_score"] for one in sorted(reply["results"], key=lambda one: one["index"])]
    if "scores" in reply:
        return [value for item in reply["scores"] for value in item]
    found = reply["choices"][0] if "choices" in reply else reply["meta_info"]
    return [label["logprob"] for label in found["label_scores"]["labels"]]


def test_every_route_gives_the_same_bits_in_any_cache_state_and_company(server: Server) -> None:
    """Asked four times: with what the cache holds by now, again, after a flush, and all routes at once beside other requests."""
    text = "The best known tower of Paris, seen by millions every year, is made of"
    labels = {"allowed_tokens": [" iron", " wood", " stone"]}
    asked: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", {"model": "m", "prompt": text, **labels}),
        ("/v1/completions", {"model": "m", "prompt": text, "allowed_answers": [" wrought iron", " old wood"]}),
        (
            "/v1/chat/completions",
            {"model": "m", "messages": [{"role": "user", "content": text}], "allowed_tokens": ["Ir", "W"]},
        ),
        ("/generate", {"text": text, **labels}),
        ("/v1/score", {"query": text, "items": [" iron", " wood"], "label_token_ids": [5, 6, 7], "model": "m"}),
        ("/v1/rerank", {"query": QUESTION, "documents": RERANKED}),
        ("/rerank", {"query": QUESTION, "texts": RERANKED}),
    ]

    def ask(one: tuple[str, dict[str, Any]]) -> list[float]:
        reply = server.post(*one)
        assert reply.status_code == 200, reply.text
        return values_of(reply.json())

    first = [ask(one) for one in asked]
    assert [ask(one) for one in asked] == first
    assert server.post("/flush_cache", {}).status_code == 200
    assert [ask(one) for one in asked] == first
    others = [("/generate", {"text": f"{text} {number} things", **labels}) for number in range(20)]
    with ThreadPoolExecutor(len(asked) + len(others)) as pool:
        answers = list(pool.map(ask, [*asked, *others]))
    assert answers[: len(asked)] == first
    record = requests.get(server.url + "/server_info", timeout=30).json()["sgl_prefill"]
    assert record["stable_answers"] is not None, record["unstable_answers"]
