"""The same requests to several engines at several rates: resumable, kept request by request, refused where answers differ."""

from __future__ import annotations

import gzip
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from benchmarks import report, shapes
from benchmarks.harness import client, engines, turns
from benchmarks.harness.kept import Kept
from benchmarks.harness.turns import Served, Servers
from sgl_prefill.errors import ServerStartError

Rate = float | None  # requests a second; None: all at once
SATURATION: Rate = None
N_WARM_UP = 5
MEDIANS = ("requests_per_s", "mean_s", "p50_s", "p99_s", "cached_share")
DEMO = "the demo model, SmolLM2-135M-Instruct"


class Run(NamedTuple):
    """One engine at one rate."""

    engine: str
    offered_per_s: Rate
    figures: client.Figures
    outcomes: list[client.Outcome]
    told_apart: float = 1.0  # see `client.told_apart`
    turn: str = ""  # which of several runs of the same

    @property
    def kept_up(self) -> float:
        """The pace of answers over that of arrivals, each between its first and its last tenth: a short run's last answers, which
        come when nothing arrives any more, say nothing of the pace."""
        if self.offered_per_s is None:
            return 1.0
        arrivals = sorted(one.at_s for one in self.outcomes)
        finishes = sorted(one.finish_s for one in self.outcomes)
        tenth = len(arrivals) // 10
        return (arrivals[-1 - tenth] - arrivals[tenth]) / (finishes[-1 - tenth] - finishes[tenth])

    def row(self) -> dict[str, Any]:
        return {
            "engine": self.engine,
            "offered_per_s": self.offered_per_s,
            **self.figures._asdict(),
            "told_apart": self.told_apart,
            "turn": self.turn,
        }


class Comparison:
    """Runs of one benchmark; a context manager, which ends the last servers.

    The `n_servers` most recently used servers stay up, so that two that take turns run in the same minutes of a noisy machine.
    A run that `timeout` cuts off writes the rows that it has, without targets, where no result is yet, and may be resumed.

    Answers to the same prompt must agree within `Engine.max_logprob_difference`, at whatever rate, and some answers to
    different prompts must differ by more, or agreement would prove nothing (not checked on a device, whose weights are
    dummies). The rows hold the share that differs as `told_apart`.
    """

    def __init__(
        self,
        arguments: Any,
        requests_of: Callable[[Rate], list[client.Due]],
        served: Served,
        n_servers: int = 1,
    ) -> None:
        self.conditions: dict[str, Any] = report.conditions()
        self._json: Path | None = arguments.json
        self._kept = Kept(arguments.json, f"{self.conditions['commit']}, {self.conditions['command']}")
        self.conditions["model"] = DEMO if served.model is None else shapes.config(served.model)
        self.conditions["dtype"] = shapes.DTYPE
        self._make_requests, self._servers = requests_of, Servers(served, n_servers)
        self._engines: list[engines.Engine] = []
        self._requests: dict[Rate, list[client.Due]] = {}
        self._answers: dict[tuple[int, ...], list[float]] = {}  # by prompt: the first engine's answer
        self._runs: dict[str, Run] = {}
        self.failed: list[dict[str, str]] = []

    def __enter__(self) -> Self:
        self._servers.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._servers.__exit__()
        if kind is SystemExit and self._json is not None and not self._json.exists():
            self.failed.append({"engine": "all others", "failed": "the run was cut off"})
            self._write([], {})

    def measure(self, engine: engines.Engine, rates: Sequence[Rate], turn: str = "") -> list[Run]:
        """Another `turn` is another run of the same.

        Raises InvalidRunError where the engine is not the one asked for, a request is lost, or an answer differs.
        """
        names = [_name(engine, rate, turn) for rate in rates]
        for name, rate in zip(names, rates, strict=True):
            if name not in self._runs:
                if is_new := name not in self._kept:
                    self._measure(engine, rate, name)
                run = self._read(engine, rate, name, turn)
                if is_new:
                    print(run.row(), file=sys.stderr)
                self._check(run, engine.max_logprob_difference)
                self._runs[name] = run
            if engine not in self._engines:
                self._engines.append(engine)
        return [self._runs[name] for name in names]

    def saturation_of(self, engine: engines.Engine, turn: str = "") -> float:
        """The paper's x: what an engine serves with all submitted at once, in requests a second."""
        (run,) = self.measure(engine, [SATURATION], turn)
        self.conditions["x_requests_per_s"] = run.figures.requests_per_s
        return run.figures.requests_per_s

    def measure_rival(self, engine: engines.Engine, rates: Sequence[Rate], turn: str = "") -> list[Run] | None:
        """As `measure`; None, and a row in `failed`, where the engine cannot be started, or ends under the load: that is a
        result too."""
        try:
            return self.measure(engine, rates, turn)
        except (ServerStartError, report.InvalidRunError) as error:
            if (why := self._servers.why_failed(engine, error)) is None:
                raise
        self.failed.append({"engine": engine.name, "failed": why})
        print(f"{engine.name} failed: {why}", file=sys.stderr)
        return None

    def take_turns(
        self, contest: turns.Contest, rates: Sequence[Rate], cost: Callable[[client.Figures], float]
    ) -> dict[engines.Engine, list[client.Figures]]:
        """`turns.take_turns` with a run at each of these rates; the medians of each engine, a rate each.

        Args:
            cost: of the figures at the first rate; the policy with the lowest is the best of its reference.
        """

        def measure(engine: engines.Engine, turn: str) -> list[Run] | None:
            return (self.measure if engine.is_ours else self.measure_rival)(engine, rates, turn)

        if shapes.HAS_CUDA:  # an engine that fails here is started again in its turn, and reported then
            self._servers.start(contest.first(self._servers.n_most))
        found = turns.take_turns(contest, measure, lambda runs: cost(runs[0].figures))
        return {
            engine: [median_of([runs[index].figures for runs in of_turns]) for index in range(len(rates))]
            for engine, of_turns in found.items()
        }

    def finish(self, targets: list[report.Target], **further: Any) -> None:
        """Write result.json, and beside it `result.requests.jsonl.gz` with each run's requests in columns."""
        self._write(targets, further)
        self._kept.forget()

    def part(self, targets: list[report.Target], **further: Any) -> dict[str, Any]:
        """What a part of a benchmark found (`report.in_parts`); each run's requests go to a file beside its result."""
        result = self._result(further)
        del result["activation_records"]
        self._write_requests()
        self._kept.forget()
        return {**result, "targets": [target._asdict() for target in targets]}

    def _write(self, targets: list[report.Target], further: dict[str, Any]) -> None:
        report.finish(self._result(further), targets, self._json)
        self._write_requests()

    def _result(self, further: dict[str, Any]) -> dict[str, Any]:
        kept = {engine.name: self._kept[engine.name] for engine in self._engines}
        self.conditions["commands"] = {name: one["command"] for name, one in kept.items()}
        self.conditions["sglang_of"] = {name: one["version"] for name, one in kept.items()}
        self.conditions["kernel_of"] = {name: one["kernel"] for name, one in kept.items()}
        self.conditions["commit_of"] = {name: one["commit"] for name, one in kept.items()}
        records = {name: one["record"] for name, one in kept.items()}
        rows = [run.row() for run in self._runs.values()]
        result = {"conditions": self.conditions, "activation_records": records, "rows": rows, "failed": self.failed}
        return {**result, "medians": medians_of(list(self._runs.values())), **further}

    def _write_requests(self) -> None:
        if self._json is not None:
            lines = [json.dumps(_columns(run)) + "\n" for run in self._runs.values()]
            self._json.with_suffix(".requests.jsonl.gz").write_bytes(gzip.compress("".join(lines).encode(), mtime=0))

    def _measure(self, engine: engines.Engine, rate: Rate, name: str) -> None:
        server = self._servers.of(engine)
        self._kept[engine.name] = {
            "command": server.command,
            "record": server.record,
            "version": server.version,
            "kernel": server.kernel,
            "commit": self.conditions["commit"],
        }
        dues = self._requests_at(rate)
        client.run(server.url, dues[:N_WARM_UP], "warm-up", engine.dialect)
        server.flush_cache()
        outcomes = client.run(server.url, dues, name, engine.dialect)
        self._kept[name] = [list(one) for one in outcomes]

    def _requests_at(self, rate: Rate) -> list[client.Due]:
        if rate not in self._requests:
            self._requests[rate] = self._make_requests(rate)
        return self._requests[rate]

    def _check(self, run: Run, max_difference: float) -> None:
        """Compares the answers with the first answers to the same prompts."""
        answers = [one.logprobs for one in run.outcomes]
        prompts = [tuple(due.input_ids) for due in self._requests_at(run.offered_per_s)]
        expected = [self._answers.setdefault(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]
        client.check_agreement(answers, expected, max_difference, run.engine)
        firsts = [answer[0] for answer in answers]
        if not shapes.HAS_CUDA and max(firsts) - min(firsts) <= max_difference:
            raise report.InvalidRunError(f"{run.engine} answers all prompts alike: {answers[0]}")

    def _read(self, engine: engines.Engine, rate: Rate, name: str, turn: str) -> Run:
        outcomes = [client.Outcome(*fields) for fields in self._kept[name]]
        told_apart = client.told_apart([one.logprobs for one in outcomes], engine.max_logprob_difference)
        return Run(engine.name, rate, client.figures(outcomes), outcomes, told_apart, turn)


def medians_of(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Takes medians over the runs of one engine at one load that took turns with others'."""
    by_load: dict[tuple[str, Rate], list[client.Figures]] = {}
    for run in runs:
        if run.turn:
            by_load.setdefault((run.engine, run.offered_per_s), []).append(run.figures)
    return [
        {
            "engine": engine,
            "offered_per_s": rate,
            "turns": len(figures),
            **{name: getattr(median_of(figures), name) for name in MEDIANS},
        }
        for (engine, rate), figures in by_load.items()
    ]


def median_of(figures: Sequence[client.Figures]) -> client.Figures:
    """Takes the median of each figure for itself."""
    return client.Figures(*(statistics.median(values) for values in zip(*figures, strict=True)))


def _name(engine: engines.Engine, rate: Rate, turn: str = "") -> str:
    name = f"{engine.name}, " + ("all at once" if rate is None else f"{rate:.6g} a second")
    return f"{name}, {turn}" if turn else name


def _columns(run: Run) -> dict[str, Any]:
    """Times in seconds from the start of the run, to the millisecond."""
    outcomes = run.outcomes
    return {
        "engine": run.engine,
        "offered_per_s": run.offered_per_s,
        "turn": run.turn,
        "arrival_s": [round(one.at_s, 3) for one in outcomes],
        "first_byte_s": [round(one.first_byte_s, 3) for one in outcomes],
        "finish_s": [round(one.finish_s, 3) for one in outcomes],
        "cached_tokens": [one.cached_tokens for one in outcomes],
        "computed_tokens": [one.prompt_tokens - one.cached_tokens for one in outcomes],
    }
