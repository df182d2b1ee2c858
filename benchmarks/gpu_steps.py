"""The GPU runbook: the steps to run on a device, their order, and their results so far.

    python benchmarks/gpu_steps.py OUT [--minutes 9] [--again NAME...]

Runs the steps that have no outcome yet until the minutes are over: tests side by side, what is timed alone. The next call goes on
there: a step that has ended is not run again, one that was cut off is, and the benchmarks among them go on where they stopped.
`scripts/gpu_bench.sh` is the command for people.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import psutil

HERE = Path(__file__).resolve().parent
MODELS = ("llama-3.1-8b", "qwen-32b-fp8", "llama-3.3-70b-fp8")
# Of benchmarks/, in the order in which their answers matter, with the seconds that a part may give to each.
QUESTIONS = {
    "gpu_step_table": 300,
    "gpu_wl1": 480,
    "mil": 480,
    "gpu_hits": 480,
    "load": 480,
    "hybrid": 360,
}
WARM_UP_S, MEMORY_S, SERVERS_S, SHARED_PREFIX_S, MODELS_S = 480, 240, 480, 300, 480
STORM_S, SMOKE_S = 240, 480
PYTEST = ("-m", "pytest", "-q", "-rA")
GRACE_S = 45  # after SIGTERM, for a benchmark to end its servers
LEAST_S = 60  # a step is not begun for less
MOST_TRIES = 3  # with all of the seconds that a step may have
CUT_OFF = "cut off"
STATES = "steps.json"


class Step(NamedTuple):
    """One command, whose output goes to a file of its own."""

    name: str
    command: tuple[str, ...]  # after `python`
    limit_s: float
    environment: Mapping[str, str] = {}
    result: Path | None = None  # below the folder of results
    side_by_side: str = ""  # steps of one name, which follow each other, run together


class Outcome(NamedTuple):
    """What became of a step."""

    status: int | str | None = None  # its exit status, or CUT_OFF; None: it has not run
    tries: int = 0  # with all of its seconds
    seconds: float = 0.0  # of the last one

    @property
    def is_over(self) -> bool:
        return isinstance(self.status, int) or self.tries >= MOST_TRIES


class Notes:
    """Outcomes by name, in a file that a person may read and change."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / STATES
        raw = json.loads(self._path.read_text()) if self._path.exists() else {}
        self._outcomes = {name: Outcome(**fields) for name, fields in raw.items()}

    def of(self, step: Step) -> Outcome:
        return self._outcomes.get(step.name, Outcome())

    def write(self, step: Step, outcome: Outcome) -> None:
        self._outcomes[step.name] = outcome
        self._save()

    def forget(self, names: Sequence[str]) -> None:
        """These steps run again. Raises KeyError for one that has not run."""
        for name in names:
            del self._outcomes[name]
        self._save()

    def _save(self) -> None:
        whole = self._path.with_suffix(".new")
        whole.write_text(json.dumps({name: one._asdict() for name, one in self._outcomes.items()}, indent=1) + "\n")
        os.replace(whole, self._path)


def steps(models: Sequence[str], backends: Sequence[str]) -> list[Step]:
    """Lists all steps, what decides most first: is the engine right, and then how good is it on the first model.

    The first backend is asked everything, each other one after it only whether it is right and what its hits cost.
    """
    first, *other_models = models
    best, *other_backends = backends
    return [
        Step("look", (f"{HERE}/gpu_warm_up.py", "--look"), LEAST_S),
        Step("kernels", (*PYTEST, "tests/gpu/test_kernels.py"), MEMORY_S),
        # Kernels are compiled before anything is timed, or has a limit of its own.
        _warm_up(first, best),
        Step("memory", (*PYTEST, "tests/gpu/test_memory.py"), MEMORY_S),
        _servers(best),
        _shared_prefix(best),
        Step("storm", (*PYTEST, "tests/gpu/test_storm.py"), STORM_S, side_by_side="right"),
        Step("smoke", (*PYTEST, "tests/gpu/test_smoke.py"), SMOKE_S, side_by_side="right"),
        *(_asked(question, first, best) for question in QUESTIONS),
        Step("models", (*PYTEST, "tests/gpu/test_models.py"), MODELS_S),
        *(
            step
            for backend in other_backends
            for step in (
                _warm_up(first, backend),
                _servers(backend),
                _shared_prefix(backend),
                _asked("gpu_hits", first, backend),
            )
        ),
        *(_warm_up(model, best) for model in other_models),
        *(_asked(question, model, best) for question in QUESTIONS for model in other_models),
    ]


def _servers(backend: str) -> Step:
    command = (*PYTEST, "-k", backend, "tests/gpu/test_servers.py")
    return Step(f"servers-{backend}", command, SERVERS_S, side_by_side="right")


def _shared_prefix(backend: str) -> Step:
    command = (*PYTEST, "-k", backend, "tests/gpu/test_shared_prefix.py")
    return Step(f"shared_prefix-{backend}", command, SHARED_PREFIX_S, side_by_side="right")


def _warm_up(model: str, backend: str) -> Step:
    return Step(
        f"warm_up-{model}-{backend}", (f"{HERE}/gpu_warm_up.py",), WARM_UP_S, environment=_chosen(model, backend)
    )


def _asked(question: str, model: str, backend: str) -> Step:
    result = Path(f"{model}-{backend}") / question / "result.json"
    return Step(
        f"{question}-{model}-{backend}",
        (f"{HERE}/{question}/run.py", "--json"),
        QUESTIONS[question],
        environment=_chosen(model, backend),
        result=result,
    )


def _chosen(model: str, backend: str) -> dict[str, str]:
    return {"BENCH_MODEL": model, "BENCH_ATTENTION_BACKEND": backend}


def run(
    all_steps: Sequence[Step],
    out: Path,
    part_s: float,
    python: str = sys.executable,
    clock: Callable[[], float] = time.monotonic,
) -> list[Step]:
    """Runs steps without an outcome until the time is over, and returns the steps that are left."""
    notes, end_s = Notes(out), clock() + part_s - GRACE_S
    waiting = [step for step in all_steps if not notes.of(step).is_over]
    print(f"{len(all_steps) - len(waiting)} of {len(all_steps)} steps are over")
    together = itertools.groupby(waiting, lambda step: step.side_by_side or step.name)
    for group in (list(of_name) for _, of_name in together):
        left_s = end_s - clock()
        if left_s < LEAST_S:
            break
        for step in group:
            print(f"== {step.name}: python {' '.join(step.command)}", flush=True)
        started_s = clock()
        limits_s = [min(step.limit_s, left_s) for step in group]
        with ThreadPoolExecutor(len(group)) as pool:
            statuses = pool.map(lambda step, limit_s: _run_one(step, out, python, limit_s), group, limits_s)
        for step, status in zip(group, statuses, strict=True):
            had_all = status == CUT_OFF and left_s >= step.limit_s
            outcome = Outcome(status, notes.of(step).tries + had_all, round(clock() - started_s, 1))
            notes.write(step, outcome)
            print(f"   {step.name} {shown(outcome)}: see {out / step.name}.txt", flush=True)
    return [step for step in all_steps if not notes.of(step).is_over]


def shown(outcome: Outcome) -> str:
    """Says what became of a step."""
    if isinstance(outcome.status, int):
        how = "done" if outcome.status == 0 else f"ended with {outcome.status}"
    else:
        how = (
            f"cut off {outcome.tries} times, and given up"
            if outcome.is_over
            else "cut off, and goes on in the next call"
        )
    return f"{how} after {outcome.seconds:.0f} s"


def _run_one(step: Step, out: Path, python: str, limit_s: float) -> int | str:
    command = [python, *step.command]
    if step.result is not None:
        (out / step.result).parent.mkdir(parents=True, exist_ok=True)
        command.append(str((out / step.result).resolve()))
    with (out / f"{step.name}.txt").open("ab") as log:  # what an earlier part said stays
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=HERE.parent,
            env={**os.environ, **step.environment},
        )
    try:
        return process.wait(timeout=limit_s)
    except subprocess.TimeoutExpired:
        _end(process)
        return CUT_OFF
    except BaseException:
        _end(process)
        raise


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a benchmark and, if it does not end them itself, its servers, which would hold the device's memory."""
    begun = psutil.Process(process.pid).children(recursive=True)
    process.terminate()
    try:
        process.wait(timeout=GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    left = [child for child in begun if child.is_running()]  # the same process, and not another one of its number
    for child in left:
        child.kill()
    psutil.wait_procs(left, timeout=GRACE_S)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="where outputs and results are written")
    parser.add_argument("--minutes", type=float, default=9.0, help="that this call may take (default: 9)")
    parser.add_argument("--again", nargs="*", default=[], metavar="NAME", help="steps to run again, by their names")
    arguments = parser.parse_args()
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    models = os.environ.get("BENCH_MODELS", " ".join(MODELS)).split()
    backends = os.environ.get("BENCH_BACKENDS", "").split() or _backends_of_this_device()
    if not backends:
        print("there is no CUDA device here: torch.cuda.is_available() is false", file=sys.stderr)
        return 2
    try:
        Notes(out).forget(arguments.again)
    except KeyError as error:
        print(f"--again {error.args[0]}: no step of {out / STATES} has this name", file=sys.stderr)
        return 2
    left = run(steps(models, backends), out, 60 * arguments.minutes)
    shutil.make_archive(str(out), "gztar", out)  # to be carried away
    print(f"left: {', '.join(step.name for step in left)}. Call again to go on" if left else "all steps are over")
    return 0


def _backends_of_this_device() -> list[str]:
    from benchmarks import shapes

    return shapes.attention_backends()


if __name__ == "__main__":
    sys.exit(main())
