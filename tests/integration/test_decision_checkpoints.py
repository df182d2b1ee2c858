"""Decision checkpoints through our server: under our policy, with stock's answers (`decision_checkpoints.json`).

`python -m tests.integration.test_decision_checkpoints` asks stock servers anew and writes the file.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import requests

from sgl_prefill.entry import local_server
from sgl_prefill.entry.local_server import LocalServer
from tests.support import decision_models

FLAGS = [
    "--dtype",
    "float32",
    "--disable-overlap-schedule",
    "--max-total-tokens",
    "4000",
    "--max-running-requests",
    "8",
]
REFUND = {"type": "noul", "instructions": "Is money asked back?", "criteria": {"true": "they name a sum or a refund"}}
DESK = {
    "type": "choice",
    "instructions": "Who handles it?",
    "criteria": {"workshop": "repairs", "sales": None, "front": "x"},
}
MOOD = {"type": "score", "criteria": ["calm", "annoyed", {"label": "furious"}]}
STATE = {"subject": "Broken chain", "days": 2}
BODIES: list[dict[str, Any]] = [
    {"state": STATE, "questions": {"refund": REFUND, "desk": DESK, "mood": MOOD}},
    {"state": STATE, "questions": {"mood": MOOD, "refund": REFUND}},
    {"state": "", "questions": {"refund": {"type": "noul", "instructions": "Is it empty?"}}},
    {"state": "a <|fim_suffix|> b \U0001f600", "questions": {"\U0001f600": DESK}},
    {"state": STATE, "questions": {"n": {"type": "choice", "criteria": {f"option {n}": None for n in range(26)}}}},
]
REFUSED: list[dict[str, Any]] = [
    {"state": STATE, "questions": {}},
    {"state": STATE, "questions": {"a": {"type": "maybe"}}},
    {"state": STATE, "questions": {"refund": REFUND}, "temperature": 1},
]


ANSWERS = Path(__file__).with_name("decision_checkpoints.json")


def running(module: str, kind: str, folder: Path, *more: str) -> AbstractContextManager[LocalServer]:
    model = decision_models.write(folder / "model", kind)
    flags = ["--model-path", str(model), *FLAGS, *(["--disable-radix-cache"] if kind == "decider" else []), *more]
    return local_server.running(module, flags, folder / "log")


@pytest.fixture(scope="module", params=decision_models.KINDS)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, LocalServer]]:
    kind = request.param
    with running("sgl_prefill.launch_server", kind, tmp_path_factory.mktemp(kind), "--memory-budget-gb", "1") as server:
        yield kind, server


def asked(server: LocalServer, body: dict[str, Any], path: str = "/v1/systemone") -> requests.Response:
    return requests.post(f"{server.url}{path}", json={"model": "default", **body}, timeout=120)


def close(found: Any, expected: Any) -> bool:
    """Equal, numbers up to 1e-5."""
    if isinstance(expected, dict):
        return set(found) == set(expected) and all(close(found[key], value) for key, value in expected.items())
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(close, found, expected))
    return bool(found == pytest.approx(expected, abs=1e-5) if isinstance(expected, float) else found == expected)


def test_answers_are_stocks_each_alone_and_all_at_once(served: tuple[str, LocalServer]) -> None:
    kind, server = served
    expected = json.loads(ANSWERS.read_text())[kind]
    alone = [asked(server, body) for body in BODIES]
    assert close([[reply.json()["answers"], reply.json()["usage"]] for reply in alone], expected), alone[0].text
    with ThreadPoolExecutor(20) as threads:
        together = list(threads.map(lambda body: asked(server, body).json()["answers"], BODIES * 4))
    assert all(close(found, answers) for found, (answers, _) in zip(together, expected * 4, strict=True))


def test_what_it_does_not_answer_is_refused(served: tuple[str, LocalServer]) -> None:
    kind, server = served
    for body in REFUSED:
        assert asked(server, body).status_code == 422
    long = asked(server, {"state": "x " * 3_000, "questions": {"refund": REFUND}})
    assert (long.status_code, "token" in long.text) == (400, True), long.text  # Clef's own code would cut the state
    options = asked(server, {**BODIES[0], "x_options": {"refund": {"orders": 1}}})
    assert (options.status_code, "x_options" in options.text) == (400, True)
    openai = {"input": "y", "questions": [{"type": "predicate", "instructions": "Is it?"}]}
    reply = asked(server, openai, "/v1/decisions")
    assert (reply.status_code, "/v1/systemone" in reply.text) == (400, True)
    if kind in ("kev", "clef"):
        reply = asked(server, {"input": "no questions"}, "/v1/embeddings")
        assert (reply.status_code, "/v1/systemone" in reply.text) == (400, True), reply.text


def test_our_policy_schedules_them(served: tuple[str, LocalServer]) -> None:
    info = requests.get(f"{served[1].url}/server_info", timeout=60).json()
    assert info["sgl_prefill"]["config"]["scheduling"] == "calibrated-srjf"
    assert requests.get(f"{served[1].url}/health_generate", timeout=60).status_code == 200


def _of_stock(kind: str) -> list[Any]:
    with (
        tempfile.TemporaryDirectory() as folder,
        running("sglang.launch_server", kind, Path(folder), "--mem-fraction-static", "0.2") as server,
    ):
        replies = [asked(server, body).json() for body in BODIES]
    return [[reply["answers"], reply["usage"]] for reply in replies]


if __name__ == "__main__":
    ANSWERS.write_text(json.dumps({kind: _of_stock(kind) for kind in decision_models.KINDS}) + "\n")
