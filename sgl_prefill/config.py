"""Our options: one frozen dataclass is the only source of names, defaults, help and checks."""

from __future__ import annotations

import argparse
import dataclasses
import enum
import math
from collections.abc import Collection
from typing import Any, Final, Literal

from sgl_prefill.errors import ConfigurationError

Scheduling = Literal["calibrated-srjf", "stock"]
LogitsDtype = Literal["float32", "model"]
JctModelName = Literal["fitted", "cache-miss"]
Sharers = Literal["count", "ignore"]
HybridPrefill = Literal["auto", "on", "off"]
SuffixKV = Literal["evict", "keep"]


class _NotGiven(enum.Enum):
    """Stands for a value that nobody has given, while a configuration is made: `None` is a value of some options."""

    NOT_GIVEN = enum.auto()


NOT_GIVEN: Final = _NotGiven.NOT_GIVEN


def _auto_or_int(text: str) -> int | None:
    return None if text == "auto" else int(text)


def _option(default: Any, help: str, **extra: Any) -> Any:
    """`default`: the value where none is given; `paper`: the one that --paper stands for; `none`: how None is written."""
    return dataclasses.field(default=NOT_GIVEN, metadata={"default": default, "help": help, **extra})


@dataclasses.dataclass(frozen=True)
class PrefillConfig:
    """Everything that we add to SGLang's flags. Picklable: it travels to the scheduler process as an argument.

    A field holds the value that was given, else the paper's with `paper=True`, else its default. Raises ConfigurationError
    with a line for each value that is wrong or contradicts another.
    """

    paper: bool = _option(
        False,
        "the paper's engine: --scheduling calibrated-srjf --pack-step-tokens 0 --fairness-lambda 500 --sharers ignore"
        " --jct-model cache-miss, and no --max-queue-s; another value of one of these is refused",
    )
    scheduling: Scheduling = _option(
        "calibrated-srjf",
        "calibrated-srjf: shortest predicted job first, and others with it while the step has room; stock: SGLang's own"
        " scheduler",
        choices=("calibrated-srjf", "stock"),
        paper="calibrated-srjf",
    )
    fairness_lambda: float = _option(
        500.0,
        "credit of a waiting request, in cache-miss tokens per second of waiting; 0: pure shortest job first",
        paper=500.0,
    )
    jct_model: JctModelName = _option(
        "fitted",
        "how long a request will take; fitted: milliseconds, measured at start and corrected by observed times;"
        " cache-miss: the number of tokens that are not cached",
        choices=("fitted", "cache-miss"),
        paper="cache-miss",
    )
    sharers: Sharers = _option(
        "count",
        "count: a request that computes a prefix which others wait for costs as much as all of them together, divided by"
        " their number; ignore: it costs what it computes itself, as in the paper",
        choices=("count", "ignore"),
        paper="ignore",
    )
    max_queue_s: float | None = _option(
        None,
        "a request that has waited so many seconds runs next, whatever its score and priority",
        none="no bound",
        paper=None,
    )
    pack_step_tokens: int | None = _option(
        None,
        "0: one request a step; N: a step takes further requests while it computes at most N tokens; auto: N where a"
        " token costs its full price here; not for --scheduling stock",
        type=_auto_or_int,
        none="auto",
        paper=0,
    )
    hybrid_prefill: HybridPrefill = _option(
        "auto",
        "everything but attention chunk by chunk in one forward; auto: where the model can be traced; on: or refuse",
        choices=("auto", "on", "off"),
    )
    hybrid_chunk_tokens: int | None = _option(
        None,
        "tokens of a chunk of hybrid prefilling; auto: the fewest that cost no time here",
        type=_auto_or_int,
        none="auto",
    )
    suffix_kv: SuffixKV = _option(
        "evict",
        "evict: of a long prompt keep only as much prefix KV as fits, on one layer's KV of scratch; keep: as stock",
        choices=("evict", "keep"),
    )
    max_input_length: int | None = _option(
        None,
        "longest prompt in tokens; memory is set aside for it; auto: the context length, or what half of the"
        " memory beyond the weights can serve",
        type=_auto_or_int,
        none="auto",
    )
    skip_parity_gate: bool = _option(False, "serve without the check at start that all paths give the same answers")
    logits_dtype: LogitsDtype = _option(
        "float32",
        "CPU only: dtype of the logits of up to 32 rows; float32: exact label scores; model: as stock SGLang",
        choices=("float32", "model"),
    )
    allow_generation: bool = _option(False, "also serve requests for more than one token")
    memory_budget_gb: float | None = _option(
        None, "CPU only: memory for weights and KV pool, in GiB", none="half of the free memory"
    )
    max_body_mb: float = _option(32.0, "largest HTTP request body, in MiB; a larger one is answered with 413")

    def __post_init__(self) -> None:
        given = {field.name for field in dataclasses.fields(self) if getattr(self, field.name) is not NOT_GIVEN}
        self._fill_in(given)
        problems = self._contradictions(given)
        if self.scheduling not in ("calibrated-srjf", "stock"):
            problems.append(f"--scheduling is {self.scheduling!r}: it must be calibrated-srjf or stock")
        if self.jct_model not in ("fitted", "cache-miss"):
            problems.append(f"--jct-model is {self.jct_model!r}: it must be fitted or cache-miss")
        if self.sharers not in ("count", "ignore"):
            problems.append(f"--sharers is {self.sharers!r}: it must be count or ignore")
        if self.logits_dtype not in ("float32", "model"):
            problems.append(f"--logits-dtype is {self.logits_dtype!r}: it must be float32 or model")
        if self.hybrid_prefill not in ("auto", "on", "off"):
            problems.append(f"--hybrid-prefill is {self.hybrid_prefill!r}: it must be auto, on or off")
        if self.suffix_kv not in ("evict", "keep"):
            problems.append(f"--suffix-kv is {self.suffix_kv!r}: it must be evict or keep")
        if self.hybrid_chunk_tokens is not None and self.hybrid_chunk_tokens < 1:
            problems.append(f"--hybrid-chunk-tokens is {self.hybrid_chunk_tokens}: it must be auto or at least 1")
        if self.max_input_length is not None and self.max_input_length < 1:
            problems.append(f"--max-input-length is {self.max_input_length}: it must be auto or at least 1 token")
        if not math.isfinite(self.fairness_lambda) or self.fairness_lambda < 0:
            problems.append(
                f"--fairness-lambda is {self.fairness_lambda}: it must be a number >= 0 (tokens per second)"
            )
        if self.max_queue_s is not None and not 0 <= self.max_queue_s < math.inf:
            problems.append(f"--max-queue-s is {self.max_queue_s}: it must be a number of seconds >= 0")
        if self.pack_step_tokens is not None and self.pack_step_tokens < 0:
            problems.append(f"--pack-step-tokens is {self.pack_step_tokens}: it must be auto or a number >= 0")
        if self.memory_budget_gb is not None and not 0 < self.memory_budget_gb < math.inf:
            problems.append(f"--memory-budget-gb is {self.memory_budget_gb}: it must be a positive number of GiB")
        if not 0 < self.max_body_mb < math.inf:
            problems.append(f"--max-body-mb is {self.max_body_mb}: it must be a positive number of MiB")
        if problems:
            raise ConfigurationError("\n".join(problems))

    def _fill_in(self, given: Collection[str]) -> None:
        """Put a value into each field that was not given, in the order of the fields: `paper` and `scheduling` come first."""
        for field in dataclasses.fields(self):
            if field.name in given:
                continue
            value = field.metadata["default"]
            if self.paper and "paper" in field.metadata:
                value = field.metadata["paper"]
            elif field.name == "pack_step_tokens" and self.scheduling == "stock":
                value = 0  # SGLang's own scheduler fills a step by itself
            object.__setattr__(self, field.name, value)  # this class is frozen for others

    def _contradictions(self, given: Collection[str]) -> list[str]:
        """What cannot be meant together."""
        if self.paper:
            return [
                f"{_flag(field)} is {_shown(field, getattr(self, field.name))}, and --paper means"
                f" {_shown(field, field.metadata['paper'])}: leave one of the two out"
                for field in dataclasses.fields(self)
                if field.name in given
                and "paper" in field.metadata
                and getattr(self, field.name) != field.metadata["paper"]
            ]
        if self.scheduling == "stock" and self.pack_step_tokens != 0:
            return [
                "--pack-step-tokens is for --scheduling calibrated-srjf: SGLang's own scheduler fills a step by itself,"
                " so leave it out"
            ]
        return []

    @property
    def max_body_bytes(self) -> int:
        return int(self.max_body_mb * (1 << 20))

    @classmethod
    def add_cli_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """One flag a field, named like it with dashes; booleans are switches. What is not given is not in the namespace."""
        group = parser.add_argument_group("sgl_prefill")
        for field in dataclasses.fields(cls):
            default, text = field.metadata["default"], field.metadata["help"]
            if isinstance(default, bool):
                group.add_argument(_flag(field), action="store_true", default=argparse.SUPPRESS, help=text)
                continue
            group.add_argument(
                _flag(field),
                type=field.metadata.get("type", str if isinstance(default, str) else float),
                default=argparse.SUPPRESS,
                choices=field.metadata.get("choices"),
                help=f"{text} (default: {_shown(field, default)})",
            )

    @classmethod
    def from_namespace(cls, namespace: argparse.Namespace) -> PrefillConfig:
        given = vars(namespace)
        return cls(**{field.name: given[field.name] for field in dataclasses.fields(cls) if field.name in given})


def _flag(field: dataclasses.Field[Any]) -> str:
    return "--" + field.name.replace("_", "-")


def _shown(field: dataclasses.Field[Any], value: Any) -> str:
    """A value as a user would write it."""
    if value is None:
        return str(field.metadata["none"])
    return f"{value:g}" if isinstance(value, float) else str(value)
