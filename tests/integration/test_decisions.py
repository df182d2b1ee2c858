"""The decisions of a live server, and its request log as a trace for the planner."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import requests

from sgl_prefill import plan
from sgl_prefill.planner import workloads
from sgl_prefill.port.steps.request_log import PAGE_TOKENS
from tests.integration.conftest import Server

N_PROMPTS = 6


def shown(server: Server, last: str) -> requests.Response:
    return requests.get(f"{server.url}/scheduler/decisions", params={"last": last}, timeout=60)


@pytest.fixture(scope="module")
def busy(server: Server) -> Server:
    """The server, after more steps than this file looks at."""
    for n in range(3):
        prompts = [f"{'A user who likes rain. ' * (10 * n + 20)} Post {post}." for post in range(N_PROMPTS)]
        server.scores(prompts, allowed_tokens=[" a", " b"], user=f"decided for {n}")
    return server


def test_the_last_decisions_are_shown_with_their_requests(busy: Server) -> None:
    """The newest last, no more than asked for."""
    reply = shown(busy, "3")
    assert (reply.status_code, reply.headers["content-type"]) == (200, "application/x-ndjson")
    steps = [json.loads(line) for line in reply.text.splitlines()]
    assert [one["step"] for one in steps] == [steps[0]["step"] + n for n in range(3)]
    last = steps[-1]
    assert last["requests"][0]["client"] == "decided for 2"
    assert 0 <= last["requests"][0]["cached_tokens"] < last["requests"][0]["input_tokens"]
    assert min(last["predicted_ms"], last["actual_ms"], last["cost"]) > 0


@pytest.mark.parametrize("last", ["-1", "abc", "0", "999999", "", "9" * 5000])
def test_a_number_that_no_server_keeps_is_refused_by_its_limit(busy: Server, last: str) -> None:
    reply = shown(busy, last)
    assert reply.status_code == 400
    message = reply.json()["error"]["message"]
    assert f"last is {last[:20]!r}: it must be a number from 1 to 1000" in message
    assert "--request-log FILE" in message


def test_the_request_log_is_a_trace_of_what_the_server_ran(busy: Server, tmp_path: Path) -> None:
    """Prefixes that requests shared are shared in the trace, without any of their tokens in the file."""
    logged = workloads.read_log(busy.request_log)
    assert logged is not None
    lines = [json.loads(line) for line in busy.request_log.read_text().splitlines()]
    ours = [one for one in lines if one["client"] == "decided for 2"]
    assert len(ours) == N_PROMPTS
    n_shared = len(ours[0]["pages"]) - 1
    assert n_shared >= 2, "the prompts are too short for this test"
    assert {tuple(one["pages"][:n_shared]) for one in ours} == {tuple(ours[0]["pages"][:n_shared])}
    assert sum(one["cached_tokens"] > PAGE_TOKENS for one in ours) >= N_PROMPTS - 1
    assert all(one["actual_ms"] > 0 and one["predicted_ms"] > 0 for one in ours)
    numbers = tmp_path / "numbers.json"
    options = ["--durable-tokens", "20000", "--lambda", "500", "--json", str(numbers)]
    assert plan.main(["--trace", str(busy.request_log), *options]) == 0
    settings = json.loads(numbers.read_text())["settings"]
    assert settings[0]["name"] == "as it ran"
    assert {one["n_requests"] for one in settings} == {len(lines)}
