"""Starts that fail late, and servers that end. One small random-weight model, no orphan process."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
import requests

from sgl_prefill.entry import local_server
from sgl_prefill.entry.local_server import LocalServer
from sgl_prefill.entry.processes import NICENESS
from sgl_prefill.startup.secret import MASK
from tests.integration.children import begin_server
from tests.integration.conftest import QUICK_START, Server, healthy
from tests.integration.rights import KEYS, assert_rights


def write_tiny_model(folder: Path, demo_folder: Path) -> Path:
    """The demo model's tokenizer and a config of 2 layers; weights are random at load."""
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).write_text((demo_folder / name).read_text())
    config = json.loads((demo_folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**config, "num_hidden_layers": 2, "hidden_size": 144, "head_dim": 16})
    )
    return folder


TWO_KEYS = ["--api-key", "user", "--admin-api-key", "admin"]
SERVES = {
    "two keys": [*TWO_KEYS, "--log-level", "debug"],  # which prints SGLang's arguments, keys among them
    "drains": [],
    "detokenizer dies": [],
    "prefork dies": [],
    "scheduler dies": ["--allow-generation", "--admin-api-key", "admin"],
}
FAILS = {
    "memory": [
        *("--load-format", "dummy", "--memory-budget-gb", "0.1", "--max-input-length", "8000"),
        *("--hybrid-prefill", "off", "--suffix-kv", "keep"),
    ],
    "weights": ["--load-format", "auto", "--memory-budget-gb", "1"],
    "intruder": ["--load-format", "dummy"],
}


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory, demo_folder: Path) -> Iterator[dict[str, LocalServer]]:
    """All servers of this file, started side by side."""
    folder = tmp_path_factory.mktemp("lifecycle")
    model = write_tiny_model(folder / "tiny", demo_folder)
    flags = ["--model-path", str(model)]
    served = ["--load-format", "dummy", "--memory-budget-gb", "1", "--max-input-length", "4000", *QUICK_START]
    environments = {"intruder": {"PYTHONPATH": os.pathsep.join([str(write_intruder(folder)), *sys.path])}}
    all_flags = {name: [*served, *own] for name, own in SERVES.items()} | FAILS
    servers = {
        name: begin_server("sgl_prefill.launch_server", [*flags, *own], folder / name, environments.get(name))
        for name, own in all_flags.items()
    }
    yield servers
    for server in servers.values():
        if server.process.poll() is None:
            local_server.kill(server.process)


class Ended(NamedTuple):
    """A start that failed."""

    status: int
    output: str


def ended(server: LocalServer) -> Ended:
    """Waits for the end of a start that must fail. No process of its session is left."""
    status = server.process.wait(timeout=300)
    assert not [
        process for process in psutil.process_iter() if is_in_session(process, server) and holds_memory(process)
    ]
    return Ended(status, server.log.read_text())


def write_intruder(folder: Path) -> Path:
    """A foreign plugin on our target, as a user would have it installed."""
    intruder = folder / "plugin"
    info = intruder / "intruder-1.0.dist-info"
    info.mkdir(parents=True)
    (intruder / "intruder.py").write_text(
        "def register():\n"
        "    from sglang.srt.plugins.hook_registry import HookRegistry, HookType\n"
        "    HookRegistry.register('sglang.srt.managers.scheduler.Scheduler.get_new_batch_prefill',\n"
        "                          lambda original, *a, **k: original(*a, **k), HookType.AROUND)\n"
    )
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: intruder\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\nintruder = intruder:register\n")
    return intruder


def test_with_two_keys_the_server_starts_and_its_end_by_force_leaves_nothing(servers: dict[str, LocalServer]) -> None:
    """The warm-up had called an administrator's route with the user's key; and `kill -9` of the launcher had left 3 GB."""
    with healthy(servers["two keys"]) as server:
        body = {"model": "tiny", "prompt": "a b c", "allowed_token_ids": [5, 6]}
        assert server.post("/v1/completions", body).status_code == 401
        answered = server.post("/v1/completions", body, headers={"Authorization": "Bearer user"})
        assert answered.status_code == 200, answered.text
        assert_rights(server, normal={"user"}, of_administrators={"admin"})
        assert_keys_are_not_shown(server)
        assert_all_listen_on_loopback_alone(server)
        foreign = {"Authorization": "Bearer \u00fc".encode()}
        assert server.post("/v1/completions", body, headers=foreign).status_code == 401
        children = psutil.Process(server.process.pid).children(recursive=True)
        assert len(children) >= 3, "prefork, scheduler and detokenizer"
        assert_all_give_way_to_steps(psutil.Process(server.process.pid), children)
        server.process.kill()
        _, left = psutil.wait_procs(children, timeout=2)
        assert not list(filter(holds_memory, left))


def assert_all_give_way_to_steps(launcher: psutil.Process, children: list[psutil.Process]) -> None:
    """A step of 40 ms took a second beside a client whose texts were read and tokenised all the time."""
    (scheduler,) = [child for child in children if "sglang::scheduler" in " ".join(child.cmdline())]
    (detokenizer,) = [child for child in children if "sglang::detokenizer" in " ".join(child.cmdline())]
    assert scheduler.nice() == os.nice(0)
    assert launcher.nice() == detokenizer.nice() == min(os.nice(0) + NICENESS, 19)


def assert_keys_are_not_shown(server: Server) -> None:
    reply = requests.get(f"{server.url}/server_info", headers={"Authorization": "Bearer user"}, timeout=60)
    assert reply.status_code == 200
    info = reply.json()
    for shown in (info, *info["internal_states"]):
        assert (shown["api_key"], shown["admin_api_key"]) == (MASK, MASK)
    assert not re.search(r"--(admin-)?api-key[= ](user|admin)", info["launch_command"])
    assert "'admin_api_key': '********'" in server.log.read_text()
    assert not re.search(r"api_key'?[=:] ?'(user|admin)'", server.log.read_text())


def assert_all_listen_on_loopback_alone(server: Server) -> None:
    """PyTorch's store for the ranks had listened on every interface."""
    launcher = psutil.Process(server.process.pid)
    addresses = {
        socket.laddr.ip
        for process in (launcher, *launcher.children(recursive=True))
        for socket in process.net_connections("inet")
        if socket.status == psutil.CONN_LISTEN
    }
    assert addresses == {"127.0.0.1"}


def is_in_session(process: psutil.Process, server: LocalServer) -> bool:
    with contextlib.suppress(ProcessLookupError):
        return os.getsid(process.pid) == server.process.pid
    return False


def holds_memory(process: psutil.Process) -> bool:
    """Says whether a process lives: one that has ended may wait for a parent that reads its status."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False


def test_a_scheduler_that_cannot_start_ends_with_one_message_last(servers: dict[str, LocalServer]) -> None:
    """An input that does not fit the memory is found after the model is loaded; no traceback, and no process left."""
    done = ended(servers["memory"])
    assert done.status == 2
    *_, first, last = done.output.strip().splitlines()
    assert first == "sgl_prefill: cannot start"
    assert "the longest input that fits has" in last
    assert "Traceback" not in done.output


def test_weights_that_are_not_there_end_the_start_with_a_status(servers: dict[str, LocalServer]) -> None:
    """An error of SGLang's own, in one sentence; the launcher had ended by SIGKILL."""
    done = ended(servers["weights"])
    assert done.status in (1, 2)
    assert "says: RuntimeError: Cannot find any model weights" in done.output
    assert "Traceback" not in done.output


def test_a_hook_that_does_not_take_ends_the_start_with_its_message(servers: dict[str, LocalServer]) -> None:
    """A foreign plugin on our target: refused by name, with no process left."""
    done = ended(servers["intruder"])
    assert done.status != 0
    assert "get_new_batch_prefill is also hooked by intruder" in done.output


def test_a_server_that_is_asked_to_end_answers_who_waits_and_takes_no_more(servers: dict[str, LocalServer]) -> None:
    """It had taken new requests for as long as there were old ones, and ended by SIGKILL."""
    with healthy(servers["drains"]) as server, ThreadPoolExecutor(40) as clients:
        children = psutil.Process(server.process.pid).children(recursive=True)
        waiting = [clients.submit(ask, server, number) for number in range(40)]
        # One runs; all others have been answered, or wait in the scheduler: one that is still on the way would be refused.
        while (n_done := sum(answer.done() for answer in waiting)) == 0 or (
            n_done + metric(server, "waiting_requests") < len(waiting) - 1
        ):
            assert server.process.poll() is None
        server.process.terminate()
        while (late := ask(server, 99)).status_code == 200:
            pass  # the signal is on its way
        assert late.status_code == 503
        assert int(late.headers["retry-after"]) == 30
        assert late.json()["error"]["message"].startswith("this server is shutting down")
        assert [answer.result().status_code for answer in waiting] == [200] * 40
        assert server.process.wait(timeout=60) == 0
        assert not list(filter(holds_memory, psutil.wait_procs(children, timeout=2)[1]))


def metric(server: Server, name: str) -> float:
    metrics = requests.get(f"{server.url}/metrics", timeout=60).text
    found = re.search(rf"^sglang:prefill_{name}{{.*}} (\S+)", metrics, re.MULTILINE)
    return 0.0 if found is None else float(found.group(1))


def ask(server: Server, number: int, n_tokens: int = 3000) -> requests.Response:
    """Asks with a prompt of its own."""
    prompt = [(7 * number + place) % 40_000 for place in range(n_tokens)]
    return server.post("/v1/completions", {"model": "tiny", "prompt": prompt, "allowed_token_ids": [5, 6]})


def test_where_the_detokenizer_dies_every_client_hears_of_it(servers: dict[str, LocalServer]) -> None:
    """Most had waited for their own time-out. It stands still until all forty answers are computed, so that none has left."""
    with healthy(servers["detokenizer dies"]) as server, ThreadPoolExecutor(40) as clients:
        children = psutil.Process(server.process.pid).children(recursive=True)
        (detokenizer,) = [child for child in children if "detokenizer" in " ".join(child.cmdline())]
        detokenizer.suspend()
        n_before = metric(server, "wait_seconds_count")
        waiting = [clients.submit(ask, server, number, n_tokens=100) for number in range(40)]
        while metric(server, "wait_seconds_count") < n_before + 40:
            assert server.process.poll() is None
        detokenizer.kill()
        answers = [answer.result() for answer in waiting]
        assert {answer.status_code for answer in answers} == {503}
        assert all("has ended" in answer.json()["error"]["message"] for answer in answers)
        assert server.process.wait(timeout=60) == 1
        assert not list(filter(holds_memory, psutil.wait_procs(children, timeout=2)[1]))


def test_a_dead_scheduler_takes_the_launcher_down_with_a_failure(servers: dict[str, LocalServer]) -> None:
    """Clients see closed connections, the supervisor a non-zero exit, and nothing is left running."""
    with healthy(servers["scheduler dies"]) as server:
        body = {"model": "tiny", "prompt": "a b c", "max_tokens": 3, "temperature": 0, "ignore_eos": True}
        generated = server.post("/v1/completions", body)
        assert generated.json()["usage"]["completion_tokens"] == 3, "--allow-generation decodes"
        assert_rights(server, normal=set(KEYS), of_administrators={"admin"})
        dies_under_load(server, "sglang::scheduler", signal.SIGKILL)


def test_where_the_process_that_starts_schedulers_ends_so_does_the_server(servers: dict[str, LocalServer]) -> None:
    with healthy(servers["prefork dies"]) as server:
        dies_under_load(server, "sgl_prefill::prefork", signal.SIGTERM)


def dies_under_load(server: Server, name: str, by: signal.Signals) -> None:
    """Ends a process of a server during a step: each client hears of it, the launcher fails, and no process is left."""
    children = psutil.Process(server.process.pid).children(recursive=True)
    (process,) = [child for child in children if name in " ".join(child.cmdline())]
    with ThreadPoolExecutor(40) as clients:
        waiting = [clients.submit(ask, server, number) for number in range(40)]
        wait(waiting, return_when=FIRST_COMPLETED)
        process.send_signal(by)
        failures = [one.exception() for one in waiting]
    refused = [one.result().status_code for one in waiting if one.exception() is None]
    assert len(refused) < 40 or set(refused) != {200}, "no client waited"
    assert all(isinstance(one, requests.ConnectionError) for one in failures if one is not None)
    assert server.process.wait(timeout=60) > 0
    _, alive = psutil.wait_procs(children, timeout=30)
    assert alive == []
