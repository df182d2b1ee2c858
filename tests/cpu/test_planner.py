"""The planner on traces whose outcome is known."""

from __future__ import annotations

import json
import os
import random
from array import array
from pathlib import Path
from typing import Any

import pytest

from sgl_prefill import plan
from sgl_prefill.config import PrefillConfig
from sgl_prefill.core.jct import FittedJct
from sgl_prefill.errors import ConfigurationError
from sgl_prefill.planner import workloads
from sgl_prefill.planner.simulate import replay, settings_of
from sgl_prefill.planner.workloads import Arrival
from sgl_prefill.port.steps.request_log import PAGE_TOKENS, RequestLog, prefix_hashes
from tests.support import toy_policy

TOKEN_A_MS = FittedJct(step_ms=0.0, miss_token_ms=1.0, pair_ms=0.0, cached_token_ms=0.0)
PAGE = 10
# Figure 5 of the paper: A and D share a prefix, B and C another, and the cache holds one request.
FIGURE_5 = [
    Arrival(0.0, "ad", 80, 20),
    Arrival(0.0, "bc", 80, 60),
    Arrival(0.0, "bc", 80, 40),
    Arrival(0.0, "ad", 80, 80),
]


def one_a_step(**options: Any) -> PrefillConfig:
    """One request a step, each for itself; without credit for waiting unless told."""
    return PrefillConfig(**{"pack_step_tokens": 0, "sharers": "ignore", "fairness_lambda": 0.0, **options})


def order_and_hits(config: PrefillConfig) -> tuple[str, int]:
    names = {100: "A", 140: "B", 120: "C", 160: "D"}
    served = list(replay(FIGURE_5, config, TOKEN_A_MS, durable_tokens=160, page_tokens=PAGE))
    return "".join(names[one.n_tokens] for one in served), sum(one.n_cached_tokens > 0 for one in served)


def test_figure_5_through_the_replay() -> None:
    """Calibration finds two hits; what the paper's FIFO loses, keeping a wanted prefix does not lose here."""
    assert order_and_hits(one_a_step()) == ("ADCB", 2)
    assert order_and_hits(one_a_step(scheduling="fifo"))[0] == "ABCD"


def test_time_and_cache_add_up() -> None:
    """1 ms a token: 100 computed, then 20 of 100 computed, one waits for the other."""
    arrivals = [Arrival(1.0, "p", 80, 20), Arrival(1.0, "p", 80, 20), Arrival(9.0, "q", 0, 50)]
    first, second, third = replay(arrivals, one_a_step(), TOKEN_A_MS, 1000, page_tokens=PAGE)
    starts_and_ends = [time_s for one in (first, second, third) for time_s in (one.start_s, one.finish_s)]
    assert starts_and_ends == pytest.approx([1.0, 1.1, 1.1, 1.12, 9.0, 9.05])
    assert [one.n_cached_tokens for one in (first, second, third)] == [0, 80, 0]


def test_a_cache_of_two_users_saves_what_an_unlimited_one_would_for_bursts() -> None:
    """WL1: the ceiling is the paper's 96.96 %, and calibrated SRJF reaches 95 % of it at any rate."""
    arrivals = workloads.post_recommendation(random.Random(0), 1000.0)
    ceiling = workloads.ceiling_of_saving(arrivals)
    assert ceiling == pytest.approx(0.9696, abs=0.0005)
    served = list(replay(arrivals, one_a_step(fairness_lambda=500.0), TOKEN_A_MS, durable_tokens=2 * 14_150))
    saved = sum(one.n_cached_tokens for one in served) / sum(one.n_tokens for one in served)
    assert 0.95 * ceiling < saved <= ceiling


def test_a_strong_lambda_costs_no_hits_where_sharers_count_together() -> None:
    """10 users mixed, a cache for two; without it, older requests of other users break in between two of one user."""
    arrivals = workloads.post_recommendation(random.Random(0), 1.0, n_users=10, n_posts=20, arrivals="single")

    def saved(counts_sharers: bool) -> float:
        config = one_a_step(fairness_lambda=2000.0, sharers="count" if counts_sharers else "ignore")
        served = list(replay(arrivals, config, TOKEN_A_MS, durable_tokens=2 * 17_150))
        return sum(one.n_cached_tokens for one in served) / sum(one.n_tokens for one in served)

    assert saved(counts_sharers=True) > 0.8
    assert saved(counts_sharers=False) < 0.6


def test_a_step_of_several_requests_is_paid_for_once() -> None:
    """100 ms a step and 1 ms a token: four hits of 20 tokens behind one prefix take 180 ms together, and 120 ms each alone."""
    machine = FittedJct(step_ms=100.0, miss_token_ms=1.0, pair_ms=0.0, cached_token_ms=0.0)
    arrivals = [Arrival(0.0, "p", 80, 20), *(Arrival(1.0, "p", 80, 20) for _ in range(4))]

    def last(pack_step_tokens: int | None) -> float:
        config = one_a_step(pack_step_tokens=pack_step_tokens)
        return max(one.finish_s for one in replay(arrivals, config, machine, 1000, page_tokens=PAGE))

    assert last(0) == pytest.approx(1.0 + 4 * 0.12)
    assert last(60) == pytest.approx(1.0 + 0.16 + 0.12)
    assert last(None) == pytest.approx(1.0 + 0.18)


def test_a_replay_runs_the_policy_with_what_the_engines_options_say() -> None:
    """In pages: the credit for waiting is worth the same, and `max_queue_s` holds for every policy."""
    found = settings_of(PrefillConfig(max_queue_s=3.0, scheduling="srjf"), TOKEN_A_MS, page_tokens=PAGE)
    assert (found.max_queue_s, found.counts_sharers) == (3.0, True)
    assert found.fairness_lambda == pytest.approx(500.0)
    assert found.cost(7, 2) == pytest.approx(TOKEN_A_MS(70, 20))
    paper = settings_of(PrefillConfig(paper=True), TOKEN_A_MS, page_tokens=PAGE)
    assert (paper.step.is_one, paper.counts_sharers, paper.fairness_lambda) == (True, False, 500.0 / PAGE)
    assert paper.cost(7, 2) == 5


def test_the_policy_of_ten_lines_that_the_page_shows_is_replayed() -> None:
    """Newest first: of three that wait, the last one runs next."""
    arrivals = [Arrival(0.0, "a", 0, 100), *(Arrival(0.01 * n, f"q{n}", 0, 10 * n) for n in (1, 2, 3))]
    served = list(replay(arrivals, one_a_step(scheduling=toy_policy.register()), TOKEN_A_MS, 1000, page_tokens=PAGE))
    assert [one.n_tokens for one in served] == [100, 30, 20, 10]


@pytest.mark.parametrize(
    ("arrivals", "seed", "config", "finish_s", "n_cached_tokens"),
    [
        ("single", 0, PrefillConfig(), 15194870.395909702, 6660366400),
        ("single", 0, PrefillConfig(paper=True), 14979238.660891587, 6773533650),
        ("burst", 1, PrefillConfig(max_queue_s=3.0), 9694497.14494716, 7164045000),
        ("at-once", 0, PrefillConfig(scheduling="srjf"), 9022069.142275685, 7233808750),
    ],
)
def test_one_engine_serves_as_before_there_were_several(
    arrivals: Any, seed: int, config: PrefillConfig, finish_s: float, n_cached_tokens: int
) -> None:
    """Sums over WL1 at 40 requests/s, each term times its place in the order, of the replay that knew one engine only."""
    trace = workloads.post_recommendation(random.Random(seed), 40.0, arrivals=arrivals)
    served = list(replay(trace, config, plan.EXAMPLE_PROFILE, 2 * 17_150))
    assert sum(place * one.finish_s for place, one in enumerate(served)) == pytest.approx(finish_s, rel=1e-12)
    assert sum(place * one.n_cached_tokens for place, one in enumerate(served)) == n_cached_tokens


def test_a_bound_on_waiting_holds() -> None:
    """One long request under a stream of short ones that alone fill the machine."""
    arrivals = [Arrival(0.0, "long", 0, 5000), *(Arrival(0.009 * n, f"s{n}", 0, 10) for n in range(2000))]

    def longest_wait(config: PrefillConfig) -> float:
        served = replay(arrivals, config, TOKEN_A_MS, 10_000, page_tokens=PAGE)
        return max(one.start_s - one.arrival_s for one in served if one.n_tokens == 5000)

    assert longest_wait(one_a_step()) > 17
    assert longest_wait(one_a_step(max_queue_s=3.0)) == pytest.approx(3.0, abs=0.02)


def test_workloads_are_as_the_paper_prints_them() -> None:
    """Lengths, counts, rates, and the three readings of `user arrivals`."""
    burst = workloads.post_recommendation(random.Random(1), 10.0)
    assert len(burst) == 1000
    assert len({one.arrival_s for one in burst}) == len({one.prefix_id for one in burst}) == 20
    assert all(11_000 <= one.prefix_tokens <= 17_000 and one.tail_tokens == 150 for one in burst)
    single = workloads.post_recommendation(random.Random(1), 10.0, arrivals="single")
    assert len({one.arrival_s for one in single}) == 1000
    assert single[-1].arrival_s == pytest.approx(100, rel=0.2)
    assert {one.arrival_s for one in workloads.post_recommendation(random.Random(1), 1.0, arrivals="at-once")} == {0.0}
    plain = workloads.post_recommendation(random.Random(1), 1.0, n_users=500, profile_range_tokens=None)
    assert min(one.prefix_tokens for one in plain) < 11_000
    credit = workloads.credit_verification(random.Random(1), 1.0)
    assert len(credit) == 60
    assert all(40_000 <= one.n_tokens <= 60_000 for one in credit)


def test_the_command_prints_a_row_for_each_setting(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, numbers = tmp_path / "t.jsonl", tmp_path / "n.json"
    workloads.write(trace, FIGURE_5)
    assert workloads.read(trace) == FIGURE_5
    options = ["--durable-tokens", "160", "--page-tokens", "10", "--lambda", "0,500", "--json", str(numbers)]
    assert plan.main(["--trace", str(trace), *options]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert rows[-1].strip().startswith("calibrated")
    settings = json.loads(numbers.read_text())["settings"]
    assert [one["name"] for one in settings] == [
        "fifo, packed",
        "srjf, lambda 500, packed",
        "calibrated-srjf, lambda 0, sharers counted, packed",
        "calibrated-srjf, lambda 500, sharers counted, packed",
        "calibrated-srjf, lambda 500, cache-miss tokens",
    ]
    assert settings[2]["hit_rate"] == 0.5


@pytest.mark.parametrize(
    ("line", "options", "says"),
    [
        ('{"arrival_s": 0}', [], "line 1"),
        ('{"arrival_s": -1, "prefix_id": "a", "prefix_tokens": 1, "tail_tokens": 1}', [], "a time >= 0"),
        ("", [], "holds no request"),
        ('{"arrival_s": 1, "prefix_id": "a", "prefix_tokens": 1, "tail_tokens": 1}', ["--lambda", "nan"], "--lambda"),
        ('{"arrival_s": 1, "prefix_id": "a", "prefix_tokens": 1, "tail_tokens": 1}', ["--rate", "-1"], "--rate"),
        (
            '{"arrival_s": 1, "prefix_id": "a", "prefix_tokens": 1, "tail_tokens": 1}',
            ["--set", "max_queue_s=-1"],
            "--set max_queue_s",
        ),
        ("[1]", [], "line 1"),
    ],
)
def test_nonsense_is_refused_with_its_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, options: list[str], says: str
) -> None:
    trace = tmp_path / "t.jsonl"
    trace.write_text(line)
    assert plan.main(["--trace", str(trace), "--durable-tokens", "100", *options]) == 2
    assert says in capsys.readouterr().err


def test_a_request_log_shares_in_the_replay_what_its_requests_shared(tmp_path: Path) -> None:
    """Written as a server writes it: three prompts share two pages, one of them in another namespace, which shares nothing."""
    file, numbers = tmp_path / "requests.jsonl", tmp_path / "n.json"
    log = RequestLog(str(file))
    shared = list(range(2 * PAGE_TOKENS + 10))
    prompts = [array("q", [*shared, 1000 + n, 1]) for n in range(3)]
    hashes = [prefix_hashes(prompts[n], "tenant" if n == 2 else None) for n in range(3)]
    assert hashes[0] == hashes[1]
    assert not set(hashes[0]) & set(hashes[2])
    assert len(prefix_hashes(prompts[0], "\ud800")) == 2, "a lone surrogate is a namespace like any other"
    log.write(
        {
            "arrival_s": 100.0 + n,
            "id": str(n),
            "client": "",
            "input_tokens": len(prompts[n]),
            "cached_tokens": 0,
            "wait_ms": 1.0,
            "predicted_ms": None,
            "actual_ms": 2.0,
            "pages": hashes[n],
        }
        for n in range(3)
    )
    with pytest.raises(ConfigurationError, match="another server"):
        RequestLog(str(file))
    log.close()
    options = ["--durable-tokens", "1000", "--lambda", "0", "--json", str(numbers)]
    assert plan.main(["--trace", str(file), *options]) == 0
    settings = {one["name"]: one for one in json.loads(numbers.read_text())["settings"]}
    assert settings["as it ran"]["mean_s"] == pytest.approx(0.003)
    assert settings["fifo, packed"]["token_saving"] == pytest.approx(2 * PAGE_TOKENS / (3 * len(prompts[0])))
    assert plan.main(["--trace", str(file), *options, "--page-tokens", "50"]) == 2


def test_a_line_that_finds_no_room_is_lost_and_leaves_no_torn_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "requests.jsonl"
    log = RequestLog(str(file))
    log.write([{"n": 1}])
    write = os.write
    monkeypatch.setattr(os, "write", lambda to, content: write(to, content[:3]))
    log.write([{"n": 2}, {"n": 3}])
    log.write([{"n": 4}])
    monkeypatch.undo()
    log.write([{"n": 5}])
    log.close()
    assert file.read_text() == '{"n":1}\n{"n":5}\n'
    assert log.n_lost_lines == 3
    assert len(caplog.records) == 1


def test_percentiles() -> None:
    values = [float(n) for n in range(1, 101)]
    assert (plan.percentile(values, 50), plan.percentile(values, 99), plan.percentile([7.0], 99)) == (50.0, 99.0, 7.0)
