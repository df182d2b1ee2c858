"""The engines of a cluster: each one's share of the machine, and whether all of them would answer alike."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import requests

from sgl_prefill import preflight
from sgl_prefill.cluster.gateway import headers_of
from sgl_prefill.cluster.options import ClusterOptions
from sgl_prefill.engine_state import RECORD_KEY
from sgl_prefill.errors import ConfigurationError

MODULE = "sgl_prefill.launch_server"
LEAST_BUDGET_GB = 0.25  # of an engine for which nobody has said how much
TIMEOUT_S = 20
# Of what an engine says of itself: answers differ with the first, and only how it serves with the second.
SAME_MODEL = ("model_path", "revision", "served_model_name", "tokenizer_path", "chat_template", "quantization")
SAME_SETTINGS = ("dtype", "kv_cache_dtype", "context_length", "max_req_input_len", "tp_size")


class Share(NamedTuple):
    """What one engine gets of this machine."""

    port: int
    flags: tuple[str, ...]
    environment: Mapping[str, str]


def shares(options: ClusterOptions) -> list[Share]:
    """Divides this machine among the engines that start here. Raises ConfigurationError where it is too small."""
    from sgl_prefill.device import this_device

    n, flags = options.n_engines, list(options.engine_flags)
    n_ranks = int(preflight.value_of(flags, "--tp-size", "--tp", "--tensor-parallel-size") or 1)
    ports = range(options.engine_port, options.engine_port + n)
    if this_device().is_host:
        if n > 1 and n_ranks > 1:
            raise ConfigurationError(
                f"--engines {n} of {n_ranks} ranks each (--tp-size): ranks are bound to cores here, those of all engines to the"
                " same: start one such engine, or engines of one rank"
            )
        budget_gb = _budget_gb(n, flags)
        threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, len(os.sched_getaffinity(0)) // max(n, 1)))
        given = () if preflight.value_of(flags, "--memory-budget-gb") else ("--memory-budget-gb", f"{budget_gb:.3f}")
        return [Share(port, (*flags, *given), {"OMP_NUM_THREADS": threads}) for port in ports]
    import torch

    n_devices = torch.cuda.device_count()
    if n * n_ranks > n_devices:
        raise ConfigurationError(
            f"--engines {n} of {n_ranks} devices each need {n * n_ranks}, and this machine has {n_devices}: start fewer"
        )
    return [Share(port, (*flags, "--base-gpu-id", str(index * n_ranks)), {}) for index, port in enumerate(ports)]


def _budget_gb(n_engines: int, flags: list[str]) -> float:
    """Returns how much memory each engine gets, before the first has taken its own."""
    for_us_gb, _ = preflight.free_memory_gb()
    given = preflight.value_of(flags, "--memory-budget-gb")
    budget_gb = for_us_gb / 2 / n_engines if given is None else float(given)
    if budget_gb * n_engines > for_us_gb:
        raise ConfigurationError(
            f"--engines {n_engines} of --memory-budget-gb {budget_gb:g} need {n_engines * budget_gb:g} GiB, and"
            f" {for_us_gb:.1f} GiB are free: start at most {int(for_us_gb / budget_gb)}, or give each less"
        )
    if budget_gb < LEAST_BUDGET_GB:
        raise ConfigurationError(
            f"--engines {n_engines} would get {budget_gb:.2f} GiB each of {for_us_gb:.1f} GiB that are free: start fewer"
        )
    return budget_gb


def differences(urls: Sequence[str], api_key: str | None = None) -> list[str]:
    """Asks each engine what it is, and lists in which settings some differ from the first. Raises ConfigurationError where one
    does not answer, or serves another model."""
    told = {url: _told(url, api_key) for url in urls}
    first, *others = urls
    found = []
    for url in others:
        for name in (*SAME_MODEL, *SAME_SETTINGS):
            if (said := _difference(name, first, told[first].get(name), url, told[url].get(name))) is None:
                continue
            if name in SAME_MODEL:
                raise ConfigurationError(f"engines behind one gateway must serve one model: {said}")
            found.append(said)
        ours, its = _options_of(told[first]), _options_of(told[url])
        said_of_options = (
            _difference(name, first, ours.get(name), url, its.get(name)) for name in dict.fromkeys((*ours, *its))
        )
        found += [said for said in said_of_options if said is not None]
    return found


def _difference(name: str, first: str, ours: Any, url: str, its: Any) -> str | None:
    return None if ours == its else f"{name} is {ours!r} at {first}, and {its!r} at {url}"


def _options_of(told: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what an engine says of our own options; a stock server has none."""
    record = told.get(RECORD_KEY)
    if record is None:
        return {"engine": "SGLang's own"}
    config = {f"prefill {name}": value for name, value in record["config"].items()}
    return {"engine": f"sgl_prefill {record['version']}", **config}


def _told(url: str, api_key: str | None) -> dict[str, Any]:
    try:
        reply = requests.get(f"{url}/server_info", headers=headers_of(api_key), timeout=TIMEOUT_S)
        reply.raise_for_status()
        return dict(reply.json())
    except (requests.RequestException, ValueError) as error:
        raise ConfigurationError(f"the engine {url} does not say what it serves: {error}") from error
