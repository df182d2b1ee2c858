"""SGLang's gateway (`smg`): the command that makes it a good neighbour of prefill-only engines."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence

import requests

from sgl_prefill.errors import ConfigurationError
from sgl_prefill.port import client

PACKAGE, EXTRA = "smg", "router"
NEVER_S = str(365 * 24 * 3600)
ROUTINGS: dict[str, tuple[str, ...]] = {
    # A user that comes back finds its prefixes; a new one goes to the engine with the fewest users.
    "user": ("manual", "--assignment-mode", "min_group", "--routing-key-headers", client.HEADER),
    "cache_aware": ("cache_aware",),
    "prefix_hash": ("prefix_hash",),
    "power_of_two": ("power_of_two",),
    "round_robin": ("round_robin",),
}
# Each with what its default would do to engines that answer 429 and 504 by design, and run steps of many seconds.
SETTINGS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("--disable-retries",), "a deadline that cannot be met is asked five times; bodies lose what the gateway does not know"),
    (("--disable-worker-overload-protection",), "from eight waiting requests on, an engine's users go elsewhere"),
    (("--worker-wedge-secs", NEVER_S), "an engine in a step of more than 3 s loses its users"),
    (("--disable-circuit-breaker",), "ten answers of 504, for deadlines that passed, count an engine as broken"),
    (("--health-check-endpoint", "/ping"), "a probe that waits for the scheduler fails within a long step; where a process of an"
     " engine ends, all of them do, and nobody answers"),
    (("--health-check-interval-secs", "1"), "a dead engine is found dead after minutes"),
    (("--health-failure-threshold", "2"), "the same"),
    (("--health-success-threshold", "1"), "an engine that is back waits for its users"),
    (("--health-check-timeout-secs", "20"), "an HTTP process that is busy for 5 s counts as dead"),
    (("--worker-startup-check-interval", "1"), "an engine that is there is seen half a minute later"),
    (("--disable-tokenizer-autoload",), "the gateway reads no prompts, unless its policy does"),
    (("--max-concurrent-requests", "0"), "requests beyond 1,024 a core get a 429, which the engines decide"),
    (("--log-level", "warn"), "each request is a line"),
)  # fmt: skip


def check_installed() -> None:
    """Raise ConfigurationError where the gateway is not there."""
    if importlib.util.find_spec(PACKAGE) is None:
        raise ConfigurationError(
            f"the gateway's package {PACKAGE} is not installed: pip install 'sgl-prefill[{EXTRA}]' brings it"
        )


def command(
    urls: Sequence[str], routing: str, host: str, port: int, metrics_port: int, grace_s: float, api_key: str | None
) -> list[str]:
    """Returns how the gateway is started.

    Args:
        grace_s: how long requests under way are waited for when it is asked to end.
        api_key: of the engines; the gateway asks its clients for it too.
    """
    policy = ROUTINGS[routing]
    return [
        *(sys.executable, "-m", PACKAGE, "launch", "--host", host, "--port", str(port)),
        *("--worker-urls", *urls, "--policy", *policy),
        *(word for words, _ in SETTINGS for word in words),
        *("--shutdown-grace-period-secs", str(max(1, round(grace_s)))),
        *("--prometheus-host", host, "--prometheus-port", str(metrics_port)),
        *(() if api_key is None else ("--api-key", api_key)),
    ]


def headers_of(api_key: str | None) -> dict[str, str]:
    return {} if api_key is None else {"authorization": f"Bearer {api_key}"}


def n_ready(url: str, api_key: str | None = None) -> int:
    """Returns how many engines the gateway at this address sends requests to; 0 where it does not answer yet."""
    try:
        workers = requests.get(f"{url}/workers", headers=headers_of(api_key), timeout=5).json()["workers"]
    except (requests.RequestException, ValueError, KeyError):
        return 0
    return sum(bool(worker.get("is_healthy", worker.get("status") == "ready")) for worker in workers)
