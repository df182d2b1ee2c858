"""Decisions that are written down, read again and made again."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import random
import resource
import subprocess
import sys
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_prefill import plan
from sgl_prefill.api.decisions import count_of
from sgl_prefill.config import PrefillConfig
from sgl_prefill.core import policies
from sgl_prefill.core.jct import FittedJct
from sgl_prefill.core.job import BACKGROUND, Job
from sgl_prefill.core.packing import StepSize
from sgl_prefill.core.policies.srjf import CalibratedSrjf
from sgl_prefill.core.policy import ScoreParts
from sgl_prefill.errors import BadRequestError, ConfigurationError
from sgl_prefill.planner import decisions
from sgl_prefill.planner.decisions import Agreement, Began, Decided, PolicyReplay
from sgl_prefill.planner.routing import RoundRobin
from sgl_prefill.planner.simulate import SimulatedEngine, replay_cluster
from sgl_prefill.planner.workloads import Arrival
from sgl_prefill.port.simulated_cache import SimulatedCache
from sgl_prefill.preflight import check_argv
from sgl_prefill.scheduling import decisions as recording
from sgl_prefill.scheduling.alike import Alike
from sgl_prefill.scheduling.decision_log import DecisionLog
from sgl_prefill.scheduling.decision_record import Start, header
from sgl_prefill.scheduling.decisions import DecisionRecorder
from sgl_prefill.scheduling.live import LiveScheduling
from sgl_prefill.scheduling.metrics import Facts

JCT_MS = FittedJct(step_ms=2.0, miss_token_ms=0.5, pair_ms=0.001, cached_token_ms=0.01, request_ms=0.1)
PACKED = StepSize(300, 8)
SECRET = 7_777_777


class Engine:
    """A policy and a prefix cache in an engine's hands, on a clock of its own, with a recorder."""

    def __init__(self, log: Path, *, shows_prompts: bool = False, step: StepSize = PACKED, **options: Any) -> None:
        config = PrefillConfig(**options)
        start = Start(config, JCT_MS, step, 2000)
        policy = policies.make(config.scheduling, start.settings(), is_fair=config.is_fair)
        self.writer = DecisionLog(str(log))
        self.recorder = DecisionRecorder(self.writer, shows_prompts=shows_prompts)
        self.recorder.begin(header(config, JCT_MS, start.settings(), engine_version="1", unix_s=0.0))
        self.cache = SimulatedCache(2000)
        self.live = LiveScheduling(self.cache.tree, policy, None, self.recorder)
        self.cache.connect(self.live.listener, self.live.advisor)
        self.waiting: list[Job] = []
        self.now_s = 0.1 + 1000 / 3
        self.orders: list[list[str]] = []
        self.found: dict[str, int] = {}
        self._n_jobs = 0

    def arrive(self, tokens: list[int], **fields: Any) -> Job | None:
        """Takes in a job of these tokens; none where it is refused."""
        self._n_jobs += 1
        fields = {"rid": f"job-{self._n_jobs}", **fields}
        job = Job(array("q", tokens), self.now_s, len(tokens) - 1, **fields)
        if self.live.policy.refusal(job) is not None:
            return None
        self.live.arrive(job)
        self.waiting.append(job)
        return job

    def cancel(self, job: Job) -> None:
        self.waiting.remove(job)
        self.live.leave(job)

    def step(self, slowness: float = 1.0, meanwhile: Any = None) -> list[Job]:
        """Runs whom the policy picks. meanwhile: is called while they run."""
        run, refuse = self.live.decide(self.now_s)
        self.waiting = [job for job in self.waiting if job not in refuse]
        if not run:
            return []
        self.orders.append([job.rid for job in run])
        plans = self.cache.begin(run)
        predicted_ms = self.live.start(run, self.now_s)
        self.waiting = [job for job in self.waiting if job not in run]
        if meanwhile is not None:
            meanwhile()
        actual_ms = slowness * (10.0 if predicted_ms is None else predicted_ms)
        self.now_s += actual_ms / 1000
        self.cache.end(run, plans)
        facts = [Facts(job.rid, one.n_cached, one.n_cached, None, None) for job, one in zip(run, plans, strict=True)]
        self.found |= {one.rid: one.n_cached for one in facts}
        self.live.observe(actual_ms, facts)
        return run

    def run_all(self) -> None:
        while self.waiting:
            self.step()


def traffic(engine: Engine, rng: random.Random, n_events: int) -> None:
    """Random arrivals of users that share prefixes, with deadlines and priorities, while steps run; some leave."""

    def arrive() -> None:
        user = rng.randrange(6)
        tokens = [*range(1000 * user, 1000 * user + rng.choice((0, 60, 200, 450)))]
        tokens += [SECRET + rng.randrange(10**9) for _ in range(rng.randint(1, 80))]
        engine.arrive(
            tokens,
            client=rng.choice(("", f"user {user}", "ünïcode \udc80")),
            rank=rng.choice((0, 0, 0, -1, 2, BACKGROUND)),
            deadline_ms=rng.choice((None, None, None, 5, 300.5, 2000)),
            n_answer_tokens=rng.choice((0, 0, 3)),
            namespace=rng.choice((None, None, "tenant")),
        )

    for _ in range(n_events):
        kind = rng.random()
        if kind < 0.5:
            for _ in range(rng.choice((1, 1, 2, 9))):
                arrive()
        elif kind < 0.6 and engine.waiting:
            engine.cancel(rng.choice(engine.waiting))
        else:
            engine.step(rng.uniform(0.5, 3.0), arrive if rng.random() < 0.5 else None)
        engine.now_s += rng.choice((0.0, 0.001, 0.2))
    engine.run_all()


def agreement(path: Path, **other: Any) -> Agreement:
    """Of a log with itself, or with what other options would do."""
    change = (lambda config: PrefillConfig(**{"scheduling": config.scheduling, **other})) if other else None
    return decisions.replay(decisions.read(path), change)


def records(path: Path) -> list[dict[str, Any]]:
    return [one.record for one in decisions.read(path) if isinstance(one, Decided)]


OPTIONS = [
    {},
    {"fair_by": "none"},
    {"fair_by": "none", "sharers": "ignore", "max_queue_s": 0.5},
    {"scheduling": "fifo"},
    {"scheduling": "srjf", "fairness_lambda": 2000.0},
    {"paper": True},
    {"max_waiting_requests": 12, "max_client_waiting_tokens": 900},
]


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32), options=st.sampled_from(OPTIONS), others=st.sampled_from(OPTIONS), packs=st.booleans()
)
def test_whatever_happens_the_log_replays_to_the_same_order(
    tmp_path_factory: pytest.TempPathFactory, seed: int, options: dict[str, Any], others: dict[str, Any], packs: bool
) -> None:
    """Under every policy, with refusals, cancelled requests, evictions and corrected predictions; others differ in words."""
    log = tmp_path_factory.mktemp("log") / "decisions.jsonl"
    engine = Engine(log, step=PACKED if packs else StepSize(), **options)
    traffic(engine, random.Random(seed), 120)
    found = agreement(log)
    assert found.is_whole
    assert found.left_out == []
    assert found.n_decisions > 10
    shown = records(log)
    assert [
        [record["first"]["id"], *(one["id"] for one in record["riders"])] for record in shown if record["first"]
    ] == (engine.orders)
    assert [orjson.loads(line) for line in engine.recorder.lines] == shown
    differing = decisions.replay(decisions.read(log), lambda _: PrefillConfig(**others))
    assert differing.is_whole or (differing.first_difference and "; now " in differing.first_difference.in_words)


def test_what_was_found_in_the_cache_and_computed_stands_beside_what_was_planned(tmp_path: Path) -> None:
    """The second of a user finds the first's prefix; times are those of the step."""
    engine = Engine(tmp_path / "log", pack_step_tokens=0, step=StepSize())
    engine.arrive([*range(100), 1], client="ada")
    engine.arrive([*range(100), 2, 3], client="ada")
    engine.run_all()
    first, second = (record["first"] for record in records(tmp_path / "log"))
    assert (first["client"], first["cached_tokens"], first["found_tokens"], first["new_tokens"]) == ("ada", 0, 0, 101)
    assert (second["cached_tokens"], second["found_tokens"], second["new_tokens"]) == (100, 100, 2)
    assert second["score"] == pytest.approx(JCT_MS(102, 100) - second["credit"], abs=0.01)
    one, two = records(tmp_path / "log")
    assert one["actual_ms"] == pytest.approx(one["predicted_ms"])
    assert two["step"] == 2
    assert two["time_s"] == pytest.approx(one["time_s"] + one["actual_ms"] / 1000)


def test_a_refusal_stands_with_its_reason(tmp_path: Path) -> None:
    """Too late to be computed at all, and no room at the door."""
    engine = Engine(tmp_path / "log", max_waiting_requests=1)
    engine.arrive([1, 2, 3], deadline_ms=0.001)
    assert engine.arrive([4, 5, 6]) is None
    engine.step()
    (record,) = records(tmp_path / "log")
    assert record["first"] is None
    assert [(one["id"], one["reason"]) for one in record["refuse"]] == [("job-1", "deadline_unreachable")]
    assert [(kind, what[-1]) for kind, *what in record["told"] if kind == "refuse"] == [("refuse", "queue_full")]
    assert agreement(tmp_path / "log").is_whole


def test_prompts_stand_in_no_record_unless_they_are_asked_for(tmp_path: Path) -> None:
    """Not even a token id, nor a hash that strangers could compare with."""
    for shows_prompts in (False, True):
        log = tmp_path / f"log-{shows_prompts}"
        engine = Engine(log, shows_prompts=shows_prompts)
        engine.arrive([SECRET + n for n in range(40)])
        engine.arrive([SECRET + n for n in range(40)])
        engine.run_all()
        assert (str(SECRET) in log.read_text()) == shows_prompts
        assert agreement(log).is_whole


def test_other_settings_are_told_apart_from_the_same(tmp_path: Path) -> None:
    """A replay that agreed with everything would prove nothing: first in, first out picks others."""
    engine = Engine(tmp_path / "log", fair_by="none", fairness_lambda=0.0)
    traffic(engine, random.Random(1), 150)
    assert agreement(tmp_path / "log").is_whole
    other = decisions.replay(decisions.read(tmp_path / "log"), lambda config: PrefillConfig(scheduling="fifo"))
    assert other.n_same < other.n_decisions == agreement(tmp_path / "log").n_decisions
    assert other.first_difference is not None
    assert other.first_difference.now != other.first_difference.then


def test_a_log_of_several_starts_is_replayed_start_by_start(tmp_path: Path) -> None:
    """A server that starts again appends, behind a line that its predecessor did not finish too."""
    log = tmp_path / "log"
    for seed in range(2):
        engine = Engine(log)
        traffic(engine, random.Random(seed), 40)
        engine.writer.close()
        with log.open("a") as file:
            file.write('{"step": 9, "to')
    found = agreement(log)
    assert found.is_whole
    assert len(found.left_out) == 2
    assert "is cut off" in found.left_out[0]
    assert sum(isinstance(one, Began) for one in decisions.read(log)) == 2


@contextmanager
def disk_of(n_bytes: int) -> Iterator[None]:
    """Files of this process end there, as on a full disk: with a short write, and then an error."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_ends_nothing_and_is_counted_and_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No half line stays; what was decided up to there replays, and the replay names what is missing."""
    engine = Engine(tmp_path / "log")
    traffic(engine, random.Random(3), 40)
    n_whole = len(records(tmp_path / "log"))
    with disk_of((tmp_path / "log").stat().st_size + 10), caplog.at_level(logging.ERROR):
        traffic(engine, random.Random(4), 30)
    assert engine.writer.n_lost > 1
    assert len([one for one in caplog.records if "--decision-log" in one.message]) == 1
    traffic(engine, random.Random(5), 10)  # there is room again
    found = agreement(tmp_path / "log")
    assert found.is_whole
    assert found.n_decisions == n_whole
    assert "is missing (a full disk?)" in found.left_out[0]


def test_two_servers_do_not_write_one_log(tmp_path: Path) -> None:
    """Their lines would mix."""
    first = DecisionLog(str(tmp_path / "log"))
    with pytest.raises(ConfigurationError, match="written by another server: give each server a file of its own"):
        DecisionLog(str(tmp_path / "log"))
    first.close()
    DecisionLog(str(tmp_path / "log")).close()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "holds no decision"),
        (b"no JSON\n", "holds no decision"),
        (b'{"step": 1, "told": []}\n', "what /decisions shows can be read, and not replayed"),
        (
            b'{"decisions_version": 2, "engine_version": "9.1"}\n',
            "version 2, written by sgl-prefill 9.1.*reads version 1",
        ),
        (b'{"decisions_version": 1}\n', "line 1: this is no beginning of a log"),
    ],
)
def test_what_is_no_log_is_refused_with_a_remedy(content: bytes, message: str, tmp_path: Path) -> None:
    """By its line, and with what would be one."""
    (tmp_path / "log").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        agreement(tmp_path / "log")


def test_a_broken_line_between_others_is_refused(tmp_path: Path) -> None:
    """What the policy heard there is not known."""
    traffic(Engine(tmp_path / "log"), random.Random(3), 40)
    lines = (tmp_path / "log").read_text().splitlines(keepends=True)
    (tmp_path / "log").write_text("".join([*lines[:3], "{}}\n", *lines[3:]]))
    with pytest.raises(ValueError, match=r"line 4: this is no decision"):
        agreement(tmp_path / "log")


def test_a_log_is_refused_where_nobody_could_write_or_decide(tmp_path: Path) -> None:
    """Before a process is spawned."""
    assert (
        "give a file in a folder that is there"
        in check_argv(PrefillConfig(decision_log=str(tmp_path / "none" / "log")), [], listens=False)[0]
    )
    assert "is no file" in check_argv(PrefillConfig(decision_log=str(tmp_path)), [], listens=False)[0]
    with pytest.raises(ConfigurationError, match="--scheduling stock SGLang's own scheduler decides"):
        PrefillConfig(decision_log="log", scheduling="stock")


def test_prompts_that_began_alike_are_found_without_keeping_them() -> None:
    """To a sixteenth of their common length, within one namespace, whatever came between."""
    alike = Alike()
    common = list(range(5000))
    assert alike.find_and_keep(array("q", [*common, 1]), None, 1) is None
    assert alike.find_and_keep(array("q", [9] * 5000), None, 2) is None
    job, n_tokens = alike.find_and_keep(array("q", [*common, 2, 3]), None, 3) or (0, 0)
    assert job == 1
    assert 5000 * 15 / 16 <= n_tokens <= 5000
    assert alike.find_and_keep(array("q", [*common, 2, 3]), "tenant", 4) is None


def test_a_policy_is_replayed_from_what_its_header_says(tmp_path: Path) -> None:
    """Floats come back to the bit, or orders would differ once in a while."""
    Engine(tmp_path / "log", fairness_lambda=1 / 3, max_queue_s=0.1)
    (began,) = decisions.read(tmp_path / "log")
    assert isinstance(began, Began)
    replayed = PolicyReplay(began.start).policy.settings
    assert replayed.fairness_lambda == 1 / 3 * JCT_MS(1000, 0) / 1000
    assert replayed.max_queue_s == 0.1
    assert json.loads((tmp_path / "log").read_text())["jct_model"] == JCT_MS._asdict()
    assert plan.EXAMPLE_PROFILE != JCT_MS


def test_the_command_replays_a_log_and_says_what_other_options_would_have_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All in the same order; and for another lambda both how many decisions change, and the latencies of a simulation."""
    log, numbers, picture = tmp_path / "log", tmp_path / "numbers.json", tmp_path / "plot.png"
    engine = Engine(log, fairness_lambda=0.0)
    traffic(engine, random.Random(9), 200)
    options = ["--fairness-lambda", "0,100000", "--json", str(numbers), "--plot", str(picture), "--page-tokens", "5"]
    assert plan.main(["--decisions", str(log), *options]) == 0
    found, n = json.loads(numbers.read_text()), len(records(log))
    assert (found["decisions"], found["same_order"]) == (n, n)
    assert [one["same_order"] == n for one in found["other_options"]] == [True, False]
    ran, simulated, same, other = found["settings"]
    assert [one["name"] for one in (ran, simulated, same, other)] == [
        "as it ran",
        "simulated as it was",
        "simulated, lambda 0",
        "simulated, lambda 100000",
    ]
    assert {**simulated, "name": ""} == {**same, "name": ""} != {**other, "name": ""}
    assert ran["token_saving"] == sum(engine.found.values()) / sum(
        one["input_tokens"] for record in records(log) for one in (record["first"], *record["riders"]) if one
    )
    assert picture.read_bytes().startswith(b"\x89PNG")
    shown = capsys.readouterr().out
    assert f"made again with the server's options: {n} of {n} decisions in the same order" in shown


def test_a_simulation_of_a_log_finds_the_prefixes_that_were_shared(tmp_path: Path) -> None:
    """Whose prompts are not there: four that begin alike are a miss and three hits of the common length."""
    engine = Engine(tmp_path / "log", fair_by="none", pack_step_tokens=0, step=StepSize())
    for n in range(4):
        engine.arrive([*range(640), 10_000 + n], client="ada")
    engine.run_all()
    assert (
        plan.main(
            [
                "--decisions",
                str(tmp_path / "log"),
                "--lambda",
                "1",
                "--page-tokens",
                "10",
                "--json",
                str(tmp_path / "j"),
            ]
        )
        == 0
    )
    ran, simulated, _ = json.loads((tmp_path / "j").read_text())["settings"]
    assert ran["token_saving"] == pytest.approx(3 * 640 / (4 * 641)) == simulated["token_saving"]


def test_what_the_command_cannot_replay_is_said_with_a_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An exit status of 2 and a sentence; of a log that does not replay 1, and which decision differs."""
    assert plan.main(["--decisions", str(tmp_path / "none")]) == 2
    assert "No such file" in capsys.readouterr().err
    log = tmp_path / "log"
    traffic(Engine(log), random.Random(9), 100)
    assert plan.main(["--decisions", str(log), "--engines", "2"]) == 2
    assert "--engines: with --decisions the log says who came" in capsys.readouterr().err
    beginning = json.loads(log.read_text().splitlines()[0])
    beginning["config"] |= {"scheduling": "fifo", "fair_by": "none"}
    log.write_text("\n".join([json.dumps(beginning), *log.read_text().splitlines()[1:]]) + "\n")
    assert plan.main(["--decisions", str(log)]) == 1
    shown = capsys.readouterr().out
    assert "the first that differs is decision " in shown
    assert "what follows is worth nothing" in shown


STRANGE = ('a\nb"c\u2028\\', "\udc80 \U0001f600", "x" * 10_000 + "1", "x" * 10_000 + "2", "")


def test_what_clients_call_themselves_and_their_requests_breaks_no_line_and_fills_no_log(tmp_path: Path) -> None:
    """Ids and names of ten thousand characters, with line ends, quotes and halves of characters; who differs stays apart."""
    engine = Engine(tmp_path / "log")
    for name in STRANGE:
        engine.arrive([*range(100)], rid=name, client=name)
        engine.arrive([*range(300)], rid=name + "again", client=name)
    engine.run_all()
    shown = records(tmp_path / "log")
    assert len((tmp_path / "log").read_bytes().splitlines()) == 1 + len(shown)
    assert (tmp_path / "log").stat().st_size < 30_000
    run = [one for record in shown for one in (record["first"], *record["riders"])]
    assert len({one["id"] for one in run}) == 2 * len(STRANGE)
    assert len({one.get("client") for one in run}) == len(STRANGE)
    assert all(one["found_tokens"] is not None for one in run)
    assert agreement(tmp_path / "log").is_whole


def test_scores_that_are_no_numbers_are_null_and_end_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a policy of one's own, which may calculate with NumPy."""
    parts = [ScoreParts(float("nan"), 0.0), ScoreParts(float("inf"), 1.0), ScoreParts(np.float64(3), np.float32(1))]  # type: ignore[arg-type]
    monkeypatch.setattr(CalibratedSrjf, "parts_of_score", lambda *_: parts.pop(0))
    engine = Engine(tmp_path / "log", step=StepSize(), pack_step_tokens=0, fair_by="none")
    for n in range(3):
        engine.arrive([n] * 10)
    engine.run_all()
    assert [(one["first"]["score"], one["first"]["credit"]) for one in records(tmp_path / "log")] == [
        (None, 0.0),
        (None, 1.0),
        (2.0, 1.0),
    ]
    assert agreement(tmp_path / "log").is_whole


def test_a_priority_beyond_64_bits_is_written_down(tmp_path: Path) -> None:
    """Python's numbers have no end, JSON's have."""
    engine = Engine(tmp_path / "log", step=StepSize(), pack_step_tokens=0)
    for rank in (2**70, 0, -(2**70)):
        engine.arrive([1, 2, 3], rank=rank)
    engine.run_all()
    assert engine.orders == [["job-3"], ["job-2"], ["job-1"]]
    assert agreement(tmp_path / "log").is_whole


def test_what_is_kept_for_the_route_has_a_limit_in_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two thousand steps of 256 requests would be 200 MB of a scheduler's memory; the file gets all of them."""
    monkeypatch.setattr(recording, "KEPT_BYTES", 200_000)
    engine = Engine(tmp_path / "log", step=StepSize(10**6, 256), fair_by="none")
    for n in range(6 * 256):
        engine.arrive([n, 1, 2])
    engine.run_all()
    shown = records(tmp_path / "log")
    assert [len(record["riders"]) for record in shown] == [255] * 6
    kept = [orjson.loads(line) for line in engine.recorder.lines]
    assert 1 <= len(kept) < 6
    assert kept == shown[-len(kept) :]
    assert sum(map(len, engine.recorder.lines)) <= 200_000
    assert agreement(tmp_path / "log").is_whole


def test_a_log_that_is_moved_away_is_written_on_and_its_name_is_free(tmp_path: Path) -> None:
    """It would otherwise be torn in two, the second part without a beginning."""
    engine = Engine(tmp_path / "log")
    traffic(engine, random.Random(1), 30)
    (tmp_path / "log").rename(tmp_path / "moved")
    traffic(engine, random.Random(2), 30)
    assert engine.writer.n_lost == 0
    found = agreement(tmp_path / "moved")
    assert found.is_whole
    assert found.n_decisions == len(engine.recorder.lines)
    traffic(Engine(tmp_path / "log"), random.Random(3), 30)
    assert agreement(tmp_path / "log").is_whole


def test_lines_of_a_deleted_log_count_as_lost(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Writing them succeeds, and nobody can read them."""
    engine = Engine(tmp_path / "log")
    (tmp_path / "log").unlink()
    with caplog.at_level(logging.ERROR):
        traffic(engine, random.Random(1), 30)
    assert engine.writer.n_lost == len(engine.recorder.lines) > 1
    (said,) = [one.message for one in caplog.records if "--decision-log" in one.message]
    assert "its file was deleted; a new one begins with the next start" in said


def test_a_log_that_was_cut_at_its_beginning_is_refused(tmp_path: Path) -> None:
    """As by a program that copies a log and empties it under a server."""
    engine = Engine(tmp_path / "log")
    traffic(engine, random.Random(1), 30)
    os.truncate(tmp_path / "log", 0)
    traffic(engine, random.Random(2), 30)
    with pytest.raises(ValueError, match="nor can a log that was cut at its beginning"):
        agreement(tmp_path / "log")


def test_half_a_line_on_a_full_disk_is_an_error_at_the_start(tmp_path: Path) -> None:
    """What a server wrote behind it later would be one line with it."""
    (tmp_path / "log").write_text("half a li")
    with disk_of(9), pytest.raises(ConfigurationError, match=r"ends in half a line.*: make room on its disk"):
        DecisionLog(str(tmp_path / "log"))
    DecisionLog(str(tmp_path / "log")).close()


def test_a_disk_without_locks_is_not_taken_for_another_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some network file systems have none; the message had sent people to look for a server that is not there."""

    def no_locks(*_: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.raises(
        ConfigurationError, match=r"cannot be locked \(No locks available\).* on a disk of this machine"
    ):
        DecisionLog(str(tmp_path / "log"))


def test_a_server_that_is_killed_leaves_whole_lines_and_the_next_appends(tmp_path: Path) -> None:
    """In the middle of writing: each line is one write, and the lock ends with the process."""
    log = tmp_path / "log"
    child = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys; from sgl_prefill.scheduling.decision_log import DecisionLog\n"
            "log, n = DecisionLog(sys.argv[1]), 0\n"
            "while n < 200_000:\n"
            "    log.write(b'x' * 500); n += 1; n == 20 and print('writes', flush=True)",
            str(log),
        ],
        stdout=subprocess.PIPE,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == b"writes\n"
    child.kill()
    child.communicate()
    DecisionLog(str(log)).close()
    lines = log.read_bytes().splitlines()
    assert len(lines) >= 20
    assert {len(line) for line in lines} == {500}


@pytest.mark.parametrize("last", ["0", "-1", "abc", "", "1e2", "2001", "999999", "\u00b2", "9" * 5000])
def test_a_number_of_decisions_that_nobody_can_have_is_refused(last: str) -> None:
    """With the limit, also where it has more digits than Python reads."""
    with pytest.raises(BadRequestError, match="it must be a number from 1 to 2000") as refused:
        count_of(last)
    assert len(str(refused.value)) < 250
    assert (count_of("1"), count_of("2000")) == (1, 2000)


def test_a_simulated_engine_writes_the_whole_record_of_a_server(tmp_path: Path) -> None:
    """Each request has a name of its own, each step what was predicted and what it took, and the log replays."""
    config = PrefillConfig(fair_by="none")
    start = Start(config, JCT_MS, PACKED, 500)
    recorder = DecisionRecorder(DecisionLog(str(tmp_path / "log")))
    recorder.begin(header(config, JCT_MS, start.settings(), engine_version="1", unix_s=0.0))
    engine = SimulatedEngine(
        config, JCT_MS, 500, page_tokens=1, settings=start.settings(), recorder=recorder, actual_ms=lambda ms: 2 * ms
    )
    arrivals = [Arrival(n / 100, f"user {n % 3}", 50, 10 + n) for n in range(40)]
    assert len(list(replay_cluster(arrivals, [engine], RoundRobin()))) == 40
    shown = records(tmp_path / "log")
    run = [one for record in shown for one in (record["first"], *record["riders"])]
    assert len({one["id"] for one in run}) == len(run) == 40
    assert all(one["found_tokens"] == one["cached_tokens"] for one in run)
    first, last = shown[0], shown[-1]
    assert first["actual_ms"] == pytest.approx(2 * first["predicted_ms"])
    assert last["actual_ms"] < 1.5 * last["predicted_ms"]  # it has learned
    assert agreement(tmp_path / "log").is_whole


def test_what_other_options_would_have_done_is_told_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Who ran, who would have run in its place, and what the policy knew of both: numbers of jobs tell nobody anything."""
    engine = Engine(tmp_path / "log", step=StepSize(), pack_step_tokens=0, fair_by="none", fairness_lambda=0.0)
    engine.arrive([*range(200)], rid="long and old", client="ada")
    engine.now_s += 60
    engine.arrive([7] * 20, rid="short and new")
    engine.run_all()
    assert plan.main(["--decisions", str(tmp_path / "log"), "--fairness-lambda", "1000"]) == 0
    shown = capsys.readouterr().out
    assert "with lambda 1000, asked at the same moments" in shown
    assert "1 decisions the same, 1 others (50.0 %)" in shown
    assert (
        "it ran request 'short and new' (waited 0 ms, 20 tokens, 0 of them cached);"
        " now runs request 'long and old' of 'ada' (waited 60000 ms, 200 tokens, 0 of them cached)"
    ) in shown
    assert plan.main(["--decisions", str(tmp_path / "log")]) == 0
    assert "what other options would have done: add --fairness-lambda" in capsys.readouterr().out


def test_a_simulation_counts_few_tokens_as_one_where_prompts_are_short(tmp_path: Path) -> None:
    """Pages of 50 tokens had hidden every hit of prompts of 60."""
    engine = Engine(tmp_path / "log", fair_by="none", pack_step_tokens=0, step=StepSize())
    for n in range(4):
        engine.arrive([*range(48), *(1000 * n + m for m in range(12))])
    engine.run_all()
    options = ["--lambda", "1", "--json", str(tmp_path / "numbers")]
    assert plan.main(["--decisions", str(tmp_path / "log"), *options]) == 0
    ran, simulated, _ = json.loads((tmp_path / "numbers").read_text())["settings"]
    assert ran["token_saving"] == pytest.approx(3 * 48 / 240) == simulated["token_saving"]
