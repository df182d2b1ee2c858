"""What nonsense gets: a 4xx with a message for people in both error shapes, and a server that stays up."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import requests

from tests.integration.conftest import Server

PROMPT = {"model": "demo", "prompt": "Is it so? Answer:"}
CHAT: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "Is it so?"}]}
NATIVE = {"text": "Is it so? Answer:"}
LABELS = [" yes", " no"]
COMPLETIONS, CHATS, GENERATE = "/v1/completions", "/v1/chat/completions", "/generate"
VOCABULARY_SIZE = 49152
WAITING = "sglang:prefill_waiting_requests{"

CASES: list[tuple[str, dict[str, Any], list[str]]] = [
    (COMPLETIONS, {**PROMPT, "max_tokens": 2}, ["max_tokens", "2", "--allow-generation"]),
    (CHATS, {**CHAT, "max_tokens": 50}, ["50", "--allow-generation"]),
    (CHATS, {**CHAT, "max_completion_tokens": 50}, ["50", "--allow-generation"]),
    (GENERATE, {**NATIVE, "sampling_params": {"max_new_tokens": 8}}, ["8", "--allow-generation"]),
    (GENERATE, NATIVE, ["128", "left out", "--allow-generation"]),
    (GENERATE, {**NATIVE, "sampling_params": {"max_new_tokens": "8"}}, ["max_new_tokens"]),
    (GENERATE, {**NATIVE, "sampling_params": {"max_new_tokens": 1, "temperature": "hot"}}, ["sampling_params"]),
    (GENERATE, {**NATIVE, "sampling_params": {"max_new_tokens": 1, "no_such_field": 1}}, ["no_such_field"]),
    (
        GENERATE,
        {**NATIVE, "sampling_params": {"max_new_tokens": 1, "repetition_penalty": 2.0}},
        ["repetition_penalty is 2.0"],
    ),
    (COMPLETIONS, {**PROMPT, "frequency_penalty": 0.5}, ["frequency_penalty is 0.5", "one: leave them out"]),
    (CHATS, {**CHAT, "presence_penalty": 1, "allowed_tokens": LABELS}, ["presence_penalty cannot be combined"]),
    (COMPLETIONS, {**PROMPT, "max_tokens": 5, "allowed_tokens": LABELS}, ["max_tokens is 5", "scored, not generated"]),
    (COMPLETIONS, {**PROMPT, "allowed_tokens": []}, ["allowed_tokens is empty"]),
    (COMPLETIONS, {**PROMPT, "allowed_token_ids": []}, ["allowed_token_ids is empty"]),
    (COMPLETIONS, {**PROMPT, "allowed_tokens": [" yes", " no", " yes"]}, ["' yes'", "more than once"]),
    (COMPLETIONS, {**PROMPT, "allowed_token_ids": [5, 5]}, ["5", "more than once"]),
    (COMPLETIONS, {**PROMPT, "allowed_tokens": [" yes", ""]}, ["empty text"]),
    (
        COMPLETIONS,
        {**PROMPT, "allowed_tokens": [" yes", " absolutely not"]},
        ["' absolutely not'", "2 tokens", "' not'"],
    ),
    (CHATS, {**CHAT, "allowed_tokens": ["definitely not"]}, ["'definitely not'", "tokens"]),
    (GENERATE, {**NATIVE, "allowed_tokens": []}, ["allowed_tokens is empty"]),
    (GENERATE, {**NATIVE, "allowed_token_ids": [5, 6], "return_sampling_mask": True}, ["return_sampling_mask"]),
    (
        COMPLETIONS,
        {**PROMPT, "prompt": [f"{n}? Answer:" for n in range(150)], "allowed_tokens": [f" a{n}" for n in range(1873)]},
        ["1873 allowed answers after 150 prompts", "280950", "50000 are the limit"],
    ),
    (
        COMPLETIONS,
        {**PROMPT, "prompt": [f"{n}? Answer:" for n in range(20)], "allowed_tokens": [f" a{n}" for n in range(1873)]},
        ["1873 allowed_tokens after 20 different ends", "37460", "30000 are the limit"],
    ),
    (
        COMPLETIONS,
        {**PROMPT, "allowed_token_ids": [1, VOCABULARY_SIZE]},
        [str(VOCABULARY_SIZE), "vocabulary has 49152"],
    ),
    (COMPLETIONS, {**PROMPT, "allowed_token_ids": [-1]}, ["-1", "vocabulary has 49152"]),
    (GENERATE, {**NATIVE, "allowed_token_ids": [10**12]}, [str(10**12), "49152"]),
    (COMPLETIONS, {**PROMPT, "prompt": [5, VOCABULARY_SIZE + 7]}, [str(VOCABULARY_SIZE + 7), "49152"]),
    (
        GENERATE,
        {**NATIVE, "sampling_params": {"max_new_tokens": 0}, "custom_labels": {"team": "a"}},
        ["'team'", "no labels"],
    ),
    (
        CHATS,
        {**CHAT, "chat_template_kwargs": {"chat_template": "{% for a in range(99999) %}{% endfor %}"}},
        ["chat_template is not allowed"],
    ),
    (
        CHATS,
        {**CHAT, "messages": [{"role": "assistant", "content": "x"}], "continue_final_message": True},
        ["messages is empty"],
    ),
    (CHATS, {**CHAT, "chat_template_kwargs": {"tokenize": True, "tools": []}}, ["holds tokenize, tools", "leave out"]),
    (CHATS, {**CHAT, "messages": CHAT["messages"] * 17_000}, ["more than 8192 messages"]),
    (CHATS, {**CHAT, "chat_template_kwargs": {"a": "x" * 5_000_000}}, ["more than 4194304 characters"]),
    (COMPLETIONS, {**PROMPT, "prompt": ["a"] * 10_001}, ["10001 values", "at most 10000"]),
    (
        GENERATE,
        {**NATIVE, "sampling_params": {"max_new_tokens": 1, "stop": [f"{n}" for n in range(257)]}},
        ["stop holds 257 texts"],
    ),
    (
        GENERATE,
        {"text": ["a"] * 300, "sampling_params": {"max_new_tokens": 1, "stop": ["x" * 500] * 3}},
        ["450000 characters of stop texts", "at most 300000"],
    ),
    # A token of 64 dashes would keep the scheduler busy for years.
    (
        GENERATE,
        {**NATIVE, "sampling_params": {"max_new_tokens": 1, "stop_regex": "(-+)+x"}},
        ["stop_regex", "--allow-generation"],
    ),
    (
        GENERATE,
        {
            "input_ids": [5] * 1000,
            "sampling_params": {"max_new_tokens": 1},
            "return_logprob": True,
            "logprob_start_len": 0,
            "top_logprobs_num": 500,
        },
        ["500000 log-probabilities", "500 at each", "50000", "top_logprobs_num"],
    ),
    (
        GENERATE,
        {
            "input_ids": [[5]] * 300,
            "sampling_params": {"max_new_tokens": 0},
            "return_logprob": True,
            "token_ids_logprob": [*range(500)],
        },
        ["50500 log-probabilities", "fewer prompts"],
    ),
    (
        GENERATE,
        {"text": ["a"] * 1000, "sampling_params": {"max_new_tokens": 1, "stop": [f"{n}" for n in range(25)]}},
        ["25000 stop texts", "at most 10000"],
    ),
    (
        GENERATE,
        {"text": ["a"] * 60, "sampling_params": {"max_new_tokens": 1, "n": 1024}},
        ["61440 answers", "10000"],
    ),
    (
        GENERATE,
        {**NATIVE, "sampling_params": {"max_new_tokens": 1, "logit_bias": {"5": 1e39}}},
        ["logit_bias holds '5': 1e+39", "1e+30"],
    ),
    (
        GENERATE,
        {"text": ["a", "b"], "sampling_params": {"max_new_tokens": 0}, "lora_id": "0"},
        ["lora_id has one value", "2 prompts"],
    ),
    ("/encode", {"text": ["a", "b"], "lora_id": [""]}, ["lora_id has 1 values", "2 prompts"]),
    (
        GENERATE,
        {
            "text": ["a", "b"],
            "sampling_params": {"max_new_tokens": 0},
            "return_logprob": True,
            "token_ids_logprob": [[5]],
        },
        ["token_ids_logprob has 1 values", "2 prompts"],
    ),
    (GENERATE, {**NATIVE, "input_ids": [], "allowed_tokens": LABELS}, ["text and input_ids are both given"]),
    (GENERATE, {"text": ["a", "b"], "audio_data": [], "allowed_tokens": LABELS}, ["audio_data has 0 values"]),
    (GENERATE, {"input_ids": [-3], "sampling_params": {"max_new_tokens": 0}}, ["-3", "49152"]),
    (COMPLETIONS, {**PROMPT, "allowed_tokens": LABELS, "allowed_token_ids": [5]}, ["both given"]),
    (COMPLETIONS, {**PROMPT, "allowed_tokens": LABELS, "n": 3, "echo": True}, ["echo, n", "leave them out"]),
    (COMPLETIONS, {**PROMPT, "allowed_tokens": LABELS, "regex": "a|b"}, ["regex"]),
    (GENERATE, {**NATIVE, "allowed_tokens": LABELS, "sampling_params": {"regex": "a"}}, ["regex"]),
    (COMPLETIONS, {**PROMPT, "allowed_tokens": " yes"}, ["allowed_tokens"]),
    (COMPLETIONS, {**PROMPT, "allowed_tokens": [1, 2]}, ["allowed_tokens"]),
    (COMPLETIONS, {**PROMPT, "allowed_token_ids": [True, "x"]}, ["allowed_token_ids"]),
    (COMPLETIONS, {**PROMPT, "prompt": ""}, ["empty"]),
    (COMPLETIONS, {**PROMPT, "prompt": "", "allowed_tokens": LABELS}, ["empty"]),
    (COMPLETIONS, {**PROMPT, "prompt": ["a", ""], "allowed_tokens": LABELS}, ["prompt 1 is empty"]),
    (COMPLETIONS, {**PROMPT, "prompt": ["a", ""]}, ["empty"]),
    (COMPLETIONS, {**PROMPT, "prompt": []}, ["empty"]),
    (CHATS, {**CHAT, "messages": [], "allowed_tokens": LABELS}, ["empty"]),
    (GENERATE, {"text": "", "allowed_tokens": LABELS}, ["empty"]),
    (GENERATE, {"allowed_tokens": LABELS}, ["prompt"]),
    (COMPLETIONS, {"model": "demo", "allowed_tokens": LABELS}, ["prompt"]),
    (COMPLETIONS, {**PROMPT, "prompt": {"a": 1}}, ["prompt"]),
    (COMPLETIONS, {**PROMPT, "logprobs": 10**9}, ["top_logprobs_num", "1000000000"]),
    (
        GENERATE,
        {**NATIVE, "sampling_params": {"max_new_tokens": 0}, "return_logprob": True, "logprob_start_len": -7},
        ["-7"],
    ),
    ("/v1/rerank", {"query": "", "documents": ["a"]}, ["empty"]),
    ("/v1/rerank", {"query": "a", "documents": []}, ["empty"]),
    ("/v2/rerank", {"query": "a", "documents": [{"title": "b"}]}, ["documents[0]", "text", "title", "rank_fields"]),
    ("/rerank", {"query": "a", "documents": ["b"], "top_n": 1, "stop_early": True}, ["stop_early", "leave it out"]),
    ("/v1/score", {"model": "demo", "query": "a", "items": ["b"], "label_token_ids": [VOCABULARY_SIZE]}, ["49152"]),
    ("/v1/score", {"model": "demo", "query": "a", "items": ["b"], "label_token_ids": []}, ["label_token_ids", "empty"]),
    (GENERATE, {**NATIVE, "sampling_params": {"max_new_tokens": 1}, "extra_key": ["a", "b"]}, ["extra_key is a list"]),
    (
        GENERATE,
        {**NATIVE, "sampling_params": {"max_new_tokens": 1, "min_new_tokens": 1, "stop_token_ids": [99999]}},
        ["99999"],
    ),
    (COMPLETIONS, {**PROMPT, "response_format": {"type": "json_object"}}, ["grammar"]),
    (GENERATE, {**NATIVE, "sampling_params": {"max_new_tokens": 0}, "image_data": "x"}, ["text only"]),
    ("/v1/embeddings", {"model": "demo", "input": "a"}, ["embedding"]),
    *((path, {"metadata": [[]] * 17_000}, ["more than 8192"]) for path in ("/v1/embeddings", "/classify", "/encode")),
    *((COMPLETIONS, {**PROMPT, "prompt": ids, "allowed_tokens": LABELS}, [str(ids[-1])]) for ids in ([-1], [10**11])),
    *(
        (route, {**body, field: ["a"], **labels}, [field])
        for route, body in ((COMPLETIONS, PROMPT), (CHATS, CHAT))
        for field in ("cache_salt", "extra_key")
        for labels in ({}, {"allowed_token_ids": [5, 6]})
    ),
    (GENERATE, {**NATIVE, "session_params": "q", "sampling_params": {"max_new_tokens": 0}}, ["session_params"]),
    *(
        (
            GENERATE,
            {**NATIVE, "session_params": params, "sampling_params": {"max_new_tokens": 0}},
            ["session_params", name],
        )
        for params, name in (({"__class__": "x"}, "__class__"), ({"offset": "x"}, "offset"))
    ),
    (CHATS, {**CHAT, "allowed_tokens": LABELS, "response_format": 2}, ["response_format must be an object"]),
    (GENERATE, {"text": [["a"]], "sampling_params": {"max_new_tokens": 0}}, ["text"]),
    (COMPLETIONS, {**PROMPT, "max_tokens": 1, "logprobs": 3, "echo": True, "stream": True, "regex": "a"}, ["regex"]),
    ("/v1/embeddings", {"model": "demo", "input": "a", "rid": ["x", "y"]}, ["rid"]),
    ("/encode", {"text": "a", "rid": ["x"]}, ["rid"]),
    ("/encode", {"text": []}, ["the list holds no prompt"]),
    ("/encode", {"image_data": "x"}, ["image_data", "text only"]),
    ("/encode", {"embed_overrides": 5}, ["no prompt", "text or input_ids"]),
    ("/encode", {"input_ids": [[5], [6]], "multi_item_delimiter_indices": [[]]}, ["filled in", "leave it out"]),
    ("/encode", {"input_ids": [[5], [6]], "token_indices_to_pool": []}, ["token_indices_to_pool", "leave it out"]),
    (
        GENERATE,
        {"text": "a", "token_indices_to_pool": [9], "allowed_token_ids": [5, 6]},
        ["token_indices_to_pool", "leave it out"],
    ),
    ("/encode", {"text": "a", "sampling_params": []}, ["sampling_params is a list"]),
    (
        GENERATE,
        {"text": ["a", "b"], "video_data": [[[]], None], "allowed_token_ids": [5, 6]},
        ["video_data", "text only"],
    ),
    ("/classify", {"input_ids": [[5], [6]], "is_cross_encoder_request": True}, ["no prompt", "text"]),
    ("/classify", {"text": ["a", "b"], "embed_overrides": 5}, ["embed_overrides is no list"]),
    ("/classify", {"text": ["a", "b"], "audio_data": 0}, ["audio_data", "text only"]),
    ("/v1/tokenize", {"prompt": "a", "stream": True}, ["streaming"]),
    ("/detokenize", {"model": "demo", "tokens": [5, VOCABULARY_SIZE]}, [str(VOCABULARY_SIZE)]),
    ("/v1/detokenize", {"model": "demo", "tokens": [[5], [-1]]}, ["-1"]),
]


@pytest.fixture(autouse=True)
def _server_stays_up(server: Server) -> Iterator[None]:
    """After every case the same server still answers a good request."""
    yield
    assert server.process.poll() is None
    assert server.scores("The capital of France is", allowed_tokens=[" Paris", " Rome"])[0]["label_mass"] > 0


def error_of(reply: requests.Response) -> str:
    """The message, which stands in OpenAI's nested shape and in SGLang's flat one."""
    body = reply.json()
    assert body["error"]["message"]
    if "message" in body:
        assert body["message"] == body["error"]["message"]
    return str(body["error"]["message"])


@pytest.mark.parametrize(("route", "body", "parts"), CASES)
def test_a_wrong_request_gets_400_and_a_message_that_names_the_cause(
    server: Server, route: str, body: dict[str, Any], parts: list[str]
) -> None:
    """Each message holds the value and the limit or remedy."""
    reply = server.post(route, body)
    assert reply.status_code == 400, (reply.status_code, reply.text)
    message = error_of(reply)
    for part in parts:
        assert part in message


@pytest.mark.parametrize("labels", [{}, {"allowed_tokens": LABELS}])
def test_a_prompt_over_the_limit_gets_400_with_both_lengths(server: Server, labels: dict[str, Any]) -> None:
    """Never truncated: 9,000 tokens where 8,191 fit, as ids and as text."""
    reply = server.post(COMPLETIONS, {**PROMPT, "prompt": [5] * 9000, **labels})
    assert reply.status_code == 400
    assert "9000" in error_of(reply)
    assert "8192" in error_of(reply)
    reply = server.post(COMPLETIONS, {**PROMPT, "prompt": "word " * 200_000, **labels})
    assert reply.status_code == 400
    assert "8192" in error_of(reply)


@pytest.mark.parametrize(
    "body", [b"{", b"", b"[1, 2]", b'"text"', b"\xff\xfe{}", b'{"prompt": "\xff"}', b'{"prompt": NaN}', b"null"]
)
@pytest.mark.parametrize("route", [COMPLETIONS, CHATS, GENERATE])
def test_malformed_json_and_invalid_utf8_get_400(server: Server, route: str, body: bytes) -> None:
    """The body is never half understood."""
    reply = requests.post(server.url + route, data=body, headers={"content-type": "application/json"}, timeout=60)
    assert reply.status_code == 400, reply.text
    error_of(reply)


def test_a_body_of_50_mb_gets_413_with_both_sizes(server: Server) -> None:
    """By its declared length, and again without one (chunked), where the bytes are counted."""
    body = json.dumps({**PROMPT, "prompt": "x" * 50_000_000}).encode()
    headers = {"content-type": "application/json"}
    declared = requests.post(server.url + COMPLETIONS, data=body, headers=headers, timeout=120)
    parts = (body[start : start + 1_000_000] for start in range(0, len(body), 1_000_000))
    chunked = requests.post(server.url + COMPLETIONS, data=parts, headers=headers, timeout=120)
    for reply in (declared, chunked):
        assert reply.status_code == 413
        assert str(32 << 20) in error_of(reply)
        assert "--max-body-mb" in error_of(reply)
    assert str(len(body)) in error_of(declared)


def test_a_broken_http_request_does_not_stop_the_server(server: Server) -> None:
    """Bytes that are no HTTP at all."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(b"\x00\x01 nonsense\r\n\r\n")
        assert b"400" in connection.recv(1000)


@pytest.mark.parametrize("path", ["/api/chat", "/update_weights_from_disk", "/no/such/route"])
def test_routes_that_make_no_sense_here_say_so(server: Server, path: str) -> None:
    reply = server.post(path, {})
    assert reply.status_code == 404
    assert error_of(reply).startswith(f"{path} is not a route of this prefill-only server: for answers use /v1/comp")


def test_unknown_paths_leave_no_trace_in_the_metrics(server: Server) -> None:
    for path in ("/no/such/route/7", "/v1/models/7"):
        assert server.post(path, {}).status_code == 404
    assert "route/7" not in (metrics := requests.get(f"{server.url}/metrics", timeout=60).text)
    assert "models/7" not in metrics


def test_a_head_without_end_gets_431(server: Server) -> None:
    """In one header, which the parser would collect, and in many."""
    host, port = server.url.removeprefix("http://").split(":")
    for header in (b"a: ", b"a: b\r\n"):
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\n" + header)
            with contextlib.suppress(ConnectionError):
                for _ in range(100):
                    connection.sendall(header * 20_000)
            reply = connection.recv(1000)
            assert reply.startswith(b"HTTP/1.1 431")
            assert b"65536 bytes" in reply


def test_a_body_with_a_thousand_problems_gets_a_short_answer(server: Server) -> None:
    """27 kB of zeros in the place of a message had been answered with 110 MB."""
    reply = server.post(CHATS, {**CHAT, "messages": [{"role": "user", "content": [0] * 9000}]})
    assert reply.status_code == 400
    assert len(reply.content) < 20_000
    assert "messages.0" in error_of(reply)


def test_a_rank_that_is_no_number_is_refused_on_every_route(server: Server) -> None:
    """Some answered with 500."""
    for path, body in ((CHATS, CHAT), (COMPLETIONS, PROMPT)):
        reply = server.post(path, body, headers={"x-data-parallel-rank": "x"})
        assert reply.status_code == 400
        assert "rank" in error_of(reply).lower()
    assert requests.put(server.url + CHATS, timeout=60).json()["error"]["message"] == "Method Not Allowed"


def test_labels_and_a_plain_token_share_a_step(server: Server) -> None:
    """Behind a long prompt they wait together; the scheduler had ended at the first such step."""
    for turn in range(3):
        with ThreadPoolExecutor(3) as clients:
            long = {"input_ids": [3000 + turn, *range(1000, 3000)], "sampling_params": {"max_new_tokens": 0}}
            blocking = clients.submit(server.post, GENERATE, long)
            others = [
                clients.submit(server.post, COMPLETIONS, {**PROMPT, **options})
                for options in ({"allowed_tokens": LABELS}, {"max_tokens": 1}) * 3
            ]
            assert {reply.result().status_code for reply in (blocking, *others)} == {200}


def test_what_had_failed_and_is_right_works(server: Server, tokenizer: Any) -> None:
    """Ids that look like a health check's, lists of ids, log-probabilities of a prompt, long texts."""
    options = {"sampling_params": {"max_new_tokens": 0}}
    assert requests.get(f"{server.url}/v1/loads?include=x", timeout=60).status_code == 400
    echoed = server.post(COMPLETIONS, {**PROMPT, "logprobs": 0, "echo": True, "max_tokens": 1}).json()["choices"][0]
    assert len(echoed["logprobs"]["token_logprobs"]) == 1 + len(tokenizer.encode(PROMPT["prompt"]))
    named = server.post(GENERATE, {**NATIVE, "rid": "HEALTH_CHECK_x", **options})
    assert named.json()["meta_info"]["id"] == "HEALTH_CHECK_x"
    assert server.post("/tokenize", {"model": "demo", "prompt": "a b"}).json()["count"] == 2
    long = "understanding " * 1600  # is tokenised in another thread, as is what follows
    assert server.post("/tokenize", {"model": "demo", "prompt": long}).json()["tokens"] == tokenizer.encode(long)
    messages = [{"role": "user", "content": long}]
    filled = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    for labels in ({}, {"allowed_tokens": ["Paris", "Rome"]}):
        answered = server.post(CHATS, {"model": "demo", "messages": messages, **labels})
        assert answered.json()["usage"]["prompt_tokens"] == len(filled)
    assert server.post("/detokenize", {"model": "demo", "tokens": [[81], [278]]}).json()["text"] == ["a", " b"]


def test_a_text_that_cannot_fit_is_refused_unread(server: Server) -> None:
    """By its characters; SGLang had tokenised 30 MB in the loop that answers everyone."""
    for n_repeated in (7_000_000, 250_000):
        text = "x y " * n_repeated
        for route, body in (
            (COMPLETIONS, {**PROMPT, "prompt": text, "allowed_tokens": LABELS}),
            (GENERATE, {"text": text, "sampling_params": {"max_new_tokens": 0}}),
            (CHATS, {**CHAT, "messages": [{"role": "user", "content": text}]}),
        ):
            reply = server.post(route, body)
            assert reply.status_code == 400
            n = 4194304 if route == CHATS and len(text) > 4194304 else len(text)
            assert f"{n} characters" in error_of(reply)


def test_answers_to_wrong_bodies_name_no_source_files(server: Server) -> None:
    message = error_of(server.post(COMPLETIONS, {**PROMPT, "prompt": {"a": 1}}))
    assert "prompt" in message
    assert ".py" not in message


def test_one_users_flood_does_not_keep_another_waiting(server: Server) -> None:
    """A long request among short ones would be last by its length; it is answered while most of the flood waits."""
    sampling = {"sampling_params": {"max_new_tokens": 0}, "allowed_token_ids": [5, 6]}
    flood = [[number, *range(1000, 1040)] for number in range(2000, 2400)]
    with ThreadPoolExecutor(2) as users:
        many = users.submit(server.post, GENERATE, {"input_ids": flood, **sampling}, headers={"x-user-id": "flood"})
        while waiting_requests(server) < 100:
            assert not many.done()
        one = server.post(
            COMPLETIONS, {**PROMPT, "prompt": [*range(3000, 3500)], "user": "other", "allowed_token_ids": [5, 6]}
        )
        n_left = waiting_requests(server)
        assert one.status_code == 200
        assert many.result().status_code == 200
    assert n_left > 25


def waiting_requests(server: Server) -> float:
    metrics = requests.get(f"{server.url}/metrics", timeout=60).text
    return sum(float(line.rsplit(" ", 1)[1]) for line in metrics.splitlines() if line.startswith(WAITING))


def test_the_ids_of_clients_are_returned_as_given(server: Server) -> None:
    """Equal ids are two requests."""
    sampling = {"sampling_params": {"max_new_tokens": 0}, "allowed_token_ids": [5, 6]}
    names = ["job-1", "job-19", "job-1"]
    reply = server.post(GENERATE, {"input_ids": [[5, 6], [7, 8], [9, 10]], "rid": names, **sampling})
    assert [one["meta_info"]["id"] for one in reply.json()] == names
    alone = server.post(GENERATE, {"input_ids": [5, 6], "rid": "job-1", **sampling}).json()
    assert alone["meta_info"]["id"] == "job-1"
    several = server.post(GENERATE, {"input_ids": [[5, 6], [7, 8]], "rid": "job", **sampling}).json()
    assert [one["meta_info"]["id"] for one in several] == ["job_0", "job_1"]
