"""A comparison of engines: the runs that it refuses, resumption, the workloads, the figures and the report, without a server."""

from __future__ import annotations

import gzip
import json
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import requests
from matplotlib import pyplot

from benchmarks import claims, figures, make_report, release, report, shapes
from benchmarks.batch import whole
from benchmarks.harness import client, engines, traffic, turns
from benchmarks.harness import outsiders as outsider
from benchmarks.harness.compare import SATURATION, Comparison, Rate, Run
from benchmarks.harness.turns import Served
from benchmarks.load import curves
from benchmarks.step_profile import run as step_profile
from sgl_prefill.entry import local_server
from sgl_prefill.errors import ServerStartError

OURS, RIVAL = engines.ours("ours"), engines.stock("fcfs")


def right(first_token: int) -> list[float]:
    return [-1.0 - first_token / 1_000, -2.0]


def wrong(first_token: int) -> list[float]:
    return [-1.0 - first_token / 1_000, -4.0]


class FakeEngines:
    """Stands in for servers and client: each engine answers at once, some of them wrongly."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, answers: dict[str, Callable[[int], list[float]]]) -> None:
        self.started: list[str] = []
        self.ended: list[str] = []
        self.asked: list[str] = []
        self.cannot_start: set[str] = set()
        self.ends_under_load: set[str] = set()
        self.answers = answers
        monkeypatch.setattr(shapes, "write_weights", lambda folder: None)
        monkeypatch.setattr(report, "conditions", lambda: {"commit": "a", "command": "b"})
        monkeypatch.setattr(engines, "running", self.running)
        monkeypatch.setattr(client, "run", self.run)
        monkeypatch.setattr(engines.Running, "flush_cache", lambda server: None)
        monkeypatch.setattr(engines.Running, "has_ended", lambda server: server.url in self.ends_under_load)

    @contextmanager
    def running(self, engine: engines.Engine, flags: Any, log: Path) -> Iterator[engines.Running]:
        self.started.append(engine.name)
        if engine.name in self.cannot_start:
            raise ServerStartError("started\nout of memory")
        yield engines.Running(engine.name, 0, f"serve {engine.name}", {} if engine.is_ours else None, "0.5.17")
        self.ended.append(engine.name)

    def run(
        self, url: str, dues: list[client.Due], name: str, dialect: client.Dialect | None = None
    ) -> list[client.Outcome]:
        if name != "warm-up":
            self.asked.append(name)
            if url in self.ends_under_load:
                raise report.InvalidRunError("no answer to a request")
        return [
            client.Outcome(due.at_s, due.at_s, due.at_s + 1, due.at_s + 1, 3, 0, self.answers[url](due.input_ids[0]))
            for due in dues
        ]


def requests_of(rate: Rate) -> list[client.Due]:
    return traffic.alone([3, 3], rate)


def comparison(folder: Path) -> Comparison:
    return Comparison(Namespace(json=folder / "result.json"), requests_of, Served("llama-small", [], []))


def test_an_engine_that_answers_wrongly_fails_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same prompts at another rate by another engine."""
    FakeEngines(monkeypatch, {OURS.name: right, RIVAL.name: wrong})
    with comparison(tmp_path) as compared:
        compared.measure(OURS, [SATURATION])
        with pytest.raises(report.InvalidRunError, match="stock fcfs disagrees"):
            compared.measure(RIVAL, [2.0])


def test_a_comparison_that_was_cut_off_starts_only_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One server an engine whatever its rates; the second run starts the rival alone, and writes both."""
    fake = FakeEngines(monkeypatch, {OURS.name: right, RIVAL.name: right})
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
    assert written["conditions"]["sglang_of"] == {"ours": "0.5.17", "stock fcfs": "0.5.17"}
    assert written["conditions"]["commands"] == {"ours": "serve ours", "stock fcfs": "serve stock fcfs"}
    requests = gzip.decompress((tmp_path / "result.requests.jsonl.gz").read_bytes())
    columns = [json.loads(line) for line in requests.splitlines()]
    assert columns[0]["finish_s"] == [1.0, 1.0]
    assert columns[0]["computed_tokens"] == [3, 3]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["result.json", "result.requests.jsonl.gz"]


def test_two_engines_that_take_turns_stay_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each turn is a run of its own; a third engine ends the one that was asked longest ago."""
    fake = FakeEngines(monkeypatch, dict.fromkeys((OURS.name, RIVAL.name, "stock lpm"), right))
    third = engines.stock("lpm")
    arguments = Namespace(json=tmp_path / "result.json")
    with Comparison(arguments, requests_of, Served("llama-small", [], []), n_servers=2) as compared:
        for turn in ("first", "second"):
            for engine in (OURS, RIVAL):
                compared.measure(engine, [2.0], turn)
        compared.measure(RIVAL, [2.0], "second")
        assert fake.asked == [
            f"{name}, 2 a second, {turn}" for turn in ("first", "second") for name in ("ours", "stock fcfs")
        ]
        compared.measure(third, [2.0])
        compared.measure(RIVAL, [3.0])
        compared.measure(OURS, [3.0])
        compared.finish([])
    (medians, _) = json.loads((tmp_path / "result.json").read_text())["medians"]
    assert (medians["engine"], medians["offered_per_s"], medians["turns"], medians["mean_s"]) == ("ours", 2.0, 2, 1.0)
    assert fake.started == ["ours", "stock fcfs", "stock lpm", "ours"]
    assert fake.ended == ["ours", "stock lpm", "stock fcfs", "ours"]


def test_servers_that_start_side_by_side_are_those_that_are_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that cannot start is told, and costs the others nothing; who is not wanted ends; more than fit are refused."""
    fake = FakeEngines(monkeypatch, dict.fromkeys((OURS.name, RIVAL.name, "stock lpm"), right))
    fake.cannot_start = {"stock lpm"}
    lpm = engines.stock("lpm")
    with turns.Servers(Served("llama-small", [], []), 2) as servers:
        assert servers.start([OURS, RIVAL]) == {}
        assert set(servers.start([RIVAL, lpm])) == {lpm}
        assert fake.ended == ["ours"]
        assert servers.of(RIVAL).url == RIVAL.name
        assert sorted(fake.started) == ["ours", "stock fcfs", "stock lpm"]
        with pytest.raises(ValueError, match="3 servers at once, and 2 are allowed"):
            servers.start([OURS, RIVAL, lpm])
    assert fake.ended == ["ours", "stock fcfs"]


def test_answers_that_are_all_alike_show_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with SGLang's dummy weights: each label is as likely as any other, whatever was computed."""
    FakeEngines(monkeypatch, {OURS.name: lambda first_token: [-10.8, -10.8]})
    with comparison(tmp_path) as compared, pytest.raises(report.InvalidRunError, match="answers all prompts alike"):
        compared.measure(OURS, [SATURATION])


def written_without_rival(tmp_path: Path) -> Any:
    """The result of a comparison whose rival fails."""
    with comparison(tmp_path) as compared:
        compared.measure(OURS, [SATURATION])
        assert compared.measure_rival(RIVAL, [SATURATION]) is None
        compared.finish([])
    return json.loads((tmp_path / "result.json").read_text())


def test_a_rival_that_cannot_start_is_a_row_and_ours_fails_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the last line of its log."""
    fake = FakeEngines(monkeypatch, {OURS.name: right})
    fake.cannot_start = {RIVAL.name}
    assert written_without_rival(tmp_path)["failed"] == [{"engine": "stock fcfs", "failed": "out of memory"}]
    fake.cannot_start = {OURS.name}
    with comparison(tmp_path) as compared, pytest.raises(ServerStartError):
        compared.measure(OURS, [SATURATION])


def test_a_rival_that_ends_under_the_load_is_a_row_and_one_that_lives_fails_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Out of memory is a result; a request that a healthy engine loses is not. Ours may do neither."""
    fake = FakeEngines(monkeypatch, {OURS.name: right, RIVAL.name: wrong})
    fake.ends_under_load = {RIVAL.name}
    written = written_without_rival(tmp_path)
    assert written["failed"] == [{"engine": "stock fcfs", "failed": "ended under the load: no answer to a request"}]
    assert [row["engine"] for row in written["rows"]] == ["ours"]
    fake.ends_under_load = {OURS.name}
    with comparison(tmp_path) as compared:
        with pytest.raises(report.InvalidRunError, match="no answer"):
            compared.measure(OURS, [SATURATION])
        fake.ends_under_load = set()
        compared.measure(OURS, [SATURATION])
        with pytest.raises(report.InvalidRunError, match="disagrees"):
            compared.measure_rival(RIVAL, [SATURATION])


def cut_off(compared: Comparison) -> None:
    with compared:
        compared.measure(OURS, [SATURATION])
        sys.exit(143)


def test_a_comparison_that_is_cut_off_writes_what_it_has_and_never_over_a_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `timeout` does on a machine that is lent for minutes."""
    FakeEngines(monkeypatch, {OURS.name: right})
    with pytest.raises(SystemExit):
        cut_off(comparison(tmp_path))
    written = json.loads((tmp_path / "result.json").read_text())
    assert [row["engine"] for row in written["rows"]] == ["ours"]
    assert written["failed"] == [{"engine": "all others", "failed": "the run was cut off"}]
    assert (tmp_path / "result.partial").exists()
    (tmp_path / "result.json").write_text("measured")
    with pytest.raises(SystemExit):
        cut_off(comparison(tmp_path))
    assert (tmp_path / "result.json").read_text() == "measured"


def test_an_engine_whose_environment_is_not_named_is_not_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It becomes a row that says so, as any that cannot start."""
    monkeypatch.delenv(engines.VLLM_PYTHON, raising=False)
    with (
        pytest.raises(ServerStartError, match="not measured: VLLM_CPU_PYTHON names no environment"),
        engines.running(engines.VLLM, [], tmp_path / "log"),
    ):
        pass


def test_an_engine_without_its_activation_record_fails_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours without one is stock SGLang; stock with one is ours."""
    monkeypatch.setenv("OMP_NUM_THREADS", "2")

    @contextmanager
    def healthy(*_: Any, **__: Any) -> Iterator[Any]:
        yield Namespace(url="", process=Namespace(pid=0), command=[])

    monkeypatch.setattr(local_server, "running", healthy)
    infos: list[tuple[engines.Engine, dict[str, Any]]] = [(OURS, {}), (RIVAL, {"sgl_prefill": {"config": {}}})]
    for engine, info in infos:
        monkeypatch.setattr(requests, "get", lambda *_, info=info, **__: Namespace(ok=True, json=lambda: info))
        with pytest.raises(report.InvalidRunError, match="activation record"), engines.running(engine, [], tmp_path):
            pass


@pytest.mark.parametrize(
    ("engine", "record", "files", "expected"),
    [
        (OURS, {"cpu_kernel": {"build": "amx", "reason": None}}, [], "amx"),
        (RIVAL.on(engines.PYTORCH_PATH), None, [], None),
        (RIVAL.on(engines.NEW_KERNEL), None, ["attention-amx.so"], "attention-amx.so"),
        (engines.transformers(), None, [], None),
    ],
)
def test_a_result_says_which_build_of_the_kernel_served(
    engine: engines.Engine, record: Any, files: list[str], expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(engines.KERNEL_VARIABLE, raising=False)
    assert engines.check_kernel(engine, record, files) == expected


@pytest.mark.parametrize(
    ("engine", "record", "files", "why"),
    [
        (OURS, {"cpu_kernel": {"build": None, "reason": "no compiler"}}, [], "without the native kernel .no compiler"),
        (OURS, {}, [], "has no cpu_kernel"),
        (RIVAL.on(engines.PYTORCH_PATH), None, ["attention-amx.so"], "runs the kernel attention-amx.so"),
        (RIVAL.on(engines.AS_SHIPPED), None, ["attention-amx.so"], "runs the kernel attention-amx.so"),
        (RIVAL.on(engines.NEW_KERNEL), None, [], "not measured: stock fcfs, new kernel"),
    ],
)
def test_an_engine_with_another_kernel_than_it_is_taken_for_does_not_count(
    engine: engines.Engine, record: Any, files: list[str], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(engines.KERNEL_VARIABLE, raising=False)
    with pytest.raises((report.InvalidRunError, ServerStartError), match=why):
        engines.check_kernel(engine, record, files)


def test_ours_without_the_kernel_counts_where_that_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a build where none was asked for does not."""
    monkeypatch.setenv(engines.KERNEL_VARIABLE, "off")
    assert engines.check_kernel(OURS, {"cpu_kernel": {"build": None, "reason": "off"}}, []) is None
    with pytest.raises(report.InvalidRunError, match="runs the kernel amx"):
        engines.check_kernel(OURS, {"cpu_kernel": {"build": "amx", "reason": None}}, [])


@pytest.mark.parametrize(
    ("reference", "backend", "is_right"),
    [
        (engines.AS_SHIPPED, None, True),
        (engines.AS_SHIPPED, "cpu_flash", False),
        (engines.PYTORCH_PATH, "cpu_flash", True),
        (engines.PYTORCH_PATH, None, False),
    ],
)
def test_stock_that_attends_in_another_way_does_not_count(
    reference: engines.Reference, backend: str | None, is_right: bool
) -> None:
    """Without a backend of its own for prefill it takes torch_native."""
    info = {"attention_backend": "torch_native", "prefill_attention_backend": backend}
    if is_right:
        return engines.check_backend(RIVAL.on(reference), info)
    with pytest.raises(report.InvalidRunError, match="attends with"):
        engines.check_backend(RIVAL.on(reference), info)
    return None


def test_ours_takes_turns_with_the_best_policy_on_each_reference() -> None:
    """Policies are tried on the last reference; the best of them runs on the others; a failure is left out."""
    lpm, broken, outsider = engines.stock("lpm"), engines.stock("hrrn"), engines.transformers()
    seconds = {
        "ours": 1.0,
        "stock fcfs, torch_native": 8.0,
        "stock lpm, torch_native": 9.0,
        "stock fcfs, new kernel": 3.0,
        "stock lpm, new kernel": 2.0,
        "transformers": 7.0,
    }
    asked: list[str] = []

    def measure(engine: engines.Engine, turn: str) -> float | None:
        asked.append(f"{engine.name}, {turn}")
        return seconds.get(engine.name)

    contest = turns.Contest((RIVAL, lpm, broken), 2, (OURS,), others=(outsider,))
    found = turns.take_turns(contest, measure, lambda one: one)
    finalists = ["ours", "stock lpm, torch_native", "stock lpm, new kernel", "transformers"]
    assert {engine.name: runs for engine, runs in found.items()} == {name: [seconds[name]] * 2 for name in finalists}
    assert sorted(name for name in asked if name.endswith("turn 2")) == sorted(f"{name}, turn 2" for name in finalists)
    assert len([name for name in asked if name.endswith("turn 1")]) == 1 + 3 + 1 + 1
    assert turns.of_reference(found, engines.AS_SHIPPED) == lpm.on(engines.AS_SHIPPED)
    asked.clear()
    turns.take_turns(contest.smoke(), measure, lambda one: one)
    assert asked == ["ours, turn 1", "stock fcfs, new kernel, turn 1"]
    with pytest.raises(report.InvalidRunError, match="no policy of stock SGLang could be measured on new kernel"):
        turns.take_turns(contest._replace(policies=(broken,)), measure, lambda one: one)


def test_vllm_serves_the_same_model_with_the_same_cache() -> None:
    """3,430 tokens are 108 of its blocks, and one that it never uses."""
    served = Served(
        None, ["--context-length", "2560", "--max-total-tokens", "3430", "--max-running-requests", "64"], []
    )
    said = ["--max-model-len", "2560", "--block-size", "32", "--num-gpu-blocks-override", "109"]
    assert served.flags(engines.VLLM) == said


class Backlog:
    """Engines that serve so many requests a second, first come, first served, of which 100 come at the rate asked for."""

    def __init__(self, serve_per_s: dict[engines.Engine, float]) -> None:
        self.serve_per_s = serve_per_s
        self.turns: list[tuple[str, str]] = []
        self.highest_per_s = 0.0  # asked of any

    def measure(self, engine: engines.Engine, rates: Sequence[Rate], turn: str = "") -> list[Run]:
        runs = []
        self.turns.append((engine.name, turn))
        # As a noisy machine: one turn is three times as slow.
        serves_per_s = self.serve_per_s[engine] / (3 if turn.endswith(" 2") else 1)
        for rate in rates:
            self.highest_per_s = max(self.highest_per_s, rate or 0.0)
            done_s, outcomes = 0.0, []
            for number in range(100):
                at_s = number / rate if rate is not None else 0.0
                done_s = max(done_s, at_s) + 1 / serves_per_s
                outcomes.append(client.Outcome(at_s, at_s, done_s, done_s, 3, 0, [0.0]))
            runs.append(Run(engine.name, rate, client.figures(outcomes), outcomes))
        return runs


def carried(ours_per_s: float, rival_per_s: float, times: tuple[float, ...]) -> tuple[dict[str, Any], Backlog]:
    compared: Any = Backlog({OURS: ours_per_s, RIVAL: rival_per_s})
    at_once = tuple(compared.measure(engine, [SATURATION])[0].figures for engine in (OURS, RIVAL))
    return curves.carried(compared, OURS, RIVAL, at_once, times, turns_s=50.0), compared


def test_an_engine_carries_as_much_more_load_as_it_is_faster() -> None:
    """1.6 times as fast as a rival that is asked for what it serves; beyond that its queue ends with the run, and it fails."""
    times = (1.0, 1.3, 1.6, 2.0, 8.0)
    faster, compared = carried(16.0, 10.0, times)
    assert (faster["times"], faster["shown"]) == (1.6, "1.6")
    slower, asked = carried(9.0, 10.0, times)
    assert slower["shown"] == "not held"
    assert asked.highest_per_s == pytest.approx(13.0), "8 times would be a waste of minutes"
    # 100 requests at 10 a second take 10 s: they take turns until 50 s are full, and one slow turn is none of the medians.
    at_first = [name for name, turn in compared.turns if "1.6x" in turn or turn.startswith("against stock")][:10]
    assert at_first == ["stock fcfs", "ours"] * 5


def test_a_queue_that_ends_with_the_run_is_not_carried() -> None:
    """At 8 times the load ours waits no longer than the run, as the rival does, and does not keep up."""
    compared = Backlog({OURS: 10.5, RIVAL: 5.0})
    (limit,), (swamped,) = compared.measure(RIVAL, [5.0]), compared.measure(OURS, [40.0])
    assert swamped.kept_up < 0.5
    assert limit.kept_up > 0.95
    assert carried(10.5, 5.0, (1.0, 2.0, 8.0))[0]["times"] == 2.0


def test_a_long_run_of_a_rival_is_made_once() -> None:
    """200 s at 0.5 a second: one turn, whatever ours is asked."""
    found, compared = carried(2.0, 0.5, (1.0, 2.0, 3.0))
    assert found["times"] == 3.0
    assert {turn for name, turn in compared.turns if name == RIVAL.name} == {"", "at its own pace"}


def test_a_step_is_held_against_its_arithmetic() -> None:
    """At 1 TFLOP/s and 10 GB/s: 2 ms of products, less than the 4 ms of reading their weights, and 1 ms of attention."""
    rows = [
        {
            "step": step,
            "setting": setting,
            "turn": turn,
            "kernel": None,
            "ms": ms * turn,
            "operator_calls": 2000,
            "work": {"linear_flop": 2 * 10**9, "attention_flop": 10**9, "weight_bytes": 40 * 10**6},
        }
        for step in step_profile.AT_LEAST
        for setting, ms in (("PyTorch path", 15.0), ("ours", 5.0))
        for turn in (1, 2, 3)
    ]
    steps = step_profile.medians_of(rows, {"flop_per_s": 1e12, "read_bytes_per_s": 1e10})
    before, ours = steps[:2]
    assert (before["ms"], ours["ms"], ours["arithmetic_share"]) == (30.0, 10.0, pytest.approx(0.5))
    targets = step_profile.targets_of(steps)
    assert [target.value for target in targets] == [3.0, 2000] * len(step_profile.AT_LEAST)


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
    "command": "python benchmarks/load/run.py",
    "commit": "0123456789abcdef",
    "commit_of": {"wl1": "0123456789abcdef"},
    "hardware": {"processor": "a processor (avx2)", "cores": 2, "accelerator": None},
    "versions": {"sglang": "0.5.23", "torch": "2.14"},
    "OMP_NUM_THREADS": "2",
}


def result_of(*targets: report.Target) -> dict[str, Any]:
    row = {"requests_per_s": 3.0, "mean_s": 1.5, "p50_s": 1.0, "p99_s": 4.0, "cached_share": 0.5}
    rows = [{"engine": engine, "offered_per_s": rate, **row} for engine in ("a", "b") for rate in (None, 1.0, 2.0)]
    return {
        "conditions": CONDITIONS,
        "targets": [target._asdict() for target in targets],
        "parts": {"wl1": {"rows": rows, "medians": []}},
    }


def test_a_figure_is_drawn_from_a_result_alone(tmp_path: Path) -> None:
    """Two curves of two points each in both halves; and nothing where there is no result, or not that part of it."""
    assert figures.draw("latency", tmp_path) is None
    folder = tmp_path / "load"
    folder.mkdir()
    (folder / "result.json").write_text(json.dumps(result_of()))
    drawn = figures.draw("latency", tmp_path)
    assert drawn is not None
    assert drawn.read_bytes().startswith(b"\x89PNG")
    assert figures.draw("long_latency", tmp_path) is None
    figure = pyplot.figure()
    figures.draw_latency(figure, result_of()["parts"]["wl1"])
    mean, p99 = figure.axes
    assert [list(line.get_xydata()[:, 1]) for line in mean.lines] == [[1.5, 1.5], [1.5, 1.5]]
    assert [list(line.get_xydata()[:, 1]) for line in p99.lines] == [[4.0, 4.0], [4.0, 4.0]]
    assert mean.get_xlabel() == "offered load, requests/s"
    pyplot.close(figure)


def test_an_engine_has_one_colour_in_every_picture() -> None:
    """And ours, its paper mode, stock with and without our kernels, and vLLM have five."""
    names = ("ours", "ours, --paper", "stock lpm, new kernel", "stock fcfs, torch_native", "vLLM 0.32")
    colours = [figures.colour_of(name, place) for place, name in enumerate(names)]
    assert colours == [figures.colour_of(name, 7) for name in names]
    assert len(set(colours)) == 5
    assert figures.colour_of("stock fcfs, new kernel", 0) == colours[2]


def plotted(name: str, result: dict[str, Any]) -> list[list[tuple[float, float]]]:
    """The points of each line."""
    figure = pyplot.figure()
    figures.FIGURES[name].draw(figure, result)
    found = [[(float(x), float(y)) for x, y in line.get_xydata()] for axes in figure.axes for line in axes.lines]
    pyplot.close(figure)
    return found


def test_the_other_figures_show_what_their_results_hold() -> None:
    """Axes are not swapped, and no point is lost."""
    assert plotted("throughput", result_of()["parts"]["wl1"])[0] == [(1.0, 3.0), (2.0, 3.0)]
    assert plotted("cdf", {"latency_percentiles_s": {"a": [1.0, 4.0]}}) == [[(1.0, 0.5), (4.0, 1.0)]]
    memory = {"rows": [{"engine": "plain", "seconds": [0.0, 1.0], "mib": [5.0, 9.0]}]}
    assert plotted("memory", memory) == [[(0.0, 5.0), (1.0, 9.0)]]
    point = {"model": "m", "actual_ms": 10.0, "predicted_jct_ms": 12.0}
    figure = pyplot.figure()
    figures.draw_jct(figure, {"figures": {"m": {}}, "rows": [point]})
    assert figure.axes[0].collections[0].get_offsets().tolist() == [[10.0, 12.0]]
    pyplot.close(figure)
    figure = pyplot.figure()
    lengths = [{"engine": engine, "model": "m", "longest_input_tokens": n} for engine, n in (("a", 1234), ("b", None))]
    figures.draw_mil(figure, {"conditions": {"budget_mib": 256}, "rows": lengths})
    assert [bar.get_width() for bar in figure.axes[0].patches] == [1234, 0]
    assert [text.get_text() for text in figure.axes[0].texts] == [" 1,234", " out of memory"]
    pyplot.close(figure)


@pytest.mark.parametrize(
    ("target", "shown", "met"),
    [
        (report.Target.at_least("a", 0.126, 0.0), "≥ 0", True),
        (report.Target.at_most("a", 9, 0), "≤ 0", False),
        (report.Target.at_most("a", 0, 0), "≤ 0", True),
        (report.Target.at_least("a", 2, 2), "≥ 2", True),
        (report.Target.at_most("a", 2, 2), "≤ 2", True),
        (report.Target.at_least("a", 1.99999, 2), "≥ 2", False),
    ],
)
def test_a_target_keeps_which_direction_is_good(target: report.Target, shown: str, met: bool) -> None:
    """It cannot be told from the value, the target and whether it is met, where the target is 0 or both are equal."""
    assert make_report.wanted(target._asdict()) == shown
    assert target.met is met


@pytest.mark.parametrize(
    ("paper", "values", "expected"),
    [
        (4.0, (4.5, 3.7), "holds"),
        (4.0, (4.5, 0.5), "holds partly"),
        (4.0, (1.7,), "holds partly"),
        (4.0, (1.01, 0.8), "refuted"),
        (1.0, (0.95,), "holds"),
        (None, (1.2,), "holds"),
        (None, (1.2, 1.05), "holds partly"),
        (None, (1.05,), "refuted"),
    ],
)
def test_a_verdict_compares_with_the_papers_figure(
    paper: float | None, values: tuple[float, ...], expected: str
) -> None:
    """Within a tenth of it counts as it; a ratio below 1.1 is no gain."""
    found = claims.judged(*(claims.Value("ours / stock", value, paper) for value in values))
    assert found.verdict == expected
    assert found.numbers.startswith(f"ours / stock {values[0]:.3g}")
    assert claims.judged(claims.Value("a", 2.0), how="simulated").verdict == "simulated: holds"


def test_the_report_names_the_misses_and_the_processor(tmp_path: Path) -> None:
    """One of two targets of a benchmark whose README says nothing about the miss."""
    met, miss = report.Target.at_least("a ratio", 2.5, 2.2), report.Target.at_most("seconds", 3.0, 2.0)
    folder = tmp_path / "start"
    folder.mkdir()
    (folder / "result.json").write_text(json.dumps(result_of(met, miss)))
    said = make_report.text(tmp_path)
    assert "**1 of 2 targets are met, 1 missed;" in said
    assert said.count("| not measured |") == len([*claims.PREFILL_ONLY, *claims.BATCH_LLM])
    assert "1 of 2: seconds 3 (≤ 2)" in said
    assert "| 1 of 2 | 0.5.23 | 0123456, AVX2 |" in said


def test_the_report_counts_the_answers_of_comparisons_alone() -> None:
    """Results without latencies under load do not check answers against another engine's, dummy weights answer all alike."""
    compared, profiled = {"requests": 1500, "p99_s": 1.0}, {"requests": 10, "request_ms": 3.0}
    real, dummy = {"commands": {"ours": "serve"}}, {"commands": {"ours": "serve --load-format dummy"}}
    results: dict[str, dict[str, Any]] = {
        "a": {"conditions": real, "rows": [compared, compared]},
        "b": {"conditions": real, "parts": {"x": {"rows": [compared]}, "y": {"rows": [profiled]}}},
        "c": {"conditions": dummy, "rows": [compared]},
    }
    assert make_report.answers(results).startswith("Of 4,500 answers under load none was lost")


def test_the_committed_report_is_what_the_results_say() -> None:
    """`python benchmarks/make_report.py` changes nothing; and it is a page that a person reads to its end."""
    page = (make_report.HERE / "REPORT.md").read_text()
    assert page == make_report.text()
    assert len(page.replace("|", " ").split()) <= 2_500


def test_a_release_knows_how_long_its_benchmarks_take() -> None:
    """From their READMEs; all exist, once."""
    assert len(set(release.NAMES)) == len(release.NAMES)
    assert all(0 < release.minutes(name) < 240 for name in release.NAMES)


def test_the_steps_of_a_job_are_those_of_the_log() -> None:
    """Prefill and decode, as SGLang writes them."""
    log = (
        "[2026-11-29 10:00:00] Prefill batch, #new-seq: 2, #new-token: 384, #cached-token: 16, token usage: 0.10, "
        "#running-req: 0, #queue-req: 9, #pending-token: 0, \n"
        "[2026-11-29 10:00:01] Decode batch, #running-req: 2, #token: 400, token usage: 0.10\n"
    )
    assert whole.LOGGED_STEP.findall(log) == [("384", ""), ("", "2")]
    result = {
        "medians": [
            {"engine": "stock lpm, new kernel", "workload": "a, 10 new tokens", "file": "sorted", "rows_per_s": 1.0},
            {"engine": "ours, with generation", "workload": "a, 10 new tokens", "file": "sorted", "rows_per_s": 2.0},
            {"engine": "ours", "workload": "a", "file": "sorted", "rows_per_s": 3.0},
        ],
        "step_tokens": {
            "ours, with generation, a, 10 new tokens, sorted": [384, 2],
            "stock lpm, new kernel, a, 10 new tokens, sorted": [100],
        },
    }
    assert plotted("steps", result) == [[(1.0, 384.0), (2.0, 2.0)], [(1.0, 100.0)]]


class Recorder:
    """A backend that gives token n the log-probability -n."""

    def __init__(self) -> None:
        self.computed: list[list[int]] = []

    def log_probabilities(self, ids: Sequence[int], n_kept: int) -> Sequence[float]:
        self.computed.append(list(ids[n_kept:]))
        return [-float(token) for token in range(10)]


@pytest.mark.parametrize("engine", [engines.transformers(), engines.llama_cpp(Path("model.gguf"))])
def test_an_outsider_takes_the_flags_that_load_the_model_of_all(engine: engines.Engine) -> None:
    command = ["--host", "127.0.0.1", "--port", "1", *shapes.weight_flags(Path("model"), "float32"), *engine.flags]
    arguments = outsider.parsed(command)
    assert (arguments.backend, arguments.dtype) == (engine.flags[0], "float32")
    assert arguments.model_path == Path("model.gguf" if engine.name == "llama.cpp" else "model")


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
