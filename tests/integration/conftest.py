"""Real servers, each started once per test session and waited for by a health check."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import requests

from benchmarks import shapes
from sgl_prefill import calibrate
from sgl_prefill.core.label_calibration import Calibration
from sgl_prefill.entry import local_server
from sgl_prefill.entry.local_server import LocalServer
from sgl_prefill.errors import ServerStartError
from sgl_prefill.examples import demo_model
from sgl_prefill.examples.label_reviews import NEGATIVE, POSITIVE
from sgl_prefill.startup import examine
from sgl_prefill.startup.calibrations import ModelName, StoredCalibration, fingerprint_of
from tests.integration import children
from tests.integration.children import begin_server
from tests.support import quiet_imports  # noqa: F401  (before all else that imports SGLang)
from tests.support.otlp_collector import Collector, collector

children.start_fork_server()

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
def healthy(begun: LocalServer) -> Iterator[Server]:
    """Waits until a server is healthy, and stops it at the end."""
    try:
        yield await_health(begun)
    finally:
        begun.stop()


def await_health(begun: LocalServer) -> Server:
    """Waits until a server is healthy."""
    try:
        local_server.await_health(begun)
    except BaseException:
        local_server.kill(begun.process)
        raise
    return Server(begun.url, begun.process, begun.log)


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


SYSTEM = "You are a careful analyst of a bank. Look at the profile of a client and say whether it gets a credit.\n"
KEY = {"Authorization": "Bearer user"}
MOST_WAITING = 200
LAUNCHER = "sgl_prefill.launch_server"
# Of starts whose checks and measurements no test reads.
NO_GATE = ["--set", "skip_parity_gate=true"]
QUICK_START = [*NO_GATE, "--set", "jct_model=cache-miss"]


def begin_ours(folder: Path, demo_folder: Path) -> LocalServer:
    """By its command line, in a process that imports SGLang itself."""
    write_calibrations(folder / "calibrations", demo_folder)
    flags = ["--model-path", str(demo_folder), "--memory-budget-gb", "3"]
    flags += ["--calibrations", str(folder / "calibrations"), "--request-log", str(folder / "requests.jsonl")]
    return local_server.begin(LAUNCHER, flags, folder / "log.txt", environment={"OMP_NUM_THREADS": "2"})


def begin_bank(folder: Path, demo_folder: Path, traces_url: str) -> LocalServer:
    (folder / "system.txt").write_text(SYSTEM)
    flags = ["--model-path", str(demo_folder), "--served-model-name", "demo", "--memory-budget-gb", "2"]
    flags += ["--max-input-length", "1000", *NO_GATE, "--api-key", "user", "--isolate-by", "user"]
    flags += ["--shared-prefix", str(folder / "system.txt"), "--max-client-waiting", str(MOST_WAITING)]
    flags += ["--log-requests", "--log-requests-level", "0", "--log-requests-format", "json"]
    if not examine.trace_problems():
        flags += ["--enable-trace", "--otlp-traces-endpoint", traces_url]
    environment = {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"}
    return begin_server(LAUNCHER, flags, folder / "log.txt", environment)


@pytest.fixture(scope="session", autouse=True)
def begun(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, demo_folder: Path, spans: Collector
) -> Iterator[dict[str, LocalServer]]:
    """The session's servers that tests of this run use. They start together, while tests run that do not use them."""
    stock_flags = [*shapes.demo_flags(), "--max-total-tokens", "40000", "--sleep-on-idle"]
    paper_flags = ["--paper", "--model-path", str(demo_folder), "--memory-budget-gb", "2", *NO_GATE]
    begin: dict[str, Callable[[Path], LocalServer]] = {
        "server": lambda folder: begin_ours(folder, demo_folder),
        "bank": lambda folder: begin_bank(folder, demo_folder, spans.url),
        "paper_server": lambda folder: begin_server(LAUNCHER, paper_flags, folder / "log.txt"),
        "stock_server": lambda folder: begin_server("sglang.launch_server", stock_flags, folder / "log.txt"),
    }
    used = used_fixtures(request.session.items)
    servers = {name: one(tmp_path_factory.mktemp(name)) for name, one in begin.items() if name in used}
    yield servers
    alive = [one for one in servers.values() if one.process.poll() is None]
    for one in alive:
        one.process.terminate()
    for one in alive:
        one.process.wait(timeout=120)


def used_fixtures(items: list[pytest.Item]) -> set[str]:
    return {name for item in items for name in getattr(item, "fixturenames", ())}


@pytest.fixture(scope="session")
def server(begun: dict[str, LocalServer]) -> Server:
    """Our server with the demo model, all features on."""
    return await_health(begun["server"])


@pytest.fixture(scope="session")
def stock_server(begun: dict[str, LocalServer]) -> Server:
    """Stock SGLang on the same machine with our package installed, in the dtype of ours, which its default need not be."""
    return await_health(begun["stock_server"])


@pytest.fixture(scope="session")
def paper_server(begun: dict[str, LocalServer]) -> Server:
    """The paper's engine."""
    return await_health(begun["paper_server"])


@pytest.fixture(scope="session")
def bank(begun: dict[str, LocalServer]) -> Server:
    """A server with an API key, tenants, traces and a log of requests."""
    return await_health(begun["bank"])._replace(headers=KEY)


@pytest.fixture(scope="session")
def spans() -> Iterator[Collector]:
    """Receives the traces of `bank`."""
    with collector() as found:
        yield found


@pytest.fixture(scope="session", autouse=True)
def scenarios(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, begun: dict[str, LocalServer]
) -> Iterator[dict[str, Future[Any]]]:
    """Results of the scenarios that tests of this run use (`children.result_of`). Two processes at a time run them, beside other
    tests, once the session's servers have started."""
    used = used_fixtures(request.session.items)
    all_results: dict[str, Future[Any]] = {}

    def run(*arguments: Any) -> None:
        for one in begun.values():
            with suppress(ServerStartError):
                local_server.await_health(one)
        children.run_scenarios(*arguments)

    with ThreadPoolExecutor(2) as threads:
        for (module, _), names in children.SCENARIOS.items():
            if results := {name: Future[Any]() for name in names if name in used}:
                threads.submit(run, module, results, tmp_path_factory.mktemp(module))
                all_results |= results
        yield all_results
        threads.shutdown(cancel_futures=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that read results of scenarios come last; the scenarios run meanwhile."""
    scenarios = {name for names in children.SCENARIOS.values() for name in names}
    reading = {item.path for item in items if scenarios & used_fixtures([item])}
    items.sort(key=lambda item: item.path in reading)


@pytest.fixture(scope="session")
def tokenizer(demo_folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(demo_folder)
