"""Who takes turns with whom: servers that stay up, and ours beside the best policy of each reference.

Between minutes a machine's speed differs by more than engines do, so that engines one after the other compare minutes.
"""

from __future__ import annotations

import itertools
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple, Self, TypeVar

import psutil

from benchmarks import report, shapes
from benchmarks.harness import client, engines
from sgl_prefill.errors import ServerStartError
from sgl_prefill.examples import demo_model

# A server of a small model has two to three GiB in its processes; one is not started where that would fill the machine.
SERVER_BYTES = 4 << 30
MANY = 8  # servers: all that take turns
# How many a device holds side by side, which take turns then. Whoever sets it knows that the card has room for so many.
AT_ONCE_ON_A_DEVICE = int(os.environ.get("BENCH_AT_ONCE", "1"))
FIRST_TURN = "turn 1"
VLLM_BLOCK_TOKENS = 32  # the least that its attention on CPUs takes
T = TypeVar("T")


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
        if engine.dialect == client.VLLM:
            return self._flags_of_vllm()
        if not engine.is_sglang:
            return []
        own = self.flags_of_ours if engine.is_ours else shapes.stock_budget()
        return ["--sleep-on-idle", *self.flags_of_all, *own]

    def _flags_of_vllm(self) -> list[str]:
        """The same context and KV cache, in its words. How many requests a step holds is left to it."""
        values = dict(itertools.pairwise(self.flags_of_all))
        said = ["--max-model-len", values["--context-length"], "--block-size", str(VLLM_BLOCK_TOKENS)]
        if (n_tokens := values.get("--max-total-tokens")) is not None:
            # One block is never used.
            said += ["--num-gpu-blocks-override", str(-(-int(n_tokens) // VLLM_BLOCK_TOKENS) + 1)]
        return said


class Servers:
    """Servers by engine, started on first use; a context manager, which ends the last ones.

    As many stay up as were allowed and memory holds, the one that was asked last longest. A device holds one, or BENCH_AT_ONCE.
    """

    def __init__(self, served: Served, n_most: int) -> None:
        self._served, self.n_most = served, AT_ONCE_ON_A_DEVICE if shapes.HAS_CUDA else n_most
        self._running: dict[str, tuple[engines.Running, ExitStack]] = {}  # the one that was asked last is the last
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        self._model_flags = self._served.model_flags(self._folder)
        return self

    def __exit__(self, *_: object) -> None:
        for name in list(self._running):
            self.stop(name)
        self._stack.close()

    @property
    def model_folder(self) -> Path:
        return demo_model.ensure() if self._served.model is None else self._folder / "model"

    def of(self, engine: engines.Engine) -> engines.Running:
        """Raises what `engines.running` raises."""
        if engine.name in self._running:
            self._running[engine.name] = self._running.pop(engine.name)
        else:
            while len(self._running) >= self.n_most or (self._running and not _has_room()):
                self.stop(next(iter(self._running)))
            self._running[engine.name] = self._start(engine)
        return self._running[engine.name][0]

    def log_of(self, engine: engines.Engine) -> Path:
        return self._folder / f"{engine.name}.log"

    def start(self, wanted: Sequence[engines.Engine]) -> Mapping[engines.Engine, Exception]:
        """Ends all servers but these, and starts those of them that are not up, side by side; returns why some failed.

        A start is mostly imports and compilation, so that on a machine with cores for all of them it takes the time of one.
        """
        if len(wanted) > self.n_most:
            raise ValueError(
                f"{len(wanted)} servers at once, and {self.n_most} are allowed: {[one.name for one in wanted]}"
            )
        for name in set(self._running) - {engine.name for engine in wanted}:
            self.stop(name)
        failed: dict[engines.Engine, Exception] = {}
        with ThreadPoolExecutor(self.n_most) as pool:
            begun = {one: pool.submit(self._start, one) for one in wanted if one.name not in self._running}
            for engine, started in begun.items():
                try:
                    self._running[engine.name] = started.result()
                except (ServerStartError, report.InvalidRunError) as error:
                    failed[engine] = error
        return failed

    def _start(self, engine: engines.Engine) -> tuple[engines.Running, ExitStack]:
        print(f"starting {engine.name}", file=sys.stderr)
        model = ["--model", *self._model_flags[1:]] if engine.dialect == client.VLLM else self._model_flags
        flags = [*model, *self._served.flags(engine)]
        stack = ExitStack()
        server = stack.enter_context(engines.running(engine, flags, self.log_of(engine)))
        return server, stack

    def why_failed(self, engine: engines.Engine, error: Exception) -> str | None:
        """What a rival that cannot be started, or ends under the load, is reported with; None for any other error."""
        why = str(error)
        if not isinstance(error, ServerStartError):
            if engine.name not in self._running or not self._running[engine.name][0].has_ended():
                return None
            why = f"ended under the load: {why}"
            self.stop(engine.name)
        return why.strip().splitlines()[-1][-300:]

    def stop(self, name: str) -> None:
        self._running.pop(name)[1].close()


class Contest(NamedTuple):
    """Who is compared, and how often."""

    policies: Sequence[engines.Engine]  # of stock SGLang, without a reference
    n_turns: int = 3
    ours: Sequence[engines.Engine] = (engines.OURS, engines.PAPER)
    references: Sequence[engines.Reference] = engines.REFERENCES
    others: Sequence[engines.Engine] = ()

    def smoke(self) -> Contest:
        """The smallest contest."""
        return Contest(self.policies[:1], 1, self.ours[:1], self.references[-1:])

    def best_of(self, cost: Callable[[engines.Engine], float | None]) -> engines.Engine:
        """The policy with the lowest cost on the last reference. Raises InvalidRunError where none could be measured."""
        reference = self.references[-1]
        costs = {policy: one for policy in self.policies if (one := cost(policy.on(reference))) is not None}
        if not costs:
            raise report.InvalidRunError(f"no policy of stock SGLang could be measured on {reference.name}")
        return min(costs, key=costs.__getitem__)

    def first(self, n_most: int) -> list[engines.Engine]:
        """The first `n_most` engines in the order of measurement."""
        rivals = [policy.on(reference) for reference in self.references for policy in self.policies]
        return [*self.ours, *rivals][:n_most]


def take_turns(
    contest: Contest, measure: Callable[[engines.Engine, str], T | None], cost: Callable[[T], float]
) -> dict[engines.Engine, list[T]]:
    """Measure each engine once, then ours, the best policy on each reference and the others in turns.

    All policies are tried on the last reference, and the best of them runs on the others too.

    Args:
        measure: a run of an engine, with the name of its turn; None where it failed.
        cost: the policy with the lowest in the first turn is the best.
    Returns:
        The runs of the engines that took turns, without engines that failed.
    """
    first: dict[engines.Engine, T] = {}

    def try_once(engine: engines.Engine) -> float | None:
        if (measured := measure(engine, FIRST_TURN)) is None:
            return None
        first[engine] = measured
        return cost(measured)

    for one in contest.ours:
        try_once(one)
    best = contest.best_of(try_once)
    finalists = [*contest.ours, *(best.on(reference) for reference in contest.references), *contest.others]
    for engine in finalists:
        if engine not in first:
            try_once(engine)
    found = {engine: [first[engine]] for engine in finalists if engine in first}
    for number in range(2, contest.n_turns + 1):
        for engine, runs in found.items():
            if (measured := measure(engine, f"turn {number}")) is not None:
                runs.append(measured)
    return found


def of_reference(found: Iterable[engines.Engine], reference: engines.Reference) -> engines.Engine | None:
    """The engine of this reference that took turns."""
    return next((engine for engine in found if engine.reference == reference), None)


def _has_room() -> bool:
    return bool(psutil.virtual_memory().available >= SERVER_BYTES)
