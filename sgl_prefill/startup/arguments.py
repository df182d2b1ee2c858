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
from typing import Any

import torch

from sgl_prefill.config import PrefillConfig
from sgl_prefill.core import rerank_template
from sgl_prefill.cpu import lm_head
from sgl_prefill.cpu.detect import ATTENTION_BACKEND_NAME, fast_dtype
from sgl_prefill.cpu.native.library import native
from sgl_prefill.errors import ConfigurationError
from sgl_prefill.startup import calibrations, examine, techniques
from sgl_prefill.startup.device import this_device
from sgl_prefill.startup.techniques import EVICT, POLICY, REQUIRED, STOCK_ONLY, Required, StockOnly

logger = logging.getLogger(__name__)


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


def required_for(config: PrefillConfig) -> list[Required]:
    """Returns the arguments of SGLang's that this configuration's techniques need."""
    return [need for need in REQUIRED if any(technique.is_on(config) for technique in need.needed_by)]


def required_flags(config: PrefillConfig) -> list[str]:
    """Returns the required values that are not SGLang's defaults. Put them before the user's flags, which override them."""
    flags = ["--enable-metrics"]  # queue_ms and actual_ms come from SGLang's request timing
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
    problems = _error_of(lambda: techniques.step_back(config, techniques.of_flags(given_in(argv))))
    problems += early_problems(config, value_of(argv, "--model-path", "--model"))
    if value_of(argv, "--enable-trace") is not None:
        problems += examine.trace_problems()
    host, port = value_of(argv, "--host") or "127.0.0.1", value_of(argv, "--port") or "30000"
    if listens and port.isdigit():
        problems += examine.port_problems([("--port", host, int(port))])
    return problems


def given_in(argv: list[str]) -> dict[str, str]:
    """Returns the arguments of SGLang's that `techniques` looks at and a command line gives, by their names in ServerArgs."""
    known: list[Required | StockOnly] = [*REQUIRED, *STOCK_ONLY]
    values = {one.field: value_of(argv, one.flag) for one in known}
    return {field: value or "True" for field, value in values.items() if value is not None}  # "": a switch


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
    problems = []
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
    if config.stable_answers == "on":
        problems += [
            f"--stable-answers on: {problem}; start with --stable-answers auto" for problem in unstable(server_args)
        ]
    problems += _error_of(lambda: calibrations.load(config.calibrations, server_args))
    if listens:
        problems += examine.port_problems([("--port", server_args.host, server_args.port)])
    if problems:
        raise ConfigurationError("\n".join(problems))


def unstable(server_args: Any) -> list[str]:
    """Returns why answers depend on their company on this machine and with these arguments of SGLang's."""
    if not this_device().is_host:
        return ["attention and matrix products on an accelerator cut their sums by the size of a step"]
    problems = []
    if server_args.tp_size > 1:
        problems.append(f"--tp-size is {server_args.tp_size}, and sums over ranks are not known to keep their order")
    phases = server_args.prefill_attention_backend, server_args.decode_attention_backend
    backends = {name or server_args.attention_backend for name in phases}
    if foreign := backends - {ATTENTION_BACKEND_NAME}:
        problems.append(f"the attention backend is {', '.join(sorted(foreign))} and not {ATTENTION_BACKEND_NAME}")
    found = native()
    if found.kernels is None:
        problems.append(f"there are no native kernels: {found.reason}")
    return problems


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
