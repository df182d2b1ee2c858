"""Several clients on one server: what one has asked nobody else finds or ends, and how much of one may wait."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest
import requests

from tests.integration.conftest import KEY, MOST_WAITING, SYSTEM, Server
from tests.integration.rights import assert_rights

LABELS = {"allowed_token_ids": [5, 6]}
RECEIVED = '"event": "request.received"'  # in the log, of one request
A_FEW_TOKENS = 8  # that a chat begins with, whoever it is of

BODIES: dict[str, Any] = {
    "/v1/completions": lambda text: {"model": "demo", "prompt": text, **LABELS},
    "/v1/chat/completions": lambda text: {"model": "demo", "messages": [{"role": "user", "content": text}], **LABELS},
    "/generate": lambda text: {"text": text, "sampling_params": {"max_new_tokens": 0}},
    "/v1/score": lambda text: {"model": "demo", "query": text, "items": [" a"], "label_token_ids": [5, 6]},
    "/v1/rerank": lambda text: {"query": text, "documents": ["a"]},
    "/v2/rerank": lambda text: {"query": text, "documents": ["a"], "stream": True},
}


def ask(server: Server, user: str, route: str, body: dict[str, Any]) -> requests.Response:
    return server.post(route, body, headers={**KEY, "x-user-id": user})


def cached_tokens_of(server: Server, user: str, route: str, body: dict[str, Any]) -> float:
    """By the scheduler's own count: not every route shows it. Another request makes sure that it has been written down."""
    before = cached_tokens(server)
    reply = ask(server, user, route, body)
    assert reply.status_code == 200, reply.text
    ask(server, "nobody else", "/generate", {"input_ids": [9], "sampling_params": {"max_new_tokens": 0}})
    return cached_tokens(server) - before


def cached_tokens(server: Server) -> float:
    metrics = requests.get(f"{server.url}/metrics", timeout=60).text
    found = re.search(r"^sglang:prefill_cached_tokens_total{.*} (\S+)", metrics, re.MULTILINE)
    return 0.0 if found is None else float(found.group(1))


@pytest.mark.parametrize("route", BODIES)
def test_what_one_tenant_asked_another_does_not_find(bank: Server, route: str) -> None:
    """On every route that computes; it finds its own."""
    text = f"{route} earns 5,000 a month, has no debts, and has paid everything in time for twenty years. Credit?" * 2
    body = BODIES[route](text)
    ann, bob = (f"{name} on {route}" for name in ("ann", "bob"))
    ask(bank, ann, route, body)
    own = cached_tokens_of(bank, ann, route, body)
    assert own > 50
    assert cached_tokens_of(bank, bob, route, body) <= A_FEW_TOKENS
    assert cached_tokens_of(bank, bob, route, body) == own
    assert cached_tokens_of(bank, bob, route, {**body, "cache_salt": "other"}) <= A_FEW_TOKENS


def test_the_user_of_a_body_is_a_tenant_too(bank: Server) -> None:
    """Also on routes whose bodies know none."""
    text = "The user of a body asks this, which is long enough to tell whether it has been asked before. " * 2
    body = BODIES["/v1/score"](text)
    bank.post("/v1/score", {**body, "user": "ann"}, headers=KEY)
    assert cached_tokens_of(bank, "ann", "/v1/score", body) > 30
    for wrong in (5, ["ann"]):
        reply = bank.post("/v1/score", {**BODIES["/v1/score"](text), "user": wrong}, headers=KEY)
        assert reply.status_code == 400
        assert "it must be a text" in reply.json()["error"]["message"]


def test_what_all_share_is_there_before_anyone_asks(bank: Server) -> None:
    """As the beginning of a text and of a chat; what follows it is a tenant's own."""
    profile = "Earns 5,000 a month, has no debts, and has paid everything in time for twenty years. Credit?"
    n_system = len(SYSTEM.split())
    chat = {"model": "demo", "messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": profile}]}
    for route, body in (
        ("/v1/completions", {"model": "demo", "prompt": SYSTEM + profile, **LABELS}),
        ("/v1/chat/completions", {**chat, **LABELS}),
    ):
        first, other = (ask(bank, user, route, body).json()["choices"][0]["label_scores"] for user in ("dan", "eve"))
        assert first["prompt_tokens"] - 10 > first["cached_tokens"] >= n_system
        same = ("prompt_tokens", "cached_tokens", "kept_tokens", "evicted_tokens")
        assert [first[name] for name in same] == [other[name] for name in same]
        assert first["labels"] == other["labels"]


def test_sessions_are_refused(bank: Server) -> None:
    """They go on with requests that may be another's."""
    body = {"text": "a", "sampling_params": {"max_new_tokens": 0}, "session_params": {"id": "s"}}
    reply = ask(bank, "ann", "/generate", body)
    assert reply.status_code == 400
    assert "--isolate-by" in reply.json()["error"]["message"]


def test_nobody_ends_anothers_requests(bank: Server) -> None:
    """By their id or all at once; its own each client ends."""
    for enders, status in ((["bob"], 200), (["bob", "ann"], 503)):
        with ThreadPoolExecutor(1) as clients:
            many = clients.submit(ask, bank, "ann", "/generate", batch(f"{enders}", rid="job"))
            while waiting_requests(bank) < MOST_WAITING / 2:
                assert not many.done()
            for user in enders:
                for body in ({"rid": "job"}, {"rid": "", "abort_all": True}):
                    assert ask(bank, user, "/abort_request", body).status_code == 200
            assert many.result().status_code == status


def test_a_client_with_much_that_waits_is_refused_more(bank: Server) -> None:
    """Two batches of 150 where 200 may wait: the second is refused whole, another client is not, and a batch that could never
    wait is a bad request."""
    n_received = bank.log.read_text().count(RECEIVED)
    with ThreadPoolExecutor(2) as clients:
        scheduler = scheduler_of(bank)
        scheduler.suspend()  # until both have come: the first must not run before the second waits
        try:
            both = [clients.submit(ask, bank, "ann", "/generate", tokens_of(150, salt)) for salt in (2000, 3000)]
            while bank.log.read_text().count(RECEIVED) < n_received + 2:
                assert bank.process.poll() is None
        finally:
            scheduler.resume()
        other = ask(bank, "bob", "/v1/completions", BODIES["/v1/completions"]("x"))
        assert other.status_code == 200
        served, more = sorted((one.result() for one in both), key=lambda reply: reply.status_code)
        assert served.status_code == 200
        assert more.status_code == 429, more.text
        assert int(more.headers["retry-after"]) >= 1
        message = more.json()["error"]["message"]
        assert f"{MOST_WAITING} requests of this client wait and --max-client-waiting is {MOST_WAITING}" in message
    too_many = ask(bank, "ann", "/generate", batch("third", n=MOST_WAITING + 1))
    assert too_many.status_code == 400
    assert "201 prompts" in too_many.json()["error"]["message"]
    metrics = requests.get(f"{bank.url}/metrics", timeout=60).text
    assert 'sglang:prefill_refused_requests_total{reason="client_queue_full"} 1.0' in metrics


def tokens_of(n: int, salt: int) -> dict[str, Any]:
    """Prompts as tokens, which the scheduler gets in one message."""
    return {"input_ids": [[salt + number, *range(1000, 1090)] for number in range(n)], **LABELS}


def scheduler_of(server: Server) -> psutil.Process:
    processes = psutil.Process(server.process.pid).children(recursive=True)
    (scheduler,) = [one for one in processes if "sglang::scheduler" in " ".join(one.cmdline())]
    return scheduler


def batch(name: str, n: int = MOST_WAITING, **fields: Any) -> dict[str, Any]:
    """Takes a second or two."""
    prompts = [f"{name} {number} " + "says that it has paid everything in time. " * 8 for number in range(n)]
    return {"text": prompts, **LABELS, **fields}


def waiting_requests(server: Server) -> float:
    metrics = requests.get(f"{server.url}/metrics", timeout=60).text
    return float(re.search(r"^sglang:prefill_waiting_requests{.*} (\S+)", metrics, re.MULTILINE)[1])  # type: ignore[index]


def test_with_one_key_all_routes_ask_for_it(bank: Server) -> None:
    assert_rights(bank, normal={"user"}, of_administrators={"user"})
