"""What a cluster is asked for: how many engines, or where they run already, and how the gateway chooses among them."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from sgl_prefill.cluster.gateway import ROUTINGS
from sgl_prefill.errors import ConfigurationError
from sgl_prefill.startup import arguments, examine

LOCAL = "127.0.0.1"
ROUTER_PORT, METRICS_PORT = 30_000, 29_000
# Of an engine's flags, what the cluster itself decides.
OURS = {"--port": "give --router-port, and --engine-port for the engines", "--host": "give --router-host"}


@dataclasses.dataclass(frozen=True)
class ClusterOptions:
    """Of `python -m sgl_prefill.cluster`, checked."""

    n_engines: int  # to start here; 0: they run already
    engine_urls: tuple[str, ...]  # of those that run already
    engine_flags: tuple[str, ...]
    routing: str
    router_host: str
    router_port: int
    engine_port: int  # of the first, the others follow
    metrics_port: int
    log_dir: Path | None
    api_key: str | None  # of every engine, and of the gateway

    @property
    def urls(self) -> list[str]:
        """Returns where the engines are."""
        ports = range(self.engine_port, self.engine_port + self.n_engines)
        return [*self.engine_urls, *(f"http://{LOCAL}:{port}" for port in ports)]


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m sgl_prefill.cluster",
        description="Starts engines and SGLang's gateway before them. All other flags are those of each engine.",
        allow_abbrev=False,
    )
    made.add_argument(
        "--engines", type=int, help="how many to start on this machine, one a device, or one a share of it"
    )
    made.add_argument(
        "--engine-urls",
        nargs="+",
        default=[],
        metavar="URL",
        help="engines that run already, in the place of --engines",
    )
    made.add_argument(
        "--routing",
        choices=list(ROUTINGS),
        default="user",
        help="user: all requests with one x-user-id at one engine, new users at the one with the fewest; or a policy of the"
        " gateway's (default: user)",
    )
    made.add_argument("--router-host", default=LOCAL, help=f"where the gateway listens (default: {LOCAL})")
    made.add_argument("--router-port", type=int, default=ROUTER_PORT, help=f"(default: {ROUTER_PORT})")
    made.add_argument(
        "--engine-port", type=int, help="of the first engine, the others follow (default: after the router's)"
    )
    made.add_argument(
        "--metrics-port", type=int, default=METRICS_PORT, help=f"of the gateway's metrics (default: {METRICS_PORT})"
    )
    made.add_argument(
        "--api-key",
        help="what clients send as `Authorization: Bearer KEY`, to the gateway as to each engine (default: nothing)",
    )
    made.add_argument("--log-dir", type=Path, help="one file a process (default: a new folder of the system's)")
    return made


def options_of(namespace: argparse.Namespace, engine_flags: list[str]) -> ClusterOptions:
    """Makes the options of what was given. Raises ConfigurationError for what cannot be meant."""
    n_engines, urls = namespace.engines, tuple(url.rstrip("/") for url in namespace.engine_urls)
    first = namespace.engine_port if namespace.engine_port is not None else namespace.router_port + 1
    problems = []
    if (n_engines is None) == (not urls):
        problems.append(
            "give --engines N to start engines here, or --engine-urls of those that run already: one of the two"
        )
    if n_engines is not None and n_engines < 1:
        problems.append(f"--engines is {n_engines}: it must be at least 1")
    if urls and engine_flags:
        problems.append(f"{' '.join(engine_flags)}: these engines run already, give such flags where they are started")
    for url in urls:
        if not url.startswith(("http://", "https://")):
            problems.append(f"--engine-urls: {url} is no URL of a server: it begins with http://")
    if len(set(urls)) < len(urls):
        problems.append("--engine-urls names an engine twice")
    for flag, remedy in OURS.items():
        if (value := arguments.value_of(engine_flags, flag)) is not None:
            problems.append(f"{flag} {value} is decided by the cluster: {remedy}")
    if not problems:
        listening = [("--router-port", namespace.router_host, namespace.router_port)]
        listening.append(("--metrics-port", namespace.router_host, namespace.metrics_port))
        listening += [("--engine-port", LOCAL, first + index) for index in range(n_engines or 0)]
        problems += examine.port_problems(listening)
    if problems:
        raise ConfigurationError("\n".join(problems))
    return ClusterOptions(
        n_engines=n_engines or 0,
        engine_urls=urls,
        engine_flags=(*engine_flags, *(("--api-key", namespace.api_key) if n_engines and namespace.api_key else ())),
        routing=namespace.routing,
        router_host=namespace.router_host,
        router_port=namespace.router_port,
        engine_port=first,
        metrics_port=namespace.metrics_port,
        log_dir=namespace.log_dir,
        api_key=namespace.api_key,
    )
