"""The whole way in one command: start a server with the demo model, label 24 reviews, print the table, stop it.

python -m sgl_prefill.examples.demo [any flag of sgl_prefill.launch_server]
"""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager

import requests

from sgl_prefill import demo_model
from sgl_prefill.examples import label_reviews

START_TIMEOUT_S = 600


def main() -> int:
    demo_model.ensure()
    with running_server(sys.argv[1:]) as url:
        print(label_reviews.table(label_reviews.label_all(url)))
    return 0


@contextmanager
def running_server(flags: list[str]) -> Iterator[str]:
    """The URL of a server of our own on a free port, healthy; stopped at the end. Exits with its log if it fails."""
    port = _free_port()
    command = [sys.executable, "-m", "sgl_prefill.launch_server", "--port", str(port), *flags]
    with tempfile.TemporaryFile("w+") as log:
        server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            url = f"http://127.0.0.1:{port}"
            if not _wait_until_healthy(server, url):
                log.seek(0)
                sys.exit(f"{log.read()}\nthe server did not start; its log is above")
            yield url
        finally:
            print("stopping the server", file=sys.stderr)
            server.send_signal(signal.SIGTERM)
            server.wait()


def _wait_until_healthy(server: subprocess.Popen[bytes], url: str) -> bool:
    started = time.monotonic()
    while server.poll() is None and (elapsed := time.monotonic() - started) < START_TIMEOUT_S:
        print(f"\rstarting the server (30 to 60 s on 2 cores): {elapsed:3.0f} s", end="", file=sys.stderr, flush=True)
        try:
            if requests.get(f"{url}/health", timeout=5).status_code == 200:
                print(file=sys.stderr)
                return True
        except requests.ConnectionError:
            pass
        time.sleep(0.5)
    print(file=sys.stderr)
    return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


if __name__ == "__main__":
    sys.exit(main())
