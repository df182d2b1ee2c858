"""The same requests to several engines at several rates: resumable, kept request by request, refused where answers differ."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, Self

from benchmarks import report, shapes
from benchmarks.harness import client, engines
from benchmarks.harness.kept import Kept
from sgl_prefill import demo_model

Rate = float | None  # requests a second; None: all at once
SATURATION: Rate = None
N_WARM_UP = 5
DEMO = "the demo model, SmolLM2-135M-Instruct in bfloat16"


class Run(NamedTuple):
    """One engine at one rate."""

    engine: str
    offered_per_s: Rate
    figures: client.Figures
    outcomes: list[client.Outcome]

    def row(self) -> dict[str, Any]:
        return {"engine": self.engine, "offered_per_s": self.offered_per_s, **self.figures._asdict()}


class Served(NamedTuple):
    """The model that all engines serve, and with which flags."""

    model: str | None  # of benchmarks/models, with random weights; None: the demo model
    flags_of_all: Sequence[str]
    flags_of_ours: Sequence[str]

    def model_flags(self, folder: Path) -> list[str]:
        if self.model is None:
            return ["--model-path", str(demo_model.ensure("bfloat16"))]
        return shapes.dummy_flags(shapes.write(self.model, folder / "model"))

    def flags(self, engine: engines.Engine) -> list[str]:
        if not engine.is_sglang:
            return []
        own = self.flags_of_ours if engine.is_ours else shapes.stock_budget()
        return ["--sleep-on-idle", *self.flags_of_all, *own]


class Comparison:
    """Runs of one benchmark; a context manager, which ends the last server.

    Answers to the same prompt must agree within `max_logprob_difference`, whoever gives them and at whatever rate.
    """

    def __init__(
        self,
        arguments: Any,
        requests_of: Callable[[Rate], list[client.Due]],
        served: Served,
        max_logprob_difference: float,
    ) -> None:
        self.conditions: dict[str, Any] = report.conditions()
        self._json: Path | None = arguments.json
        self._kept = Kept(arguments.json, self.conditions["commit"])
        self.conditions["model"] = DEMO if served.model is None else shapes.config(served.model)
        self._requests_of, self._served = requests_of, served
        self._max_difference = max_logprob_difference
        self._engines: list[engines.Engine] = []
        self._serving: tuple[engines.Engine, engines.Running] | None = None
        self._stack, self._server = ExitStack(), ExitStack()
        self._answers: dict[tuple[int, ...], list[float]] = {}  # by prompt: of who was asked first
        self._runs: dict[str, Run] = {}

    def __enter__(self) -> Self:
        self._folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        self._model_flags = self._served.model_flags(self._folder)
        return self

    def __exit__(self, *error: Any) -> None:
        self._server.close()
        self._stack.close()

    def measure(self, engine: engines.Engine, rates: Sequence[Rate]) -> list[Run]:
        """Raises InvalidRunError where the engine is not the one asked for, a request is lost, or an answer differs."""
        for rate in rates:
            if _name(engine, rate) not in self._kept:
                self._measure(engine, rate)
            if _name(engine, rate) not in self._runs:
                self._check(run := self._read(engine, rate))
                self._runs[_name(engine, rate)] = run
        if engine not in self._engines:
            self._engines.append(engine)
        return [self._runs[_name(engine, rate)] for rate in rates]

    def finish(self, targets: list[report.Target], **further: Any) -> None:
        """Write result.json, and beside it `requests.jsonl` with each run's requests in columns."""
        kept = [self._kept[engine.name] for engine in self._engines]
        self.conditions["commands"] = {one.name: each["command"] for one, each in zip(self._engines, kept, strict=True)}
        records = {one.name: each["record"] for one, each in zip(self._engines, kept, strict=True)}
        rows = [run.row() for run in self._runs.values()]
        result = {"conditions": self.conditions, "activation_records": records, "rows": rows, **further}
        report.finish(result, targets, self._json)
        if self._json is not None:
            lines = [json.dumps(_columns(run)) for run in self._runs.values()]
            self._json.with_name("requests.jsonl").write_text("\n".join(lines) + "\n")
        self._kept.forget()

    def _measure(self, engine: engines.Engine, rate: Rate) -> None:
        server = self._server_of(engine)
        dues = self._requests_of(rate)
        client.run(server.url, dues[:N_WARM_UP], "warm-up")
        server.flush_cache()
        outcomes = client.run(server.url, dues, _name(engine, rate))
        self._kept[_name(engine, rate)] = [list(one) for one in outcomes]
        print(self._read(engine, rate).row(), file=sys.stderr)

    def _server_of(self, engine: engines.Engine) -> engines.Running:
        """One runs at a time, until another is wanted."""
        if self._serving is None or self._serving[0] != engine:
            self._server.close()
            print(f"starting {engine.name}", file=sys.stderr)
            flags = [*self._model_flags, *self._served.flags(engine)]
            server = self._server.enter_context(engines.running(engine, flags, self._folder / "log"))
            self._kept[engine.name] = {"command": server.command, "record": server.record}
            self._serving = engine, server
        return self._serving[1]

    def _check(self, run: Run) -> None:
        """Against who answered the same prompts first."""
        answers = [one.logprobs for one in run.outcomes]
        prompts = [tuple(due.input_ids) for due in self._requests_of(run.offered_per_s)]
        expected = [self._answers.setdefault(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]
        client.check_agreement(answers, expected, self._max_difference, run.engine)

    def _read(self, engine: engines.Engine, rate: Rate) -> Run:
        outcomes = [client.Outcome(*fields) for fields in self._kept[_name(engine, rate)]]
        return Run(engine.name, rate, client.figures(outcomes), outcomes)


def _name(engine: engines.Engine, rate: Rate) -> str:
    return f"{engine.name}, " + ("all at once" if rate is None else f"{rate:.6g} a second")


def _columns(run: Run) -> dict[str, Any]:
    """Times in seconds from the start of the run, to the millisecond."""
    outcomes = run.outcomes
    return {
        "engine": run.engine,
        "offered_per_s": run.offered_per_s,
        "arrival_s": [round(one.at_s, 3) for one in outcomes],
        "first_byte_s": [round(one.first_byte_s, 3) for one in outcomes],
        "finish_s": [round(one.finish_s, 3) for one in outcomes],
        "cached_tokens": [one.cached_tokens for one in outcomes],
        "computed_tokens": [one.prompt_tokens - one.cached_tokens for one in outcomes],
    }
