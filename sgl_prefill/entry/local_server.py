"""Starts a server (this package's or stock SGLang) as a process on a free local port, waits until it is healthy, and ends it with
all its children. For the demo, the cluster, the tests and the benchmarks.
"""

from __future__ import annotations

import contextlib
import os
import secrets
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
    url: str
    command: list[str]
    process: subprocess.Popen[bytes]
    log: Path

    def stop(self) -> int:
        """Ends the server gracefully, and returns its exit status. SGLang ends its children."""
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
    """Starts `python -m module --port PORT flags` without waiting for it.

    Args:
        port: None: any free port.
        environment: added to this process's.
        ends_with_us: the server ends with this process, even where that is killed.
    """
    port = free_port() if port is None else port
    command = [python, "-m", module, "--host", "127.0.0.1", "--port", str(port), *flags]
    return LocalServer(
        f"http://127.0.0.1:{port}", command, spawn(command, log, environment, ends_with_us=ends_with_us), log
    )


def spawn(
    command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None, *, ends_with_us: bool = False
) -> subprocess.Popen[bytes]:
    """Starts a process in a session of its own: a terminal's signals reach only this process."""
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
    """Like `begin`, and waits until the server is healthy. Calls `on_wait` with the seconds so far. Raises ServerStartError."""
    server = begin(module, flags, log, python=python, environment=environment)
    try:
        await_health(server, on_wait)
    except BaseException:  # e.g. KeyboardInterrupt: only this function knows the server
        kill(server.process)
        raise
    return server


@contextmanager
def running(module: str, flags: Sequence[str], log: Path, **options: object) -> Iterator[LocalServer]:
    """`start` for a `with` statement."""
    server = start(module, flags, log, **options)  # type: ignore[arg-type]
    try:
        yield server
    finally:
        server.stop()


def await_health(server: LocalServer, on_wait: Callable[[float], None] = lambda elapsed_s: None) -> None:
    """Raises ServerStartError where the server ends, or is not healthy in time."""
    started = time.monotonic()
    while not is_healthy(server, elapsed_s := time.monotonic() - started):
        on_wait(elapsed_s)


def is_healthy(server: LocalServer, elapsed_s: float) -> bool:
    """Waits POLL_S, then asks. elapsed_s: since the start. Raises ServerStartError where the server has ended, or is too slow."""
    if _ended_within(server.process, POLL_S):
        status = server.process.returncode
        raise ServerStartError(f"{' '.join(server.command)} ended with status {status}:\n{_tail(server.log)}")
    if elapsed_s > START_TIMEOUT_S:
        raise ServerStartError(
            f"{' '.join(server.command)} was not healthy after {START_TIMEOUT_S} s:\n{_tail(server.log)}"
        )
    try:
        return requests.get(f"{server.url}/health", timeout=10).status_code == 200
    except requests.RequestException:
        return False


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kills a process with all of its session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _ended_within(process: subprocess.Popen[bytes], seconds: float) -> bool:
    try:
        process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def free_port() -> int:
    """One that the system hands to no connection by itself (on Linux from 32768 on): a server binds it half a minute later."""
    while True:
        port = 10_000 + secrets.randbelow(20_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def _tail(log: Path, n_characters: int = 4000) -> str:
    return log.read_text(errors="replace")[-n_characters:]
