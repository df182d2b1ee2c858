"""The paper's figures from committed results, each one command; no benchmark runs.

    python benchmarks/figures.py [latency throughput cdf mil memory jct ...] [--folder benchmarks]

Needs matplotlib (`pip install -e '.[bench]'`). Writes benchmarks/figures/NAME.png; a figure whose result is not there yet is left
out by name.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.ticker import LogLocator, NullFormatter

HERE = Path(__file__).parent
Result = dict[str, Any]


class Figure(NamedTuple):
    """One picture."""

    benchmark: str  # whose result.json it shows
    of_paper: str
    draw: Callable[[Any, Result], None]  # (matplotlib Figure, result)


def draw_latency(figure: Any, result: Result) -> None:
    for axes, name, title in zip(figure.subplots(1, 2, sharex=True), ("mean_s", "p99_s"), ("mean", "P99"), strict=True):
        for engine, rows in _curves(result).items():
            axes.plot([row["offered_per_s"] for row in rows], [row[name] for row in rows], marker="o", label=engine)
        axes.set(
            xlabel="offered load, requests/s", ylabel=f"{title} latency, s", xscale="log", yscale="log", title=title
        )
        axes.grid(alpha=0.3)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            axis.set_major_formatter("{x:g}")
            axis.set_minor_formatter(NullFormatter())
    axes.legend(fontsize="x-small")


def draw_throughput(figure: Any, result: Result) -> None:
    axes = figure.subplots()
    for engine, rows in _curves(result).items():
        axes.plot(
            [row["offered_per_s"] for row in rows], [row["requests_per_s"] for row in rows], marker="o", label=engine
        )
    axes.set(xlabel="offered load, requests/s", ylabel="served, requests/s")
    axes.legend(fontsize="x-small")
    axes.grid(alpha=0.3)


def _curves(result: Result) -> dict[str, list[dict[str, Any]]]:
    """Rows of the engines that were asked some load, by load."""
    curves: dict[str, list[dict[str, Any]]] = {}
    for row in result["rows"]:
        if row["offered_per_s"] is not None and not row.get("turn"):
            curves.setdefault(row["engine"], []).append(row)
    return {engine: sorted(rows, key=lambda row: float(row["offered_per_s"])) for engine, rows in curves.items()}


def draw_cdf(figure: Any, result: Result) -> None:
    axes = figure.subplots()
    for setting, percentiles_s in result["latency_percentiles_s"].items():
        axes.plot(
            percentiles_s, [(index + 1) / len(percentiles_s) for index in range(len(percentiles_s))], label=setting
        )
    axes.set(xlabel="latency, s (simulated)", ylabel="share of requests", xscale="log")
    axes.legend(fontsize="x-small")
    axes.grid(alpha=0.3)


def draw_mil(figure: Any, result: Result) -> None:
    axes = figure.subplots()
    names = [f"{row['engine']}\n{row['model']}" for row in result["rows"]]
    lengths = [row["longest_input_tokens"] or 0 for row in result["rows"]]
    axes.barh(names, lengths)
    for place, (row, length) in enumerate(zip(result["rows"], lengths, strict=True)):
        shown = "out of memory" if row["longest_input_tokens"] is None else f"{length:,}"
        axes.text(length, place, f" {shown}", va="center", fontsize="x-small")
    conditions = result["conditions"]
    memory = (
        f"{conditions['budget_mib']} MiB beside the weights" if "budget_mib" in conditions else "the paper's devices"
    )
    axes.set(xlabel=f"longest input in {memory}, tokens")
    axes.tick_params(axis="y", labelsize="x-small")
    axes.margins(x=0.15)


def draw_memory(figure: Any, result: Result) -> None:
    axes = figure.subplots()
    for row in result["rows"]:
        axes.plot(row["seconds"], row["mib"], label=row["engine"])
    axes.set(xlabel="time since the request was sent, s", ylabel="memory of the scheduler process, MiB")
    axes.legend()
    axes.grid(alpha=0.3)


def draw_jct(figure: Any, result: Result) -> None:
    models = list(result["figures"])
    for axes, model in zip(figure.subplots(1, len(models), squeeze=False)[0], models, strict=True):
        rows = [row for row in result["rows"] if row["model"] == model]
        actual_ms = [row["actual_ms"] for row in rows]
        axes.scatter(actual_ms, [row["predicted_jct_ms"] for row in rows], s=8)
        axes.plot([min(actual_ms), max(actual_ms)], [min(actual_ms), max(actual_ms)], color="gray", linewidth=1)
        axes.set(xlabel="actual, ms", ylabel="predicted, ms", xscale="log", yscale="log", title=model)
        axes.grid(alpha=0.3)


FIGURES: dict[str, Figure] = {
    "latency": Figure("post_recommendation", "Figs. 6 and 7", draw_latency),
    "long_latency": Figure("credit_verification", "Figs. 6 and 7", draw_latency),
    "throughput": Figure("post_recommendation", "Fig. 9", draw_throughput),
    "mil": Figure("mil", "Table 2 and Fig. 10", draw_mil),
    "cdf": Figure("planner", "Fig. 11", draw_cdf),
    "memory": Figure("memory_trace", "Fig. 3", draw_memory),
    "jct": Figure("jct_model", "section 6.3", draw_jct),
}


def draw(name: str, folder: Path = HERE) -> Path | None:
    """The picture's path; None where its benchmark has no result."""
    chosen = FIGURES[name]
    path = folder / chosen.benchmark / "result.json"
    if not path.exists():
        return None
    result = json.loads(path.read_text())
    figure = pyplot.figure(figsize=(9, 4.5), layout="constrained")
    chosen.draw(figure, result)
    conditions = result["conditions"]
    figure.suptitle(
        f"{conditions['command']}, {machine_of(conditions['hardware'])}, commit {conditions['commit'][:10]}"
        + (f", lengths divided by {conditions['scaled_by']}" if conditions.get("scaled_by", 1) != 1 else ""),
        fontsize="xx-small",
    )
    drawn = folder / "figures" / f"{name}.png"
    drawn.parent.mkdir(exist_ok=True)
    figure.savefig(drawn, dpi=130, metadata={"Software": None})
    pyplot.close(figure)
    return drawn


def machine_of(hardware: dict[str, Any]) -> str:
    """The accelerator, where there is one."""
    return hardware["accelerator"] or f"{hardware['processor']}, {hardware['cores']} cores"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*FIGURES, []], help="default: all")
    parser.add_argument("--folder", type=Path, default=HERE, help="where the results are (default: beside this file)")
    arguments = parser.parse_args()
    for name in arguments.names or FIGURES:
        drawn = draw(name, arguments.folder)
        print(drawn if drawn is not None else f"{name}: no {FIGURES[name].benchmark}/result.json yet")
    return 0


if __name__ == "__main__":
    sys.exit(main())
