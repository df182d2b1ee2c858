"""How long from the command to the first answer, beside stock SGLang?

    python benchmarks/start/run.py [--quick] [--json PATH]

The demo model, each engine several times in turn. See the README beside this file.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "2")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import report, shapes
from benchmarks.harness import client, engines

ROUNDS, QUICK_ROUNDS = 3, 1
FRESH, AGAIN, STOCK = "ours, first start", "ours, again", "stock"


def main() -> int:
    arguments = report.arguments(__doc__, Path(__file__).with_name("result.json"))
    conditions: dict[str, Any] = {**report.conditions(), "commands": {}}
    rows: list[dict[str, Any]] = []
    records = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        common = [*shapes.demo_flags(), "--sleep-on-idle"]
        for number in range(QUICK_ROUNDS if arguments.quick else ROUNDS):
            # The profiles of the memory and of the JCT model are kept on disk: a folder of its own for each first start.
            cache = {"XDG_CACHE_HOME": str(folder / f"cache {number}")}
            for name in (FRESH, AGAIN, STOCK):
                is_ours = name != STOCK
                engine = engines.ours(name) if is_ours else engines.stock("fcfs").on(engines.REFERENCES[0])
                flags = [*common, *(shapes.budget(3) if is_ours else shapes.stock_budget())]
                started = time.perf_counter()
                with engines.running(engine, flags, folder / "log", cache if is_ours else None) as server:
                    client.run(server.url, [client.Due(0.0, [1000] * 20)], name)
                    seconds = time.perf_counter() - started
                    conditions["commands"][name], records[name] = server.command, server.record
                rows.append({"engine": name, "round": number, "seconds": seconds})
                print(rows[-1], file=sys.stderr)
    medians = {
        name: statistics.median(row["seconds"] for row in rows if row["engine"] == name)
        for name in (FRESH, AGAIN, STOCK)
    }
    targets = [
        report.Target.at_most(f"start to first answer, {name} / stock", medians[name] / medians[STOCK], 1.0)
        for name in (AGAIN, FRESH)
    ]
    report.finish({"conditions": conditions, "activation_records": records, "rows": rows}, targets, arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
