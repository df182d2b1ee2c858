"""`python -m sgl_prefill.cluster`: engines on this machine, or elsewhere, and SGLang's gateway before them.

Exit status: 0 if it was asked to end and all ended well, 1 if the gateway or the last engine has died, 2 if it could not start.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from sgl_prefill import local_server
from sgl_prefill.cluster import engines, gateway
from sgl_prefill.cluster.options import ClusterOptions, options_of, parser
from sgl_prefill.errors import ServerStartError, SglPrefillError
from sgl_prefill.port.ending import DRAIN_S

GATEWAY, ENGINE = "the gateway", "engine"
POLL_S = 0.2
GATEWAY_START_S = 120
END_S = 20  # beyond what is given to requests under way


class _Child(NamedTuple):
    name: str
    url: str
    process: subprocess.Popen[bytes]
    log: Path
    command: Sequence[str]


class _Asked(Exception):  # noqa: N818 -- no error: somebody wants us to end
    pass


def main(argv: list[str] | None = None) -> int:
    """Runs a cluster until it is stopped, and returns the exit status."""
    namespace, engine_flags = parser().parse_known_args(sys.argv[1:] if argv is None else argv)
    children: list[_Child] = []
    try:
        options = options_of(namespace, engine_flags)
        gateway.check_installed()
        shares = engines.shares(options) if options.n_engines else []
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _ask)
        log_dir = options.log_dir or Path(tempfile.mkdtemp(prefix="sgl_prefill_cluster_"))
        log_dir.mkdir(parents=True, exist_ok=True)
        _start(options, shares, log_dir, children)
        return _watch(children, options)
    except _Asked:
        return _end(children)
    except SglPrefillError as error:
        _end(children, 0)
        print(f"sgl_prefill.cluster: cannot start\n{error}", file=sys.stderr)
        return 2


def _ask(number: int, frame: object) -> None:
    signal.signal(number, signal.SIG_IGN)
    raise _Asked


def _say(text: str) -> None:
    print(f"sgl_prefill.cluster: {text}", file=sys.stderr, flush=True)


def _start(options: ClusterOptions, shares: Sequence[engines.Share], log_dir: Path, children: list[_Child]) -> None:
    """Starts all, and waits until the gateway sends requests to each engine; children: gets what runs."""
    _say(f"logs are in {log_dir}")
    begun = []
    for index, share in enumerate(shares):
        server = local_server.begin(
            engines.MODULE,
            share.flags,
            log_dir / f"engine_{index}.log",
            port=share.port,
            environment=share.environment,
            ends_with_us=True,
        )
        children.append(_Child(f"{ENGINE} {index}", server.url, server.process, server.log, server.command))
        begun.append(server)
        if index == 0:  # the others take over what it measures
            local_server.await_health(server)
    for server in begun[1:]:
        local_server.await_health(server)
    for difference in engines.differences(options.urls, options.api_key):
        _say(f"engines differ: {difference}")
    url = f"http://{options.router_host}:{options.router_port}"
    command = gateway.command(
        options.urls,
        options.routing,
        options.router_host,
        options.router_port,
        options.metrics_port,
        DRAIN_S,
        options.api_key,
    )
    log = log_dir / "gateway.log"
    process = local_server.spawn(command, log, ends_with_us=True)
    children.append(_Child(GATEWAY, url, process, log, command))
    deadline = time.monotonic() + GATEWAY_START_S
    while (n := gateway.n_ready(url, options.api_key)) < len(options.urls):
        if process.poll() is not None or time.monotonic() > deadline:
            raise ServerStartError(
                f"the gateway sees {n} of {len(options.urls)} engines:\n{log.read_text(errors='replace')[-4000:]}"
            )
        time.sleep(POLL_S)
    _say(f"ready: {url}, before {', '.join(options.urls)}; the gateway's metrics: port {options.metrics_port}")


def _watch(children: list[_Child], options: ClusterOptions) -> int:
    """Returns when the gateway or the last engine has died; says so of each process."""
    while True:
        time.sleep(POLL_S)
        for child in [one for one in children if one.process.poll() is not None]:
            children.remove(child)
            _say(f"{child.name} ({child.url}) has ended with status {child.process.returncode}; its log: {child.log}")
            if child.name != GATEWAY and len(children) > 1:
                _say(f"its users go to the other engines. To start it again: {' '.join(child.command)}")
            else:
                _end(children)
                return 1


def _end(children: list[_Child], drain_s: float = DRAIN_S) -> int:
    """Ends the gateway, which answers what is under way, and then the engines. Returns 1 where one did not end well."""
    statuses = []
    for name in (GATEWAY, ENGINE):
        group = [child for child in children if child.name.startswith(name)]
        for child in group:
            child.process.terminate()
        for child in group:
            try:
                statuses.append(child.process.wait(timeout=drain_s + END_S))
            except subprocess.TimeoutExpired:
                _say(f"{child.name} does not end within {drain_s + END_S:g} s, and is killed")
                local_server.kill(child.process)
                statuses.append(1)
    return int(any(statuses))


if __name__ == "__main__":
    sys.exit(main())
