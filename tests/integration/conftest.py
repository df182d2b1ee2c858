"""Real servers, each started once per test session and waited for by a health check."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import requests

from sgl_prefill import demo_model

START_TIMEOUT_S = 300


class Server(NamedTuple):
    """A running server and how to talk to it."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def post(self, path: str, body: Any, **options: Any) -> requests.Response:
        return requests.post(self.url + path, json=body, timeout=300, **options)

    def scores(self, prompt: Any, **labels: Any) -> list[dict[str, Any]]:
        """`label_scores` of each prompt through /v1/completions."""
        reply = self.post("/v1/completions", {"model": "demo", "prompt": prompt, **labels})
        assert reply.status_code == 200, reply.text
        return [choice["label_scores"] for choice in reply.json()["choices"]]


def start(module: str, log: Path, *flags: str) -> Server:
    """A server of `python -m module` on a free port, healthy. Fails the test with its log otherwise."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", module, "--host", "127.0.0.1", "--port", str(port), *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, env=environment
        )
    server = Server(f"http://127.0.0.1:{port}", process, log)
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            process.wait(timeout=0.5)
            pytest.fail(f"{command} ended with {process.returncode}:\n{log.read_text()[-4000:]}")
        except subprocess.TimeoutExpired:
            pass
        try:
            if requests.get(server.url + "/health", timeout=5).status_code == 200:
                return server
        except requests.ConnectionError:
            pass
    stop(server)
    pytest.fail(f"{command} was not healthy after {START_TIMEOUT_S} s:\n{log.read_text()[-4000:]}")


def stop(server: Server) -> None:
    """End our own process and wait for it; SGLang ends its children with it."""
    if server.process.poll() is None:
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(timeout=60)


@pytest.fixture(scope="session")
def demo_folder() -> Path:
    return demo_model.ensure("bfloat16")


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, demo_folder: Path) -> Iterator[Server]:
    """Our server with the demo model, all features on."""
    log = tmp_path_factory.mktemp("ours") / "log.txt"
    running = start("sgl_prefill.launch_server", log, "--model-path", str(demo_folder), "--memory-budget-gb", "3")
    yield running
    stop(running)


@pytest.fixture(scope="session")
def stock_server(tmp_path_factory: pytest.TempPathFactory, demo_folder: Path) -> Iterator[Server]:
    """Stock SGLang on the same machine with our package installed."""
    log = tmp_path_factory.mktemp("stock") / "log.txt"
    flags = ["--model-path", str(demo_folder), "--max-total-tokens", "40000", "--sleep-on-idle"]
    running = start("sglang.launch_server", log, *flags)
    yield running
    stop(running)


@pytest.fixture(scope="session")
def tokenizer(demo_folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(demo_folder)
