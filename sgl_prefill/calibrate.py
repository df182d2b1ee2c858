"""Fits a calibration of label probabilities to scored examples and writes it as one JSON file.

    python -m sgl_prefill.calibrate scored.jsonl --method vector --model-path MODEL --output calibrations/reviews.json

Each line of the input holds the server's `label_scores` of one prompt, and "label", the right one, or "content_free": true for a
prompt without content (for --method contextual):

    {"label_scores": {"labels": [{"label": " yes", "logprob": -0.3}, {"label": " no", "logprob": -1.4}]}, "label": " yes"}
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sgl_prefill.core import label_calibration
from sgl_prefill.core.label_calibration import FROM_EXAMPLES, METHODS, N_BINS, N_FOLDS, Calibration, Quality
from sgl_prefill.errors import ConfigurationError, SglPrefillError
from sgl_prefill.startup.calibrations import (
    NAME,
    NAME_RULE,
    SETTINGS,
    Measured,
    ModelName,
    StoredCalibration,
    fingerprint_of,
    shown,
)

FEWEST_EXAMPLES = 20
FEWEST_OF_A_LABEL = 2  # for `vector`, which has two parameters for each label


class Scored(NamedTuple):
    """The rows of a file."""

    labels: list[str]
    forms: dict[str, list[str]]  # of labels that have other surface forms than their name
    content_free: list[list[float]]  # log-probabilities of the labels, a row a prompt, up to a common summand
    examples: list[list[float]]
    answers: list[int]  # of each of `examples`: the index of the right label


def read(path: Path) -> Scored:
    """Raises ConfigurationError, naming the line, for what is no scored example."""
    found: Scored | None = None
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            entries = row["label_scores"]["labels"]
            values = {entry["label"]: _score(entry) for entry in entries}
            is_content_free, label = row.get("content_free") is True, row.get("label")
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigurationError(
                f'{path}:{number}: {type(error).__name__} {error}: give {{"label_scores": ..., "label": ...}}, with the'
                " server's label_scores of a prompt"
            ) from error
        if found is None:
            found = Scored(list(values), _forms(entries), [], [], [])
        if len(values) != len(entries) or values.keys() != set(found.labels) or len(values) < 2:
            raise ConfigurationError(
                f"{path}:{number} has the labels {shown([entry['label'] for entry in entries])}, and the first line"
                f" {shown(found.labels)}: all lines need the same labels, at least two, none twice"
            )
        if is_content_free == (label is not None) or not (is_content_free or label in found.labels):
            raise ConfigurationError(
                f'{path}:{number}: label is {label!r}: give one of {shown(found.labels)}, or "content_free": true instead'
            )
        logprobs = [values[name] for name in found.labels]
        if not any(map(math.isfinite, logprobs)) or any(value != value or value == math.inf for value in logprobs):
            raise ConfigurationError(
                f"{path}:{number}: the log-probabilities are {logprobs}: one at least must be finite"
            )
        (found.content_free if is_content_free else found.examples).append(logprobs)
        if not is_content_free:
            found.answers.append(found.labels.index(label))
    if found is None:
        raise ConfigurationError(f"{path} is empty: give a line for each scored prompt")
    return found


def _score(entry: dict[str, Any]) -> float:
    """Returns what the server normalises over the labels: the raw score; of labels of several tokens `score` is the same."""
    value = next(entry[name] for name in ("raw_score", "score", "logprob") if name in entry)
    return -math.inf if value is None else float(value)  # JSON has no infinity


def _forms(entries: Sequence[dict[str, Any]]) -> dict[str, list[str]]:
    found = {entry["label"]: sorted(form["text"] for form in entry.get("forms", ())) for entry in entries}
    return {label: forms for label, forms in found.items() if forms and forms != [label]}


def fit(method: str, scored: Scored) -> tuple[Calibration, int, Measured | None]:
    """Returns the calibration, how many rows it was fitted to, and its quality on examples that it was not fitted to.

    Raises ConfigurationError for too few examples.
    """
    examples, answers = scored.examples, scored.answers
    before = [label_calibration.identity(len(scored.labels)).probabilities(row) for row in examples]
    if method in FROM_EXAMPLES:
        n_of = Counter(scored.labels[answer] for answer in answers)
        if len(examples) < FEWEST_EXAMPLES or len(n_of) < 2:
            raise ConfigurationError(
                f"there are {len(examples)} examples with {len(n_of)} different right labels: --method {method} needs at least"
                f" {FEWEST_EXAMPLES}, of at least two labels"
            )
        rarest = min(scored.labels, key=lambda label: n_of[label])
        if method == "vector" and n_of[rarest] < FEWEST_OF_A_LABEL:
            raise ConfigurationError(
                f"{n_of[rarest]} examples have the label {rarest!r}, and --method vector needs at least {FEWEST_OF_A_LABEL} of"
                " each label: give more, or use temperature"
            )
        calibration = label_calibration.fit(method, examples, answers)
        after = label_calibration.cross_validated(method, examples, answers)
        how, n_fitted = f"{N_FOLDS}-fold cross-validation", len(examples)
    else:
        if not scored.content_free:
            raise ConfigurationError('--method contextual needs lines with "content_free": true: give at least one')
        calibration = label_calibration.fit_contextual(scored.content_free)
        after = [calibration.probabilities(row) for row in examples]
        how, n_fitted = "all labelled examples", len(scored.content_free)
    if not examples:
        return calibration, n_fitted, None
    quality = label_calibration.quality
    return calibration, n_fitted, Measured(how, quality(before, answers), quality(after, answers))


def draw(path: Path, title: str, measured: Measured) -> None:
    """Writes the reliability plot: accuracy against confidence before and after, and the share of examples in each bin.

    Raises ConfigurationError without matplotlib.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigurationError("--plot needs matplotlib, which is not installed: pip install matplotlib") from error
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    sides = (("before", measured.before), ("after", measured.after))
    for axes, (name, quality) in zip(figure.subplots(1, 2, sharey=True), sides, strict=True):
        places = [(index + 0.5) / N_BINS for index in range(N_BINS)]
        axes.bar(places, [one.n_examples / quality.n_examples for one in quality.bins], 1 / N_BINS, alpha=0.2)
        used = [one for one in quality.bins if one.n_examples]
        axes.plot([0, 1], [0, 1], linestyle="--", linewidth=1, color="gray")
        axes.plot([one.confidence for one in used], [one.accuracy for one in used], marker="o")
        axes.set(
            xlim=(0, 1),
            ylim=(0, 1),
            xlabel="confidence (bars: share of the examples)",
            ylabel="accuracy" if name == "before" else "",
            title=f"{name}: ECE {quality.expected_calibration_error:.3f}, accuracy {quality.accuracy:.3f}",
        )
        axes.grid(alpha=0.3)
    figure.suptitle(f"{title}, {measured.before.n_examples} examples, {measured.how}")
    figure.savefig(path, dpi=100)


def _quality_json(quality: Quality) -> dict[str, Any]:
    return {**quality._asdict(), "bins": [one._asdict() for one in quality.bins]}


def run(arguments: argparse.Namespace) -> StoredCalibration:
    """Does what the command line says. Raises ConfigurationError."""
    scored = read(arguments.scored)
    calibration, n_fitted, measured = fit(arguments.method, scored)
    if arguments.plot is not None:
        if measured is None:
            raise ConfigurationError("--plot needs labelled examples, and the file has none: add some, or leave it out")
        draw(arguments.plot, f"{arguments.output.stem} ({arguments.method})", measured)
    way = {"normalise": arguments.normalise, "answer_end": arguments.answer_end, "forms": scored.forms}
    stored = StoredCalibration(
        name=arguments.output.stem,
        method=arguments.method,
        model=ModelName(arguments.model_path, fingerprint_of(arguments), arguments.adapter),
        labels=scored.labels,
        calibration=calibration,
        n_examples=n_fitted,
        measured=measured
        and {"how": measured.how, "before": _quality_json(measured.before), "after": _quality_json(measured.after)},
        way={name: value for name, value in way.items() if value},
    )
    if arguments.output.suffix != ".json" or not NAME.fullmatch(arguments.output.stem):
        raise ConfigurationError(
            f"--output is {str(arguments.output)!r}: its name must be {NAME_RULE}, and end in .json"
        )
    try:
        arguments.output.write_text(json.dumps(stored.to_json(), indent=1) + "\n")
    except OSError as error:
        raise ConfigurationError(f"--output {arguments.output} cannot be written: {error.strerror}") from error
    return stored


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        allow_abbrev=False,
        prog="python -m sgl_prefill.calibrate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("scored", type=Path, help="file of scored examples, JSON lines")
    made.add_argument("--method", choices=METHODS, required=True, help="how it is fitted")
    made.add_argument(
        "--output", type=Path, required=True, help="file to write: NAME.json in the server's --calibrations"
    )
    made.add_argument("--plot", type=Path, help="also write the reliability plot (PNG; needs matplotlib)")
    made.add_argument("--adapter", help="the LoRA adapter that the examples were scored with")
    made.add_argument("--normalise", help="as in the requests that scored the examples, where it was not sum")
    made.add_argument("--answer-end", help='as in the requests; "end_token" for the end token')
    made.add_argument("--model-path", required=True, help="as the server's")
    made.add_argument("--revision", help="as the server's")
    for name, default in SETTINGS.items():
        made.add_argument(f"--{name.replace('_', '-')}", default=default, help="as the server's")
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    asked = parser().parse_args(arguments)
    try:
        stored = run(asked)
    except SglPrefillError as error:
        sys.exit(f"sgl_prefill.calibrate: {error}")
    print(f"wrote {asked.output}: {stored.method}, {stored.n_examples} rows, model {stored.model.fingerprint}")
    for side in ("before", "after") if stored.measured else ():
        values = {name: value for name, value in stored.measured[side].items() if name != "bins"}  # type: ignore[index]
        print(f"{side}: " + ", ".join(f"{name} {value:.4g}" for name, value in values.items()))


if __name__ == "__main__":
    main()
