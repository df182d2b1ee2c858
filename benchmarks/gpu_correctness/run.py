"""Is the engine right on this card: aliased memory, hybrid prefilling, the parity gate, graphs, on every attention backend?

    python benchmarks/gpu_correctness/run.py [--quick] [--json PATH]

Runs `tests/gpu` and keeps the outcome of each test. See the README beside this file.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "2")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from benchmarks import report, shapes
from benchmarks.harness.turns import AT_ONCE_ON_A_DEVICE

PYTEST = (sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider")
OUTCOME = re.compile(r"^(PASSED|FAILED|ERROR|SKIPPED) (?:\[\d+\] )?(?:tests/gpu/)?(\S+)", re.M)
LIMIT_S = float(os.environ.get("BENCH_PART_S", "480"))


class Part(NamedTuple):
    """One process of pytest."""

    name: str
    words: tuple[str, ...]


class Ended(NamedTuple):
    """What became of a part."""

    tests: dict[str, str]  # outcome by test
    seconds: float
    is_cut_off: bool
    output: str


def main() -> int:
    arguments = report.arguments(__doc__, Path(__file__).with_name("result.json"))
    conditions: dict[str, Any] = {**report.conditions(), "processes_at_once": AT_ONCE_ON_A_DEVICE}
    if shapes.HAS_CUDA:
        conditions |= {"cuda": torch.version.cuda, "driver": driver(), "backends": shapes.attention_backends()}
    found: dict[str, Ended] = {}
    # Memory first and alone: its tests count the bytes that are free.
    groups = [[memory()], [] if arguments.quick else list(servers(shapes.attention_backends()))]
    for group in groups:
        for first in range(0, len(group), AT_ONCE_ON_A_DEVICE):
            found |= run(group[first : first + AT_ONCE_ON_A_DEVICE], LIMIT_S)
    rows = [
        {"part": part, "test": test, "outcome": outcome}
        for part, ended in found.items()
        for test, outcome in ended.tests.items()
    ]
    parts = {
        name: {"seconds": round(one.seconds, 1), "cut_off": one.is_cut_off, "why": why(one)}
        for name, one in found.items()
    }
    report.finish({"conditions": conditions, "parts": parts, "rows": rows}, targets_of(found), arguments.json)
    return 0


def memory() -> Part:
    return Part("memory", ("tests/gpu/test_memory.py",))


def servers(backends: Sequence[str]) -> Iterator[Part]:
    """One part for each backend (our server and stock SGLang's), and one for the starts that must fail."""
    for backend in backends:
        yield Part(backend, ("-k", f"{backend} and not is_wrong", "tests/gpu/test_servers.py"))
    for backend in backends[:1]:
        yield Part("a wrong engine", ("-k", f"{backend} and is_wrong", "tests/gpu/test_servers.py"))


def run(parts: Sequence[Part], limit_s: float) -> dict[str, Ended]:
    """Runs these side by side, and ends what takes longer; a test that had no time has no outcome."""
    with tempfile.TemporaryDirectory() as name:
        started_s = time.monotonic()
        begun = []
        for number, part in enumerate(parts):
            log = Path(name) / f"{number}.txt"
            with log.open("wb") as output:
                words = [*PYTEST, f"--basetemp={name}/{number}", *part.words]
                process = subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT, cwd=report.REPOSITORY)
            begun.append((part, process, log))
        found = {}
        for part, process, log in begun:
            is_cut_off = ends_late(process, started_s + limit_s)
            text = log.read_text(errors="replace")
            tests = {test: outcome.lower() for outcome, test in OUTCOME.findall(text)}
            found[part.name] = Ended(tests, time.monotonic() - started_s, is_cut_off, text)
            print(f"== {part.name}: {json.dumps(tests, indent=1)}{why(found[part.name])}", file=sys.stderr, flush=True)
        return found


def ends_late(process: subprocess.Popen[bytes], limit_s: float) -> bool:
    """Waits until a process ends, and terminates it at `limit_s` of the monotonic clock. Returns whether it did."""
    try:
        process.wait(max(0.1, limit_s - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        return True
    return False


def why(ended: Ended) -> str:
    """What pytest says of tests that failed, and how it ended."""
    lines = [line[:300] for line in ended.output.splitlines() if line.startswith("E  ")]
    return "\n".join([*lines[:30], *ended.output.splitlines()[-1:]])


def targets_of(found: dict[str, Ended]) -> list[report.Target]:
    """No test fails, and no part is cut off."""
    outcomes = [outcome for one in found.values() for outcome in one.tests.values()]
    failed = sum(outcome in ("failed", "error") for outcome in outcomes)
    return [
        report.Target.at_least("tests that passed", outcomes.count("passed"), 1),
        report.Target.at_most("tests that failed", failed, 0),
        report.Target.at_most("parts that were cut off", sum(one.is_cut_off for one in found.values()), 0),
    ]


def driver() -> str:
    """The version of NVIDIA's driver."""
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
