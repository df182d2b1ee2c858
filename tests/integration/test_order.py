"""The paper's order, a client that leaves, deadlines and metrics."""

from __future__ import annotations

import http.client
import itertools
import json
import math
import re
import select
import socket
from contextlib import ExitStack
from typing import Any, NamedTuple

import pytest
import requests

from tests.integration.conftest import Server

FAIRNESS_LAMBDA = 500.0
LABELS = {"allowed_token_ids": [5, 6]}
NOTICED_S = 4  # after so long SGLang looks whether a client is still there


class Run(NamedTuple):
    """When one request was handed to the scheduler, and its forward."""

    n_tokens: int
    arrival_s: float
    start_s: float
    end_s: float


def run_of(n_tokens: int, output: dict[str, Any]) -> Run:
    meta = output["meta_info"]
    times_s = (meta[name] for name in ("api_server_dispatch_finish_ts", "forward_entry_time", "prefill_finished_time"))
    return Run(n_tokens, *times_s)


def run_burst(server: Server, prompts: list[list[int]]) -> list[Run]:
    """All prompts in one call: SGLang hands them over together."""
    outputs = server.post("/generate", {"input_ids": prompts, **LABELS}).json()
    return [run_of(len(prompt), output) for prompt, output in zip(prompts, outputs, strict=True)]


def prompt_of(n_tokens: int, salt: int) -> list[int]:
    """Shares no prefix with a prompt of another salt."""
    return [100 + salt, *(1000 + (salt * 7919 + i * 31) % 30_000 for i in range(n_tokens - 1))]


def test_the_record_of_the_papers_engine_shows_what_the_flag_means(paper_server: Server) -> None:
    """Whoever reads a result sees which engine made it; no time was spent on a JCT profile."""
    record = requests.get(paper_server.url + "/server_info", timeout=60).json()["sgl_prefill"]
    shown = ("paper", "scheduling", "fairness_lambda", "jct_model", "sharers", "max_queue_s", "pack_step_tokens")
    assert [record["config"][name] for name in shown] == [
        *(True, "calibrated-srjf", FAIRNESS_LAMBDA, "cache-miss", "ignore", None, 0)
    ]
    assert "jct_model" not in record


def test_waiting_requests_run_one_at_a_time_the_best_score_of_those_that_wait_first(paper_server: Server) -> None:
    """While a long request runs, others arrive one by one on connections of their own, longest first. Who is taken has the
    smallest score, length and arrival, of all that were there. (Credit alone: `test_scheduling`.)"""
    server = paper_server
    requests.post(server.url + "/flush_cache", timeout=60)
    lengths = [900, 750, 600, 450, 300, 150]
    n_started = metric(server, "wait_seconds_count")
    with ExitStack() as stack:
        blocking = stack.enter_context(send(server, prompt_of(7900, salt=1)))
        while metric(server, "wait_seconds_count") == n_started:
            assert server.process.poll() is None
        waiting = [stack.enter_context(send(server, prompt_of(n, salt=n))) for n in lengths]
        runs = [run_of(7900, reply_of(blocking))]
        runs += [run_of(n, reply_of(one)) for n, one in zip(lengths, waiting, strict=True)]
    in_order = sorted(runs, key=lambda run: run.start_s)
    for before, after in itertools.pairwise(in_order):
        assert after.start_s >= before.end_s, "two requests ran at once"
    n_compared = 0
    for previous, chosen in itertools.pairwise(in_order):
        for other in runs:
            if other.start_s > chosen.start_s and other.arrival_s < previous.end_s - 0.05:
                n_compared += 1
                assert score(chosen) <= score(other)
    assert n_compared > 0, "nobody waited: the test showed nothing"


def score(run: Run) -> float:
    """In tokens, up to what all have in common; a token for the arrival's rounding."""
    return round(run.n_tokens + FAIRNESS_LAMBDA * run.arrival_s)


def test_waiting_requests_share_a_step_by_default_and_are_told_its_time(server: Server) -> None:
    """A long request blocks the scheduler while 16 short ones arrive: few steps hold them, each with one prediction."""
    requests.post(server.url + "/flush_cache", timeout=60)
    info = requests.get(server.url + "/server_info", timeout=60).json()["sgl_prefill"]
    assert info["step_size"]["max_tokens"] > 40
    assert info["step_size"]["max_requests"] == 32
    prompts = [prompt_of(3000, salt=21), *(prompt_of(10, salt=70 + n) for n in range(16))]
    outputs = server.post("/generate", {"input_ids": prompts, **LABELS}).json()
    predictions: dict[float, set[float]] = {}
    for output in outputs[1:]:
        steps = predictions.setdefault(output["meta_info"]["forward_entry_time"], set())
        steps.add(output["meta_info"]["predicted_jct_ms"])
    assert len(predictions) <= 8, "each ran alone"
    assert all(len(shown) == 1 for shown in predictions.values())


def test_a_request_whose_prefix_was_just_computed_overtakes_shorter_ones(paper_server: Server) -> None:
    """Calibration: once 300 tokens are cached, a prompt of 550 that starts with them runs before one of 400."""
    server = paper_server
    requests.post(server.url + "/flush_cache", timeout=60)
    first = prompt_of(300, salt=11)
    runs = run_burst(server, [[*first, *prompt_of(250, salt=13)], prompt_of(400, salt=12), first])
    assert [run.n_tokens for run in sorted(runs, key=lambda run: run.start_s)] == [300, 550, 400]


def test_the_request_of_a_client_that_left_is_never_computed(server: Server) -> None:
    """It waits behind long ones, its client closes the connection, and its prompt is not in the cache afterwards.

    The blockers run for longer than SGLang takes to notice a lost client (4 s), on any machine, and are shorter than the victim,
    so that they run first also if all reach the scheduler at once.
    """
    requests.post(server.url + "/flush_cache", timeout=60)
    (one,) = run_burst(server, [prompt_of(7500, salt=59)])
    n_blockers = math.ceil(2 * NOTICED_S / (one.end_s - one.start_s))
    victim = prompt_of(7900, salt=32)
    with ExitStack() as stack:
        blocking = [stack.enter_context(send(server, prompt_of(7500, salt=60 + n))) for n in range(n_blockers)]
        leaving = send(server, victim)
        leaving.close()
        for blocker in blocking:
            reply_of(blocker)
    again = server.post("/generate", {"input_ids": victim[:500], **LABELS}).json()
    assert again["meta_info"]["cached_tokens"] == 0, "the abandoned request was computed"


def test_no_client_ends_the_request_of_another(server: Server) -> None:
    """SGLang ends whatever begins with the id that is to be ended: "job-1" took "job-12" along, and "0" to "f" all that it had
    named itself. An empty session is none. Who was ended gets an answer in the error shape, not a plain-text 500."""
    requests.post(server.url + "/flush_cache", timeout=60)
    n_started = metric(server, "wait_seconds_count")
    names = ["job-1", *"0123456789abcdef"]
    with ExitStack() as stack:
        blocking = stack.enter_context(send(server, prompt_of(7900, salt=61)))
        while metric(server, "wait_seconds_count") == n_started:
            assert server.process.poll() is None
        victims = [
            stack.enter_context(send(server, prompt_of(40, salt=62), rid=name, session_params={})) for name in names
        ]
        others = [stack.enter_context(send(server, prompt_of(30, salt=63), rid=f"job-1{n}")) for n in range(4)]
        others += [stack.enter_context(send(server, prompt_of(30, salt=64))) for _ in range(16)]
        while len(select.select(victims, [], [], 0)[0]) < len(victims):  # an id is known once its request has been read
            for rid in (*names, "job", "job-"):
                server.post("/abort_request", {"rid": rid})
        for victim in victims:
            assert "abort" in reply_of(victim, status=503)["error"]["message"].lower()
        for other in (blocking, *others):
            reply_of(other)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/generate"])
@pytest.mark.parametrize("labels", [LABELS, {}])
def test_a_deadline_that_cannot_be_met_is_refused_at_once_with_the_prediction(
    server: Server, path: str, labels: dict[str, list[int]]
) -> None:
    """7,500 tokens within 50 ms; with and without allowed answers; and the counter of refusals goes up by one."""
    before = refusals(server, "deadline_unreachable")
    prompt = prompt_of(7500, salt=41)
    text = "word " * 7000
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": {"model": "demo", "prompt": prompt},
        "/v1/chat/completions": {"model": "demo", "messages": [{"role": "user", "content": text}]},
        "/generate": {"input_ids": prompt, "sampling_params": {"max_new_tokens": 1}},
    }
    reply = server.post(path, {**bodies[path], **labels, "deadline_ms": 50})
    assert reply.status_code == 429, reply.text
    assert "deadline_ms is 50, and this request is predicted to finish" in reply.json()["error"]["message"]
    assert refusals(server, "deadline_unreachable") == before + 1


def test_a_request_whose_deadline_passes_in_the_queue_gets_504(server: Server) -> None:
    """It arrives while a long request runs, which the prediction of 60 ms of work of its own cannot know."""
    requests.post(server.url + "/flush_cache", timeout=60)
    n_started = metric(server, "wait_seconds_count")
    with send(server, prompt_of(7900, salt=51)) as blocking:
        while metric(server, "wait_seconds_count") == n_started:
            assert server.process.poll() is None
        reply = server.post("/generate", {"input_ids": prompt_of(40, salt=52), **LABELS, "deadline_ms": 400})
        assert reply.status_code == 504, reply.text
        assert blocking.recv(12) == b"HTTP/1.1 200"


def test_a_deadline_that_is_no_time_is_refused(server: Server) -> None:
    """Each with its value."""
    for wrong in (0, -5, "soon"):
        reply = server.post("/v1/completions", {"model": "demo", "prompt": "x", **LABELS, "deadline_ms": wrong})
        assert reply.status_code == 400
        assert "deadline_ms" in reply.json()["error"]["message"]


def test_the_policys_metrics_are_in_sglangs_endpoint(server: Server) -> None:
    """Queue, ages, tokens, prediction error, overhead: each with a value, under SGLang's prefix."""
    server.post("/generate", {"input_ids": prompt_of(100, salt=61), **LABELS})
    metrics = requests.get(server.url + "/metrics", timeout=60).text
    for name in (
        *("waiting_requests", "oldest_wait_seconds", "p99_wait_seconds", "starvation_seconds", "wait_seconds_count"),
        *("policy_seconds_count", "jct_error_ratio_count"),
        *("cached_tokens_total", "kept_tokens_total", "evicted_tokens_total"),
    ):
        assert f"\nsglang:prefill_{name}{{" in metrics, name


def refusals(server: Server, reason: str) -> float:
    return metric(server, "refused_requests_total", f'reason="{reason}"')


def metric(server: Server, name: str, labels: str = ".*") -> float:
    """0 where it has no value yet."""
    text = requests.get(server.url + "/metrics", timeout=60).text
    found = re.search(rf"^sglang:prefill_{name}{{{labels}}} (\S+)", text, re.MULTILINE)
    return 0.0 if found is None else float(found.group(1))


def reply_of(connection: socket.socket, status: int = 200) -> dict[str, Any]:
    """The answer that a connection of `send` waits for."""
    with http.client.HTTPResponse(connection) as reply:
        reply.begin()
        assert reply.status == status, reply.read()
        answer: dict[str, Any] = json.loads(reply.read())
        return answer


def send(server: Server, prompt: list[int], **options: Any) -> socket.socket:
    """A scoring request on a connection of its own, sent whole; the answer is still to be read."""
    body = json.dumps({"input_ids": prompt, **LABELS, **options}).encode()
    head = (
        f"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=300)
    connection.sendall(head.encode() + body)
    return connection
