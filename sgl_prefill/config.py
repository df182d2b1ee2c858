"""Our options: one frozen dataclass is the only source of names, defaults, help and checks."""

from __future__ import annotations

import argparse
import dataclasses
import enum
import math
from collections.abc import Collection, Sequence
from typing import Any, Final

from sgl_prefill.core.policies import POLICIES, can_be_fair
from sgl_prefill.core.quotas import Limit, Quotas
from sgl_prefill.errors import ConfigurationError

STOCK = "stock"  # of --scheduling: SGLang's own scheduler


class _NotGiven(enum.Enum):
    """Stands for a value that nobody has given, while a configuration is made: `None` is a value of some options."""

    NOT_GIVEN = enum.auto()


NOT_GIVEN: Final = _NotGiven.NOT_GIVEN


def _auto_or_int(text: str) -> int | None:
    return None if text == "auto" else int(text)


def _none_or_int(text: str) -> int | None:
    return None if text == "none" else int(text)


def _option(default: Any, help: str, **extra: Any) -> Any:
    """Declares an option. `default`: the value where none is given; `paper`: the one that --paper stands for; `none`: how
    None is written.
    """
    return dataclasses.field(default=NOT_GIVEN, metadata={"default": default, "help": help, **extra})


CLIENTS = ("none", "user", "key")  # who is one: all together, each user that requests name, or each API key
LIMITS_OF_WAITING = tuple(f"max_{whose}waiting_{unit}" for whose in ("", "client_") for unit in ("requests", "tokens"))
LIMIT: dict[str, Any] = {"type": _none_or_int, "none": "none"}  # of what waits


@dataclasses.dataclass(frozen=True)
class PrefillConfig:
    """Everything that we add to SGLang's flags. Picklable: it travels to the scheduler process as an argument.

    A field holds the value that was given, else the paper's with `paper=True`, else its default. Raises ConfigurationError
    with a line for each value that is wrong or contradicts another.
    """

    paper: bool = _option(
        False,
        "the paper's engine: {paper}; another value of one of these is refused",
    )
    scheduling: str = _option(
        "calibrated-srjf",
        "who runs next; calibrated-srjf: shortest predicted job first, and others with it while the step has room; srjf: the"
        " same without a look at the prefix cache; fifo: first in, first out; stock: SGLang's own scheduler",
        choices=lambda: (*POLICIES, STOCK),  # whatever is registered by then
        paper="calibrated-srjf",
    )
    fairness_lambda: float = _option(
        500.0,
        "credit of a waiting request, in cache-miss tokens per second of waiting; 0: pure shortest job first",
        paper=500.0,
    )
    jct_model: str = _option(
        "fitted",
        "how long a request will take; fitted: milliseconds, measured at start and corrected by observed times;"
        " cache-miss: the number of tokens that are not cached",
        choices=("fitted", "cache-miss"),
        paper="cache-miss",
    )
    sharers: str = _option(
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
    fair_by: str = _option(
        "user",
        "whose requests get fair shares; user: of those that requests name (header x-user-id, or the body's user); key: of API"
        " keys; none: all are one client; within a client --scheduling decides. none with fifo, whole-job and stock",
        choices=CLIENTS,
        paper="none",
    )
    isolate_by: str = _option(
        "none",
        "whose prefixes are shared with nobody else; user, key: as of --fair-by; none: all share all",
        choices=CLIENTS,
    )
    shared_prefix: str | None = _option(
        None,
        "a file with the text of a system prompt that all may share in spite of --isolate-by; it is computed at start, and stays"
        " in the prefix cache",
        type=str,
        none="none",
    )
    max_waiting_requests: int | None = _option(None, "more prompts that wait are refused with 429", **LIMIT)
    max_waiting_tokens: int | None = _option(None, "the same in tokens of prompts", **LIMIT)
    max_client_waiting_requests: int | None = _option(
        None, "more prompts of one client (see --fair-by) that wait are refused with 429", **LIMIT
    )
    max_client_waiting_tokens: int | None = _option(None, "the same in tokens of prompts", **LIMIT)
    request_log: str | None = _option(
        None,
        "a file to which one JSON line per finished request is appended, for `python -m sgl_prefill.plan --trace`; not for"
        " --scheduling stock",
        type=str,
        none="none",
    )
    background_step_ms: float = _option(
        20.0,
        "requests of background jobs (header x-prefill-background: 1) run when no other waits, in steps predicted to take at"
        " most so many milliseconds",
    )
    hybrid_prefill: str = _option(
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
    shared_prefix_attention: str = _option(
        "auto",
        "requests of a step that share a cached prefix attend to it together; auto: where that is expected to gain; on: wherever"
        " they share one; off: each alone, as stock",
        choices=("auto", "on", "off"),
    )
    suffix_kv: str = _option(
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
    logits_dtype: str = _option(
        "float32",
        "dtype of the logits of up to 32 rows on a CPU, 128 on a GPU; float32: exact label scores; model: as stock SGLang",
        choices=("float32", "model"),
    )
    rerank_template: str | None = _option(
        None,
        "what a causal model is asked about a document by /v1/rerank: yes-no, qwen3-reranker, or a file (http/README.md)",
        type=str,
        none="yes-no, and SGLang's own handler for models whose chat template is a reranker's",
    )
    stable_answers: bool = _option(
        False,
        "CPU only: a request gets the same bits whatever runs beside it, whatever is cached and however it is cut into chunks, on"
        " one machine and build; refused where a part of the model cannot",
    )
    allow_generation: bool = _option(False, "also serve requests for more than one token")
    memory_budget_gb: float | None = _option(
        None, "CPU only: memory for weights and KV pool, in GiB", none="half of the free memory"
    )
    calibrations: str | None = _option(
        None,
        "a folder of calibrations of label probabilities (NAME.json, by python -m sgl_prefill.calibrate), read at the start",
        type=str,
        none="none",
    )
    max_body_mb: float = _option(32.0, "largest HTTP request body, in MiB; a larger one is answered with 413")

    def __post_init__(self) -> None:
        given = {field.name for field in dataclasses.fields(self) if getattr(self, field.name) is not NOT_GIVEN}
        self._fill_in(given)
        problems = self._contradictions(given)
        problems += [
            f"{_flag(field)} is {value!r}: it must be {_one_of(choices)}"
            for field in dataclasses.fields(self)
            if (choices := _choices(field)) is not None and (value := getattr(self, field.name)) not in choices
        ]
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
        if not 0 < self.background_step_ms < math.inf:
            problems.append(f"--background-step-ms is {self.background_step_ms}: it must be a positive number")
        if self.memory_budget_gb is not None and not 0 < self.memory_budget_gb < math.inf:
            problems.append(f"--memory-budget-gb is {self.memory_budget_gb}: it must be a positive number of GiB")
        for name in LIMITS_OF_WAITING:
            if (limit := getattr(self, name)) is not None and limit < 1:
                problems.append(f"{_flag_of(name)} is {limit}: it must be at least 1")
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
            elif field.name == "pack_step_tokens" and self.scheduling == STOCK:
                value = 0  # SGLang's own scheduler fills a step by itself
            elif field.name == "fair_by" and not can_be_fair(self.scheduling):
                value = "none"
            object.__setattr__(self, field.name, value)  # this class is frozen for others

    def _contradictions(self, given: Collection[str]) -> list[str]:
        """Lists what cannot be meant together."""
        return [
            *self._contradictions_of_policy(given),
            *self._contradictions_of_clients(),
            *self._contradictions_of_records(),
            *self._contradictions_of_stable_answers(),
        ]

    def _contradictions_of_stable_answers(self) -> list[str]:
        if not self.stable_answers:
            return []
        problems = []
        if self.hybrid_prefill == "off":
            problems.append(
                "--stable-answers needs the native kernels for all layers, and --hybrid-prefill off keeps SGLang's: leave one of"
                " the two out"
            )
        if self.logits_dtype != "float32":
            problems.append(
                f"--stable-answers needs logits in float32, and --logits-dtype is {self.logits_dtype}: leave one of the two out"
            )
        return problems

    def _contradictions_of_records(self) -> list[str]:
        if self.request_log is None or self.has_policy:
            return []
        return [
            "--request-log records predictions of this package's policies, and with --scheduling stock SGLang's own scheduler"
            " decides: leave one of the two out"
        ]

    def _contradictions_of_clients(self) -> list[str]:
        problems = []
        asked = [name for name in LIMITS_OF_WAITING if getattr(self, name) is not None]
        if self.scheduling == STOCK and asked:
            flags = ", ".join(map(_flag_of, asked))
            problems.append(
                f"{flags}: --scheduling stock knows no such limits, but SGLang's --max-queued-requests; leave them out"
            )
        elif not self.is_fair and (of_client := [name for name in asked if name.startswith("max_client")]):
            flags = ", ".join(map(_flag_of, of_client))
            problems.append(f"{flags}: there are no clients with --fair-by none; leave them out, or say who is one")
        if self.shared_prefix is not None and self.isolate_by == "none":
            problems.append("--shared-prefix is for --isolate-by: without it all prefixes are shared, leave it out")
        elif self.shared_prefix is not None and not (self.has_policy or self.evicts_suffix_kv):
            problems.append(
                "--shared-prefix needs this package's prefix cache, and with --scheduling stock and --suffix-kv keep SGLang's own"
                " serves: leave one of these out"
            )
        return problems

    def _contradictions_of_policy(self, given: Collection[str]) -> list[str]:
        if self.paper:
            return [
                f"{_flag(field)} is {_shown(field, getattr(self, field.name))}, and --paper means"
                f" {_shown(field, field.metadata['paper'])}: leave one of the two out"
                for field in dataclasses.fields(self)
                if field.name in given
                and "paper" in field.metadata
                and getattr(self, field.name) != field.metadata["paper"]
            ]
        if self.fair_by != "none" and not can_be_fair(self.scheduling):
            return [f"--fair-by {self.fair_by} is not for --scheduling {self.scheduling}: leave it out"]
        if self.scheduling == STOCK and self.pack_step_tokens != 0:
            return [
                "--pack-step-tokens is not for --scheduling stock, since SGLang's own scheduler fills a step by itself:"
                " leave it out"
            ]
        return []

    @property
    def has_policy(self) -> bool:
        """Says whether a policy of ours decides who runs, and not SGLang's scheduler."""
        return self.scheduling != STOCK

    @property
    def is_fair(self) -> bool:
        return self.fair_by != "none"

    @property
    def isolates(self) -> bool:
        return self.isolate_by != "none"

    @property
    def quotas(self) -> Quotas:
        return Quotas(
            Limit(self.max_waiting_requests, self.max_waiting_tokens),
            Limit(self.max_client_waiting_requests, self.max_client_waiting_tokens),
        )

    @property
    def evicts_suffix_kv(self) -> bool:
        return self.suffix_kv == "evict"

    @property
    def max_body_bytes(self) -> int:
        return int(self.max_body_mb * (1 << 20))

    @classmethod
    def add_cli_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """Adds one flag a field, named like it with dashes; booleans are switches. What is not given is not in the namespace."""
        group = parser.add_argument_group("sgl_prefill")
        for field in dataclasses.fields(cls):
            cls.add_cli_argument(group, field.name)

    @classmethod
    def add_cli_argument(cls, parser: argparse._ActionsContainer, name: str) -> None:
        """Adds the flag of one field."""
        (field,) = [field for field in dataclasses.fields(cls) if field.name == name]
        default, text = field.metadata["default"], field.metadata["help"].replace("{paper}", _papers_options())
        if isinstance(default, bool):
            parser.add_argument(_flag(field), action="store_true", default=argparse.SUPPRESS, help=text)
            return
        parser.add_argument(
            _flag(field),
            type=field.metadata.get("type", float if default is None else type(default)),
            default=argparse.SUPPRESS,
            choices=_choices(field),
            help=f"{text} (default: {_shown(field, default)})",
        )

    @classmethod
    def from_namespace(cls, namespace: argparse.Namespace, names: Collection[str] | None = None) -> PrefillConfig:
        """Makes a configuration from the flags that were given; names: of these fields alone."""
        given = vars(namespace)
        fields = [field.name for field in dataclasses.fields(cls) if names is None or field.name in names]
        return cls(**{name: given[name] for name in fields if name in given})


def _flag(field: dataclasses.Field[Any]) -> str:
    return _flag_of(field.name)


def _flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def _choices(field: dataclasses.Field[Any]) -> Sequence[str] | None:
    choices: Any = field.metadata.get("choices")
    found: Sequence[str] | None = choices() if callable(choices) else choices
    return found


def _one_of(choices: Sequence[str]) -> str:
    return ", ".join(choices[:-1]) + f" or {choices[-1]}"


def _papers_options() -> str:
    """Lists what --paper stands for, as command line."""
    fields = [field for field in dataclasses.fields(PrefillConfig) if "paper" in field.metadata]
    return ", ".join(f"{_flag(field)} {_shown(field, field.metadata['paper'])}" for field in fields)


def _shown(field: dataclasses.Field[Any], value: Any) -> str:
    """Writes a value as a user would."""
    if value is None:
        return str(field.metadata["none"])
    return f"{value:g}" if isinstance(value, float) else str(value)
