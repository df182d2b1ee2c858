"""Two engines behind SGLang's gateway: what passes, who stays where, and what a death costs."""

from __future__ import annotations

import itertools
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
import requests

from sgl_prefill.entry import local_server
from sgl_prefill.entry.local_server import free_port
from sgl_prefill.port.steps import clients

pytest.importorskip("smg")
MODULE = "sgl_prefill.cluster"
LABELS = {"allowed_tokens": [" yes", " no"]}
USERS = [f"user-{n}" for n in range(16)]
WAIT_S = 300  # an engine that starts again takes more than a minute on two busy cores


class Cluster(NamedTuple):
    """A running cluster, and how to ask it or one of its engines."""

    url: str
    engine_urls: list[str]
    metrics_url: str
    process: subprocess.Popen[bytes]
    log: Path

    def ask(self, path: str, body: Any, user: str | None = None, url: str | None = None) -> requests.Response:
        headers = {} if user is None else {clients.HEADER: user}
        return requests.post((url or self.url) + path, json={"model": "demo", **body}, headers=headers, timeout=120)

    def engine_of(self, user: str) -> str:
        """Asks a prompt that no engine knows, and finds who knows it then."""
        prompt = f"{user} {time.monotonic_ns()} " + "likes a long walk and a good book, " * 8 + "Is it so? Answer:"
        assert self.ask("/v1/completions", {"prompt": prompt, **LABELS}, user).status_code == 200
        return max(
            self.engine_urls,
            key=lambda url: cached_tokens(self.ask("/v1/completions", {"prompt": prompt, **LABELS}, url=url)),
        )


def cached_tokens(reply: requests.Response) -> int:
    (choice,) = reply.json()["choices"]
    return int(choice["label_scores"]["cached_tokens"])


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def started(folder: Path, demo_folder: Path, n_engines: int = 2) -> Cluster:
    """Starts engines on ports that are free, and waits until the cluster says that it is ready."""
    router, first, metrics = free_port(), _two_free_ports(), free_port()
    flags = ["--model-path", str(demo_folder), "--served-model-name", "demo", "--memory-budget-gb", "1.5"]
    command = [
        sys.executable,
        "-m",
        MODULE,
        "--engines",
        str(n_engines),
        "--router-port",
        str(router),
        "--engine-port",
        str(first),
    ]
    command += ["--metrics-port", str(metrics), "--log-dir", str(folder / "logs"), *flags]
    log = folder / "cluster.log"
    process = local_server.spawn(command, log)
    while "ready:" not in log.read_text():
        assert process.poll() is None, log.read_text()
        time.sleep(0.2)
    urls = [f"http://127.0.0.1:{first + index}" for index in range(n_engines)]
    return Cluster(f"http://127.0.0.1:{router}", urls, f"http://127.0.0.1:{metrics}/metrics", process, log)


def _two_free_ports() -> int:
    while True:
        port = free_port()
        try:
            with socket.create_server(("127.0.0.1", port + 1)):
                return port
        except OSError:
            pass


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, demo_folder: Path) -> Iterator[Cluster]:
    made = started(tmp_path_factory.mktemp("cluster"), demo_folder)
    yield made
    if made.process.poll() is None:
        local_server.kill(made.process)


PROMPT = "The sky is blue. Is it so? Answer:"
PASSES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": [PROMPT, "Is it late? Answer:"], **LABELS, "deadline_ms": 60_000, "logprobs": 2}),
    ("/v1/completions", {"prompt": [[504, 4832], [504]], "allowed_token_ids": [9805, 787]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": PROMPT}], "allowed_tokens": ["yes", "no"]}),
    ("/generate", {"text": PROMPT, **LABELS, "cache_salt": "a", "rid": "mine", "prefill_background": True}),
    ("/v1/completions", {"prompt": PROMPT, **LABELS, "stream": True}),
]


@pytest.mark.parametrize(("path", "body"), PASSES)
def test_fields_and_replies_pass_as_they_are(cluster: Cluster, path: str, body: dict[str, Any]) -> None:
    through, direct = (cluster.ask(path, body, "ann", url) for url in (cluster.url, cluster.engine_urls[0]))
    assert (through.status_code, direct.status_code) == (200, 200), through.text
    assert fields_of(through) == fields_of(direct)
    assert probabilities_of(through) == pytest.approx(probabilities_of(direct), abs=1e-4)
    assert len(probabilities_of(through)) >= 2
    assert ("mine" in through.text) == ("rid" in body)


def fields_of(reply: requests.Response) -> set[str]:
    told_of_hits = {"cached_tokens_details", "device", "host"}  # the second who asks hits
    return set(re.findall(r'"(\w+)":', reply.text)) - told_of_hits


def probabilities_of(reply: requests.Response) -> list[float]:
    return [float(number) for number in re.findall(r'"probability": ?([\d.e-]+)', reply.text)]


@pytest.mark.parametrize(
    ("body", "status", "told"),
    [
        ({"prompt": PROMPT, "allowed_tokens": [" absolutely not"]}, 400, "2 tokens"),
        ({"prompt": "word " * 20_000, **LABELS}, 400, "shorten it"),
        ({"prompt": "", **LABELS}, 400, "empty"),
    ],
)
def test_refusals_pass_as_they_are(cluster: Cluster, body: dict[str, Any], status: int, told: str) -> None:
    reply = cluster.ask("/v1/completions", body, "ann")
    assert reply.status_code == status
    assert told in reply.json()["error"]["message"]


def test_what_the_gateway_does_not_pass_and_what_to_call_instead(cluster: Cluster) -> None:
    items = [" yes", " no"]
    score = {"query": PROMPT, "items": items, "label_token_ids": [9805, 787]}
    assert cluster.ask("/v1/score", score).status_code == 404
    prompts = {"prompt": [PROMPT + item for item in items], "allowed_token_ids": [9805, 787]}
    assert len(cluster.ask("/v1/completions", prompts).json()["choices"]) == 2
    for path in ("/tokenize", "/detokenize", "/encode", "/invocations", "/api/chat", "/abort_request"):
        assert cluster.ask(path, {}).status_code == 404, path
    reranked = cluster.ask("/v1/rerank", {"query": "a colour", "documents": ["blue", "ten"]})
    assert reranked.status_code == 200, reranked.text
    assert len(reranked.json()["results"]) == 2


def test_a_user_stays_at_one_engine_and_users_are_spread(cluster: Cluster) -> None:
    """The gateway compares how many users have requests under way; here none has, and the engine is drawn: all 16 at one of
    two engines is no accident (3 in 100,000)."""
    homes = {user: cluster.engine_of(user) for user in USERS}
    assert set(homes.values()) == set(cluster.engine_urls)
    assert {user: cluster.engine_of(user) for user in USERS} == homes


def test_deadlines_that_cannot_be_met_cost_no_engine_its_users(cluster: Cluster) -> None:
    """429 for each, asked once of the engine, and more of them than open a circuit breaker."""
    user = USERS[0]
    home = cluster.engine_of(user)
    refused_before = _metric(home, "sglang:prefill_refused_requests_total")
    late = {"prompt": "It rains in the hills. " * 600 + "Is it so? Answer:", **LABELS, "deadline_ms": 0.001}
    statuses = Counter(cluster.ask("/v1/completions", late, user).status_code for _ in range(12))
    assert set(statuses) <= {429, 504}
    assert _metric(home, "sglang:prefill_refused_requests_total") - refused_before == 12
    assert cluster.engine_of(user) == home


def _metric(url: str, name: str) -> float:
    text = requests.get(f"{url}/metrics", timeout=30).text
    return sum(
        float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith((name + "{", name + " "))
    )


def test_the_metrics_of_all_engines_are_in_one_place(cluster: Cluster) -> None:
    text = requests.get(f"{cluster.url}/engine_metrics", timeout=30).text
    assert "prefill_waiting_requests" in text
    for url in cluster.engine_urls:
        assert url.removeprefix("http://") in text
    assert "smg_http_requests_total" in requests.get(cluster.metrics_url, timeout=30).text


def test_a_slow_engine_keeps_its_users(cluster: Cluster) -> None:
    """Its scheduler stands still with requests before it, longer than the gateway's defaults allow."""
    user = USERS[0]
    home = cluster.engine_of(user)
    scheduler = _scheduler_of(home)
    scheduler.suspend()
    try:
        with ThreadPoolExecutor(8) as pool:
            waiting = [
                pool.submit(cluster.ask, "/v1/completions", {"prompt": f"{n}{PROMPT}", **LABELS}, user)
                for n in range(8)
            ]
            time.sleep(6)
            scheduler.resume()
            assert {one.result().status_code for one in waiting} == {200}
    finally:
        scheduler.resume()
    assert cluster.engine_of(user) == home


def _scheduler_of(url: str) -> psutil.Process:
    (launcher,) = [
        one
        for one in psutil.process_iter(["cmdline"])
        if url.rpartition(":")[2] in (one.info["cmdline"] or [])
        and "sgl_prefill.launch_server" in (one.info["cmdline"] or [])
    ]
    (scheduler,) = [
        one
        for one in launcher.children(recursive=True)
        if "scheduler" in one.name() or "scheduler" in " ".join(one.cmdline())
    ]
    return scheduler


def test_a_death_costs_what_was_under_way_and_an_engine_that_is_back_is_used(cluster: Cluster) -> None:
    homes = {user: cluster.engine_of(user) for user in USERS}
    dead, left = homes[USERS[0]], next(url for url in cluster.engine_urls if url != homes[USERS[0]])
    port = dead.rpartition(":")[2]
    (launcher,) = [one for one in psutil.Process(cluster.process.pid).children() if port in one.cmdline()[:10]]
    command = launcher.cmdline()

    def one(n: int) -> tuple[str, int, str]:
        user = USERS[n % len(USERS)]
        reply = cluster.ask("/v1/completions", {"prompt": f"{n} {PROMPT}" * 20, **LABELS}, user)
        return user, reply.status_code, reply.text

    with ThreadPoolExecutor(12) as pool:
        asked = [pool.submit(one, n) for n in range(120)]
        until(lambda: sum(one.done() for one in asked) > 20)
        launcher.send_signal(signal.SIGKILL)
        answered = [one.result() for one in asked]
    assert len(answered) == 120
    for user, status, text in answered:
        assert status == 200 or ("error" in text and homes[user] == dead), (user, status, text)
    until(lambda: f"({dead}) has ended with status" in cluster.log.read_text())
    until(lambda: cluster.ask("/v1/completions", {"prompt": PROMPT, **LABELS}, USERS[0]).status_code == 200)
    assert {cluster.ask("/v1/completions", {"prompt": PROMPT, **LABELS}, user).status_code for user in USERS} == {200}
    again = local_server.spawn(command, cluster.log.with_name("again.log"))
    try:
        until(lambda: cluster_sees(cluster) == 2)
        new = itertools.count()
        until(lambda: cluster.engine_of(f"new-{next(new)}") == dead)  # drawn, as above
        assert {cluster.engine_of(user) for user in USERS if homes[user] == left} == {left}
    finally:
        again.send_signal(signal.SIGTERM)
        again.wait(timeout=60)


def cluster_sees(cluster: Cluster) -> int:
    from sgl_prefill.cluster.__main__ import n_ready

    return n_ready(cluster.url)


def test_it_ends_as_one(cluster: Cluster) -> None:
    """The last test: the cluster is gone thereafter."""
    left = psutil.Process(cluster.process.pid).children(recursive=True)
    cluster.process.send_signal(signal.SIGTERM)
    assert cluster.process.wait(timeout=WAIT_S) == 0
    assert not [one for one in left if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]


def test_a_killed_cluster_leaves_nothing(tmp_path: Path, demo_folder: Path) -> None:
    made = started(tmp_path, demo_folder, n_engines=1)
    left = psutil.Process(made.process.pid).children(recursive=True)
    assert len(left) > 4
    os.kill(made.process.pid, signal.SIGKILL)
    made.process.wait()
    until(lambda: not [one for one in left if one.is_running() and one.status() != psutil.STATUS_ZOMBIE])
