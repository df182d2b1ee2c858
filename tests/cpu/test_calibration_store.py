"""Calibrations on disk: by name and tenant, for one model, whole or not at all."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sgl_prefill.api import reply_options
from sgl_prefill.api.calibration_store import (
    MOST_OF_A_TENANT,
    CalibrationStore,
    Measured,
    ModelName,
    StoredCalibration,
    check_name,
)
from sgl_prefill.api.reliability_plot import reliability_png
from sgl_prefill.core.label_calibration import Calibration, quality
from sgl_prefill.core.labels import restrict
from sgl_prefill.errors import BadRequestError, ConflictError, NotFoundError
from sgl_prefill.model_fingerprint import N_PIECES, PIECE_BYTES, WHOLE_BYTES, fingerprint

ANN, BOB, NOBODY = "a1/", "b2/", ""
MEASURED = Measured("by hand", quality([[0.9, 0.1]], [0]), quality([[0.6, 0.4]], [0]))
STORED = StoredCalibration(
    "reviews",
    "vector",
    ModelName("demo", "f1", None),
    [" no", " yes"],
    Calibration([0.5, 2.0], [0.25, -3.0]),
    24,
    1_700_000_000,
    MEASURED,
    {},
)


def store(folder: Path, model: str = "f1") -> CalibrationStore:
    return CalibrationStore(folder, lambda: model)


def test_what_was_stored_is_there_after_a_restart(tmp_path: Path) -> None:
    """All of it, from another store over the same folder; one without measurements too."""
    unmeasured = STORED._replace(name="b", measured=None)
    for one in (STORED, unmeasured):
        store(tmp_path).put(NOBODY, one, replace=False)
        assert store(tmp_path).get(NOBODY, one.name) == one
    assert store(tmp_path).names(NOBODY) == ["b", "reviews"]
    assert [path.suffix for path in tmp_path.rglob("*.*")] == [".json", ".json"]


def test_another_model_is_refused_by_name(tmp_path: Path) -> None:
    """It may be looked at, and made again."""
    store(tmp_path).put(NOBODY, STORED, replace=False)
    other = store(tmp_path, model="f2")
    with pytest.raises(ConflictError, match=r"'reviews' was made for the model 'demo' \(f1\).*another one \(f2\)"):
        other.get(NOBODY, "reviews")
    assert not other.fits(other.look_at(NOBODY, "reviews"))
    again = STORED._replace(model=ModelName("other", "f2", None))
    other.put(NOBODY, again, replace=True)
    assert other.get(NOBODY, "reviews") == again


def test_one_that_was_applied_is_not_read_again_until_it_is_another(tmp_path: Path) -> None:
    """Also where another server replaces it, or takes it away, or where the model changes."""
    served = ["f1"]
    calibrations, other = CalibrationStore(tmp_path, lambda: served[0]), store(tmp_path)
    other.put(NOBODY, STORED, replace=False)
    assert calibrations.recent(NOBODY, "reviews") is None
    found = calibrations.get(NOBODY, "reviews")
    assert calibrations.recent(NOBODY, "reviews") is found
    assert calibrations.recent(ANN, "reviews") is None
    served[0] = "f2"
    assert calibrations.recent(NOBODY, "reviews") is None
    served[0] = "f1"
    other.put(NOBODY, STORED._replace(n_examples=30), replace=True)
    assert calibrations.recent(NOBODY, "reviews") is None
    assert calibrations.get(NOBODY, "reviews").n_examples == 30
    other.delete(NOBODY, "reviews")
    assert calibrations.recent(NOBODY, "reviews") is None


def test_names_of_one_tenant_do_not_leak_to_another(tmp_path: Path) -> None:
    calibrations = store(tmp_path)
    calibrations.put(ANN, STORED, replace=False)
    calibrations.put(BOB, STORED._replace(name="mine"), replace=False)
    with pytest.raises(NotFoundError) as caught:
        calibrations.get(BOB, "reviews")
    assert "'mine'" in str(caught.value)
    assert calibrations.names(NOBODY) == []
    with pytest.raises(NotFoundError, match="none yet"):
        calibrations.delete(NOBODY, "reviews")
    calibrations.delete(ANN, "reviews")
    assert calibrations.names(ANN) == []


@pytest.mark.parametrize("name", ["", "a/b", "../x", "a\\b", "a b", "a\n", "ü", "a" * 65, "%2e"])
def test_a_name_cannot_leave_the_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(BadRequestError, match="1 to 64"):
        store(tmp_path).get(NOBODY, name)


@pytest.mark.parametrize("name", [".", "..", "...", "-", "a.json", "a" * 64])
def test_any_other_name_is_a_file_of_the_folder(tmp_path: Path, name: str) -> None:
    check_name(name)
    calibrations = store(tmp_path)
    calibrations.put(ANN, STORED._replace(name=name), replace=False)
    assert calibrations.names(ANN) == [name]
    (file,) = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert file.parent == tmp_path / "a1"
    calibrations.delete(ANN, name)


def test_what_is_there_is_replaced_only_where_that_is_asked_for(tmp_path: Path) -> None:
    calibrations = store(tmp_path)
    calibrations.put(NOBODY, STORED, replace=False)
    with pytest.raises(ConflictError, match="exists already"):
        calibrations.put(NOBODY, STORED._replace(n_examples=30), replace=False)
    assert calibrations.get(NOBODY, "reviews").n_examples == 24
    calibrations.put(NOBODY, STORED._replace(n_examples=30), replace=True)
    assert calibrations.get(NOBODY, "reviews").n_examples == 30


def test_a_folder_that_cannot_be_written_is_told_with_the_option(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConflictError, match=r"cannot write calibrations.*--calibrations"):
        store(tmp_path / "file" / "below").put(NOBODY, STORED, replace=False)


def test_two_servers_that_make_the_same_name_at_once_do_not_write_over_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second finds the file only when it writes its own."""
    store(tmp_path).put(NOBODY, STORED, replace=False)
    monkeypatch.setattr(CalibrationStore, "check_new", lambda *_, **__: None)
    with pytest.raises(ConflictError, match="exists already"):
        store(tmp_path).put(NOBODY, STORED._replace(n_examples=30), replace=False)
    assert store(tmp_path).get(NOBODY, "reviews").n_examples == 24
    assert [path.name for path in (tmp_path / "all").iterdir()] == ["reviews.json"]


def test_a_tenant_cannot_fill_the_disk(tmp_path: Path) -> None:
    folder = tmp_path / "a1"
    folder.mkdir()
    for number in range(MOST_OF_A_TENANT):
        (folder / f"{number}.json").write_text("{}")
    with pytest.raises(ConflictError, match=f"{MOST_OF_A_TENANT} is the limit"):
        store(tmp_path).put(ANN, STORED, replace=True)
    store(tmp_path).put(ANN, STORED._replace(name="0"), replace=True)


@pytest.mark.parametrize(
    "change",
    [
        lambda found: found.update(format=0),
        lambda found: found.pop("labels"),
        lambda found: found["labels"].append(" maybe"),
        lambda found: found["calibration"].update(scales=[1.0, math.nan]),
        lambda found: found["calibration"].update(biases=[1.0, "x"]),
        lambda found: found.update(method="unknown"),
        lambda found: found["measured"]["after"].update(bins=[]),
    ],
)
def test_a_file_that_is_none_is_refused_and_can_be_taken_away(tmp_path: Path, change: Any) -> None:
    """Never half applied."""
    calibrations = store(tmp_path)
    calibrations.put(NOBODY, STORED, replace=False)
    path = tmp_path / "all" / "reviews.json"
    found = json.loads(path.read_text())
    change(found)
    path.write_text(json.dumps(found))
    with pytest.raises(ConflictError, match="DELETE it"):
        calibrations.get(NOBODY, "reviews")
    calibrations.delete(NOBODY, "reviews")
    assert calibrations.names(NOBODY) == []


def test_labels_are_known_by_their_text_in_any_order() -> None:
    """Each keeps its own scale and bias."""
    logprobs = [-0.5, -2.0]
    expected = STORED.calibration.probabilities(logprobs)
    shares = restrict(logprobs).probabilities
    assert STORED.probabilities([" no", " yes"], shares) == pytest.approx(expected)
    assert STORED.probabilities([" yes", " no"], shares[::-1]) == pytest.approx(expected[::-1])
    STORED.check([" yes", " no"], {}, {None})
    for wrong in ([" no"], [" no", " yes", " maybe"], ["no", " yes"], [" no", " no", " yes"]):
        with pytest.raises(BadRequestError, match="' no', ' yes', and this request allows") as caught:
            STORED.check(wrong, {}, {None})
        assert repr(wrong[-1]) in str(caught.value)
    with pytest.raises(ConflictError, match="no adapter, and this request asks for the adapter 'german'"):
        STORED.check([" yes", " no"], {}, {None, "german"})
    with pytest.raises(BadRequestError, match="has normalise 'mean'"):
        STORED.check([" yes", " no"], {"normalise": "mean"}, {None})


def test_a_plot_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert reliability_png(STORED).startswith(b"\x89PNG")
    with pytest.raises(BadRequestError, match="evaluate_on"):
        reliability_png(STORED._replace(measured=None))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(BadRequestError, match="pip install matplotlib"):
        reliability_png(STORED)


def test_options_without_labels_are_refused_and_left_out_ones_are_not() -> None:
    none = SimpleNamespace(calibration=None, raw_scores=False, top_alternatives=None)
    reply_options.check(none, has_answers=False)
    for name, value in (("calibration", "a"), ("raw_scores", True), ("top_alternatives", 3)):
        request = SimpleNamespace(**{**vars(none), name: value})
        reply_options.check(request, has_answers=True)
        with pytest.raises(BadRequestError, match=f"{name} without allowed answers"):
            reply_options.check(request, has_answers=False)
    for n in (-1, 0, 101):
        with pytest.raises(BadRequestError, match=f"top_alternatives is {n}: ask for 1 to 100"):
            reply_options.check(SimpleNamespace(**{**vars(none), "top_alternatives": n}), has_answers=True)


def write_model(folder: Path, weights: bytes | bytearray) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text('{"hidden_size": 8}')
    (folder / "model.safetensors").write_bytes(weights)
    return folder


def test_a_copy_of_a_model_is_the_same_model_and_a_fine_tune_is_another(tmp_path: Path) -> None:
    """Where a file is large, pieces of it are read; notes beside it do not count, and settings do."""
    size = 2 * WHOLE_BYTES
    weights = bytearray(size)
    own = fingerprint(str(write_model(tmp_path / "a", weights)), {"quantization": None})
    copy = write_model(tmp_path / "copy", weights)
    (copy / "README.md").write_text("a copy")
    assert fingerprint(str(copy), {"quantization": None}) == own
    assert fingerprint(str(copy), {"quantization": "fp8"}) != own
    gap = (size - PIECE_BYTES) // (N_PIECES - 1)
    tuned = bytearray(weights)
    tuned[size // 2 : size // 2 + gap] = b"\1" * gap  # a small matrix of it
    assert fingerprint(str(write_model(tmp_path / "tuned", tuned)), {"quantization": None}) != own
    (copy / "config.json").write_text('{"hidden_size": 9}')
    assert fingerprint(str(copy), {"quantization": None}) != own


def test_a_name_without_files_counts_as_it_is(tmp_path: Path) -> None:
    assert fingerprint("nobody/none", {}) != fingerprint("nobody/other", {})
    file = tmp_path / "model.gguf"
    file.write_bytes(b"weights")
    assert fingerprint(str(file), {}) == fingerprint(str(file), {}) != fingerprint("not a name", {})
