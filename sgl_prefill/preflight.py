"""Everything that can be refused before a process is spawned, with all complaints in one message."""

from __future__ import annotations

import itertools
import json
import logging
import os
import re
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from sgl_prefill import calibrations, container_memory, flashinfer_version
from sgl_prefill.config import PrefillConfig
from sgl_prefill.core import rerank_template
from sgl_prefill.cpu import lm_head
from sgl_prefill.cpu.detect import ATTENTION_BACKEND_NAME, fast_dtype
from sgl_prefill.cpu.native.library import native
from sgl_prefill.device import this_device
from sgl_prefill.errors import ConfigurationError
from sgl_prefill.port import traces

# Under this name SGLang's registry of radix caches knows ours (`--radix-cache-backend`).
PREFIX_CACHE_NAME = "sgl_prefill_suffix_kv"

logger = logging.getLogger(__name__)


class Feature(NamedTuple):
    """A part of ours that can be left out."""

    is_on: Callable[[PrefillConfig], bool]
    without: str  # the flags that leave it out


POLICY = Feature(lambda config: config.has_policy, "--scheduling stock")
ONE_A_STEP = Feature(lambda config: config.has_policy and config.pack_step_tokens == 0, "--pack-step-tokens auto")
EVICT = Feature(lambda config: config.evicts_suffix_kv, "--suffix-kv keep")


class Required(NamedTuple):
    """A value of SGLang's that our engine needs."""

    field: str  # of ServerArgs
    value: Any
    flag: str  # as the user would write it
    why: str
    needed_by: tuple[Feature, ...] = ()  # any of these; where there is none, every server of ours does
    instead: str = ""  # what serves those who want the other value


# On an accelerator. The memory plan has measured one row of logits; 128 of 150,000 words take 0.2 GB with their
# log-probabilities.
DEVICE_MAX_REQUESTS = 128

# On an accelerator too. SGLang's own default for requests in one piece keeps activations of 16,384 tokens free, which is 25 GB.
# A smaller fraction is what SGLang makes of it: weights and KV take no more. From this one on it sets no limit: KV takes
# what the measured activations and a margin leave.
DEVICE_MEMORY_FRACTION = 0.9

# On an accelerator too. Steps of up to so many tokens, which are hits, are replayed from CUDA graphs. SGLang takes the size of
# its chunks, and requests run in one piece here: -1 tokens, and no graph at all. To launch the kernels of a step takes a
# processor some 10 ms, whatever its size (an estimate). An H100 computes 2,048 tokens of 1.5 billion weights in that time (6e12
# operations at 6e14 a second), of a larger model fewer: longer steps keep it busy, and graphs cost start and memory.
DEVICE_REPLAYED_TOKENS = 2048
# The profile of job completion times wants steps of so many requests, however few a step of the policy has.
FEWEST_ROWS = 16

REQUIRED: tuple[Required, ...] = (
    Required("enable_metrics", True, "--enable-metrics", "queue_ms and actual_ms come from SGLang's request timing"),
    Required("prefill_max_requests", 1, "--prefill-max-requests", "one request per step", (ONE_A_STEP,)),
    Required("chunked_prefill_size", -1, "--chunked-prefill-size", "a request runs in one forward", (POLICY, EVICT)),
    Required(
        "disable_overlap_schedule",
        True,
        "--disable-overlap-schedule",
        "with the overlap loop a request is picked before the last one's prefix is cached, and runs before the last one"
        " has given its scratch back",
        (POLICY, EVICT),
    ),
    Required(
        "radix_cache_backend",
        PREFIX_CACHE_NAME,
        "--radix-cache-backend",
        "the policy hears of every change of the prefix cache, and scratch slots must not reach it",
        (POLICY, EVICT),
    ),
    Required("schedule_policy", "fcfs", "--schedule-policy", "our policy orders the queue", (POLICY,)),
    Required("enable_mixed_chunk", False, "--enable-mixed-chunk", "a request runs in one forward", (POLICY, EVICT)),
    Required(
        "dp_size",
        1,
        "--dp-size",
        "SGLang gives a request to any of the copies, wherever its user's prefix is",
        instead="start `python -m sgl_prefill.cluster --engines N`, which keeps a user's requests at one engine",
    ),
    Required(
        "enable_pdmux", False, "--enable-pdmux", "it runs prefills layer by layer, past our policy and hybrid passes"
    ),
    Required("pp_size", 1, "--pp-size", "the policy and the scratch know one batch in flight", (POLICY, EVICT)),
    Required("dcp_size", 1, "--dcp-size", "scratch is not spread over ranks", (EVICT,)),
    Required(
        "enable_hierarchical_cache", False, "--enable-hierarchical-cache", "the cache has one tier", (POLICY, EVICT)
    ),
    Required("enable_streaming_session", False, "--enable-streaming-session", "a session would keep scratch", (EVICT,)),
    Required("enable_memory_saver", False, "--enable-memory-saver", "aliased KV buffers cannot be released", (EVICT,)),
    Required("enable_page_major_kv_layout", False, "--enable-page-major-kv-layout", "layers share scratch", (EVICT,)),
    Required("enable_unified_memory", False, "--enable-unified-memory", "layers share scratch", (EVICT,)),
    Required("speculative_algorithm", None, "--speculative-algorithm", "SGLang's prefill-only path is off with it"),
    Required("disaggregation_mode", "null", "--disaggregation-mode", "there is no decode to hand over to"),
    Required("tokenizer_worker_num", 1, "--tokenizer-worker-num", "our routes live in the one HTTP process"),
    Required("allow_auto_truncate", False, "--allow-auto-truncate", "a prompt is never cut silently"),
    Required("smg_grpc_mode", False, "--smg-grpc-mode", "labels are served over HTTP"),
    Required("use_ray", False, "--use-ray", "our scheduler process is started by SGLang's own launcher only"),
    Required("encoder_only", False, "--encoder-only", "there is no language model to score with"),
)


def required_for(config: PrefillConfig) -> tuple[Required, ...]:
    """Lists what this configuration needs of SGLang."""
    return tuple(need for need in REQUIRED if not need.needed_by or _those_on(config, need))


def _those_on(config: PrefillConfig, need: Required) -> list[Feature]:
    return [feature for feature in need.needed_by if feature.is_on(config)]


def required_flags(config: PrefillConfig) -> list[str]:
    """Returns the needs that differ from SGLang's defaults, as command line; put first, so that a user's own flag shows up."""
    flags = []
    for need in required_for(config):
        if need.value is True:
            flags.append(need.flag)
        elif need.field in ("prefill_max_requests", "chunked_prefill_size", "radix_cache_backend"):
            flags += [need.flag, str(need.value)]
    return flags


def default_settings(config: PrefillConfig, asked_max_requests: int | None = None) -> dict[str, Any]:
    """Returns what suits this machine where the user says nothing, by names of ServerArgs. asked_max_requests: what the user
    says of `--prefill-max-requests`.
    """
    fraction = memory_fraction(config)
    packs = config.has_policy and config.pack_step_tokens != 0
    most_requests = most_requests_of_step(config) if packs else None
    limit: dict[str, Any] = {} if most_requests is None else {"prefill_max_requests": most_requests}
    if fraction is None:
        return {**_device_settings(config, asked_max_requests or (most_requests if packs else 1)), **limit}
    # An idle scheduler that polls without rest takes a core from the tokenizer and the clients on a small machine.
    settings: dict[str, Any] = {"mem_fraction_static": round(fraction, 4), "sleep_on_idle": True, **limit}
    if fast_dtype() == "float32":
        logger.warning(
            "this processor is many times slower in bfloat16 than in float32: --dtype is float32 if not given"
        )
        settings["dtype"] = "float32"
    return settings


def _device_settings(config: PrefillConfig, most_requests: int | None) -> dict[str, Any]:
    """Returns what an accelerator wants. most_requests: of a step of the policy."""
    settings: dict[str, Any] = {}
    if POLICY.is_on(config) or EVICT.is_on(config):  # else SGLang's defaults suit its chunks
        settings["mem_fraction_static"] = DEVICE_MEMORY_FRACTION
        settings["cuda_graph_max_bs_prefill"] = DEVICE_REPLAYED_TOKENS
    if config.allow_generation:
        return settings
    settings["disable_decode_cuda_graph"] = True  # nothing is decoded
    if POLICY.is_on(config) and most_requests is not None:
        # A row of SGLang's table of KV slots is as wide as the context, and a request that waits needs none: 2,048 rows, SGLang's
        # own number, are 1 GiB for a context of 131,072 tokens.
        settings["max_running_requests"] = max(most_requests, FEWEST_ROWS)
    return settings


def most_requests_of_step(config: PrefillConfig) -> int | None:
    """Returns how many requests share a step at most where the user says nothing; None: as SGLang limits them.

    On a host all rows of a packed step get the same logits as a lone one: a label must not depend on its company.
    """
    if not this_device().is_host:
        return DEVICE_MAX_REQUESTS
    return lm_head.MAX_ROWS if config.logits_dtype == "float32" else None


def default_flags(config: PrefillConfig, argv: Sequence[str] = ()) -> list[str]:
    """Returns the same as command line; put first too, so that a flag of the user's command line `argv` counts."""
    asked = value_of(list(argv), "--prefill-max-requests")
    flags = []
    for name, value in default_settings(config, int(asked) if asked and asked.isdigit() else None).items():
        flags += ["--" + name.replace("_", "-"), *([] if value is True else [str(value)])]
    return flags


def free_memory_gb() -> tuple[float, float]:
    """Returns how much memory we may take, and how much of the machine's is free, in GiB."""
    free_gb: float = psutil.virtual_memory().available / (1 << 30)  # as SGLang counts it
    return min(free_gb, container_memory.free_bytes() / (1 << 30)), free_gb


def memory_fraction(config: PrefillConfig) -> float | None:
    """`--mem-fraction-static` for the memory budget on a machine without an accelerator; None where SGLang decides.

    SGLang's KV pool gets `fraction * free memory - weights`, so this budget covers weights and KV pool together.
    """
    if not this_device().is_host:
        if config.memory_budget_gb is not None:
            raise ConfigurationError(
                f"--memory-budget-gb {config.memory_budget_gb} is for machines without an accelerator,"
                " and this one has one: use --mem-fraction-static"
            )
        return None
    for_us_gb, free_gb = free_memory_gb()
    budget_gb = for_us_gb / 2 if config.memory_budget_gb is None else config.memory_budget_gb
    if budget_gb > for_us_gb:
        whose = "this machine has" if for_us_gb == free_gb else "this container (cgroup) has"
        raise ConfigurationError(
            f"--memory-budget-gb is {budget_gb:g}, and {whose} {for_us_gb:.1f} GiB free: ask for less"
        )
    return budget_gb / free_gb


def check_argv(config: PrefillConfig, argv: list[str], *, listens: bool = True) -> list[str]:
    """Lists what the bare command line already shows to be wrong, before SGLang's import takes its 20 seconds."""
    problems = []
    for need in required_for(config):
        raw = value_of(argv, need.flag)
        given = "True" if raw == "" else raw  # a switch
        if given is not None and given != str(need.value):
            problems.append(_contradiction(config, need, given))
    if (model_path := value_of(argv, "--model-path", "--model")) is not None:
        problems += _model_path_problems(model_path)
    if config.shared_prefix is not None:
        problems += _text_file_problems("--shared-prefix", config.shared_prefix)
    if config.request_log is not None:
        problems += _log_file_problems("--request-log", config.request_log)
    if config.rerank_template is not None:
        problems += _rerank_template_problems(config.rerank_template)
    if value_of(argv, "--enable-trace") is not None and (missing := traces.missing_packages()):
        problems.append(missing)
    host, port = value_of(argv, "--host") or "127.0.0.1", value_of(argv, "--port") or "30000"
    if listens and port.isdigit():
        problems += port_problems([("--port", host, int(port))])
    return problems


def value_of(argv: list[str], *flags: str) -> str | None:
    """Returns the last value given to one of these flags: "" for a switch, None where it is not given."""
    found = None
    for word, following in itertools.pairwise([*argv, "--"]):
        name, equals, value = word.partition("=")
        if name in flags:
            found = value if equals else ("" if following.startswith("--") else following)
    return found


def check_server_args(config: PrefillConfig, server_args: Any, *, listens: bool) -> None:
    """Raise ConfigurationError naming every flag of SGLang's ServerArgs that contradicts the engine, and, if it listens, a taken
    port."""
    problems = [
        _contradiction(config, need, value)
        for need in required_for(config)
        if (value := getattr(server_args, need.field)) != need.value
    ]
    if config.evicts_suffix_kv and config.allow_generation and server_args.page_size > 1 and this_device().is_host:
        problems.append(
            f"--page-size {server_args.page_size} with --allow-generation needs a Triton kernel for each token:"
            " leave one of the two out on a machine without an accelerator, or start with --suffix-kv keep"
        )
    if config.rerank_template is not None and server_args.is_embedding:
        problems.append(
            f"--rerank-template {config.rerank_template} is a prompt for a causal language model, and --is-embedding serves"
            " none: leave one of the two out"
        )
    if server_args.enable_trace and (missing := traces.missing_packages()):
        problems.append(missing)
    problems += rank_problems(server_args.tp_size, server_args.model_path)
    kinds = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
    if not this_device().is_host and (
        problem := flashinfer_version.problem([getattr(server_args, kind) for kind in kinds])
    ):
        problems.append(problem)
    if config.stable_answers:
        problems += stable_answer_problems(server_args)
    try:
        calibrations.load(config.calibrations, server_args)
    except ConfigurationError as error:
        problems.append(str(error))
    if listens:
        problems += port_problems([("--port", server_args.host, server_args.port)])
    if problems:
        raise ConfigurationError("\n".join(problems))


def stable_answer_problems(server_args: Any) -> list[str]:
    """Says what of the machine and of SGLang's options keeps --stable-answers from holding."""
    if not this_device().is_host:
        return [
            "--stable-answers is for machines without an accelerator: attention and matrix products on a GPU cut their sums by"
            " the size of a step. Leave it out"
        ]
    problems = []
    if server_args.tp_size > 1:
        problems.append(
            f"--stable-answers is for one rank, and --tp-size is {server_args.tp_size}: nobody has shown that sums over ranks"
            " keep their order. Leave one of the two out"
        )
    backends = server_args.prefill_attention_backend, server_args.decode_attention_backend
    if foreign := [name for name in backends if not str(name).startswith(ATTENTION_BACKEND_NAME)]:
        names = ", ".join(str(name or server_args.attention_backend) for name in dict.fromkeys(foreign))
        problems.append(
            f"--stable-answers needs the attention backend {ATTENTION_BACKEND_NAME}, and {names} is asked for: leave one of the"
            " two out"
        )
    found = native()
    if found.kernels is None:
        problems.append(f"--stable-answers needs the native kernels, and there are none: {found.reason}")
    return problems


def _contradiction(config: PrefillConfig, need: Required, value: Any) -> str:
    those_on = _those_on(config, need)
    remedy = "leave it out" if not need.instead else f"leave it out, and {need.instead}"
    if those_on:
        remedy += f", or start with {' '.join(feature.without for feature in those_on)}"
        if config.paper and {POLICY, ONE_A_STEP} & set(those_on):
            remedy += " and without --paper"
    return f"{need.flag} is {value} and must be {need.value} ({need.why}): {remedy}"


def rank_problems(tp_size: int, model_path: str) -> list[str]:
    """Says why this model or this machine cannot be shared by so many ranks."""
    if tp_size == 1:
        return []
    problems = []
    n_cores = len(os.sched_getaffinity(0))
    if this_device().is_host and tp_size > n_cores:
        problems.append(f"--tp-size is {tp_size}, and there are {n_cores} cores: each rank needs one of its own")
    try:
        model = json.loads(Path(model_path, "config.json").read_text())
    except (OSError, ValueError):  # a hub's name, or no folder
        return problems
    model = model.get("text_config", model)
    n_heads = model.get("num_attention_heads")
    n_kv_heads = model.get("num_key_value_heads") or n_heads
    fits = not n_heads or (n_heads % tp_size == 0 and (n_kv_heads % tp_size == 0 or tp_size % n_kv_heads == 0))
    if not fits:
        problems.append(
            f"--tp-size is {tp_size}, and this model has {n_heads} attention heads and {n_kv_heads} of K and V: each rank needs"
            " as many as the others. Leave it out, or take a divisor of both"
        )
    return problems


def _model_path_problems(model_path: str) -> list[str]:
    """Says what is wrong with a path that is neither a model folder, nor a file or remote store of SGLang's, nor the name of
    a model on a hub."""
    if os.path.isdir(model_path):
        if os.path.exists(os.path.join(model_path, "config.json")):
            return []
        return [f"--model-path {model_path} is a folder without config.json: give a Hugging Face model folder"]
    is_hub_name = re.fullmatch(r"\w[\w.-]*/[\w.-]+", model_path) is not None
    if os.path.isfile(model_path) or is_hub_name or re.match(r"[a-z0-9]+://", model_path):
        return []
    return [f"--model-path {model_path} does not exist: give a model folder, or leave it out for the demo model"]


def _text_file_problems(flag: str, path: str) -> list[str]:
    try:
        is_empty = not Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        return [
            f"{flag} {path} cannot be read ({getattr(error, 'strerror', None) or error}): give a file of UTF-8 text"
        ]
    return [f"{flag} {path} is empty: give a file that holds the text, or leave it out"] if is_empty else []


def _log_file_problems(flag: str, path: str) -> list[str]:
    """Tries to open a file to which lines are appended; one that was not there is there afterwards."""
    if Path(path).exists() and not Path(path).is_file():
        return [f"{flag} {path} is no file: name one, or a new one"]
    try:
        with open(path, "ab"):
            return []
    except OSError as error:
        return [
            f"{flag} {path} cannot be written ({error.strerror}): give a file in a folder that is there and is yours"
        ]


def _rerank_template_problems(name_or_path: str) -> list[str]:
    try:
        rerank_template.load(name_or_path)
    except ConfigurationError as error:
        return [str(error)]
    return []


def check_model_path(model_path: str) -> None:
    """Raise ConfigurationError where no model can be at this path."""
    if problems := _model_path_problems(model_path):
        raise ConfigurationError(problems[0])


def port_problems(listening: Sequence[tuple[str, str, int]]) -> list[str]:
    """Lists what keeps a server from listening; listening: flag, host and port of each."""
    ports = [port for _, _, port in listening]
    problems = [f"{flag} {port} is asked for twice" for flag, _, port in listening if ports.count(port) > 1]
    return problems or [problem for one in listening for problem in _port_problems(*one)]


def _port_problems(flag: str, host: str, port: int) -> list[str]:
    if not 0 < port < 65536:
        return [f"{flag} is {port}: it must be from 1 to 65535"]
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return [f"{flag} {port} on {host} cannot be used ({error.strerror or error}): choose another"]
    return []
