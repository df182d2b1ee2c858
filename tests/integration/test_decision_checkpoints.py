"""Decision checkpoints through our server: under our policy, with stock's answers."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
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
REFUSED: list[tuple[dict[str, Any], int]] = [
    ({"state": STATE, "questions": {}}, 422),
    ({"state": STATE, "questions": {"a": {"type": "maybe"}}}, 422),
    ({"state": STATE, "questions": {"refund": REFUND}, "temperature": 1}, 422),
]


class Both:
    def __init__(self, kind: str, ours: LocalServer, stock: LocalServer) -> None:
        self.kind, self.ours, self.stock = kind, ours, stock


@pytest.fixture(scope="module", params=decision_models.KINDS)
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    folder = tmp_path_factory.mktemp(request.param)
    model = decision_models.write(folder / "model", request.param)
    flags = ["--model-path", str(model), *FLAGS, *(["--disable-radix-cache"] if request.param == "decider" else [])]
    with (
        local_server.running("sgl_prefill.launch_server", [*flags, "--memory-budget-gb", "1"], folder / "ours") as ours,
        local_server.running(
            "sglang.launch_server", [*flags, "--mem-fraction-static", "0.2"], folder / "stock"
        ) as stock,
    ):
        yield Both(request.param, ours, stock)


def asked(server: LocalServer, body: dict[str, Any]) -> requests.Response:
    return requests.post(f"{server.url}/v1/systemone", json={"model": "default", **body}, timeout=120)


def close(found: Any, expected: Any) -> bool:
    """Equal, numbers up to 1e-5."""
    if isinstance(expected, dict):
        return set(found) == set(expected) and all(close(found[key], value) for key, value in expected.items())
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(close, found, expected))
    return bool(found == pytest.approx(expected, abs=1e-5) if isinstance(expected, float) else found == expected)


def test_answers_are_stocks_each_alone_and_all_at_once(both: Both) -> None:
    alone = [asked(both.ours, body) for body in BODIES]
    for body, ours in zip(BODIES, alone, strict=True):
        stock = asked(both.stock, body)
        assert ours.status_code == stock.status_code == 200, (body, ours.text, stock.text)
        assert close(ours.json()["answers"], stock.json()["answers"]), (ours.text, stock.text)
        assert ours.json()["usage"] == stock.json()["usage"]
    with ThreadPoolExecutor(20) as threads:
        together = list(threads.map(lambda body: asked(both.ours, body).json()["answers"], BODIES * 4))
    assert all(close(found, one.json()["answers"]) for found, one in zip(together, alone * 4, strict=True))


def test_what_stock_refuses_is_refused(both: Both) -> None:
    for body, status in REFUSED:
        assert asked(both.ours, body).status_code == asked(both.stock, body).status_code == status
    long = {"state": "x " * 6_000, "questions": {"refund": REFUND}}
    assert (asked(both.ours, long).status_code == 200) == (both.kind == "clef")  # which cuts a state
    options = asked(both.ours, {**BODIES[0], "x_options": {"refund": {"orders": 1}}})
    assert options.status_code == 400
    assert "x_options" in options.text
    openai = {"model": "default", "input": "y", "questions": [{"type": "predicate", "instructions": "Is it?"}]}
    reply = requests.post(f"{both.ours.url}/v1/decisions", json=openai, timeout=60)
    assert reply.status_code == 400
    assert "/v1/systemone" in reply.text


def test_our_policy_schedules_them(both: Both) -> None:
    info = requests.get(f"{both.ours.url}/server_info", timeout=60).json()
    assert info["sgl_prefill"]["config"]["scheduling"] == "calibrated-srjf"
    assert requests.get(f"{both.ours.url}/health_generate", timeout=60).status_code == 200
