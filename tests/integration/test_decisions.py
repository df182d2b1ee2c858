"""The decisions of a live server: shown, logged, and made again by the command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import requests

from tests.integration.conftest import Server

N_PROMPTS = 6


def shown(server: Server, last: str) -> requests.Response:
    return requests.get(f"{server.url}/decisions", params={"last": last}, timeout=60)


@pytest.fixture(scope="module")
def busy(server: Server) -> Server:
    """The server, once it has decided more often than this file looks at."""
    for n in range(3):
        prompts = [f"{'A user who likes rain. ' * (10 * n + 1)} Post {post}." for post in range(N_PROMPTS)]
        server.scores(prompts, allowed_tokens=[" a", " b"], user=f"decided for {n}")
    return server


def plan(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the command, as a person does."""
    command = [sys.executable, "-m", "sgl_prefill.plan", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "2"}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)


def test_the_last_decisions_are_shown_as_they_stand_in_the_log(busy: Server) -> None:
    """The newest last, no more than asked for, and each whole."""
    reply = shown(busy, "3")
    assert (reply.status_code, reply.headers["content-type"]) == (200, "application/x-ndjson")
    lines = reply.text.splitlines()
    assert lines == busy.decision_log.read_text().splitlines()[-3:]
    steps = [json.loads(line) for line in lines]
    assert [one["step"] for one in steps] == [steps[0]["step"] + n for n in range(3)]
    last = steps[-1]
    assert last["first"]["client"] == "decided for 2"
    assert last["first"]["found_tokens"] + last["first"]["new_tokens"] == last["first"]["input_tokens"]
    assert min(last["predicted_ms"], last["actual_ms"]) > 0


@pytest.mark.parametrize("last", ["-1", "abc", "0", "999999", "", "9" * 5000])
def test_a_number_that_no_server_keeps_is_refused_by_its_limit(busy: Server, last: str) -> None:
    """For people: the value, the limit, and what to do for more."""
    reply = shown(busy, last)
    assert reply.status_code == 400
    message = reply.json()["error"]["message"]
    assert f"last is {last[:20]!r}: it must be a number from 1 to 2000" in message
    assert "--decision-log FILE" in message


def test_all_that_a_live_server_has_decided_is_made_again_in_the_same_order(busy: Server) -> None:
    """Whatever else the tests of this session have asked it: refusals, priorities, cancelled requests."""
    found = plan("--decisions", str(busy.decision_log))
    assert found.returncode == 0, found.stdout + found.stderr
    n = json.loads(shown(busy, "1").text)["step"]
    assert f"{n} of {n} decisions" in found.stdout


def test_another_lambda_gives_a_report_and_a_plot(busy: Server, tmp_path: Path) -> None:
    """How many decisions it would have made alike, and the latencies of a simulation beside those that were."""
    numbers, picture = tmp_path / "numbers.json", tmp_path / "latency.png"
    found = plan(
        *("--decisions", str(busy.decision_log), "--fairness-lambda", "100000"),
        *("--json", str(numbers), "--plot", str(picture)),
    )
    assert found.returncode == 0, found.stdout + found.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")
    result = json.loads(numbers.read_text())
    assert result["same_order"] == result["decisions"]
    assert [one["options"] for one in result["other_options"]] == [{"fairness_lambda": 100000.0}]
    assert [one["name"] for one in result["settings"]] == [
        "as it ran",
        "simulated as it was",
        "simulated, lambda 100000",
    ]
