"""Starts that fail late, and a server whose scheduler dies. One small random-weight model, no orphan process."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
import requests

from sgl_prefill.local_server import free_port
from sgl_prefill.port.priority import NICENESS
from sgl_prefill.secret import MASK
from tests.integration.conftest import Server, running
from tests.integration.rights import KEYS, assert_rights


@pytest.fixture
def tiny_model(tmp_path: Path, demo_folder: Path) -> Path:
    return write_tiny_model(tmp_path / "tiny", demo_folder)


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


@pytest.fixture(scope="module")
def in_vain(tmp_path_factory: pytest.TempPathFactory, demo_folder: Path) -> dict[str, subprocess.CompletedProcess[str]]:
    """Starts that must fail, all at once: most of each is imports."""
    folder = tmp_path_factory.mktemp("in_vain")
    starts = {
        "memory": (
            *("--load-format", "dummy", "--memory-budget-gb", "0.1", "--max-input-length", "8000"),
            *("--hybrid-prefill", "off", "--suffix-kv", "keep"),
        ),
        "weights": ("--load-format", "auto", "--memory-budget-gb", "1"),
        "intruder": ("--load-format", "dummy"),
    }
    environments = {"intruder": {"PYTHONPATH": str(write_intruder(folder))}}

    def start(name: str) -> subprocess.CompletedProcess[str]:
        model = write_tiny_model(folder / name, demo_folder)
        command = [
            sys.executable,
            "-m",
            "sgl_prefill.launch_server",
            "--model-path",
            str(model),
            "--port",
            str(free_port()),
        ]
        done = subprocess.run(
            [*command, *starts[name]],
            env={**os.environ, **environments.get(name, {})},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert not [p for p in psutil.process_iter(["cmdline"]) if str(model) in (p.info["cmdline"] or [])]
        return done

    with ThreadPoolExecutor() as threads:
        return dict(zip(starts, threads.map(start, starts), strict=True))


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


def test_with_two_keys_the_server_starts_and_its_end_by_force_leaves_nothing(tiny_model: Path, tmp_path: Path) -> None:
    """The warm-up had called an administrator's route with the user's key; and `kill -9` of the launcher had left 3 GB."""
    keys = ["--api-key", "user", "--admin-api-key", "admin"]
    flags = ["--model-path", str(tiny_model), "--load-format", "dummy", "--memory-budget-gb", "1", *keys]
    flags += ["--log-level", "debug"]  # which prints SGLang's arguments, keys among them
    with running("sgl_prefill.launch_server", tmp_path / "log.txt", *flags) as server:
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
    assert "admin_api_key='********'" in server.log.read_text()
    assert not re.search(r"api_key='(user|admin)'", server.log.read_text())


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


def holds_memory(process: psutil.Process) -> bool:
    """Says whether a process lives: one that has ended may wait for a parent that reads its status."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False


def test_a_scheduler_that_cannot_start_ends_with_one_message_last(
    in_vain: dict[str, subprocess.CompletedProcess[str]],
) -> None:
    """An input that does not fit the memory is found after the model is loaded; no traceback, and no process left."""
    done = in_vain["memory"]
    assert done.returncode == 2
    *_, first, last = done.stderr.strip().splitlines()
    assert first == "sgl_prefill: cannot start"
    assert "the longest input that fits has" in last
    assert "Traceback" not in done.stderr


def test_weights_that_are_not_there_end_the_start_with_a_status(
    in_vain: dict[str, subprocess.CompletedProcess[str]],
) -> None:
    """An error of SGLang's own, with its traceback; the launcher had ended by SIGKILL."""
    done = in_vain["weights"]
    assert done.returncode in (1, 2)
    assert "for the reason above" in done.stderr.strip().splitlines()[-1]


def test_a_hook_that_does_not_take_ends_the_start_with_its_message(
    in_vain: dict[str, subprocess.CompletedProcess[str]],
) -> None:
    """A foreign plugin on our target: refused by name, with no process left."""
    done = in_vain["intruder"]
    assert done.returncode != 0
    assert "get_new_batch_prefill is also hooked by intruder" in done.stderr


def test_a_server_that_is_asked_to_end_answers_who_waits_and_takes_no_more(tiny_model: Path, tmp_path: Path) -> None:
    """It had taken new requests for as long as there were old ones, and ended by SIGKILL."""
    with forty_waiting(tiny_model, tmp_path / "log.txt") as (server, children, waiting):
        server.process.terminate()
        while (late := ask(server, 99)).status_code == 200:
            pass  # the signal is on its way
        assert late.status_code == 503
        assert int(late.headers["retry-after"]) == 30
        assert late.json()["error"]["message"].startswith("this server is shutting down")
        assert [answer.result().status_code for answer in waiting] == [200] * 40
        assert server.process.wait(timeout=60) == 0
        assert not list(filter(holds_memory, psutil.wait_procs(children, timeout=2)[1]))


class Forty(NamedTuple):
    """A server, its processes, and requests of which one at least is answered."""

    server: Server
    children: list[psutil.Process]
    waiting: list[Future[requests.Response]]


@contextlib.contextmanager
def forty_waiting(model: Path, log: Path, *flags: str) -> Iterator[Forty]:
    flags = ("--model-path", str(model), "--load-format", "dummy", "--memory-budget-gb", "1", *flags)
    with running("sgl_prefill.launch_server", log, *flags) as server, ThreadPoolExecutor(60) as clients:
        children = psutil.Process(server.process.pid).children(recursive=True)
        waiting = [clients.submit(ask, server, number) for number in range(40)]
        # One runs; all others have been answered, or wait in the scheduler: who is still on the way would be refused.
        while (n_done := sum(answer.done() for answer in waiting)) == 0 or n_done + n_waiting(server) < len(
            waiting
        ) - 1:
            assert server.process.poll() is None
        yield Forty(server, children, waiting)


def n_waiting(server: Server) -> float:
    metrics = requests.get(f"{server.url}/metrics", timeout=60).text
    found = re.search(r"^sglang:prefill_waiting_requests{.*} (\S+)", metrics, re.MULTILINE)
    return 0.0 if found is None else float(found.group(1))


def ask(server: Server, number: int) -> requests.Response:
    """Asks with a long prompt of its own."""
    prompt = [(7 * number + place) % 40_000 for place in range(3000)]
    return server.post("/v1/completions", {"model": "tiny", "prompt": prompt, "allowed_token_ids": [5, 6]})


def test_where_the_detokenizer_dies_every_client_hears_of_it(tiny_model: Path, tmp_path: Path) -> None:
    """Most had waited for their own time-out."""
    with forty_waiting(tiny_model, tmp_path / "log.txt") as (server, children, waiting):
        (detokenizer,) = [child for child in children if "detokenizer" in " ".join(child.cmdline())]
        detokenizer.kill()
        answers = [answer.result() for answer in waiting]
        assert {answer.status_code for answer in answers} <= {200, 503}
        refused = [answer for answer in answers if answer.status_code == 503]
        assert refused
        assert all("has ended" in answer.json()["error"]["message"] for answer in refused)
        assert server.process.wait(timeout=60) == 1
        assert not list(filter(holds_memory, psutil.wait_procs(children, timeout=2)[1]))


def test_a_dead_scheduler_takes_the_launcher_down_with_a_failure(tiny_model: Path, tmp_path: Path) -> None:
    """Clients see closed connections, the supervisor a non-zero exit, and nothing is left running."""
    flags = ["--model-path", str(tiny_model), "--load-format", "dummy", "--memory-budget-gb", "1"]
    flags += ["--allow-generation", "--admin-api-key", "admin"]
    with running("sgl_prefill.launch_server", tmp_path / "log.txt", *flags) as server:
        body = {"model": "tiny", "prompt": "a b c", "max_tokens": 3, "temperature": 0, "ignore_eos": True}
        generated = server.post("/v1/completions", body)
        assert generated.json()["usage"]["completion_tokens"] == 3, "--allow-generation decodes"
        assert_rights(server, normal=set(KEYS), of_administrators={"admin"})
        children = psutil.Process(server.process.pid).children(recursive=True)
        (scheduler,) = [child for child in children if "sglang::scheduler" in " ".join(child.cmdline())]
        scheduler.kill()
        assert server.process.wait(timeout=60) != 0
        _, alive = psutil.wait_procs(children, timeout=30)
        assert alive == []
