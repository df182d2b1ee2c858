"""Which tiny models of the causal families start, in SGLang's engine and in ours without flags, and are their answers right?"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import report
from tests.integration import children, families_child
from tests.support import tiny_models

EXACT = (
    2e-5  # largest difference of a log-probability from transformers in float32, where SGLang's own layers are exact
)
LIMIT_S = 200
QUICK = ("llama", "mistral-window", "glm4-moe-lite")


def main() -> int:
    arguments = report.arguments(__doc__, Path(__file__).with_name("result.json"))
    conditions = report.conditions()
    children.start_fork_server()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for family in QUICK if arguments.quick else tiny_models.ALL_FAMILIES:
            if family not in tiny_models.EMBEDDING_FAMILIES:
                rows.append(row_of(Path(folder), family))
                print(rows[-1], file=sys.stderr)
    report.finish({"conditions": conditions, "rows": rows}, targets_of(rows), arguments.json)
    return 0


def row_of(folder: Path, family: str) -> dict[str, Any]:
    architecture = tiny_models.ALL_FAMILIES[family]["architectures"][0]
    row: dict[str, Any] = {"family": family, "architecture": architecture}
    for name, serve in (("stock", families_child.stock), ("ours", families_child.ours)):
        found = in_a_process(serve, folder, family)
        row[f"{name}_starts"], row[f"{name}_error"] = "error" not in found, found.get("error")
        row[f"{name}_difference"] = found.get("difference")
        if name == "ours" and row["ours_starts"]:
            record, evicted = found["record"], found["evicted_tokens"]
            row |= {"left_to_sglang": record["left_to_sglang"], "model_notes": record["model_notes"]}
            row |= {
                "is_hybrid": found["is_hybrid"],
                "evicts": max(evicted) > 0,
                "reuses": max(found["cached_tokens"]) > 0,
            }
    return row


def in_a_process(serve: Callable[[Path, str], dict[str, Any]], folder: Path, family: str) -> dict[str, Any]:
    """Returns what `serve` finds, or the last line of its error."""
    out, log = folder / "found.json", folder / "log"
    out.unlink(missing_ok=True)
    child: Any = children.forked(_child, (serve, folder, family, out, log))
    child.join(LIMIT_S)
    if child.is_alive():
        child.kill()
        child.join()
        return {"error": f"no answer in {LIMIT_S} s"}
    if out.exists():
        found: dict[str, Any] = json.loads(out.read_text())
        return found
    errors = [line for line in log.read_text().splitlines() if "Error" in line and not line.startswith(" ")]
    return {"error": errors[-1][:200] if errors else f"the process ended with status {child.exitcode}"}


def _child(serve: Callable[[Path, str], dict[str, Any]], folder: Path, family: str, out: Path, log: Path) -> None:
    children.redirect(log)
    os.setpgid(0, 0)
    try:
        found = serve(folder, family)
        difference = max(families_child.largest_differences(folder, family, found))
        record = found.get("record", {})
        is_hybrid = "hybrid and plain" in (record.get("parity_gate") or {})
        out.write_text(json.dumps({**found, "logprobs": None, "difference": difference, "is_hybrid": is_hybrid}))
    except BaseException:
        traceback.print_exc()
    os._exit(0)


def targets_of(rows: list[dict[str, Any]]) -> list[report.Target]:
    of_stock = [row for row in rows if row["stock_starts"]]
    started = sum(row["ours_starts"] for row in of_stock)
    exact = [row for row in of_stock if row["stock_difference"] <= EXACT and row["ours_starts"]]
    worst = max((row["ours_difference"] for row in exact), default=0.0)
    return [
        report.Target.at_least(
            "families that start without flags, of those that stock starts", started / len(of_stock), 1.0
        ),
        report.Target("largest difference from transformers, where stock is exact", worst, EXACT, worst <= EXACT, "<="),
    ]


if __name__ == "__main__":
    sys.exit(main())
