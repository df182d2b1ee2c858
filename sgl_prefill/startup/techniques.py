"""The three techniques of this package, and when it steps back from one: SGLang's own part serves where the model, its KV pool or
SGLang's flags do not allow a technique that was not asked for. One that was asked for is refused by name.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from sgl_prefill.config import PrefillConfig
from sgl_prefill.errors import ConfigurationError
from sgl_prefill.startup.device import this_device

logger = logging.getLogger(__name__)

# Name of this engine's prefix cache in SGLang's registry (`--radix-cache-backend`).
PREFIX_CACHE_NAME = "sgl_prefill_suffix_kv"


class Technique(NamedTuple):
    name: str
    is_on: Callable[[PrefillConfig], bool]
    option: str  # of PrefillConfig
    off: Any  # its value without the technique

    @property
    def without(self) -> str:
        """Flags that switch it off."""
        return "--set pack_step_tokens=auto" if self is ONE_A_STEP else f"--{self.option.replace('_', '-')} {self.off}"

    def is_asked_for(self, config: PrefillConfig) -> bool:
        return config.paper or self.option in config.given


POLICY = Technique("scheduling", lambda config: config.has_policy, "scheduling", "stock")
ONE_A_STEP = Technique(
    "one request a step", lambda config: config.has_policy and config.pack_step_tokens == 0, "pack_step_tokens", None
)
EVICT = Technique("suffix-KV eviction", lambda config: config.evicts_suffix_kv, "suffix_kv", "keep")
HYBRID = Technique("hybrid prefilling", lambda config: config.hybrid_prefill != "off", "hybrid_prefill", "off")
ALL = (POLICY, EVICT, HYBRID)


class Required(NamedTuple):
    field: str  # of ServerArgs
    value: Any
    flag: str
    why: str
    needed_by: tuple[Technique, ...]


REQUIRED: tuple[Required, ...] = (
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
    Required("enable_pdmux", False, "--enable-pdmux", "it runs prefills layer by layer", ALL),
    Required("enable_layernorm_sp", False, "--enable-layernorm-sp", "it spreads rows over ranks itself", (HYBRID,)),
    Required("enable_paged_experts", False, "--enable-paged-experts", "all weights stay in place", (HYBRID,)),
    Required("pp_size", 1, "--pp-size", "policy and scratch allow one batch in flight", ALL),
    Required("dcp_size", 1, "--dcp-size", "scratch is not spread over ranks", (EVICT,)),
    Required(
        "enable_hierarchical_cache", False, "--enable-hierarchical-cache", "the cache has one tier", (POLICY, EVICT)
    ),
    Required("enable_lmcache", False, "--enable-lmcache", "the cache has one tier", (POLICY, EVICT)),
    Required("enable_flexkv", False, "--enable-flexkv", "the cache has one tier", (POLICY, EVICT)),
    Required(
        "enable_unified_cache_external_linker",
        False,
        "--enable-unified-cache-external-linker",
        "the cache has one tier",
        (POLICY, EVICT),
    ),
    Required(
        "enable_streaming_session", False, "--enable-streaming-session", "a session would keep scratch", (POLICY, EVICT)
    ),
    Required(
        "enable_session_radix_cache",
        False,
        "--enable-session-radix-cache",
        "sessions need SGLang's cache",
        (POLICY, EVICT),
    ),
    Required("enable_memory_saver", False, "--enable-memory-saver", "aliased KV buffers cannot be released", (EVICT,)),
    Required("enable_page_major_kv_layout", False, "--enable-page-major-kv-layout", "layers share scratch", (EVICT,)),
    Required("enable_unified_memory", False, "--enable-unified-memory", "layers share scratch", (EVICT,)),
    Required(
        "disable_hybrid_swa_memory",
        True,
        "--disable-hybrid-swa-memory",
        "layers with a sliding window share the others' slots: policy and scratch know one pool",
        (POLICY, EVICT),
    ),
    Required(
        "swa_full_tokens_ratio",
        None,
        "--swa-full-tokens-ratio",
        "layers with a sliding window have no pool",
        (POLICY, EVICT),
    ),
    Required("enable_hisparse", False, "--enable-hisparse", "layers share scratch", (EVICT,)),
    Required(
        "prefill_only_disable_kv_cache",
        False,
        "--prefill-only-disable-kv-cache",
        "there is no KV to keep or to look up",
        (POLICY, EVICT),
    ),
    Required(
        "enable_dp_attention", False, "--enable-dp-attention", "ranks would run different requests", (POLICY, EVICT)
    ),
)


KV_DTYPES, HOST_KV_DTYPES = ("auto", "bfloat16", "bf16"), ("fp8_e4m3", "fp8_e5m2")


class StockOnly(NamedTuple):
    """A flag with which SGLang's own server serves, without anything of this package."""

    field: str
    value: Any  # with which this package serves
    flag: str
    why: str


STOCK_ONLY: tuple[StockOnly, ...] = (
    StockOnly(
        "dp_size",
        1,
        "--dp-size",
        "SGLang sends a request to any of the copies, and its user's prefix is cached in one of them;"
        " `python -m sgl_prefill.cluster --engines N` keeps a user's requests at one engine",
    ),
    StockOnly("speculative_algorithm", None, "--speculative-algorithm", "SGLang's prefill-only path is off with it"),
    StockOnly("disaggregation_mode", "null", "--disaggregation-mode", "a prefill-only engine has no decode server"),
    StockOnly("tokenizer_worker_num", 1, "--tokenizer-worker-num", "our routes live in one HTTP process"),
    StockOnly("allow_auto_truncate", False, "--allow-auto-truncate", "our routes never cut a prompt silently"),
    StockOnly("smg_grpc_mode", False, "--smg-grpc-mode", "labels are served over HTTP"),
    StockOnly("grpc_mode", False, "--grpc-mode", "labels are served over HTTP"),
    StockOnly("use_ray", False, "--use-ray", "our scheduler process is started by SGLang's own launcher only"),
    StockOnly("dllm_algorithm", None, "--dllm-algorithm", "a diffusion model's answer is not the next token"),
    StockOnly("encoder_only", False, "--encoder-only", "there is no language model to score with"),
)


class StepBack(NamedTuple):
    """Techniques that cannot be on."""

    techniques: tuple[Technique, ...]
    reason: str
    remedy: str = ""  # beside doing without the techniques


def _differs(given: Any, value: Any) -> bool:
    """Whether an argument, as text of a command line or as SGLang's value, is not this package's."""
    return str(given) != str(value)


def stock_only(config: PrefillConfig, given: Mapping[str, Any]) -> list[str]:
    """Returns why SGLang's own server must serve, a reason for each flag. Raises ConfigurationError where options of this package
    are given too.

    given: SGLang's arguments that the user gives, by their names in ServerArgs.
    """
    found = [one for one in STOCK_ONLY if one.field in given and _differs(given[one.field], one.value)]
    if found and config.given:
        options = ", ".join(sorted(f"--{name.replace('_', '-')}" for name in config.given))
        raise ConfigurationError(
            "\n".join(
                f"{one.flag} is {given[one.field]}, with which SGLang's own server serves ({one.why}), and {options}"
                " needs this package: leave one of the two out"
                for one in found
            )
        )
    return [f"{one.flag} {given[one.field]}: {one.why}" for one in found]


def of_flags(given: Mapping[str, Any]) -> list[StepBack]:
    """Returns what these arguments of SGLang's do not allow."""
    return [
        StepBack(
            need.needed_by,
            f"{need.flag} is {given[need.field]} and must be {'unset' if need.value is None else need.value} ({need.why})",
            "leave it out, or ",
        )
        for need in REQUIRED
        if need.field in given and _differs(given[need.field], need.value)
    ]


def of_kv_dtype(name: str) -> list[StepBack]:
    """name: of --kv-cache-dtype, as SGLang has resolved it."""
    if name in KV_DTYPES or (this_device().is_host and name in HOST_KV_DTYPES):
        return []
    why = "scratch holds K and V of the model's dtype" + (", or of 8 bits" if this_device().is_host else "")
    return [StepBack((EVICT,), f"--kv-cache-dtype is {name} ({why})", "leave it out, or ")]


def step_back(config: PrefillConfig, found: Iterable[StepBack]) -> PrefillConfig:
    """Returns the configuration without these techniques. Raises ConfigurationError with each one that was asked for."""
    problems, reasons, values = [], dict[str, str](), dict[str, Any]()
    for one in found:
        on = [technique for technique in one.techniques if technique.is_on(config)]
        if asked_for := [technique for technique in on if technique.is_asked_for(config)]:
            without = " ".join(technique.without for technique in asked_for)
            problems.append(f"{one.reason}: {one.remedy}start with {without}" + _and_not_paper(config, asked_for))
        for technique in on:
            reasons.setdefault(technique.name, one.reason)
            values[technique.option] = technique.off
    if problems:
        raise ConfigurationError("\n".join(problems))
    if not values:
        return config
    try:
        return config.with_default(values, reasons)
    except ConfigurationError as error:
        why = "; ".join(f"{name} is left to SGLang: {reason}" for name, reason in reasons.items())
        raise ConfigurationError(f"{error}\n({why})") from error


def _and_not_paper(config: PrefillConfig, asked_for: Iterable[Technique]) -> str:
    return " and without --paper" if config.paper and {POLICY, ONE_A_STEP} & set(asked_for) else ""


def log_what_is_off(config: PrefillConfig) -> None:
    for name, reason in config.stepped_back.items():
        logger.warning("%s is left to SGLang: %s", name, reason)
