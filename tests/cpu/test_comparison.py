"""A comparison of engines: the runs that it refuses, resumption, the workloads, the figures and the report, without a server."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from matplotlib import pyplot

from benchmarks import figures, make_report, report
from benchmarks.harness import client, engines, traffic
from benchmarks.harness.compare import SATURATION, Comparison, Rate, Served
from benchmarks.outsiders import server as outsider

RIGHT, WRONG = [-1.0, -2.0, -3.0], [-1.0, -2.0, -9.0]
OURS, RIVAL = engines.ours("ours"), engines.stock("fcfs")


class FakeEngines:
    """Stands in for servers and client: each engine answers at once, some of them wrongly."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, answers: dict[str, list[float]]) -> None:
        self.started: list[str] = []
        self.asked: list[str] = []
        self.answers = answers
        monkeypatch.setattr(report, "conditions", lambda: {"commit": "a"})
        monkeypatch.setattr(engines, "running", self.running)
        monkeypatch.setattr(client, "run", self.run)
        monkeypatch.setattr(engines.Running, "flush_cache", lambda server: None)

    @contextmanager
    def running(self, engine: engines.Engine, flags: Any, log: Path) -> Iterator[engines.Running]:
        self.started.append(engine.name)
        yield engines.Running(engine.name, 0, f"serve {engine.name}", {} if engine.is_ours else None)

    def run(self, url: str, dues: list[client.Due], name: str) -> list[client.Outcome]:
        if name != "warm-up":
            self.asked.append(name)
        return [client.Outcome(due.at_s, due.at_s, due.at_s + 1, due.at_s + 1, 3, 0, self.answers[url]) for due in dues]


def requests_of(rate: Rate) -> list[client.Due]:
    return traffic.alone([3, 3], rate)


def comparison(folder: Path) -> Comparison:
    return Comparison(Namespace(json=folder / "result.json"), requests_of, Served("llama-small", [], []), 0.25)


def test_an_engine_that_answers_wrongly_fails_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same prompts at another rate by another engine."""
    FakeEngines(monkeypatch, {OURS.name: RIGHT, RIVAL.name: WRONG})
    with comparison(tmp_path) as compared:
        compared.measure(OURS, [SATURATION])
        with pytest.raises(report.InvalidRunError, match="stock fcfs disagrees"):
            compared.measure(RIVAL, [2.0])


def test_a_comparison_that_was_cut_off_starts_only_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One server an engine whatever its rates; the second run starts the rival alone, and writes both."""
    fake = FakeEngines(monkeypatch, {OURS.name: RIGHT, RIVAL.name: RIGHT})
    with comparison(tmp_path) as compared:
        compared.measure(OURS, [SATURATION, 2.0])
    assert fake.started == ["ours"]
    with comparison(tmp_path) as compared:
        compared.measure(OURS, [SATURATION, 2.0])
        compared.measure(RIVAL, [2.0])
        compared.measure(OURS, [SATURATION])
        compared.finish([])
    assert fake.started == ["ours", "stock fcfs"]
    written = json.loads((tmp_path / "result.json").read_text())
    assert [(row["engine"], row["offered_per_s"]) for row in written["rows"]] == [
        ("ours", None),
        ("ours", 2.0),
        ("stock fcfs", 2.0),
    ]
    assert written["activation_records"] == {"ours": {}, "stock fcfs": None}
    assert written["conditions"]["commands"] == {"ours": "serve ours", "stock fcfs": "serve stock fcfs"}
    columns = [json.loads(line) for line in (tmp_path / "requests.jsonl").read_text().splitlines()]
    assert columns[0]["finish_s"] == [1.0, 1.0]
    assert columns[0]["computed_tokens"] == [3, 3]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["requests.jsonl", "result.json"]


def test_arrivals_are_poisson() -> None:
    """Gaps of 10,000 arrivals at 5 a second: mean and deviation are 0.2 s, and a share of 1 / e is longer than the mean."""
    times_s = traffic.poisson(5.0, 10_000)
    gaps = [after - before for before, after in zip([0.0, *times_s], times_s, strict=False)]
    mean_s = sum(gaps) / len(gaps)
    deviation_s = (sum((gap - mean_s) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert mean_s == pytest.approx(0.2, rel=0.03)
    assert deviation_s == pytest.approx(0.2, rel=0.05)
    assert sum(gap > mean_s for gap in gaps) / len(gaps) == pytest.approx(0.368, abs=0.02)


def test_prompts_do_not_depend_on_the_rate() -> None:
    """Or answers could not be compared; a burst has the same requests in another order."""

    def prompts(rate: Rate, arrivals: traffic.Arrivals = "single") -> list[tuple[int, ...]]:
        dues = traffic.post_recommendation(rate, arrivals, 10, n_users=3, n_posts=4)
        return [tuple(due.input_ids) for due in dues]

    assert prompts(SATURATION) == prompts(3.0) == prompts(30.0)
    assert sorted(prompts(3.0)) == sorted(prompts(3.0, "burst"))
    profiles = {prompt[:1_100] for prompt in prompts(3.0)}
    assert len(profiles) == 3
    assert len(set(prompts(3.0))) == 12


def test_the_short_mix_has_four_lengths_in_equal_counts() -> None:
    lengths = [len(due.input_ids) for due in traffic.short_mix(1.0, 5)]
    assert sorted(lengths) == [n for n in (128, 512, 2048, 8192) for _ in range(5)]


CONDITIONS = {
    "command": "python benchmarks/post_recommendation/run.py",
    "commit": "0123456789abcdef",
    "hardware": {"processor": "a processor", "cores": 2, "accelerator": None},
    "versions": {"sglang": "0.5.17", "torch": "2.11"},
    "OMP_NUM_THREADS": "2",
}


def result_of(*targets: report.Target) -> dict[str, Any]:
    row = {"requests_per_s": 3.0, "mean_s": 1.5, "p50_s": 1.0, "p99_s": 4.0, "cached_share": 0.5}
    rows = [{"engine": engine, "offered_per_s": rate, **row} for engine in ("a", "b") for rate in (None, 1.0, 2.0)]
    return {"conditions": CONDITIONS, "targets": [target._asdict() for target in targets], "rows": rows}


def test_a_figure_is_drawn_from_a_result_alone(tmp_path: Path) -> None:
    """Two curves of two points each in both halves; and nothing where there is no result."""
    assert figures.draw("latency", tmp_path) is None
    folder = tmp_path / "post_recommendation"
    folder.mkdir()
    (folder / "result.json").write_text(json.dumps(result_of()))
    drawn = figures.draw("latency", tmp_path)
    assert drawn is not None
    assert drawn.read_bytes().startswith(b"\x89PNG")
    figure = pyplot.figure()
    figures.draw_latency(figure, result_of())
    mean, p99 = figure.axes
    assert [list(line.get_xydata()[:, 1]) for line in mean.lines] == [[1.5, 1.5], [1.5, 1.5]]
    assert [list(line.get_xydata()[:, 1]) for line in p99.lines] == [[4.0, 4.0], [4.0, 4.0]]
    assert mean.get_xlabel() == "offered load, requests/s"
    pyplot.close(figure)


@pytest.mark.parametrize(
    ("value", "expected"), [(4.5, "holds"), (1.7, "holds partly"), (0.8, "does not hold"), (None, "not tested here")]
)
def test_the_verdict_on_a_claim_follows_from_its_targets(value: float | None, expected: str) -> None:
    """Met; in its direction; in the other; and no result."""
    claim = make_report.CLAIMS[0]
    results = {}
    if value is not None:
        results[claim.benchmark] = result_of(report.Target.at_least("load carried, ours / stock fcfs", value, 4.0))
    assert make_report.verdict(claim, results)[0] == expected


def test_the_committed_report_is_what_the_results_say() -> None:
    """`python benchmarks/make_report.py` changes nothing."""
    assert (make_report.HERE / "REPORT.md").read_text() == make_report.text()


class Recorder:
    """A backend that gives token n the log-probability -n."""

    def __init__(self) -> None:
        self.computed: list[list[int]] = []

    def log_probabilities(self, ids: Sequence[int], n_kept: int) -> Sequence[float]:
        self.computed.append(list(ids[n_kept:]))
        return [-float(token) for token in range(10)]


def test_an_outsider_computes_what_differs_from_its_last_prompt() -> None:
    """And the last token always; everything after a flush."""
    backend = Recorder()
    slot = outsider.Slot(backend)
    assert slot.score([1, 2, 3], [4, 7]) == (0, [-4.0, -7.0])
    assert slot.score([1, 2, 5, 6], [4])[0] == 2
    assert slot.score([1, 2, 5, 6], [4])[0] == 3
    slot.flush()
    assert slot.score([1, 2], [4])[0] == 0
    assert backend.computed == [[1, 2, 3], [5, 6], [6], [1, 2]]
