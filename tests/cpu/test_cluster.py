"""What a cluster refuses before it starts anything, and what it asks of the gateway."""

from __future__ import annotations

import http.server
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from sgl_prefill import preflight
from sgl_prefill.cluster import __main__ as cluster
from sgl_prefill.cluster import engines, gateway
from sgl_prefill.cluster.options import ClusterOptions, options_of, parser
from sgl_prefill.errors import ConfigurationError
from sgl_prefill.local_server import free_port

README = (Path(cluster.__file__).parent / "README.md").read_text()


def free_neighbours() -> int:
    """Returns a free port before two more: the gateway's, and those of its first engines, which follow it."""
    while True:
        first = free_port()
        with ExitStack() as stack:
            try:
                for port in range(first, first + 3):
                    stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except (OSError, OverflowError):
                continue
            return first


def parsed(*argv: str) -> ClusterOptions:
    namespace, engine_flags = parser().parse_known_args(["--router-port", str(free_neighbours()), *argv])
    return options_of(namespace, engine_flags)


@pytest.fixture
def _much_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "free_memory_gb", lambda: (8.0, 16.0))
    monkeypatch.setattr(preflight, "_port_problems", lambda *_: [])  # whoever listens on this machine
    monkeypatch.setattr("sgl_prefill.device.has_accelerator", lambda: False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        ([], "give --engines N"),
        (["--engines", "2", "--engine-urls", "http://a:1"], "one of the two"),
        (["--engines", "0"], "--engines is 0: it must be at least 1"),
        (["--engines", "-1"], "--engines is -1"),
        (["--engine-urls", "a:1"], "a:1 is no URL"),
        (["--engine-urls", "http://a:1", "http://a:1/"], "names an engine twice"),
        (["--engine-urls", "http://a:1", "--dtype", "float32"], "give such flags where they are started"),
        (["--engines", "1", "--port", "5"], "--port 5 is decided by the cluster: give --router-port"),
        (["--engines", "1", "--metrics-port", "0"], "--metrics-port is 0: it must be from 1 to 65535"),
        (["--engines", "2", "--engine-port", "65535"], "--engine-port is 65536"),
        (["--engines", "2", "--engine-port", "7000", "--metrics-port", "7001"], "7001 is asked for twice"),
    ],
)
def test_what_cannot_be_meant_is_refused(argv: list[str], told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        parsed(*argv)


def test_a_port_that_is_taken_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match=f"--engine-port {port} on 127.0.0.1 cannot be used"):
            parsed("--engines", "1", "--engine-port", str(port))


@pytest.mark.usefixtures("_much_memory")
def test_engines_share_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(6)))
    options = parsed("--engines", "2", "--engine-port", "7100", "--dtype", "float32")
    assert options.urls == ["http://127.0.0.1:7100", "http://127.0.0.1:7101"]
    assert engines.shares(options) == [
        (
            port,
            ("--dtype", "float32", "--memory-budget-gb", "2.000"),
            {"OMP_NUM_THREADS": "3"},
        )
        for port in (7100, 7101)
    ]


@pytest.mark.usefixtures("_much_memory")
@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (
            ["--engines", "3", "--memory-budget-gb", "3"],
            "3 of --memory-budget-gb 3 need 9 GiB, and 8.0 GiB are free: start at most 2",
        ),
        (["--engines", "2", "--tp-size", "2"], "2 of 2 ranks each"),
        (["--engines", "40"], "would get 0.10 GiB each of 8.0 GiB"),
    ],
)
def test_more_engines_than_the_machine_holds_are_refused_with_the_numbers(argv: list[str], told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        engines.shares(parsed(*argv))


def test_without_the_gateway_nothing_starts_and_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(engines, "shares", lambda options: pytest.fail("an engine was planned"))
    assert cluster.main(["--engines", "1", "--router-port", str(free_neighbours())]) == 2
    assert "pip install 'sgl-prefill[router]'" in capsys.readouterr().err


@contextmanager
def engine_that_says(told: Any) -> Iterator[str]:
    """Something that answers /server_info, and nothing else."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps(told).encode()
            self.send_response(200 if self.path == "/server_info" else 404)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: Any) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_engines_that_differ_are_seen() -> None:
    first = {"model_path": "/m", "dtype": "float32", "port": 1}
    with (
        engine_that_says(first) as one,
        engine_that_says({**first, "port": 2}) as alike,
        engine_that_says({**first, "dtype": "bfloat16"}) as other_settings,
        engine_that_says({**first, "model_path": "/n"}) as other_model,
    ):
        assert engines.differences([one, alike]) == []
        assert engines.differences([one, other_settings]) == [
            f"dtype is 'float32' at {one}, and 'bfloat16' at {other_settings}"
        ]
        with engine_that_says({**first, "sgl_prefill": {"version": "1", "config": {"scheduling": "fifo"}}}) as ours:
            assert engines.differences([one, ours]) == [
                f"engine is \"SGLang's own\" at {one}, and 'sgl_prefill 1' at {ours}",
                f"prefill scheduling is None at {one}, and 'fifo' at {ours}",
            ]
        with pytest.raises(ConfigurationError, match="must serve one model: model_path is '/m'"):
            engines.differences([one, alike, other_model])
    with pytest.raises(ConfigurationError, match=f"{one} does not say what it serves"):
        engines.differences([one, alike])


def test_a_key_is_given_to_the_engines_that_start_here_and_to_the_gateway() -> None:
    """Engines elsewhere have it already: it is no flag of theirs then."""
    assert parsed("--engines", "1", "--api-key", "k").engine_flags == ("--api-key", "k")
    elsewhere = parsed("--engine-urls", "http://a:1", "--api-key", "k")
    assert (elsewhere.engine_flags, elsewhere.api_key) == ((), "k")
    assert gateway.command(["http://a:1"], "user", "127.0.0.1", 1, 2, 30, "k")[-2:] == ["--api-key", "k"]


def test_the_page_names_every_setting_of_the_gateway_and_why() -> None:
    for words, why in gateway.SETTINGS:
        shown = " ".join(words).replace(gateway.NEVER_S, "31536000")
        assert f"| `{shown}` | {why} |" in README, words
    command = gateway.command(["http://a:1"], "user", "127.0.0.1", 1, 2, 30, None)
    assert " ".join(command[command.index("--policy") :]).startswith(
        "--policy manual --assignment-mode min_group --routing-key-headers x-user-id"
    )
