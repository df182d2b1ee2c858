"""Start a server as its own process on a free local port, wait until it is healthy, and end it with all its children.

Serves the demo, the tests and the benchmarks, for our launcher and for stock SGLang alike.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import requests

from sgl_prefill.entry.prefork import end_with_parent
from sgl_prefill.errors import ServerStartError

START_TIMEOUT_S = 600
POLL_S = 0.25


class LocalServer(NamedTuple):
    """A healthy server of our own."""

    url: str
    command: list[str]
    process: subprocess.Popen[bytes]
    log: Path

    def stop(self) -> int:
        """End it and wait; its exit status. SGLang ends its children with it."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=120)


def begin(
    module: str,
    flags: Sequence[str],
    log: Path,
    *,
    port: int | None = None,
    python: str = sys.executable,
    environment: Mapping[str, str] | None = None,
    ends_with_us: bool = False,
) -> LocalServer:
    """Starts `python -m module --port PORT flags`, and waits for nothing.

    Args:
        port: where it listens; None: any that is free.
        environment: is added to this process's.
        ends_with_us: also where this process is killed.
    """
    port = free_port() if port is None else port
    command = [python, "-m", module, "--host", "127.0.0.1", "--port", str(port), *flags]
    return LocalServer(
        f"http://127.0.0.1:{port}", command, spawn(command, log, environment, ends_with_us=ends_with_us), log
    )


def spawn(
    command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None, *, ends_with_us: bool = False
) -> subprocess.Popen[bytes]:
    """Starts a process in a session of its own, so that what a terminal sends reaches this process alone."""
    with log.open("wb") as output:
        return subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=end_with_parent if ends_with_us else None,
            env={**os.environ, **(environment or {})},
        )


def start(
    module: str,
    flags: Sequence[str],
    log: Path,
    *,
    python: str = sys.executable,
    environment: Mapping[str, str] | None = None,
    on_wait: Callable[[float], None] = lambda elapsed_s: None,
) -> LocalServer:
    """Does `begin`, and waits until the server is healthy. Raises ServerStartError.

    `on_wait` is called with the seconds so far while waiting.
    """
    server = begin(module, flags, log, python=python, environment=environment)
    try:
        await_health(server, on_wait)
    except BaseException:  # also where the caller is ended while it waits: nobody else knows of the server
        kill(server.process)
        raise
    return server


@contextmanager
def running(module: str, flags: Sequence[str], log: Path, **options: object) -> Iterator[LocalServer]:
    """Does `start` for a `with` statement."""
    server = start(module, flags, log, **options)  # type: ignore[arg-type]
    try:
        yield server
    finally:
        server.stop()


def await_health(server: LocalServer, on_wait: Callable[[float], None] = lambda elapsed_s: None) -> None:
    """Waits until a server is healthy. Raises ServerStartError where it ends, or takes too long."""
    started = time.monotonic()
    while (elapsed_s := time.monotonic() - started) < START_TIMEOUT_S:
        on_wait(elapsed_s)
        if _ended_within(server.process, POLL_S):
            status = server.process.returncode
            raise ServerStartError(f"{' '.join(server.command)} ended with status {status}:\n{_tail(server.log)}")
        if _is_healthy(server.url):
            return
    raise ServerStartError(
        f"{' '.join(server.command)} was not healthy after {START_TIMEOUT_S} s:\n{_tail(server.log)}"
    )


def kill(process: subprocess.Popen[bytes]) -> None:
    """Ends a process with all of its session, at once."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _ended_within(process: subprocess.Popen[bytes], seconds: float) -> bool:
    try:
        process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def _is_healthy(url: str) -> bool:
    try:
        return requests.get(f"{url}/health", timeout=10).status_code == 200
    except requests.RequestException:
        return False


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _tail(log: Path, n_characters: int = 4000) -> str:
    return log.read_text(errors="replace")[-n_characters:]
