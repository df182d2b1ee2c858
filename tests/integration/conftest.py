"""Real servers, each started once per test session and waited for by a health check."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import requests

from benchmarks import shapes
from sgl_prefill import demo_model, local_server
from tests.support import quiet_imports  # noqa: F401  (before all else that imports SGLang)


class Server(NamedTuple):
    """A running server and how to talk to it."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def calibrations(self) -> Path:
        """Where it keeps them, if it was told so."""
        return self.log.parent / "calibrations"

    @property
    def request_log(self) -> Path:
        """Its `--request-log`, if it has one."""
        return self.log.parent / "requests.jsonl"

    def post(self, path: str, body: Any, **options: Any) -> requests.Response:
        return requests.post(self.url + path, json=body, timeout=300, **options)

    def scores(self, prompt: Any, **labels: Any) -> list[dict[str, Any]]:
        """`label_scores` of each prompt through /v1/completions."""
        reply = self.post("/v1/completions", {"model": "demo", "prompt": prompt, **labels})
        assert reply.status_code == 200, reply.text
        return [choice["label_scores"] for choice in reply.json()["choices"]]


@contextmanager
def running(module: str, log: Path, *flags: str) -> Iterator[Server]:
    """A healthy server of `python -m module`, stopped at the end."""
    with local_server.running(module, flags, log, environment={"OMP_NUM_THREADS": "2"}) as server:
        yield Server(server.url, server.process, log)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the child processes of a module keep their models."""
    return tmp_path_factory.mktemp("tiny")


@pytest.fixture(scope="session")
def demo_folder() -> Path:
    return demo_model.ensure()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, demo_folder: Path) -> Iterator[Server]:
    """Our server with the demo model, all features on."""
    log = tmp_path_factory.mktemp("ours") / "log.txt"
    flags = ["--model-path", str(demo_folder), "--memory-budget-gb", "3"]
    flags += ["--calibrations", str(log.parent / "calibrations"), "--request-log", str(log.parent / "requests.jsonl")]
    with running("sgl_prefill.launch_server", log, *flags) as ours:
        yield ours


@pytest.fixture(scope="session")
def stock_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Stock SGLang on the same machine with our package installed, in the dtype of ours, which its default need not be."""
    log = tmp_path_factory.mktemp("stock") / "log.txt"
    flags = [*shapes.demo_flags(), "--max-total-tokens", "40000", "--sleep-on-idle"]
    with running("sglang.launch_server", log, *flags) as stock:
        yield stock


@pytest.fixture(scope="session")
def tokenizer(demo_folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(demo_folder)
