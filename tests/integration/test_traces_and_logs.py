"""What SGLang's own traces and request log say of a request to this engine."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import pytest
import requests

from sgl_prefill.port.steps import traces
from sgl_prefill.startup import examine
from tests.integration.conftest import KEY, Server
from tests.support.otlp_collector import Collector

SECRET = "Mauritius"
LONG = f"The island of {SECRET} lies in the Indian Ocean. " * 20


class Watched(NamedTuple):
    """A server that traces and logs."""

    server: Server
    spans: Collector


@pytest.fixture
def watched(bank: Server, spans: Collector) -> Watched:
    return Watched(bank, spans)


def asked(watched: Watched, prompt: str) -> dict[str, Any]:
    """Asks for one answer, and returns what the reply says of it."""
    body = {"text": prompt, "sampling_params": {"max_new_tokens": 1}}
    reply = watched.server.post("/generate", body)
    assert reply.status_code == 200, reply.text
    facts: dict[str, Any] = reply.json()["meta_info"]
    return facts


def finished(watched: Watched) -> list[dict[str, Any]]:
    """Returns the lines of requests that have been answered."""
    lines = watched.server.log.read_text().splitlines()
    return [json.loads(line[line.index("{") :]) for line in lines if '"event": "request.finished"' in line]


@pytest.mark.skipif(bool(examine.trace_problems()), reason="OpenTelemetry's exporters are not installed")
def test_a_requests_trace_says_when_and_with_whom_it_was_picked_and_what_was_kept(watched: Watched) -> None:
    """The step's number is the one of /scheduler/decisions; all spans of a request are one trace, from HTTP to the scheduler."""
    facts = asked(watched, f"Once more. {LONG}")
    n_tokens = facts["prompt_tokens"]
    root = watched.spans.wait_for(lambda span: span.attributes.get("gen_ai.usage.prompt_tokens") == n_tokens)
    assert root.attributes["sgl_prefill.kept_tokens"] == facts["kept_tokens"]
    assert root.attributes["sgl_prefill.predicted_jct_ms"] == facts["predicted_jct_ms"]
    forward = watched.spans.wait_for(lambda span: traces.EVENT in span.events and span.trace_id == root.trace_id)
    assert forward.name == "prefill_forward"
    event = forward.events[traces.EVENT]
    assert event["sgl_prefill.predicted_ms"] == facts["predicted_jct_ms"]
    assert event["sgl_prefill.input_tokens"] == facts["prompt_tokens"]
    assert event["sgl_prefill.step_requests"] == 1
    assert event["sgl_prefill.wait_ms"] >= 0
    decisions = map(
        json.loads, requests.get(f"{watched.server.url}/scheduler/decisions", headers=KEY, timeout=60).text.splitlines()
    )
    (step,) = [one for one in decisions if one["requests"][0]["id"] == event["sgl_prefill.picked_first"]]
    assert step["step"] == event["sgl_prefill.step"]


def test_a_requests_line_in_the_log_carries_its_facts_and_nothing_of_its_prompt(watched: Watched) -> None:
    """At level 0; a service whose prompts are private can log every request."""
    before = finished(watched)
    facts = asked(watched, LONG)
    (line,) = finished(watched)[len(before) :]
    logged = line["out"]["meta_info"]
    for name in ("kept_tokens", "evicted_tokens", "predicted_jct_ms", "cached_tokens", "prompt_tokens"):
        assert logged[name] == facts[name]
    watched.server.scores(LONG, allowed_tokens=[" yes", " no"])
    assert len(finished(watched)) == len(before) + 2
    assert SECRET not in watched.server.log.read_text()
