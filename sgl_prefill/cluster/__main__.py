"""`python -m sgl_prefill.cluster`: starts engines on this machine, and SGLang's gateway in front of them.

Exit status: 0 after a graceful shutdown; 1 if the gateway or the last engine died, or a process did not end well; 2 if the
cluster could not start.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import requests

from sgl_prefill.entry import local_server
from sgl_prefill.errors import ConfigurationError, ServerStartError, SglPrefillError
from sgl_prefill.http.shutdown import DRAIN_S
from sgl_prefill.port.steps import clients
from sgl_prefill.startup import arguments, disk_cache, examine
from sgl_prefill.startup.progress_bar import ProgressBar

PROGRAM = "sgl_prefill.cluster"
GATEWAY, LOCAL = "the gateway", "127.0.0.1"
LEAST_BUDGET_GB = 0.25  # of an engine without --memory-budget-gb
START_GB = 2.5  # of an engine that starts, beside its budget: Python, PyTorch and SGLang in four processes
POLL_S, GATEWAY_START_S = 0.2, 120
END_S = 20  # for a process to end, after DRAIN_S for its requests
NEVER_S = str(365 * 24 * 3600)
ROUTINGS: dict[str, tuple[str, ...]] = {
    # A user that comes back finds its prefixes; a new one goes to the engine with the fewest users.
    "user": ("manual", "--assignment-mode", "min_group", "--routing-key-headers", clients.HEADER),
    **{name: (name,) for name in ("cache_aware", "prefix_hash", "power_of_two", "round_robin")},
}
# Each with what the gateway's default does to engines that answer 429 and 504 by design, and run steps of many seconds.
SETTINGS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("--disable-retries",), "a deadline that cannot be met is asked five times; bodies lose what the gateway does not know"),
    (("--disable-worker-overload-protection",), "from eight waiting requests on, an engine's users go elsewhere"),
    (("--worker-wedge-secs", NEVER_S), "an engine in a step of more than 3 s loses its users"),
    (("--disable-circuit-breaker",), "ten answers of 504, for deadlines that passed, count an engine as broken"),
    (("--health-check-endpoint", "/ping"), "a probe that waits for the scheduler fails within a long step; where a process of an"
     " engine ends, all of them do, and `/ping` fails"),
    (("--health-check-interval-secs", "1"), "a dead engine is found dead after minutes"),
    (("--health-failure-threshold", "2"), "the same"),
    (("--health-success-threshold", "1"), "an engine that is back waits for its users"),
    (("--health-check-timeout-secs", "20"), "an HTTP process that is busy for 5 s counts as dead"),
    (("--worker-startup-check-interval", "1"), "an engine that is ready is used half a minute later"),
    (("--disable-tokenizer-autoload",), "the gateway loads a tokenizer, which only some policies read"),
    (("--max-concurrent-requests", "0"), "requests beyond 1,024 a core get a 429, which the engines decide"),
    (("--log-level", "warn"), "each request is a line"),
)  # fmt: skip


class Child(NamedTuple):
    name: str
    server: local_server.LocalServer


class _Terminated(Exception):  # noqa: N818 -- a signal, not an error
    pass


def main(argv: list[str] | None = None) -> int:
    """Runs a cluster until a signal or a death ends it, and returns the exit status."""
    options, flags = parsed(sys.argv[1:] if argv is None else argv)
    children: list[Child] = []
    try:
        check(options, flags)
        engines = shares(options.engines, flags)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _terminate)
        _start(options, engines, children)
        return _watch(children)
    except _Terminated:
        return _end(children)
    except SglPrefillError as error:
        _end(children, drain_s=0)
        print(f"{PROGRAM}: cannot start\n{error}", file=sys.stderr)
        return 2


def parsed(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The cluster's options, and the flags of its engines."""
    made = argparse.ArgumentParser(
        prog="python -m sgl_prefill.cluster",
        description="Starts engines and SGLang's gateway in front of them. All other flags are passed to each engine.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    add = made.add_argument
    add("--engines", type=int, required=True, help="how many; each gets a share of the CPU, or devices of its own")
    add("--routing", choices=list(ROUTINGS), default="user", help="by the header x-user-id, or a policy of the gateway")
    add("--router-host", default=LOCAL, help="where the gateway listens")
    add("--router-port", type=int, default=30_000, help="where the gateway listens")
    add(
        "--engine-port",
        type=int,
        help="of the first engine, the others follow; without it, the ports after the gateway's",
    )
    add("--metrics-port", type=int, default=29_000, help="of the gateway's own metrics")
    add("--api-key", help="what clients send as `Authorization: Bearer KEY`; the engines ask for it too")
    add("--log-dir", type=Path, help="one file a process; without it a new temporary folder")
    options, flags = made.parse_known_args(argv)
    if options.engine_port is None:
        options.engine_port = options.router_port + 1
    return options, [*flags, *(("--api-key", options.api_key) if options.api_key else ())]


def check(options: argparse.Namespace, flags: list[str]) -> None:
    """Raises ConfigurationError, with all that is wrong, before anything starts."""
    problems = []
    if importlib.util.find_spec("smg") is None:
        problems.append("the gateway's package smg is not installed: pip install '.[router]' brings it")
    if options.engines < 1:
        problems.append(f"--engines is {options.engines}: it must be at least 1")
    for flag, remedy in (("--port", "--router-port or --engine-port"), ("--host", "--router-host")):
        if (value := arguments.value_of(flags, flag)) is not None:
            problems.append(f"{flag} {value} is decided by the cluster: give {remedy}")
    listening = [("--router-port", options.router_host, options.router_port)]
    listening.append(("--metrics-port", options.router_host, options.metrics_port))
    listening += [("--engine-port", LOCAL, options.engine_port + index) for index in range(options.engines)]
    if problems := problems or examine.port_problems(listening):
        raise ConfigurationError("\n".join(problems))


def shares(n_engines: int, flags: list[str]) -> list[tuple[list[str], Mapping[str, str]]]:
    """Flags and environment variables of each engine. Raises ConfigurationError where the machine is too small."""
    from sgl_prefill.startup.device import this_device

    n_ranks = int(arguments.value_of(flags, "--tp-size", "--tp", "--tensor-parallel-size") or 1)
    if this_device().is_host:
        if n_engines > 1 and n_ranks > 1:
            raise ConfigurationError(
                f"--engines {n_engines} of {n_ranks} ranks each (--tp-size): ranks are bound to cores here, those of all"
                " engines to the same: start one such engine, or engines of one rank"
            )
        budget_gb = _budget_gb(n_engines, flags)
        is_given = arguments.value_of(flags, "--memory-budget-gb") is not None
        budget = [] if is_given else ["--memory-budget-gb", f"{budget_gb:.3f}"]
        n_threads = max(1, len(os.sched_getaffinity(0)) // n_engines)
        threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(n_threads)}
        return [([*flags, *budget], threads)] * n_engines
    import torch

    n_devices = torch.cuda.device_count()
    if n_engines * n_ranks > n_devices:
        raise ConfigurationError(
            f"--engines {n_engines} of {n_ranks} devices each need {n_engines * n_ranks}, and this machine has {n_devices}:"
            " start fewer"
        )
    return [([*flags, "--base-gpu-id", str(index * n_ranks)], {}) for index in range(n_engines)]


def _budget_gb(n_engines: int, flags: list[str]) -> float:
    """Memory of each engine: as given, or half of what is free, divided, before the first engine has taken its part."""
    free_gb, _ = examine.free_memory_gb()
    given = arguments.value_of(flags, "--memory-budget-gb")
    budget_gb = free_gb / 2 / n_engines if given is None else float(given)
    if budget_gb * n_engines > free_gb:
        raise ConfigurationError(
            f"--engines {n_engines} of --memory-budget-gb {budget_gb:g} need {n_engines * budget_gb:g} GiB, and"
            f" {free_gb:.1f} GiB are free: start at most {int(free_gb / budget_gb)}, or give each less"
        )
    if budget_gb < LEAST_BUDGET_GB:
        raise ConfigurationError(
            f"--engines {n_engines} would get {budget_gb:.2f} GiB each of {free_gb:.1f} GiB that are free: start fewer"
        )
    return budget_gb


def gateway_command(
    urls: Sequence[str], routing: str, host: str, port: int, metrics_port: int, grace_s: float, api_key: str | None
) -> list[str]:
    """The gateway's command line. grace_s: how long it waits for requests in flight at its shutdown."""
    return [
        *(sys.executable, "-m", "smg", "launch", "--host", host, "--port", str(port)),
        *("--worker-urls", *urls, "--policy", *ROUTINGS[routing]),
        *(word for words, _ in SETTINGS for word in words),
        *("--shutdown-grace-period-secs", str(max(1, round(grace_s)))),
        *("--prometheus-host", host, "--prometheus-port", str(metrics_port)),
        *(() if api_key is None else ("--api-key", api_key)),
    ]


def n_ready(url: str, api_key: str | None = None) -> int:
    """How many engines the gateway at this address sends requests to; 0 while it does not answer."""
    headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
    try:
        workers = requests.get(f"{url}/workers", headers=headers, timeout=5).json()["workers"]
    except (requests.RequestException, ValueError, KeyError):
        return 0
    return sum(bool(worker.get("is_healthy", worker.get("status") == "ready")) for worker in workers)


def _start(
    options: argparse.Namespace, engines: Sequence[tuple[list[str], Mapping[str, str]]], to: list[Child]
) -> None:
    """Starts all processes, adds them to `to`, and waits until the gateway sends requests to each engine."""
    logs = options.log_dir or Path(tempfile.mkdtemp(prefix="sgl_prefill_cluster_"))
    logs.mkdir(parents=True, exist_ok=True)
    _say(f"logs are in {logs}")
    key, host, port = options.api_key, options.router_host, options.router_port
    n, is_together = len(engines), start_together(engines)
    lock = {disk_cache.LOCK: str(logs / "measuring.lock")} if is_together else {}
    for index, (flags, environment) in enumerate(engines):
        engine = local_server.begin(
            "sgl_prefill.launch_server",
            flags,
            logs / f"engine_{index + 1}.log",
            port=options.engine_port + index,
            environment={**environment, **lock},
            ends_with_us=True,
        )
        to.append(Child(f"engine {index + 1} of {n}", engine))
        if not is_together:
            _await(to[-1:])
    if is_together:
        _await(to)
    urls = [child.server.url for child in to]
    command = gateway_command(urls, options.routing, host, port, options.metrics_port, DRAIN_S, key)
    url, log = f"http://{host}:{port}", logs / "gateway.log"
    process = local_server.spawn(command, log, ends_with_us=True)
    to.append(Child(GATEWAY, local_server.LocalServer(url, command, process, log)))
    deadline = time.monotonic() + GATEWAY_START_S
    while (n := n_ready(url, key)) < len(urls):
        if process.poll() is not None or time.monotonic() > deadline:
            raise ServerStartError(
                f"the gateway sees {n} of {len(urls)} engines:\n{log.read_text(errors='replace')[-4000:]}"
            )
        time.sleep(POLL_S)
    _say(f"ready: {url}, before {', '.join(urls)}; the gateway's metrics: port {options.metrics_port}")


def start_together(engines: Sequence[tuple[list[str], Mapping[str, str]]]) -> bool:
    """Whether all engines fit in memory while they start; if not, says why they start one after the other."""
    free_gb, _ = examine.free_memory_gb()
    budgets = (arguments.value_of(flags, "--memory-budget-gb") for flags, _ in engines)
    needed_gb = sum(START_GB + float(budget or 0) for budget in budgets)
    if needed_gb > free_gb and len(engines) > 1:
        _say(
            f"the engines start one after the other: together they could take {needed_gb:.1f} GiB while they start, and"
            f" {free_gb:.1f} GiB are free"
        )
    return needed_gb <= free_gb


def _await(children: Sequence[Child]) -> None:
    """Waits until these engines, which start now, serve. Raises ServerStartError."""
    starting = list(children)
    with ProgressBar() as bar:
        while starting:
            for child in tuple(starting):
                bar.show(0, f"{PROGRAM}: {len(starting)} engines start")
                if local_server.is_healthy(child.server, bar.elapsed_s):
                    starting.remove(child)
                    bar.say(f"{PROGRAM}: {child.name} serves after {bar.elapsed_s:.0f} s")


def _watch(children: list[Child]) -> int:
    """Reports each process that dies, and returns when the gateway or the last engine has died."""
    while True:
        time.sleep(POLL_S)
        for child in [one for one in children if one.server.process.poll() is not None]:
            children.remove(child)
            url, command, process, log = child.server
            _say(f"{child.name} ({url}) has ended with status {process.returncode}; its log: {log}")
            if child.name == GATEWAY or len(children) == 1:
                _end(children)
                return 1
            _say(f"its users go to the other engines. To start it again: {' '.join(command)}")


def _end(children: list[Child], drain_s: float = DRAIN_S) -> int:
    """Ends the gateway, which answers the requests in flight, then the engines. Returns 1 if one did not end well."""
    statuses = []
    for is_gateway in (True, False):
        group = [child for child in children if (child.name == GATEWAY) == is_gateway]
        for child in group:
            child.server.process.terminate()
        for name, server in group:
            try:
                statuses.append(server.process.wait(timeout=drain_s + END_S))
            except subprocess.TimeoutExpired:
                _say(f"{name} does not end within {drain_s + END_S:g} s, and is killed")
                local_server.kill(server.process)
                statuses.append(1)
    return int(any(statuses))


def _terminate(number: int, frame: object) -> None:
    signal.signal(number, signal.SIG_IGN)
    raise _Terminated


def _say(text: str) -> None:
    print(f"{PROGRAM}: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
