"""SGLang's arguments: values that this engine requires, defaults for this machine, and all problems in one message.

Does not import SGLang. `examine` checks the machine.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from sgl_prefill.config import PrefillConfig
from sgl_prefill.core import rerank_template
from sgl_prefill.cpu import lm_head
from sgl_prefill.cpu.detect import ATTENTION_BACKEND_NAME, fast_dtype
from sgl_prefill.cpu.native.library import native
from sgl_prefill.errors import ConfigurationError
from sgl_prefill.startup import calibrations, examine
from sgl_prefill.startup.device import this_device

# Name of this engine's prefix cache in SGLang's registry (`--radix-cache-backend`).
PREFIX_CACHE_NAME = "sgl_prefill_suffix_kv"

logger = logging.getLogger(__name__)


class Feature(NamedTuple):
    is_on: Callable[[PrefillConfig], bool]
    without: str  # flags that switch it off


POLICY = Feature(lambda config: config.has_policy, "--scheduling stock")
ONE_A_STEP = Feature(lambda config: config.has_policy and config.pack_step_tokens == 0, "--set pack_step_tokens=auto")
EVICT = Feature(lambda config: config.evicts_suffix_kv, "--suffix-kv keep")


class Required(NamedTuple):
    field: str  # of ServerArgs
    value: Any
    flag: str
    why: str
    needed_by: tuple[Feature, ...] = ()  # required if any of these is on; empty: always
    instead: str = ""  # alternative for users who want another value


# Defaults on an accelerator:
# The memory plan measures one row of logits; 128 rows with a vocabulary of 150,000 take 0.2 GB with their log-probabilities.
DEVICE_MAX_REQUESTS = 128
# For unchunked requests SGLang's default keeps 25 GB free, the activations of 16,384 tokens. A user's smaller fraction limits
# weights and KV together. From this value on, KV takes what the measured activations and a margin leave.
DEVICE_MEMORY_FRACTION = 0.9
# Steps of up to so many tokens (prefix hits) are replayed from CUDA graphs. SGLang's default is the chunk size, -1 here: none.
# The CPU launches the kernels of a step in about 10 ms (an estimate). In that time an H100 computes 2,048 tokens with 1.5 billion
# weights (6e12 operations at 6e14 per second). Longer steps keep it busy, and each graph costs start time and memory.
DEVICE_REPLAYED_TOKENS = 2048
FEWEST_ROWS = 16  # the JCT profile runs steps of up to 16 requests, even if the policy's steps have fewer

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
        "the policy follows every change of the prefix cache, and scratch slots must not reach it",
        (POLICY, EVICT),
    ),
    Required("schedule_policy", "fcfs", "--schedule-policy", "our policy orders the queue", (POLICY,)),
    Required("enable_mixed_chunk", False, "--enable-mixed-chunk", "a request runs in one forward", (POLICY, EVICT)),
    Required(
        "dp_size",
        1,
        "--dp-size",
        "SGLang sends a request to any of the copies, and its user's prefix is cached in one of them",
        instead="start `python -m sgl_prefill.cluster --engines N`, which keeps a user's requests at one engine",
    ),
    Required(
        "enable_pdmux", False, "--enable-pdmux", "it runs prefills layer by layer, without our policy and hybrid passes"
    ),
    Required("pp_size", 1, "--pp-size", "policy and scratch allow one batch in flight", (POLICY, EVICT)),
    Required("dcp_size", 1, "--dcp-size", "scratch is not spread over ranks", (EVICT,)),
    Required(
        "enable_hierarchical_cache", False, "--enable-hierarchical-cache", "the cache has one tier", (POLICY, EVICT)
    ),
    Required("enable_streaming_session", False, "--enable-streaming-session", "a session would keep scratch", (EVICT,)),
    Required("enable_memory_saver", False, "--enable-memory-saver", "aliased KV buffers cannot be released", (EVICT,)),
    Required("enable_page_major_kv_layout", False, "--enable-page-major-kv-layout", "layers share scratch", (EVICT,)),
    Required("enable_unified_memory", False, "--enable-unified-memory", "layers share scratch", (EVICT,)),
    Required("speculative_algorithm", None, "--speculative-algorithm", "SGLang's prefill-only path is off with it"),
    Required("disaggregation_mode", "null", "--disaggregation-mode", "a prefill-only engine has no decode server"),
    Required("tokenizer_worker_num", 1, "--tokenizer-worker-num", "our routes live in the one HTTP process"),
    Required("allow_auto_truncate", False, "--allow-auto-truncate", "a prompt is never cut silently"),
    Required("smg_grpc_mode", False, "--smg-grpc-mode", "labels are served over HTTP"),
    Required("use_ray", False, "--use-ray", "our scheduler process is started by SGLang's own launcher only"),
    Required("encoder_only", False, "--encoder-only", "there is no language model to score with"),
)


def required_for(config: PrefillConfig) -> tuple[Required, ...]:
    return tuple(need for need in REQUIRED if not need.needed_by or _features_on(config, need))


def _features_on(config: PrefillConfig, need: Required) -> list[Feature]:
    return [feature for feature in need.needed_by if feature.is_on(config)]


def required_flags(config: PrefillConfig) -> list[str]:
    """Returns the required values that are not SGLang's defaults. Put them before the user's flags, which override them."""
    flags = []
    for need in required_for(config):
        if need.value is True:
            flags.append(need.flag)
        elif need.field in ("prefill_max_requests", "chunked_prefill_size", "radix_cache_backend"):
            flags += [need.flag, str(need.value)]
    return flags


def default_settings(config: PrefillConfig, user_max_requests: int | None = None) -> dict[str, Any]:
    """Returns defaults for this machine by names of ServerArgs. user_max_requests: the user's `--prefill-max-requests`."""
    fraction = memory_fraction(config)
    packs = config.has_policy and config.pack_step_tokens != 0
    most_requests = most_requests_of_step(config) if packs else None
    limit: dict[str, Any] = {} if most_requests is None else {"prefill_max_requests": most_requests}
    if fraction is None:
        return {**_device_settings(config, user_max_requests or (most_requests if packs else 1)), **limit}
    # Without `sleep_on_idle` an idle scheduler polls, which takes a core from the tokenizer and the clients.
    settings: dict[str, Any] = {"mem_fraction_static": round(fraction, 4), "sleep_on_idle": True, **limit}
    if fast_dtype() == "float32":
        logger.warning(
            "this processor is many times slower in bfloat16 than in float32: --dtype is float32 if not given"
        )
        settings["dtype"] = "float32"
    return settings


def _device_settings(config: PrefillConfig, most_requests: int | None) -> dict[str, Any]:
    """Returns defaults for an accelerator. most_requests: of a step of the policy."""
    settings: dict[str, Any] = {}
    if POLICY.is_on(config) or EVICT.is_on(config):  # else SGLang's chunks, with its defaults
        settings["mem_fraction_static"] = DEVICE_MEMORY_FRACTION
        settings["cuda_graph_max_bs_prefill"] = DEVICE_REPLAYED_TOKENS
    if config.allow_generation:
        return settings
    settings["disable_decode_cuda_graph"] = True  # nothing is decoded
    if POLICY.is_on(config) and most_requests is not None:
        # A row of SGLang's table of KV slots is as wide as the context: its default of 2,048 rows takes 1 GiB for a context of
        # 131,072 tokens. Waiting requests have no row.
        settings["max_running_requests"] = max(most_requests, FEWEST_ROWS)
    return settings


def most_requests_of_step(config: PrefillConfig) -> int | None:
    """Default limit on the requests of a step; None: SGLang's. On a host `lm_head` computes so many rows in float32, as for a
    single request.
    """
    if not this_device().is_host:
        return DEVICE_MAX_REQUESTS
    return lm_head.MAX_ROWS if config.logits_dtype == "float32" else None


def default_flags(config: PrefillConfig, argv: Sequence[str] = ()) -> list[str]:
    """Returns `default_settings` as flags. Put them before the user's flags `argv`, which override them."""
    given = value_of(list(argv), "--prefill-max-requests")
    flags = []
    for name, value in default_settings(config, int(given) if given and given.isdigit() else None).items():
        flags += ["--" + name.replace("_", "-"), *([] if value is True else [str(value)])]
    return flags


def memory_fraction(config: PrefillConfig) -> float | None:
    """`--mem-fraction-static` for the memory budget on a machine without an accelerator; None where SGLang decides.

    SGLang's KV pool gets `fraction * free memory - weights`: the budget covers weights and KV pool. Raises ConfigurationError.
    """
    if not this_device().is_host:
        if config.memory_budget_gb is not None:
            raise ConfigurationError(
                f"--memory-budget-gb {config.memory_budget_gb} is for machines without an accelerator,"
                " and this one has one: use --mem-fraction-static"
            )
        return None
    for_us_gb, free_gb = examine.free_memory_gb()
    budget_gb = for_us_gb / 2 if config.memory_budget_gb is None else config.memory_budget_gb
    if budget_gb > for_us_gb:
        whose = "this machine has" if for_us_gb == free_gb else "this container (cgroup) has"
        raise ConfigurationError(
            f"--memory-budget-gb is {budget_gb:g}, and {whose} {for_us_gb:.1f} GiB free: ask for less"
        )
    return budget_gb / free_gb


def check_argv(config: PrefillConfig, argv: list[str], *, listens: bool = True) -> list[str]:
    """Returns problems of the machine and the command line that can be found before SGLang's import of 20 seconds."""
    problems = []
    for need in required_for(config):
        raw = value_of(argv, need.flag)
        given = "True" if raw == "" else raw  # a switch
        if given is not None and given != str(need.value):
            problems.append(_contradiction(config, need, given))
    problems += early_problems(config, value_of(argv, "--model-path", "--model"))
    if value_of(argv, "--enable-trace") is not None:
        problems += examine.trace_problems()
    host, port = value_of(argv, "--host") or "127.0.0.1", value_of(argv, "--port") or "30000"
    if listens and port.isdigit():
        problems += examine.port_problems([("--port", host, int(port))])
    return problems


def early_problems(config: PrefillConfig, model_path: str | None) -> list[str]:
    """Returns problems of the machine, the model's path, and this engine's options that name a file."""
    problems = examine.driver_problems(torch.version.cuda)
    problems += _error_of(lambda: memory_fraction(config))
    if model_path is not None:
        problems += _model_path_problems(model_path)
    if config.shared_prefix is not None:
        problems += _text_file_problems("--shared-prefix", config.shared_prefix)
    if config.request_log is not None:
        problems += _log_file_problems("--request-log", config.request_log)
    if (template := config.rerank_template) is not None:
        problems += _error_of(lambda: rerank_template.load(template))
    return problems


def _error_of(check: Callable[[], object]) -> list[str]:
    try:
        check()
    except ConfigurationError as error:
        return [str(error)]
    return []


def value_of(argv: list[str], *flags: str) -> str | None:
    """Returns the last value of one of these flags: "" for a switch, None where it is missing."""
    found = None
    for word, following in itertools.pairwise([*argv, "--"]):
        name, equals, value = word.partition("=")
        if name in flags:
            found = value if equals else ("" if following.startswith("--") else following)
    return found


def check_server_args(config: PrefillConfig, server_args: Any, *, listens: bool) -> None:
    """Raises ConfigurationError with all problems of SGLang's resolved ServerArgs and of its port."""
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
            " an embedding model: leave one of the two out"
        )
    if server_args.enable_trace:
        problems += examine.trace_problems()
    problems += rank_problems(server_args.tp_size, server_args.model_path)
    kinds = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
    if not this_device().is_host:
        problems += examine.flashinfer_problems([getattr(server_args, kind) for kind in kinds])
    if config.stable_answers:
        problems += stable_answer_problems(server_args)
    problems += _error_of(lambda: calibrations.load(config.calibrations, server_args))
    if listens:
        problems += examine.port_problems([("--port", server_args.host, server_args.port)])
    if problems:
        raise ConfigurationError("\n".join(problems))


def stable_answer_problems(server_args: Any) -> list[str]:
    """Returns why --stable-answers is impossible on this machine and with these arguments of SGLang's."""
    if not this_device().is_host:
        return [
            "--stable-answers is for machines without an accelerator: attention and matrix products on a GPU cut their sums by"
            " the size of a step. Leave it out"
        ]
    problems = []
    if server_args.tp_size > 1:
        problems.append(
            f"--stable-answers is for one rank, and --tp-size is {server_args.tp_size}: sums over ranks are not known to keep"
            " their order. Leave one of the two out"
        )
    backends = server_args.prefill_attention_backend, server_args.decode_attention_backend
    if foreign := [name for name in backends if not str(name).startswith(ATTENTION_BACKEND_NAME)]:
        names = ", ".join(str(name or server_args.attention_backend) for name in dict.fromkeys(foreign))
        problems.append(
            f"--stable-answers needs the attention backend {ATTENTION_BACKEND_NAME}, and {names} is given: leave one of the two"
            " out"
        )
    found = native()
    if found.kernels is None:
        problems.append(f"--stable-answers needs the native kernels, and there are none: {found.reason}")
    return problems


def _contradiction(config: PrefillConfig, need: Required, value: Any) -> str:
    features = _features_on(config, need)
    remedy = "leave it out" if not need.instead else f"leave it out, and {need.instead}"
    if features:
        remedy += f", or start with {' '.join(feature.without for feature in features)}"
        if config.paper and {POLICY, ONE_A_STEP} & set(features):
            remedy += " and without --paper"
    return f"{need.flag} is {value} and must be {need.value} ({need.why}): {remedy}"


def rank_problems(tp_size: int, model_path: str) -> list[str]:
    """Returns why so many ranks cannot share this model or this machine."""
    if tp_size == 1:
        return []
    problems = []
    n_cores = len(os.sched_getaffinity(0))
    if this_device().is_host and tp_size > n_cores:
        problems.append(f"--tp-size is {tp_size}, and there are {n_cores} cores: each rank needs one of its own")
    try:
        model = json.loads(Path(model_path, "config.json").read_text())
    except (OSError, ValueError):  # e.g. the name of a model on the hub
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
    """Accepts a model folder, a file, a remote store of SGLang's, and a model name on the hub."""
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
    """Creates the file if it does not exist."""
    if Path(path).exists() and not Path(path).is_file():
        return [f"{flag} {path} is not a file: name a file, or a new one"]
    try:
        with open(path, "ab"):
            return []
    except OSError as error:
        return [
            f"{flag} {path} cannot be written ({error.strerror}): give a file in an existing folder that you may write to"
        ]
