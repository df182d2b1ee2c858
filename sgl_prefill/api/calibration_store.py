"""Calibrations by name: each a file of its tenant's folder, with the model that it was made for."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from sgl_prefill import demo_model, model_fingerprint
from sgl_prefill.core.label_calibration import (
    HIGHEST_SCALE,
    LOWEST_SCALE,
    METHODS,
    MOST_BIAS,
    N_BINS,
    Bin,
    Calibration,
    Quality,
)
from sgl_prefill.errors import BadRequestError, ConflictError, NotFoundError

if TYPE_CHECKING:
    from sgl_prefill.api.tokenizer_manager import PrefillTokenizerManager

FORMAT = 1
NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
OF_ALL = "all"  # the folder where there are no tenants; theirs are hexadecimal
MOST_OF_A_TENANT = 1_000
MOST_SHOWN = 20  # names or labels in a message

_Stamp = tuple[int, int, int]  # of a file: another one where it was written anew


class Measured(NamedTuple):
    """What a calibration is worth, on examples that it was not fitted to."""

    how: str
    before: Quality
    after: Quality


class ModelName(NamedTuple):
    """Which model a calibration is for."""

    name: str  # for people
    fingerprint: str
    adapter: str | None  # LoRA


class StoredCalibration(NamedTuple):
    """One calibration, as it lies on disk."""

    name: str
    method: str
    model: ModelName
    labels: list[str]
    calibration: Calibration  # in their order
    n_examples: int  # that it was fitted to, of labelled ones or of prompts without content
    created: int  # seconds since 1970
    measured: Measured | None
    way: dict[str, Any]  # how the labels get their probabilities: `AllowedAnswers.way`

    def check(self, labels: Sequence[str], way: Mapping[str, Any], adapters: set[str | None]) -> None:
        """Raises BadRequestError where a request allows other labels, or computes them in another way, and ConflictError where
        it names another adapter."""
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
            raise ConflictError(
                f"calibration {self.name!r} was made with {_adapter(self.model.adapter)}, and this request asks for"
                f" {_adapter(next(iter(others)))}: make another calibration for it"
            )

    def probabilities(self, labels: Sequence[str], probabilities: Sequence[float]) -> list[float]:
        """Returns the calibrated distribution in the order of these labels, which are the calibration's."""
        place = {label: index for index, label in enumerate(self.labels)}
        order = [place[label] for label in labels]
        scales, biases = self.calibration
        of_these = Calibration([scales[index] for index in order], [biases[index] for index in order])
        return of_these.probabilities(logs_of(probabilities))

    def to_json(self) -> dict[str, Any]:
        measured = None
        if self.measured is not None:
            how, before, after = self.measured
            measured = {"how": how, "before": _quality_json(before), "after": _quality_json(after)}
        return {
            "format": FORMAT,
            **self._asdict(),
            "model": self.model._asdict(),
            "calibration": self.calibration._asdict(),
            "measured": measured,
        }

    @classmethod
    def from_json(cls, found: Any) -> StoredCalibration:
        """Raises ValueError, TypeError, KeyError or AssertionError for what `to_json` has not made."""
        assert found.pop("format") == FORMAT
        measured = found["measured"]
        if measured is not None:
            measured = Measured(measured["how"], *(_quality_of(measured[name]) for name in ("before", "after")))
        made = cls(
            **{
                **found,
                "model": ModelName(**found["model"]),
                "calibration": Calibration(**found["calibration"]),
                "measured": measured,
            }
        )
        scales, biases = made.calibration
        assert made.method in METHODS
        assert isinstance(made.way, dict)
        assert len(scales) == len(biases) == len(set(made.labels)) == len(made.labels) > 1
        assert all(LOWEST_SCALE <= scale <= HIGHEST_SCALE for scale in scales)
        assert all(abs(bias) <= MOST_BIAS for bias in biases)
        return made


class CalibrationStore:
    """The calibrations of one folder, which several servers may share: what another has written is seen at once."""

    def __init__(self, folder: Path, fingerprint: Callable[[], str]) -> None:
        self._folder = folder
        self._fingerprint = fingerprint  # of the model that is served
        self._recent: dict[Path, tuple[_Stamp, StoredCalibration]] = {}  # those that were applied

    def get(self, tenant: str, name: str) -> StoredCalibration:
        """Returns a calibration that may be applied. Raises NotFoundError, or ConflictError where it is another model's."""
        path = self._path(tenant, name)
        stamp = _stamp(path)
        found = self.look_at(tenant, name)
        if found.model.fingerprint != (served := self._fingerprint()):
            raise ConflictError(
                f"calibration {name!r} was made for the model {found.model.name!r} ({found.model.fingerprint}), and this server"
                f" serves another one ({served}): make it again here, under another name or with replace"
            )
        if stamp is not None:
            if len(self._recent) >= MOST_OF_A_TENANT:
                self._recent.clear()
            self._recent[path] = stamp, found
        return found

    def recent(self, tenant: str, name: str) -> StoredCalibration | None:
        """Returns what `get` has returned before, if its file and the model are still the same: one look at the file."""
        path = self._path(tenant, name)
        stamp, found = self._recent.get(path, (None, None))
        is_same = found is not None and stamp == _stamp(path) and found.model.fingerprint == self._fingerprint()
        return found if is_same else None

    def look_at(self, tenant: str, name: str) -> StoredCalibration:
        """Returns a calibration, whichever model it is for. Raises NotFoundError, which lists those that exist."""
        path = self._path(tenant, name)
        try:
            return StoredCalibration.from_json(json.loads(path.read_text()))
        except FileNotFoundError as error:
            names = self.names(tenant)
            raise NotFoundError(
                f"calibration {name!r} does not exist; those that do: {shown(names) if names else 'none yet'}."
                " POST /v1/calibrations makes one"
            ) from error
        except (OSError, ValueError, TypeError, KeyError, AttributeError, AssertionError) as error:
            raise ConflictError(
                f"the file of calibration {name!r} cannot be read as one ({type(error).__name__}): DELETE it, and make it again"
            ) from error

    def fits(self, stored: StoredCalibration) -> bool:
        return stored.model.fingerprint == self._fingerprint()

    def names(self, tenant: str) -> list[str]:
        return sorted(path.stem for path in self._of(tenant).glob("*.json") if NAME.fullmatch(path.stem))

    def check_new(self, tenant: str, name: str, *, replace: bool) -> None:
        """Raises ConflictError where the name is taken, or where there are too many."""
        if not replace and self._path(tenant, name).exists():
            raise ConflictError(
                f"calibration {name!r} exists already: DELETE it, set replace to true, or take another name"
            )
        if len(names := self.names(tenant)) >= MOST_OF_A_TENANT and name not in names:
            raise ConflictError(
                f"there are {len(names)} calibrations, and {MOST_OF_A_TENANT} is the limit: DELETE some"
            )

    def put(self, tenant: str, stored: StoredCalibration, *, replace: bool) -> None:
        """Writes one, whole or not at all, also beside another server. Raises what `check_new` raises."""
        self.check_new(tenant, stored.name, replace=replace)
        try:
            self._write(self._path(tenant, stored.name), json.dumps(stored.to_json()), replace=replace)
        except FileExistsError as error:  # somebody was faster
            raise ConflictError(f"calibration {stored.name!r} exists already: take another name") from error
        except OSError as error:
            raise ConflictError(
                f"this server cannot write calibrations ({error.strerror or error}): start it with --calibrations and a folder"
                " that it may write to"
            ) from error

    def _write(self, path: Path, text: str, *, replace: bool) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".part", delete=False) as part:
            try:
                part.write(text)
                part.flush()
                os.fsync(part.fileno())
                if replace:
                    os.replace(part.name, path)
                else:
                    os.link(part.name, path)
            finally:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(part.name)

    def delete(self, tenant: str, name: str) -> None:
        """Takes a calibration away, also one that cannot be read. Raises NotFoundError."""
        path = self._path(tenant, name)
        if not path.exists():
            self.look_at(tenant, name)
        path.unlink(missing_ok=True)

    def _of(self, tenant: str) -> Path:
        return self._folder / (tenant.rstrip("/") or OF_ALL)

    def _path(self, tenant: str, name: str) -> Path:
        check_name(name)
        return self._of(tenant) / f"{name}.json"


def store_of(manager: PrefillTokenizerManager) -> CalibrationStore:
    given = manager.prefill_config.calibrations
    folder = demo_model.cache_root() / "calibrations" if given is None else Path(given)
    return CalibrationStore(folder, lambda: fingerprint_of(manager))


_fingerprints: dict[str, str] = {}


def fingerprint_of(manager: PrefillTokenizerManager) -> str:
    """Says which model is served; its files are read once, also where weights are loaded anew from another folder."""
    args = manager.server_args
    if args.model_path not in _fingerprints:
        settings = {
            name: getattr(args, name)
            for name in (
                "quantization",
                "chat_template",
                "completion_template",
                "load_format",
                "json_model_override_args",
            )
        }
        _fingerprints[args.model_path] = model_fingerprint.fingerprint(args.model_path, settings, args.revision)
    return _fingerprints[args.model_path]


def _stamp(path: Path) -> _Stamp | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def check_name(name: str) -> None:
    """Raises BadRequestError for what is no name."""
    if not NAME.fullmatch(name):
        raise BadRequestError(
            f"calibration {name[:80]!r}: a name has 1 to 64 of the characters A-Z, a-z, 0-9, '.', '_' and '-'"
        )


def logs_of(probabilities: Sequence[float]) -> list[float]:
    """Returns the log-probabilities, -inf of 0."""
    return [math.log(p) if p > 0 else -math.inf for p in probabilities]


def shown(texts: Sequence[str]) -> str:
    """Writes names or labels for a message."""
    listed = ", ".join(map(repr, texts[:MOST_SHOWN]))
    return listed + (f" and {len(texts) - MOST_SHOWN} more" if len(texts) > MOST_SHOWN else "")


def _way(way: Mapping[str, Any]) -> str:
    return (
        ", ".join(f"{name} {value!r}" for name, value in way.items())
        or "neither answer_end, normalise nor other surface forms"
    )


def _adapter(name: str | None) -> str:
    return "no adapter" if name is None else f"the adapter {name!r}"


def _quality_json(quality: Quality) -> dict[str, Any]:
    return {**quality._asdict(), "bins": [one._asdict() for one in quality.bins]}


def _quality_of(found: dict[str, Any]) -> Quality:
    bins = [Bin(**one) for one in found["bins"]]
    assert len(bins) == N_BINS
    return Quality(**{**found, "bins": bins})
