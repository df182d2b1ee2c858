"""Calibrations of label probabilities: files for one model, read at the start, and the program that writes them."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sgl_prefill import calibrate
from sgl_prefill.core.label_calibration import Calibration
from sgl_prefill.core.labels import restrict
from sgl_prefill.errors import BadRequestError, ConfigurationError
from sgl_prefill.http.scored_prompt import check_reply_fields
from sgl_prefill.startup import calibrations
from sgl_prefill.startup.calibrations import SETTINGS, ModelName, StoredCalibration
from sgl_prefill.startup.model_fingerprint import N_PIECES, PIECE_BYTES, WHOLE_BYTES, fingerprint

ARGS = SimpleNamespace(model_path="nobody/none", revision=None, **SETTINGS)
STORED = StoredCalibration(
    "reviews",
    "vector",
    ModelName("demo", calibrations.fingerprint_of(ARGS), None),
    [" no", " yes"],
    Calibration([0.5, 2.0], [0.25, -3.0]),
    24,
    None,
    {},
)


def write(folder: Path, *stored: StoredCalibration) -> str:
    for one in stored:
        (folder / f"{one.name}.json").write_text(json.dumps(one.to_json()))
    return str(folder)


def test_a_folder_is_read_by_name(tmp_path: Path) -> None:
    other = STORED._replace(name="b", way={"normalise": "mean"})
    found = calibrations.load(write(tmp_path, STORED, other), ARGS)
    assert found == {"reviews": STORED, "b": other}
    assert calibrations.by_name(found, "b") == other
    with pytest.raises(BadRequestError, match="'a' does not exist; this server has 'b', 'reviews'"):
        calibrations.by_name(found, "a")
    with pytest.raises(BadRequestError, match=r"none .*--calibrations DIR"):
        calibrations.by_name(calibrations.load(None, ARGS), "a")


def test_all_files_that_cannot_be_applied_are_named_at_once(tmp_path: Path) -> None:
    """Another model's with both fingerprints."""
    folder = write(tmp_path, STORED, STORED._replace(name="other", model=ModelName("old", "f2", None)))
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(ConfigurationError) as caught:
        calibrations.load(folder, ARGS)
    broken, other = str(caught.value).splitlines()
    assert "broken.json is no calibration" in broken
    assert "other.json was made for the model 'old' (f2)" in other
    assert f"'nobody/none' ({STORED.model.fingerprint})" in other
    with pytest.raises(ConfigurationError, match="missing is no folder"):
        calibrations.load(str(tmp_path / "missing"), ARGS)


@pytest.mark.parametrize("name", ["..", "-rf", "9", "a b", "ä", "a" * 101])
def test_a_name_is_one_that_can_be_written_in_a_request(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigurationError, match=r"rename it to a letter"):
        calibrations.load(write(tmp_path, STORED._replace(name=name)), ARGS)


@pytest.mark.parametrize(
    "change",
    [
        lambda found: found.update(format=0),
        lambda found: found.pop("labels"),
        lambda found: found["labels"].append(" maybe"),
        lambda found: found["calibration"].update(scales=[1.0, math.nan]),
        lambda found: found["calibration"].update(biases=[1.0, "x"]),
        lambda found: found.update(method="unknown"),
    ],
)
def test_a_file_that_is_none_is_refused(tmp_path: Path, change: Any) -> None:
    found = json.loads(json.dumps(STORED.to_json()))
    change(found)
    (tmp_path / "reviews.json").write_text(json.dumps(found))
    with pytest.raises(ConfigurationError, match="is no calibration"):
        calibrations.load(str(tmp_path), ARGS)


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
    with pytest.raises(BadRequestError, match="no adapter, and this request asks for the adapter 'german'"):
        STORED.check([" yes", " no"], {}, {None, "german"})
    with pytest.raises(BadRequestError, match="has normalise 'mean'"):
        STORED.check([" yes", " no"], {"normalise": "mean"}, {None})


def row(yes_minus_no: float, **answer: Any) -> dict[str, Any]:
    """A prompt after which log P(yes) - log P(no) is this."""
    labels = [{"label": "no", "logprob": -3.0}, {"label": "yes", "raw_score": yes_minus_no - 3.0, "logprob": 0.0}]
    return {"label_scores": {"labels": labels}, **answer}


def examples(n: int, shift: float = 0.0) -> list[dict[str, Any]]:
    """The sign says the label, but for a shift towards yes."""
    return [
        row((index % 5 + 1) * sign + shift, label=("no", "yes")[sign > 0]) for index in range(n) for sign in (-1, 1)
    ][:n]


def calibrated(folder: Path, rows: list[dict[str, Any]], method: str, *options: str) -> dict[str, Any]:
    (folder / "scored.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    output = folder / "made.json"
    arguments = [
        str(folder / "scored.jsonl"),
        "--method",
        method,
        "--model-path",
        "nobody/none",
        "--output",
        str(output),
    ]
    calibrate.main([*arguments, *options])
    found: dict[str, Any] = json.loads(output.read_text())
    return found


def test_what_the_program_writes_the_server_reads(tmp_path: Path) -> None:
    """Measured by cross-validation; with the plot that was asked for."""
    plot = tmp_path / "plot.png"
    found = calibrated(tmp_path, examples(40, shift=3.0), "vector", "--plot", str(plot), "--normalise", "mean")
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "cross-validation" in found["measured"]["how"]
    assert found["measured"]["after"]["accuracy"] > found["measured"]["before"]["accuracy"]
    stored = calibrations.load(str(tmp_path), ARGS)["made"]
    assert (stored.labels, stored.n_examples, stored.way) == (["no", "yes"], 40, {"normalise": "mean"})


def test_prompts_without_content_need_no_labels(tmp_path: Path) -> None:
    """Their mean distribution is divided by; labelled rows are measured on."""
    nothing = [row(1.0, content_free=True)] * 2
    found = calibrated(tmp_path, nothing, "contextual")
    no, yes = found["calibration"]["biases"]
    assert no - yes == pytest.approx(1.0)
    assert (found["measured"], found["n_examples"]) == (None, 2)
    measured = calibrated(tmp_path, [*nothing, *examples(9)], "contextual")
    assert measured["measured"]["before"]["n_examples"] == 9


def test_forms_of_labels_are_taken_from_the_reply(tmp_path: Path) -> None:
    """And `score`, which is what the server normalises; JSON writes -inf as null."""
    labels = [
        {"label": "good", "score": -1.0, "forms": [{"text": " good"}, {"text": " fine"}], "logprob": -9.0},
        {"label": "bad", "score": None, "forms": [{"text": "bad"}], "logprob": None},
    ]
    path = tmp_path / "scored.jsonl"
    path.write_text(json.dumps({"label_scores": {"labels": labels}, "label": "bad"}))
    found = calibrate.read(path)
    assert (found.forms, found.examples, found.answers) == ({"good": [" fine", " good"]}, [[-1.0, -math.inf]], [1])


@pytest.mark.parametrize(
    ("rows", "method", "told"),
    [
        ([], "vector", "is empty"),
        ([{"label": "no"}], "vector", "scored.jsonl:1: KeyError 'label_scores'"),
        ([*examples(2), row(1.0, label="maybe")], "vector", ":3: label is 'maybe': give one of 'no', 'yes'"),
        ([row(1.0, label="no", content_free=True)], "vector", ":1: label is 'no'"),
        ([row(math.inf, label="no")], "vector", "must be finite"),
        ([*examples(1), {**row(1.0), "label_scores": {"labels": []}}], "vector", ":2 has the labels"),
        (examples(19), "temperature", "19 examples .* at least 20"),
        ([row(1.0, label="no")] * 20, "temperature", "1 different right labels"),
        ([*[row(1.0, label="no")] * 20, row(1.0, label="yes")], "vector", "1 examples have the label 'yes'"),
        (examples(20), "contextual", '"content_free": true'),
    ],
)
def test_what_is_wrong_with_examples_is_named(tmp_path: Path, rows: list[Any], method: str, told: str) -> None:
    with pytest.raises(SystemExit, match=told):
        calibrated(tmp_path, rows, method)
    assert not (tmp_path / "made.json").exists()


def test_a_plot_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plot = ("--plot", str(tmp_path / "plot.png"))
    with pytest.raises(SystemExit, match="--plot needs labelled examples"):
        calibrated(tmp_path, [row(1.0, content_free=True)], "contextual", *plot)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(SystemExit, match="pip install matplotlib"):
        calibrated(tmp_path, examples(20), "temperature", *plot)


def test_options_without_labels_are_refused_and_left_out_ones_are_not() -> None:
    none = SimpleNamespace(calibration=None, raw_scores=False, top_alternatives=None)
    check_reply_fields(none, has_answers=False)
    for name, value in (("calibration", "a"), ("raw_scores", True), ("top_alternatives", 3)):
        request = SimpleNamespace(**{**vars(none), name: value})
        check_reply_fields(request, has_answers=True)
        with pytest.raises(BadRequestError, match=f"{name} without allowed answers"):
            check_reply_fields(request, has_answers=False)
    for n in (-1, 0, 101):
        with pytest.raises(BadRequestError, match=f"top_alternatives is {n}: ask for 1 to 100"):
            check_reply_fields(SimpleNamespace(**{**vars(none), "top_alternatives": n}), has_answers=True)


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
