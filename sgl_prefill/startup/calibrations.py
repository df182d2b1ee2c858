"""Calibrations of label probabilities: files of `sgl_prefill.calibrate`, which the server loads at start and applies by name."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sgl_prefill.core.label_calibration import HIGHEST_SCALE, LOWEST_SCALE, METHODS, MOST_BIAS, Calibration, Quality
from sgl_prefill.errors import BadRequestError, ConfigurationError
from sgl_prefill.startup import model_fingerprint

FORMAT = 1
NAME = re.compile(r"[A-Za-z][A-Za-z0-9._-]{0,99}")
NAME_RULE = "a letter, then letters, digits and ._-, 100 at most"
MOST_SHOWN = 20  # names or labels in a message
# Options of SGLang that change a model's answers, with their defaults.
SETTINGS = {"quantization": None, "chat_template": None, "completion_template": None, "json_model_override_args": "{}"}


class Measured(NamedTuple):
    """Quality on examples that the calibration was not fitted to."""

    how: str
    before: Quality
    after: Quality


class ModelName(NamedTuple):
    name: str  # for messages
    fingerprint: str
    adapter: str | None  # LoRA


class StoredCalibration(NamedTuple):
    name: str  # of its file, without .json
    method: str
    model: ModelName
    labels: list[str]
    calibration: Calibration  # scales and biases in the order of the labels
    n_examples: int  # labelled examples or content-free prompts that it was fitted to
    measured: dict[str, Any] | None  # `Measured` as JSON
    way: dict[str, Any]  # options by which labels get their probabilities: `AllowedAnswers.way`

    def check(self, labels: Sequence[str], way: Mapping[str, Any], adapters: set[str | None]) -> None:
        """Raises BadRequestError where a request's labels, adapter or `way` differ from the calibration's."""
        if Counter(labels) != Counter(self.labels):
            raise BadRequestError(
                f"calibration {self.name!r} is for the labels {shown(self.labels)}, and this request allows {shown(labels)}:"
                " allow the same ones, in any order, or make a calibration for these"
            )
        if way != self.way:
            raise BadRequestError(
                f"calibration {self.name!r} is for labels with {_way(self.way)}, and this request has {_way(way)}: ask for them"
                " in the same way, or make a calibration for this one"
            )
        if others := adapters - {self.model.adapter}:
            raise BadRequestError(
                f"calibration {self.name!r} was made with {_adapter(self.model.adapter)}, and this request asks for"
                f" {_adapter(next(iter(others)))}: make another calibration for it"
            )

    def probabilities(self, labels: Sequence[str], probabilities: Sequence[float]) -> list[float]:
        """Returns the calibrated distribution. labels: the calibration's, in any order."""
        place = {label: index for index, label in enumerate(self.labels)}
        order = [place[label] for label in labels]
        scales, biases = self.calibration
        of_these = Calibration([scales[index] for index in order], [biases[index] for index in order])
        return of_these.probabilities([math.log(p) if p > 0 else -math.inf for p in probabilities])

    def to_json(self) -> dict[str, Any]:
        fields = self._asdict()
        del fields["name"]
        return {"format": FORMAT, **fields, "model": self.model._asdict(), "calibration": self.calibration._asdict()}

    @classmethod
    def from_json(cls, name: str, found: Any) -> StoredCalibration:
        """Raises ValueError, TypeError, KeyError, AttributeError or AssertionError for anything but output of `to_json`."""
        assert found.pop("format") == FORMAT
        found |= {"model": ModelName(**found["model"]), "calibration": Calibration(**found["calibration"])}
        made = cls(name=name, **found)
        scales, biases = made.calibration
        assert made.method in METHODS
        assert isinstance(made.way, dict)
        assert len(scales) == len(biases) == len(set(made.labels)) == len(made.labels) > 1
        assert all(LOWEST_SCALE <= scale <= HIGHEST_SCALE for scale in scales)
        assert all(abs(bias) <= MOST_BIAS for bias in biases)
        return made


def load(folder: str | None, server_args: Any) -> dict[str, StoredCalibration]:
    """Returns the calibrations of a folder by name. Raises ConfigurationError with a line for each that it cannot apply."""
    if folder is None:
        return {}
    if not Path(folder).is_dir():
        raise ConfigurationError(f"--calibrations {folder} is no folder: create it, or leave the option out")
    found, problems = {}, []
    for path in sorted(Path(folder).glob("*.json")):
        if not NAME.fullmatch(path.stem):
            problems.append(
                f"--calibrations: {str(path)!r} cannot be asked for by name: rename it to {NAME_RULE}, and .json"
            )
            continue
        try:
            one = StoredCalibration.from_json(path.stem, json.loads(path.read_text()))
        except (OSError, ValueError, TypeError, KeyError, AttributeError, AssertionError) as error:
            problems.append(
                f"--calibrations: {path} is no calibration ({type(error).__name__}): write it with"
                " python -m sgl_prefill.calibrate, or remove it"
            )
            continue
        if one.model.fingerprint != (served := fingerprint_of(server_args)):
            problems.append(
                f"--calibrations: {path} was made for the model {one.model.name!r} ({one.model.fingerprint}), and this server"
                f" serves {server_args.model_path!r} ({served}): make it again for this model, or remove it"
            )
        found[one.name] = one
    if problems:
        raise ConfigurationError("\n".join(problems))
    return found


def by_name(calibrations: Mapping[str, StoredCalibration], name: str) -> StoredCalibration:
    """Raises BadRequestError with the existing names for another name."""
    if name not in calibrations:
        names = shown(sorted(calibrations)) if calibrations else "none (start the server with --calibrations DIR)"
        raise BadRequestError(f"calibration {name[:80]!r} does not exist; this server has {names}")
    return calibrations[name]


_fingerprints: dict[tuple[Any, ...], str] = {}  # cached: reading the files takes a second


def fingerprint_of(server_args: Any) -> str:
    """Returns the fingerprint of a model with SGLang's options. server_args: has `model_path`, `revision` and SETTINGS."""
    settings = {name: getattr(server_args, name) for name in SETTINGS}
    key = (server_args.model_path, server_args.revision, *map(str, settings.values()))
    if key not in _fingerprints:
        _fingerprints[key] = model_fingerprint.fingerprint(server_args.model_path, settings, server_args.revision)
    return _fingerprints[key]


def shown(texts: Sequence[str]) -> str:
    """Formats names or labels for a message."""
    listed = ", ".join(map(repr, texts[:MOST_SHOWN]))
    return listed + (f" and {len(texts) - MOST_SHOWN} more" if len(texts) > MOST_SHOWN else "")


def _way(way: Mapping[str, Any]) -> str:
    return (
        ", ".join(f"{name} {value!r}" for name, value in way.items())
        or "neither answer_end, normalise nor other surface forms"
    )


def _adapter(name: str | None) -> str:
    return "no adapter" if name is None else f"the adapter {name!r}"
