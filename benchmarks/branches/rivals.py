"""The same questions to `/v1/systemone` of stock SGLang, and of vLLM 0.32 for CPUs in an environment of its own."""

from __future__ import annotations

import itertools
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import report, shapes
from benchmarks.harness import engines

TURNS = 3
STATES, COUNTS = (200, 2_000, 16_000), (1, 8, 32)
CONTEXT = "24000"  # tokens
NAME = "jev-latest"
SHIPPED, WITH_OUR_ATTENTION = (engines.stock("fcfs").on(way) for way in (engines.AS_SHIPPED, engines.NEW_KERNEL))
ENGINES = (engines.OURS, SHIPPED, WITH_OUR_ATTENTION, engines.VLLM)
LONGEST_OF_SHIPPED = 2_000  # tokens of a state
LEAST: dict[str, dict[int, float]] = {  # times the questions a second, by tokens of the state
    SHIPPED.name: {200: 8, 2_000: 8},
    WITH_OUR_ATTENTION.name: {200: 2.5, 2_000: 2.2, 16_000: 1.7},
    engines.VLLM.name: dict.fromkeys(STATES, 3),
}


Send = Callable[[str, Sequence[tuple[str, bytes]]], tuple[float, list[Any]]]


def measure(folder: Path, maker: Callable[[], Any], send: Send, *, quick: bool) -> dict[str, Any]:
    """folder: of a model that vLLM decides with; logs go beside it. maker: makes a Maker of the same works for each server."""
    turns: list[dict[str, Any]] = [
        {"engine": engine.name, "turn": turn, **row}
        for turn in range(1, 2 if quick else 1 + TURNS)
        for engine in ENGINES
        for row in _timed(engine, folder, maker(), send, quick=quick)
    ]
    cells: dict[tuple[str, int, int], list[dict[str, Any]]] = {}
    for row in turns:
        cells.setdefault((row["engine"], row["state"], row["questions"]), []).append(row)
    medians = [
        {"engine": name, "state": n_state, "questions": n, "seconds": statistics.median(row["seconds"] for row in rows)}
        | {"difference": _largest_difference(cells[engines.OURS.name, n_state, n], rows)}
        for (name, n_state, n), rows in cells.items()
    ]
    for row in turns:
        del row["answers"]
    ours = {(row["state"], row["questions"]): row["seconds"] for row in medians if row["engine"] == engines.OURS.name}
    targets = [
        report.Target.at_least(
            f"state {row['state']}, {row['questions']} questions: questions a second, ours / {row['engine']}",
            row["seconds"] / ours[row["state"], row["questions"]],
            LEAST[row["engine"]][row["state"]],
        )
        for row in medians
        if row["engine"] in LEAST and row["questions"] > 1
    ]
    return report.part(medians, targets, turns=turns)


def _timed(engine: engines.Engine, folder: Path, maker: Any, send: Send, *, quick: bool) -> Iterator[dict[str, Any]]:
    """Yields a row for each state and number of questions. Each request has a new state."""
    with engines.running(engine, _flags(engine, folder), folder.with_name("rivals.log")) as server:
        for _ in range(2):  # a server's first requests take longer
            send(server.url, [("/v1/systemone", maker.work(200, 8).in_default_orders)])
        for n_state, n in itertools.product(STATES[: 1 if quick else None], COUNTS):
            work = maker.work(n_state, n)
            if engine == SHIPPED and n_state > LONGEST_OF_SHIPPED:
                continue
            body = work.body if engine.is_ours else work.in_default_orders
            seconds, (reply,) = send(server.url, [("/v1/systemone", body)])
            answers = [list(one["probabilities"].values()) for one in reply["answers"].values()]
            row = {"state": n_state, "questions": n, "seconds": seconds, "answers": answers}
            print(engine.name, n_state, n, seconds, file=sys.stderr)
            yield row


def _flags(engine: engines.Engine, folder: Path) -> list[str]:
    if engine == engines.VLLM:
        flags = ["--model", str(folder), "--dtype", shapes.DTYPE, "--max-model-len", CONTEXT]
    else:
        flags = [*shapes.weight_flags(folder, shapes.DTYPE), "--context-length", CONTEXT, "--max-total-tokens", "60000"]
        flags += shapes.budget(3) if engine.is_ours else shapes.stock_budget()
    return [*flags, "--served-model-name", NAME]


def _largest_difference(some: list[dict[str, Any]], others: list[dict[str, Any]]) -> float:
    """Of the probabilities of all options of the same questions."""
    pairs = zip((row["answers"] for row in some), (row["answers"] for row in others), strict=True)
    differences = (
        abs(p - q)
        for mine, theirs in pairs
        for a, b in zip(mine, theirs, strict=True)
        for p, q in zip(a, b, strict=True)
    )
    return float(max(differences))
