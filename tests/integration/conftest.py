"""Real servers, each started once per test session and waited for by a health check."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import requests

from benchmarks import shapes
from sgl_prefill import calibrate
from sgl_prefill.core.label_calibration import Calibration
from sgl_prefill.entry import local_server
from sgl_prefill.entry.local_server import LocalServer
from sgl_prefill.examples import demo_model
from sgl_prefill.examples.label_reviews import NEGATIVE, POSITIVE
from sgl_prefill.startup.calibrations import ModelName, StoredCalibration, fingerprint_of
from tests.integration.children import begin_server
from tests.support.otlp_collector import Collector, collector

forkserver.ensure_running()  # imports SGLang while this process does
from tests.support import quiet_imports  # noqa: E402, F401  (before all else that imports SGLang)

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
    headers: dict[str, str] = {}

    @property
    def calibrations(self) -> Path:
        """The folder from which it has read CALIBRATIONS."""
        return self.log.parent / "calibrations"

    @property
    def request_log(self) -> Path:
        """Its `--request-log`, if it has one."""
        return self.log.parent / "requests.jsonl"

    def post(
        self, path: str, body: Any, *, headers: Mapping[str, str | bytes] | None = None, **options: Any
    ) -> requests.Response:
        all_headers: dict[str, str | bytes] = {**self.headers, **(headers or {})}
        return requests.post(self.url + path, json=body, timeout=300, headers=all_headers, **options)

    def scores(self, prompt: Any, **labels: Any) -> list[dict[str, Any]]:
        """`label_scores` of each prompt through /v1/completions."""
        reply = self.post("/v1/completions", {"model": "demo", "prompt": prompt, **labels})
        assert reply.status_code == 200, reply.text
        return [choice["label_scores"] for choice in reply.json()["choices"]]


@contextmanager
def running(module: str, log: Path, *flags: str, environment: Mapping[str, str] | None = None) -> Iterator[Server]:
    """A healthy server of `python -m module`, forked from a process that has imported SGLang, and stopped at the end."""
    with healthy(begin_server(module, flags, log, environment)) as server:
        yield server


@contextmanager
def healthy(begun: LocalServer) -> Iterator[Server]:
    """Waits until a server is healthy, and stops it at the end."""
    try:
        local_server.await_health(begun)
    except BaseException:
        local_server.kill(begun.process)
        raise
    try:
        yield Server(begun.url, begun.process, begun.log)
    finally:
        begun.stop()


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


@pytest.fixture(scope="session", autouse=True)
def begun(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, demo_folder: Path
) -> Iterator[dict[str, LocalServer]]:
    """The session's servers that tests of this run use. They start while tests run that use none of them."""
    ours, stock = (tmp_path_factory.mktemp(name) / "log.txt" for name in ("ours", "stock"))
    modules: dict[str, tuple[str, list[str], Path]] = {
        "server": ("sgl_prefill.launch_server", ["--model-path", str(demo_folder), "--memory-budget-gb", "3"], ours),
        "stock_server": (
            "sglang.launch_server",
            [*shapes.demo_flags(), "--max-total-tokens", "40000", "--sleep-on-idle"],
            stock,
        ),
    }
    write_calibrations(ours.parent / "calibrations", demo_folder)
    modules["server"][1].extend(["--calibrations", str(ours.parent / "calibrations")])
    modules["server"][1].extend(["--request-log", str(ours.parent / "requests.jsonl")])
    used = {name for item in request.session.items for name in getattr(item, "fixturenames", ())}
    environment = {"OMP_NUM_THREADS": "2"}
    servers = {name: local_server.begin(*modules[name], environment=environment) for name in modules if name in used}
    yield servers
    for one in servers.values():
        if one.process.poll() is None:  # of tests that did not come to run
            local_server.kill(one.process)


@pytest.fixture(scope="session")
def server(begun: dict[str, LocalServer]) -> Iterator[Server]:
    """Our server with the demo model, all features on, started by its command line."""
    with healthy(begun["server"]) as ours:
        yield ours


@pytest.fixture(scope="session")
def stock_server(begun: dict[str, LocalServer]) -> Iterator[Server]:
    """Stock SGLang on the same machine with our package installed, in the dtype of ours, which its default need not be."""
    with healthy(begun["stock_server"]) as stock:
        yield stock


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that use no server of the session come first; the servers start meanwhile."""
    used = {item.path for item in items if {"server", "stock_server"} & {*getattr(item, "fixturenames", ())}}
    items.sort(key=lambda item: item.path in used)


SYSTEM = "You are a careful analyst of a bank. Look at the profile of a client and say whether it gets a credit.\n"
KEY = {"Authorization": "Bearer user"}
MOST_WAITING = 200


@pytest.fixture(scope="session")
def spans() -> Iterator[Collector]:
    """Receives the traces of `bank`."""
    with collector() as found:
        yield found


@pytest.fixture(scope="session")
def bank(tmp_path_factory: pytest.TempPathFactory, demo_folder: Path, spans: Collector) -> Iterator[Server]:
    """A server with an API key, tenants, traces and a request log."""
    from sgl_prefill.startup import examine

    folder = tmp_path_factory.mktemp("tenants")
    (folder / "system.txt").write_text(SYSTEM)
    flags = ["--model-path", str(demo_folder), "--served-model-name", "demo", "--memory-budget-gb", "2"]
    flags += ["--api-key", "user", "--isolate-by", "user"]
    flags += ["--shared-prefix", str(folder / "system.txt"), "--max-client-waiting", str(MOST_WAITING)]
    flags += ["--log-requests", "--log-requests-level", "0", "--log-requests-format", "json"]
    if not examine.trace_problems():
        flags += ["--enable-trace", "--otlp-traces-endpoint", spans.url]
    environment = {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"}
    with running("sgl_prefill.launch_server", folder / "log.txt", *flags, environment=environment) as server:
        yield server._replace(headers=KEY)


@pytest.fixture(scope="session")
def tokenizer(demo_folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(demo_folder)
