"""The same questions to `/v1/systemone` of SGLang 0.5.23 and of vLLM 0.32 for CPUs, each in an environment of its own."""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import report, shapes
from benchmarks.harness import engines
from sgl_prefill.entry import local_server

TURNS = 3
STATES, COUNTS = (200, 2_000, 16_000), (1, 8, 32)
LONGEST_S = 60.0  # longer ones are not repeated, nor asked with more questions
CONTEXT = "24000"
NAME = "jev-latest"


class Rival(NamedTuple):
    name: str
    python: str  # that runs it, or the variable that names it
    module: str
    flags: tuple[str, ...]
    environment: tuple[tuple[str, str], ...] = ()

    @property
    def executable(self) -> str | None:
        return self.python if os.path.isabs(self.python) else os.environ.get(self.python)


def rivals(folder: Path) -> list[Rival]:
    common = ("--dtype", shapes.DTYPE, "--served-model-name", NAME)
    sglang = ("--model-path", str(folder), *common, "--context-length", CONTEXT, "--max-total-tokens", "60000")
    vllm = ("--model", str(folder), *common, "--max-model-len", CONTEXT, "--enable-prefix-caching")
    native = tuple(engines.AS_SHIPPED.flags)
    of_vllm = (("VLLM_CPU_KVCACHE_SPACE", "1"), ("VLLM_CPU_OMP_THREADS_BIND", "nobind"), ("HF_HUB_OFFLINE", "1"))
    ours = (*sglang, "--max-input-length", CONTEXT, *shapes.budget(3))
    newer = (*sglang, *native, *shapes.stock_budget())
    return [
        Rival("ours", sys.executable, engines.OURS.module, ours),
        Rival("SGLang 0.5.23", engines.NEWER_PYTHON, "sglang.launch_server", newer),
        Rival("vLLM 0.32", "VLLM_CPU_PYTHON", "vllm.entrypoints.openai.api_server", vllm, of_vllm),
    ]


Send = Callable[[str, Sequence[tuple[str, bytes]]], tuple[float, list[Any]]]


def measure(folder: Path, maker: Callable[[], Any], send: Send, scratch: Path, *, quick: bool) -> dict[str, Any]:
    """maker: of works, the same for each server; each is about a new state. scratch: for logs."""
    turns, missing = [], []
    for turn in range(1, 2 if quick else 1 + TURNS):
        for rival in rivals(folder):
            if rival.executable is None:
                missing.append(f"{rival.name}: {rival.python} names no environment")
                continue
            turns += list(_timed(rival, maker(), send, turn, scratch, quick=quick))
    medians = []
    for name, n_state, n in dict.fromkeys((row["engine"], row["state"], row["questions"]) for row in turns):
        seconds = [
            row["seconds"] for row in turns if (row["engine"], row["state"], row["questions"]) == (name, n_state, n)
        ]
        medians.append({"engine": name, "state": n_state, "questions": n, "seconds": statistics.median(seconds)})
    ours = {(row["state"], row["questions"]): row["seconds"] for row in medians if row["engine"] == "ours"}
    targets = [
        report.Target.at_least(
            f"state {row['state']}, {row['questions']} questions: questions a second, ours / {row['engine']}",
            row["seconds"] / ours[row["state"], row["questions"]],
            8 if "SGLang" in row["engine"] else 3,
        )
        for row in medians
        if row["engine"] != "ours" and row["questions"] > 1
    ]
    return report.part(medians, targets, turns=turns, not_measured=sorted(set(missing)))


def _timed(rival: Rival, maker: Any, send: Send, turn: int, scratch: Path, *, quick: bool) -> Iterator[dict[str, Any]]:
    python = rival.executable
    assert python is not None
    environment = {"OMP_NUM_THREADS": "2", **engines.QUIET, "PYTHONSAFEPATH": "1", **dict(rival.environment)}
    if rival.name == "ours":
        environment["PYTHONPATH"] = str(report.REPOSITORY)
    log = scratch / f"{rival.name}.log"
    with local_server.running(rival.module, rival.flags, log, python=python, environment=environment) as server:
        for _ in range(2):  # a server's first requests take longer
            send(server.url, [("/v1/systemone", maker.work(200, 8).body)])
        for n_state in STATES[: 1 if quick else None]:
            for n in COUNTS:
                seconds, _ = send(server.url, [("/v1/systemone", maker.work(n_state, n).body)])
                row = {"engine": rival.name, "turn": turn, "state": n_state, "questions": n, "seconds": seconds}
                print(row, file=sys.stderr)
                yield row
                if seconds > LONGEST_S:
                    break
