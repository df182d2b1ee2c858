"""One request per step, shortest first, and a client that leaves."""

from __future__ import annotations

import itertools
import json
import socket
from typing import NamedTuple

import requests

from tests.integration.conftest import Server

FAIRNESS_LAMBDA = 500.0
LABELS = {"allowed_token_ids": [5, 6]}


class Run(NamedTuple):
    """When one request was handed to the scheduler, and its forward."""

    n_tokens: int
    arrival_s: float
    start_s: float
    end_s: float


def run_burst(server: Server, prompts: list[list[int]]) -> list[Run]:
    """All prompts in one call: SGLang hands them over one by one, within milliseconds."""
    outputs = server.post("/generate", {"input_ids": prompts, **LABELS}).json()
    return [
        Run(
            len(prompt),
            output["meta_info"]["api_server_dispatch_finish_ts"],
            output["meta_info"]["forward_entry_time"],
            output["meta_info"]["prefill_finished_time"],
        )
        for prompt, output in zip(prompts, outputs, strict=True)
    ]


def prompt_of(n_tokens: int, salt: int) -> list[int]:
    """Shares no prefix with a prompt of another salt."""
    return [100 + salt, *(1000 + (salt * 7919 + i * 31) % 30_000 for i in range(n_tokens - 1))]


def test_waiting_requests_run_one_at_a_time_and_shortest_first(server: Server) -> None:
    """A long request blocks the scheduler while six others arrive, longest first; they run shortest first."""
    requests.post(server.url + "/flush_cache", timeout=60)
    prompts = [prompt_of(3000, salt=1), *(prompt_of(n, salt=n) for n in (900, 750, 600, 450, 300, 150))]
    runs = run_burst(server, prompts)
    in_order = sorted(runs, key=lambda run: run.start_s)
    for before, after in itertools.pairwise(in_order):
        assert after.start_s >= before.end_s, "two requests ran at once"
    n_compared = 0
    for chosen, previous in zip(in_order[1:], in_order, strict=False):
        for other in in_order:
            if other.start_s > chosen.start_s and other.arrival_s < previous.end_s - 0.05:
                n_compared += 1
                credit = FAIRNESS_LAMBDA * (chosen.arrival_s - other.arrival_s)
                assert chosen.n_tokens + credit <= other.n_tokens + 1
    assert n_compared >= 10, "hardly anything waited: the test showed nothing"


def test_a_request_whose_prefix_was_just_computed_overtakes_shorter_ones(server: Server) -> None:
    """Calibration: once 300 tokens are cached, a prompt of 550 that starts with them runs before one of 400."""
    requests.post(server.url + "/flush_cache", timeout=60)
    first = prompt_of(300, salt=11)
    runs = run_burst(server, [[*first, *prompt_of(250, salt=13)], prompt_of(400, salt=12), first])
    assert [run.n_tokens for run in sorted(runs, key=lambda run: run.start_s)] == [300, 550, 400]


def test_the_request_of_a_client_that_left_is_never_computed(server: Server) -> None:
    """It waits behind a long one, its client closes the connection, and its prompt is not in the cache afterwards.

    The blocker runs for longer than SGLang takes to notice a lost client (4 s), and is shorter than the victim, so it
    runs first also if both reach the scheduler at once.
    """
    requests.post(server.url + "/flush_cache", timeout=60)
    blocker, victim = prompt_of(7500, salt=31), prompt_of(7900, salt=32)
    blocking, leaving = send(server, blocker), send(server, victim)
    leaving.close()
    with blocking:
        assert blocking.recv(12) == b"HTTP/1.1 200"
    again = server.post("/generate", {"input_ids": victim[:500], **LABELS}).json()
    assert again["meta_info"]["cached_tokens"] == 0, "the abandoned request was computed"


def send(server: Server, prompt: list[int]) -> socket.socket:
    """A scoring request on a connection of its own, sent whole; the answer is still to be read."""
    body = json.dumps({"input_ids": prompt, **LABELS}).encode()
    head = (
        f"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=300)
    connection.sendall(head.encode() + body)
    return connection
