"""Real servers, each started once per test session and waited for by a health check."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import requests

from benchmarks import shapes
from sgl_prefill import calibrate, demo_model, local_server
from sgl_prefill.calibrations import ModelName, StoredCalibration, fingerprint_of
from sgl_prefill.core.label_calibration import Calibration
from sgl_prefill.examples.label_reviews import NEGATIVE, POSITIVE
from tests.support import quiet_imports  # noqa: F401  (before all else that imports SGLang)

# By name: the labels, and the scale and bias of each.
CALIBRATIONS = {
    "reviews": ([POSITIVE, NEGATIVE], Calibration([0.5, 2.0], [0.0, 1.5])),
    "cities": ([" Paris", " Rome"], Calibration([1.0, 1.0], [-20.0, 20.0])),
    "turned": ([" yes", " no"], Calibration([1.5, 1.5], [0.5, 0.0])),
    "chats": (["Good", "Bad"], Calibration([1.0, 1.0], [-5.0, 5.0])),
}
FORMS = {"good": [" very good indeed", " good"], "bad": [" not good at all"]}


class Server(NamedTuple):
    """A running server and how to talk to it."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def calibrations(self) -> Path:
        """The folder from which it has read CALIBRATIONS."""
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


def write_calibrations(folder: Path, demo_folder: Path) -> None:
    folder.mkdir()
    options: Any = calibrate.parser().parse_args(
        ["x", "--method", "vector", "--output", "x", "--model-path", str(demo_folder)]
    )
    model = ModelName("demo", fingerprint_of(options), None)
    made = [
        StoredCalibration(name, "vector", model, labels, calibration, 20, None, {})
        for name, (labels, calibration) in CALIBRATIONS.items()
    ]
    ways = {"forms": {label: sorted(forms) for label, forms in FORMS.items()}}
    made.append(
        StoredCalibration("forms", "vector", model, list(FORMS), Calibration([1.0] * 2, [0.5, 0.0]), 20, None, ways)
    )
    for one in made:
        (folder / f"{one.name}.json").write_text(json.dumps(one.to_json()))


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, demo_folder: Path) -> Iterator[Server]:
    """Our server with the demo model, all features on."""
    log = tmp_path_factory.mktemp("ours") / "log.txt"
    flags = ["--model-path", str(demo_folder), "--memory-budget-gb", "3"]
    write_calibrations(log.parent / "calibrations", demo_folder)
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
