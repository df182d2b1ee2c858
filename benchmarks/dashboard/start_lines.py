"""How many lines does a start print until the server is healthy, and how soon does the first one come? Beside stock SGLang.

The demo model, each engine three times in turn, on its default flags. A line of a progress bar that is written over counts once.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import report, shapes
from sgl_prefill.entry import local_server

ROUNDS, QUICK_ROUNDS = 3, 1
MOST_LINES, FIRST_LINE_S = 20, 2.0
ENGINES = {"ours": "sgl_prefill.launch_server", "stock": "sglang.launch_server"}
POLL_S = 0.01


class Start(NamedTuple):
    """What one start printed."""

    n_lines: int  # until the server was healthy
    first_line_s: float  # after the command


def start(module: str, flags: list[str], log: Path) -> tuple[Start, list[str]]:
    """Starts a server, waits until it is healthy, and ends it. Returns what it printed, and its command."""
    first_line_s: list[float] = []
    log.write_bytes(b"")
    is_over = threading.Event()
    started = time.perf_counter()

    def watch() -> None:
        while not is_over.wait(POLL_S) and not first_line_s:
            if b"\n" in log.read_bytes():
                first_line_s.append(time.perf_counter() - started)

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        server = local_server.start(module, flags, log)
        n_lines = log.read_bytes().count(b"\n")
        server.stop()
    finally:
        is_over.set()
        watching.join()
    if not first_line_s:
        raise report.InvalidRunError(f"{module} printed nothing until it was healthy")
    return Start(n_lines, first_line_s[0]), server.command


def measure(quick: bool = False) -> dict[str, Any]:
    """Starts each engine, in turns."""
    rows: list[dict[str, Any]] = []
    commands: dict[str, str] = {}
    flags = {"ours": [*shapes.demo_flags(), *shapes.budget(3)], "stock": [*shapes.demo_flags(), *shapes.stock_budget()]}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(QUICK_ROUNDS if quick else ROUNDS):
            for name, module in ENGINES.items():
                found, command = start(module, flags[name], Path(folder) / "log")
                commands[name] = report.portable(command)
                rows.append({"engine": name, "round": number, **found._asdict()})
                print(rows[-1], file=sys.stderr)
    medians = {
        name: {field: statistics.median(row[field] for row in rows if row["engine"] == name) for field in Start._fields}
        for name in ENGINES
    }
    targets = [
        report.Target.at_most("lines printed by a start", medians["ours"]["n_lines"], MOST_LINES),
        report.Target.at_most("seconds to the first line", medians["ours"]["first_line_s"], FIRST_LINE_S),
    ]
    return report.part(rows, targets, medians=medians, commands=commands)
