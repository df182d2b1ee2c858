"""The same requests to several engines at several rates: resumable, kept request by request, refused where answers differ."""

from __future__ import annotations

import gzip
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, Self

from benchmarks import report, shapes
from benchmarks.harness import client, engines
from benchmarks.harness.kept import Kept
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
    told_apart: float = 1.0  # the share of answers that would be found wrong if they were those of the request before
    turn: str = ""  # which of several runs of the same

    @property
    def kept_up(self) -> float:
        """Requests answered in a second over those that came; below 1 by what was still waiting when the last one came."""
        return 1.0 if self.offered_per_s is None else self.figures.requests_per_s / self.offered_per_s

    def row(self) -> dict[str, Any]:
        return {
            "engine": self.engine,
            "offered_per_s": self.offered_per_s,
            **self.figures._asdict(),
            "told_apart": self.told_apart,
            "turn": self.turn,
        }


class Served(NamedTuple):
    """The model that all engines serve, and with which flags."""

    model: str | None  # of benchmarks/models, with random weights; None: the demo model
    flags_of_all: Sequence[str]
    flags_of_ours: Sequence[str]

    def model_flags(self, folder: Path) -> list[str]:
        if self.model is None:
            return shapes.demo_flags()
        shapes.write(self.model, folder / "model")
        if shapes.HAS_CUDA:  # these models are too large to be written
            return shapes.dummy_flags(folder / "model")
        shapes.write_weights(folder / "model")
        return shapes.weight_flags(folder / "model", shapes.DTYPE)

    def flags(self, engine: engines.Engine) -> list[str]:
        if not engine.is_sglang:
            return []
        own = self.flags_of_ours if engine.is_ours else shapes.stock_budget()
        return ["--sleep-on-idle", *self.flags_of_all, *own]


class Comparison:
    """Runs of one benchmark; a context manager, which ends the last servers.

    `n_servers` stay up, the one that was asked last longest: two that take turns meet the same minutes of a noisy machine.
    A run that `timeout` cuts off writes the rows that it has, without targets, where no result is yet, and may be resumed.

    Answers to the same prompt must agree within `Engine.max_logprob_difference`, at whatever rate, and some answers to
    different prompts must differ by more, or nothing would be shown (on a device the weights are dummies, which cannot);
    how many do is in the rows, as `told_apart`.
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
        self._make_requests, self._served, self._n_servers = requests_of, served, n_servers
        self._engines: list[engines.Engine] = []
        self._serving: dict[str, tuple[engines.Running, ExitStack]] = {}  # the one that was asked last is the last
        self._stack = ExitStack()
        self._requests: dict[Rate, list[client.Due]] = {}
        self._answers: dict[tuple[int, ...], list[float]] = {}  # by prompt: of who was asked first
        self._runs: dict[str, Run] = {}
        self.failed: list[dict[str, str]] = []

    def __enter__(self) -> Self:
        self._folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        self._model_flags = self._served.model_flags(self._folder)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: Any, _: Any) -> None:
        for name in list(self._serving):
            self._stop(name)
        self._stack.close()
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

    def saturation_of(self, engine: engines.Engine) -> float:
        """The paper's x: what the reference serves with all submitted at once, in requests a second."""
        (run,) = self.measure(engine, [SATURATION])
        self.conditions["x_requests_per_s"] = run.figures.requests_per_s
        return run.figures.requests_per_s

    def measure_rival(self, engine: engines.Engine, rates: Sequence[Rate], turn: str = "") -> list[Run] | None:
        """None, and a row in `failed`, where the engine cannot be started, or ends under the load: that is a result too."""
        try:
            return self.measure(engine, rates, turn)
        except ServerStartError as error:
            why = str(error)
        except report.InvalidRunError as error:
            if engine.name not in self._serving or not self._serving[engine.name][0].has_ended():
                raise
            why = f"ended under the load: {error}"
        last_line = why.strip().splitlines()[-1][-300:]
        self.failed.append({"engine": engine.name, "failed": last_line})
        print(f"{engine.name} failed: {last_line}", file=sys.stderr)
        if engine.name in self._serving:
            self._stop(engine.name)
        return None

    def finish(self, targets: list[report.Target], **further: Any) -> None:
        """Write result.json, and beside it `result.requests.jsonl.gz` with each run's requests in columns."""
        self._write(targets, further)
        self._kept.forget()

    def _write(self, targets: list[report.Target], further: dict[str, Any]) -> None:
        kept = {engine.name: self._kept[engine.name] for engine in self._engines}
        self.conditions["commands"] = {name: one["command"] for name, one in kept.items()}
        self.conditions["sglang_of"] = {name: one["version"] for name, one in kept.items()}
        self.conditions["commit_of"] = {name: one["commit"] for name, one in kept.items()}
        records = {name: one["record"] for name, one in kept.items()}
        rows = [run.row() for run in self._runs.values()]
        result = {"conditions": self.conditions, "activation_records": records, "rows": rows, "failed": self.failed}
        result |= {"medians": medians_of(list(self._runs.values()))}
        report.finish({**result, **further}, targets, self._json)
        if self._json is not None:
            lines = [json.dumps(_columns(run)) + "\n" for run in self._runs.values()]
            self._json.with_suffix(".requests.jsonl.gz").write_bytes(gzip.compress("".join(lines).encode(), mtime=0))

    def _measure(self, engine: engines.Engine, rate: Rate, name: str) -> None:
        server = self._server_of(engine)
        dues = self._requests_at(rate)
        client.run(server.url, dues[:N_WARM_UP], "warm-up")
        server.flush_cache()
        outcomes = client.run(server.url, dues, name)
        self._kept[name] = [list(one) for one in outcomes]

    def _server_of(self, engine: engines.Engine) -> engines.Running:
        if engine.name in self._serving:
            self._serving[engine.name] = self._serving.pop(engine.name)
        else:
            while len(self._serving) >= self._n_servers:
                self._stop(next(iter(self._serving)))
            print(f"starting {engine.name}", file=sys.stderr)
            flags = [*self._model_flags, *self._served.flags(engine)]
            stack = ExitStack()
            server = stack.enter_context(engines.running(engine, flags, self._folder / f"{engine.name}.log"))
            self._kept[engine.name] = {
                "command": server.command,
                "record": server.record,
                "version": server.version,
                "commit": self.conditions["commit"],
            }
            self._serving[engine.name] = server, stack
        return self._serving[engine.name][0]

    def _stop(self, name: str) -> None:
        self._serving.pop(name)[1].close()

    def _requests_at(self, rate: Rate) -> list[client.Due]:
        if rate not in self._requests:
            self._requests[rate] = self._make_requests(rate)
        return self._requests[rate]

    def _check(self, run: Run, max_difference: float) -> None:
        """Against who answered the same prompts first."""
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
    """Of the runs of one engine at one load that took turns with others'."""
    turns: dict[tuple[str, Rate], list[client.Figures]] = {}
    for run in runs:
        if run.turn:
            turns.setdefault((run.engine, run.offered_per_s), []).append(run.figures)
    return [
        {
            "engine": engine,
            "offered_per_s": rate,
            "turns": len(figures),
            **{name: statistics.median(getattr(one, name) for one in figures) for name in MEDIANS},
        }
        for (engine, rate), figures in turns.items()
    ]


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
