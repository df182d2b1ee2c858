"""Everything that can be refused before a process is spawned, with all complaints in one message."""

from __future__ import annotations

import os
import re
import socket
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil

from sgl_prefill.config import PrefillConfig
from sgl_prefill.cpu.detect import has_accelerator
from sgl_prefill.errors import ConfigurationError

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs


class Required(NamedTuple):
    """A value of SGLang's that our engine needs."""

    field: str  # of ServerArgs
    value: Any
    flag: str  # as the user would write it
    why: str
    only_for_srjf: bool = False


REQUIRED: tuple[Required, ...] = (
    Required("enable_metrics", True, "--enable-metrics", "queue_ms and actual_ms come from SGLang's request timing"),
    Required("prefill_max_requests", 1, "--prefill-max-requests", "one request per step", only_for_srjf=True),
    Required("chunked_prefill_size", -1, "--chunked-prefill-size", "a request runs in one forward", only_for_srjf=True),
    Required(
        "disable_overlap_schedule",
        True,
        "--disable-overlap-schedule",
        "with the overlap loop a request is picked before the last one's prefix is cached",
        only_for_srjf=True,
    ),
    Required("schedule_policy", "fcfs", "--schedule-policy", "our policy orders the queue", only_for_srjf=True),
    Required("enable_mixed_chunk", False, "--enable-mixed-chunk", "a request runs in one forward", only_for_srjf=True),
    Required("tp_size", 1, "--tp-size", "the ranks have no agreed clock for their queues yet", only_for_srjf=True),
    Required("pp_size", 1, "--pp-size", "the policy knows one batch in flight", only_for_srjf=True),
    Required(
        "enable_hierarchical_cache", False, "--enable-hierarchical-cache", "the cache probe reads one tier", only_for_srjf=True
    ),
    Required("speculative_algorithm", None, "--speculative-algorithm", "SGLang's prefill-only path is off with it"),
    Required("disaggregation_mode", "null", "--disaggregation-mode", "there is no decode to hand over to"),
    Required("tokenizer_worker_num", 1, "--tokenizer-worker-num", "our routes live in the one HTTP process"),
    Required("allow_auto_truncate", False, "--allow-auto-truncate", "a prompt is never cut silently"),
    Required("smg_grpc_mode", False, "--smg-grpc-mode", "labels are served over HTTP"),
    Required("use_ray", False, "--use-ray", "our scheduler process is started by SGLang's own launcher only"),
    Required("encoder_only", False, "--encoder-only", "there is no language model to score with"),
)


def required_for(config: PrefillConfig) -> tuple[Required, ...]:
    """What this configuration needs of SGLang."""
    is_srjf = config.scheduling == "calibrated-srjf"
    return tuple(need for need in REQUIRED if is_srjf or not need.only_for_srjf)


def required_flags(config: PrefillConfig) -> list[str]:
    """The needs that differ from SGLang's defaults, as command line; put first, so that a user's own flag shows up."""
    flags = []
    for need in required_for(config):
        if need.value is True:
            flags.append(need.flag)
        elif need.field in ("prefill_max_requests", "chunked_prefill_size"):
            flags += [need.flag, str(need.value)]
    return flags


def memory_fraction(config: PrefillConfig) -> float | None:
    """`--mem-fraction-static` for the memory budget on a machine without an accelerator; None where SGLang decides.

    SGLang's KV pool gets `fraction * free memory - weights`, so this budget covers weights and KV pool together.
    """
    if has_accelerator():
        if config.memory_budget_gb is not None:
            raise ConfigurationError(
                f"--memory-budget-gb {config.memory_budget_gb} is for machines without an accelerator,"
                " and this one has one: use --mem-fraction-static"
            )
        return None
    free_gb = psutil.virtual_memory().available / (1 << 30)
    budget_gb = free_gb / 2 if config.memory_budget_gb is None else config.memory_budget_gb
    if budget_gb > free_gb:
        raise ConfigurationError(
            f"--memory-budget-gb is {budget_gb:g}, and this machine has {free_gb:.1f} GiB free: ask for less"
        )
    return budget_gb / free_gb


def check_model_path(model_path: str) -> None:
    """Raise ConfigurationError for a path that is neither a folder with a model nor the name of one on a hub."""
    if os.path.isdir(model_path):
        if not os.path.exists(os.path.join(model_path, "config.json")):
            raise ConfigurationError(
                f"--model-path {model_path} is a folder without config.json: give a Hugging Face model folder"
            )
        return
    if os.path.isfile(model_path) or re.match(r"^[a-z0-9]+://", model_path):
        return  # a GGUF file or a remote store, which SGLang loads itself
    is_hub_name = re.fullmatch(r"[\w.-]+/[\w.-]+", model_path) is not None and not model_path.startswith((".", "/"))
    if not is_hub_name:
        raise ConfigurationError(f"--model-path {model_path} does not exist: give a model folder, or leave it out for the demo model")


def check_server_args(config: PrefillConfig, server_args: ServerArgs) -> None:
    """Raise ConfigurationError naming every flag that contradicts the engine, and a port that is taken."""
    problems = []
    for need in required_for(config):
        value = getattr(server_args, need.field)
        if value != need.value:
            remedy = "leave it out" + (", or start with --scheduling stock" if need.only_for_srjf else "")
            problems.append(f"{need.flag} is {value!r} and must be {need.value!r} ({need.why}): {remedy}")
    if server_args.port == 0:
        problems.append("--port is 0: give the port to listen on")
    elif (reason := _port_problem(server_args.host, server_args.port)) is not None:
        problems.append(f"--port {server_args.port} on {server_args.host} cannot be used ({reason}): choose another")
    if problems:
        raise ConfigurationError("\n".join(problems))


def _port_problem(host: str, port: int) -> str | None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error.strerror or str(error)
    return None
