"""This package's options: one frozen dataclass is the only source of names, defaults, help and checks."""

from __future__ import annotations

import argparse
import dataclasses
import enum
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from sgl_prefill.core.policies import POLICIES, can_be_fair
from sgl_prefill.core.quotas import Limit, Quotas
from sgl_prefill.errors import ConfigurationError

STOCK = "stock"  # of --scheduling: SGLang's own scheduler
AUTO = "auto"
# Values of options that are not given, or auto, until `startup.techniques` steps back from one.
WANTED = {"scheduling": "calibrated-srjf", "suffix_kv": "evict"}


class _NotGiven(enum.Enum):
    """The value of an option that was not given, while a configuration is made: some options have None as a value."""

    NOT_GIVEN = enum.auto()


NOT_GIVEN: Final = _NotGiven.NOT_GIVEN


def _auto_or_int(text: str) -> int | None:
    return None if text == "auto" else int(text)


def _bool(text: str) -> bool:
    return {"true": True, "false": False}[text]


def _option(default: Any, help: str, **extra: Any) -> Any:
    """Declares an option.

    Args:
        default: the value where none is given.
        extra: `type`; `choices`; `none`: how None is written; `paper`: the value under --paper; `bare`: that of a flag alone.
    """
    return dataclasses.field(default=NOT_GIVEN, metadata={"default": default, "help": help, **extra})


def _setting(default: Any, help: str, **extra: Any) -> Any:
    """Declares an option of `--set NAME=VALUE`, for experiments: its default is measured at start or proven."""
    return _option(default, help, is_setting=True, **extra)


CLIENTS = ("none", "user", "key")
LIMITS = ("max_waiting", "max_client_waiting")


@dataclasses.dataclass(frozen=True)
class PrefillConfig:
    """Everything that this package adds to SGLang's flags. Picklable: it is an argument of the scheduler process.

    A field holds the value that was given, else the paper's with `paper=True`, else its default. Raises ConfigurationError
    with a line for each value that is wrong or contradicts another.
    """

    paper: bool = _option(
        False,
        "the paper's engine: {paper}; another value of one of these is refused",
    )
    scheduling: str = _option(
        AUTO,
        "which request runs next. calibrated-srjf: shortest predicted job first, with the prefix cache as it is now; srjf:"
        " without a look at the cache; fifo: first in, first out; stock: SGLang's own scheduler; auto: calibrated-srjf where the"
        " model and SGLang's flags allow it, else stock",
        choices=lambda: (AUTO, *POLICIES, STOCK),  # policies registered by then
        paper="calibrated-srjf",
    )
    fairness_lambda: float = _option(
        500.0,
        "credit of a waiting request, in cache-miss tokens per second of waiting; 0: pure shortest job first",
        paper=500.0,
    )
    fair_by: str = _option(
        "user",
        "clients that get fair shares. user: users that requests name (header x-user-id, or `user` of the body); key: API keys;"
        " none: all requests are of one client. Always none with fifo, whole-job and stock",
        choices=CLIENTS,
        paper="none",
    )
    isolate_by: str = _option(
        "none",
        "clients whose cached prefixes no other client can hit. user, key: as of --fair-by; none: all requests share all",
        choices=CLIENTS,
    )
    shared_prefix: str | None = _option(
        None,
        "a file with the text of a system prompt that all clients share in spite of --isolate-by. It is computed at start and"
        " stays in the prefix cache",
        type=str,
        none="none",
    )
    max_waiting: str | None = _option(
        None, "waiting limit: N prompts, or Nt tokens of prompts; what exceeds it gets a 429", type=str, none="none"
    )
    max_client_waiting: str | None = _option(None, "the same for each client of --fair-by", type=str, none="none")
    request_log: str | None = _option(
        None,
        "a file to which one JSON line per finished request is appended (times, tokens, hashes of its prefixes, no text), for"
        " `python -m sgl_prefill.plan --trace`. Not for --scheduling stock",
        type=str,
        none="none",
    )
    hybrid_prefill: str = _option(
        "auto",
        "compute everything but attention chunk by chunk, in one forward pass. auto: where the model can be traced; on: or refuse"
        " the start; off: SGLang's layers",
        choices=(AUTO, "on", "off"),
    )
    suffix_kv: str = _option(
        AUTO,
        "evict: keep only as much of a long prompt's KV as fits, and compute the rest with one layer's KV of scratch memory;"
        " keep: as stock; auto: evict where the model's KV pool and SGLang's flags allow it",
        choices=(AUTO, "evict", "keep"),
    )
    max_input_length: int | None = _option(
        None,
        "longest prompt in tokens; memory is set aside for it. auto: the context length, or what half of the memory beyond the"
        " weights can serve",
        type=_auto_or_int,
        none="auto",
    )
    logits_dtype: str = _option(
        "float32",
        "dtype of the logits of up to 32 rows a step on a CPU, 128 on a GPU. float32: close labels do not tie; model: as stock",
        choices=("float32", "model"),
    )
    rerank_template: str | None = _option(
        None,
        "the prompt by which a causal model reranks a document: yes-no, qwen3-reranker, or a file of your own (http/README.md)",
        type=str,
        none="yes-no, and SGLang's own handler for models whose chat template is a reranker's",
    )
    stable_answers: str = _option(
        AUTO,
        "a request gets the same bits whatever runs beside it, is cached or is cut into chunks, on one machine and build. auto:"
        " where the machine (a CPU) and all parts of the model allow it; on: or refuse the start; off: answers differ in their"
        " last digits",
        choices=(AUTO, "on", "off"),
        bare="on",
    )
    allow_generation: bool = _option(False, "also serve requests for more than one token")
    memory_budget_gb: float | None = _option(
        None, "CPU only: memory for weights, activations and KV together, in GiB", none="half of the free memory"
    )
    calibrations: str | None = _option(
        None,
        "a folder of calibrations of label probabilities (NAME.json, by `python -m sgl_prefill.calibrate`), read at start",
        type=str,
        none="none",
    )
    max_body_mb: float = _option(32.0, "largest HTTP request body in MiB; a larger one gets a 413")
    jct_model: str = _setting(
        "fitted",
        "predicted time of a request. fitted: milliseconds, measured at start and corrected by observed times; cache-miss: the"
        " number of tokens that are not cached",
        choices=("fitted", "cache-miss"),
        paper="cache-miss",
    )
    sharers: str = _setting(
        "count",
        "count: a request that computes a prefix for which others wait costs as much as all of them together, divided by their"
        " number; ignore: it costs what it computes itself",
        choices=("count", "ignore"),
        paper="ignore",
    )
    max_queue_s: float | None = _setting(
        None,
        "seconds after which a waiting request runs next, whatever its score and priority; not with fifo",
        none="no bound",
        paper=None,
    )
    pack_step_tokens: int | None = _setting(
        None,
        "a step takes further requests while it computes at most so many tokens. 0: one request a step; auto: where a token costs"
        " its full price on this machine; not for --scheduling stock",
        type=_auto_or_int,
        none="auto",
        paper=0,
    )
    background_step_ms: float = _setting(
        20.0,
        "longest predicted step of background jobs (header x-prefill-background: 1), which run when no other request waits",
    )
    hybrid_chunk_tokens: int | None = _setting(
        None,
        "tokens of a chunk of hybrid prefilling. auto: the fewest that cost no time on this machine",
        type=_auto_or_int,
        none="auto",
    )
    shared_prefix_attention: str = _setting(
        "auto",
        "requests of a step that share a cached prefix attend to it together. auto: on a CPU as on, on a GPU as off; on: wherever"
        " they share one; off: each request alone, as stock",
        choices=("auto", "on", "off"),
    )
    skip_parity_gate: bool = _setting(
        False, "true: serve without the check at start that all paths give the same answers", type=_bool
    )

    def __post_init__(self) -> None:
        given = {field.name for field in dataclasses.fields(self) if getattr(self, field.name) not in (NOT_GIVEN, AUTO)}
        self.__dict__["_given"] = frozenset(given)
        self._fill_in(given)
        problems = self._contradictions(given)
        problems += [
            f"{flag_of(field.name)} is {value!r}: it must be {_listed(choices, 'or')}"
            for field in dataclasses.fields(self)
            if (choices := choices_of(field)) is not None and (value := getattr(self, field.name)) not in choices
        ]
        if self.hybrid_chunk_tokens is not None and self.hybrid_chunk_tokens < 1:
            problems.append(f"--set hybrid_chunk_tokens is {self.hybrid_chunk_tokens}: it must be auto or at least 1")
        if self.max_input_length is not None and self.max_input_length < 1:
            problems.append(f"--max-input-length is {self.max_input_length}: it must be auto or at least 1 token")
        if not math.isfinite(self.fairness_lambda) or self.fairness_lambda < 0:
            problems.append(
                f"--fairness-lambda is {self.fairness_lambda}: it must be a number >= 0 (tokens per second)"
            )
        if self.max_queue_s is not None and not 0 <= self.max_queue_s < math.inf:
            problems.append(f"--set max_queue_s is {self.max_queue_s}: it must be a number of seconds >= 0")
        if self.pack_step_tokens is not None and self.pack_step_tokens < 0:
            problems.append(f"--set pack_step_tokens is {self.pack_step_tokens}: it must be auto or a number >= 0")
        if not 0 < self.background_step_ms < math.inf:
            problems.append(f"--set background_step_ms is {self.background_step_ms}: it must be a positive number")
        if self.memory_budget_gb is not None and not 0 < self.memory_budget_gb < math.inf:
            problems.append(f"--memory-budget-gb is {self.memory_budget_gb}: it must be a positive number of GiB")
        problems += [
            f"{flag_of(name)} is {text!r}: it must be a number of prompts, like 200, or of tokens, like 100000t, and at least 1"
            for name in LIMITS
            if (text := getattr(self, name)) is not None and Limit.parse(text) is None
        ]
        if not 0 < self.max_body_mb < math.inf:
            problems.append(f"--max-body-mb is {self.max_body_mb}: it must be a positive number of MiB")
        if problems:
            raise ConfigurationError("\n".join(problems))

    def _fill_in(self, given: Collection[str]) -> None:
        """Put a value into each field that was not given, in the order of the fields: `paper` and `scheduling` come first."""
        for field in dataclasses.fields(self):
            if field.name in given:
                continue
            value = WANTED.get(field.name, field.metadata["default"])
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
        if self.stable_answers != "on":
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
        limits = [flag_of(name) for name in LIMITS if getattr(self, name) is not None]
        if self.scheduling == STOCK and limits:
            problems.append(
                f"{', '.join(limits)}: --scheduling stock has no such limits, but SGLang's --max-queued-requests; leave them out"
            )
        elif not self.is_fair and self.max_client_waiting is not None:
            problems.append(
                "--max-client-waiting: there are no clients with --fair-by none; leave it out, or name what a client is"
            )
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
                f"{flag_of(field.name)} is {shown(field, getattr(self, field.name))}, and --paper means"
                f" {shown(field, field.metadata['paper'])}: leave one of the two out"
                for field in dataclasses.fields(self)
                if field.name in given
                and "paper" in field.metadata
                and getattr(self, field.name) != field.metadata["paper"]
            ]
        if self.fair_by != "none" and not can_be_fair(self.scheduling):
            return [f"--fair-by {self.fair_by} is not for --scheduling {self.scheduling}: leave it out"]
        if self.scheduling == STOCK and self.pack_step_tokens != 0:
            return [
                "--set pack_step_tokens is not for --scheduling stock, since SGLang's own scheduler fills a step by itself:"
                " leave it out"
            ]
        return []

    @property
    def given(self) -> frozenset[str]:
        """Names of the options that were given."""
        return self.__dict__["_given"]  # type: ignore[no-any-return]

    def with_default(self, values: Mapping[str, Any], reasons: Mapping[str, str] | None = None) -> PrefillConfig:
        """Returns the configuration with other values of options that were not given. Raises ConfigurationError.

        reasons: why a technique is off, by its name.
        """
        values = {**self.__dict__.get("_defaults", {}), **values}
        found = PrefillConfig(**{**values, **{name: getattr(self, name) for name in self.given}})
        found.__dict__.update(
            _given=self.given, _defaults=values, _stepped_back={**self.stepped_back, **(reasons or {})}
        )
        return found

    @property
    def stepped_back(self) -> Mapping[str, str]:
        """Techniques that are off although they were not asked to be, by name, and why."""
        return self.__dict__.get("_stepped_back", {})  # type: ignore[no-any-return]

    @property
    def has_policy(self) -> bool:
        """Says whether a policy of ours decides who runs, and not SGLang's scheduler."""
        return self.scheduling != STOCK

    @property
    def is_fair(self) -> bool:
        return self.fair_by != "none"

    @property
    def quotas(self) -> Quotas:
        of_all, of_client = (
            Limit.parse(text) if text is not None else None for text in (self.max_waiting, self.max_client_waiting)
        )
        return Quotas(of_all or Limit(), of_client or Limit())

    @property
    def evicts_suffix_kv(self) -> bool:
        return self.suffix_kv == "evict"

    @property
    def max_body_bytes(self) -> int:
        return int(self.max_body_mb * (1 << 20))

    @classmethod
    def add_cli_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """Adds one flag per option, and `--set` for the settings. What is not given is not in the namespace."""
        group = parser.add_argument_group("sgl_prefill")
        for field in dataclasses.fields(cls):
            if not is_setting(field):
                _add_flag(group, field)
        cls.add_set_argument(group)

    @classmethod
    def add_set_argument(cls, parser: argparse._ActionsContainer) -> None:
        settings = "; ".join(
            f"{f.name} ({shown(f, f.metadata['default'])}): {f.metadata['help']}" for f in settings_of(cls)
        )
        parser.add_argument(
            "--set",
            action="append",
            default=argparse.SUPPRESS,
            metavar="NAME=VALUE",
            help=f"a setting for experiments, whose default is measured or proven; can be repeated. {settings}",
        )

    @classmethod
    def from_namespace(cls, namespace: argparse.Namespace) -> PrefillConfig:
        """Makes a configuration from the flags that were given. Raises ConfigurationError."""
        given = dict(vars(namespace))
        values = _parsed_settings(given.pop("set", []), cls)
        names = {field.name for field in dataclasses.fields(cls) if not is_setting(field)}
        return cls(**{name: value for name, value in given.items() if name in names}, **values)


def is_setting(field: dataclasses.Field[Any]) -> bool:
    return bool(field.metadata.get("is_setting"))


def settings_of(config: type[PrefillConfig]) -> list[dataclasses.Field[Any]]:
    return [field for field in dataclasses.fields(config) if is_setting(field)]


def _type_of(field: dataclasses.Field[Any]) -> Any:
    default = field.metadata["default"]
    return field.metadata.get("type", float if default is None else type(default))


def _add_flag(group: argparse._ActionsContainer, field: dataclasses.Field[Any]) -> None:
    default, text = field.metadata["default"], help_of(field)
    if isinstance(default, bool):
        group.add_argument(flag_of(field.name), action="store_true", default=argparse.SUPPRESS, help=text)
        return
    group.add_argument(
        flag_of(field.name),
        type=_type_of(field),
        default=argparse.SUPPRESS,
        choices=choices_of(field),
        **({"nargs": "?", "const": field.metadata["bare"]} if "bare" in field.metadata else {}),
        help=f"{text} (default: {shown(field, default)})",
    )


def _parsed_settings(assignments: Sequence[str], config: type[PrefillConfig]) -> dict[str, Any]:
    settings, values, problems = {field.name: field for field in settings_of(config)}, {}, []
    for assignment in assignments:
        name, _, text = assignment.partition("=")
        if name not in settings:
            problems.append(
                f"--set {assignment}: there is no setting {name!r}; the settings are {_listed(sorted(settings), 'and')}"
            )
            continue
        try:
            values[name] = _type_of(settings[name])(text)
        except (ValueError, KeyError):
            problems.append(f"--set {assignment}: {text!r} is no value of {name} ({settings[name].metadata['help']})")
    if problems:
        raise ConfigurationError("\n".join(problems))
    return values


def flag_of(name: str) -> str:
    """Returns how an option is given on the command line, without its value."""
    (field,) = (field for field in dataclasses.fields(PrefillConfig) if field.name == name)
    return f"--set {name}" if is_setting(field) else "--" + name.replace("_", "-")


def help_of(field: dataclasses.Field[Any]) -> str:
    text: str = field.metadata["help"]
    return text.replace("{paper}", _papers_options())


def choices_of(field: dataclasses.Field[Any]) -> Sequence[str] | None:
    choices: Any = field.metadata.get("choices")
    found: Sequence[str] | None = choices() if callable(choices) else choices
    return found


def _listed(names: Sequence[str], word: str) -> str:
    """Joins at least two names by commas and a word."""
    return ", ".join(names[:-1]) + f" {word} {names[-1]}"


def _papers_options() -> str:
    """Lists the options that --paper stands for, as command line."""
    fields = [field for field in dataclasses.fields(PrefillConfig) if "paper" in field.metadata]
    return ", ".join(
        f"{flag_of(field.name)}{'=' if is_setting(field) else ' '}{shown(field, field.metadata['paper'])}"
        for field in fields
    )


def shown(field: dataclasses.Field[Any], value: Any) -> str:
    """Writes a value as a user would."""
    if value is None:
        return str(field.metadata["none"])
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:g}" if isinstance(value, float) else str(value)
