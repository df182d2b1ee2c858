"""The papers' figures from committed results, each one command; no benchmark runs.

    python benchmarks/figures.py [latency long_latency throughput cdf mil memory jct ...] [--folder benchmarks]

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
# One colour for one engine in every picture, for others than ours by a part of its name; dark enough for print.
COLOURS = {
    "ours, --paper": "#56b4e9",
    "ours": "#0072b2",
    "new kernel": "#e69f00",
    "PyTorch path": "#a07000",
    "torch_native": "#d55e00",
    "vLLM 0.32": "#009e73",
}
OTHERS = ("#444444", "#888888", "#cc79a7", "#000000")
SHOWN = {"new kernel": "our kernels", "torch_native": "as installed"}


class Figure(NamedTuple):
    """One picture."""

    benchmark: str  # whose result.json it shows
    of_paper: str
    draw: Callable[[Any, Result], None]  # (matplotlib Figure, result)
    part: str | None = None  # of the benchmark


def colour_of(engine: str, place: int) -> str:
    """place: of the engine among those of the picture, which tells those without a colour of their own apart."""
    if engine.startswith("ours"):
        return COLOURS["ours, --paper" if "--paper" in engine else "ours"]
    return next((colour for name, colour in COLOURS.items() if name in engine), OTHERS[place % len(OTHERS)])


def label_of(engine: str) -> str:
    for name, shown in SHOWN.items():
        engine = engine.replace(name, shown)
    return engine


def draw_latency(figure: Any, result: Result) -> None:
    for axes, name, title in zip(figure.subplots(1, 2, sharex=True), ("mean_s", "p99_s"), ("mean", "P99"), strict=True):
        _plot(axes, result, name)
        axes.set(
            xlabel="offered load, requests/s", ylabel=f"{title} latency, s", xscale="log", yscale="log", title=title
        )
        _label_axes(axes)
    figure.legend(*axes.get_legend_handles_labels(), fontsize="small", loc="outside lower center", ncols=3)


def draw_throughput(figure: Any, result: Result) -> None:
    axes = figure.subplots()
    _plot(axes, result, "requests_per_s")
    axes.set(xlabel="offered load, requests/s", ylabel="served, requests/s", xscale="log", yscale="log")
    _label_axes(axes)
    axes.legend(fontsize="small")


def _label_axes(axes: Any) -> None:
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter(NullFormatter())


def _plot(axes: Any, result: Result, name: str) -> None:
    """A second policy of an engine is dashed, others are dotted."""
    drawn: list[str] = []
    for place, (engine, rows) in enumerate(_curves(result).items()):
        loads, values = [row["offered_per_s"] for row in rows], [row[name] for row in rows]
        colour = colour_of(engine, place)
        style = ("-", "--", ":")[min(drawn.count(colour), 2)]
        axes.plot(loads, values, marker="o", linestyle=style, color=colour, label=label_of(engine))
        drawn.append(colour)
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
    for place, (setting, percentiles_s) in enumerate(result["latency_percentiles_s"].items()):
        shares = [(index + 1) / len(percentiles_s) for index in range(len(percentiles_s))]
        axes.plot(percentiles_s, shares, color=colour_of(setting, place), label=setting)
    axes.set(xlabel="latency, s", ylabel="share of requests", xscale="log")
    axes.legend(fontsize="small")
    axes.grid(alpha=0.3)


def draw_mil(figure: Any, result: Result) -> None:
    axes = figure.subplots()
    names = [f"{row['engine']}\n{row['model']}" for row in result["rows"]]
    lengths = [row["longest_input_tokens"] or 0 for row in result["rows"]]
    attends = ["new kernel" if row["engine"].startswith("stock") else row["engine"] for row in result["rows"]]
    colours = [colour_of(name, place) for place, name in enumerate(attends)]
    axes.barh(names, lengths, color=colours)
    for place, (row, length) in enumerate(zip(result["rows"], lengths, strict=True)):
        shown = "out of memory" if row["longest_input_tokens"] is None else f"{length:,}"
        axes.text(length, place, f" {shown}", va="center", fontsize="small")
    conditions = result["conditions"]
    memory = (
        f"{conditions['budget_mib']} MiB beside the weights" if "budget_mib" in conditions else "the paper's devices"
    )
    axes.set(xlabel=f"longest input in {memory}, tokens")
    axes.tick_params(axis="y", labelsize="small")
    axes.margins(x=0.15)


def draw_memory(figure: Any, result: Result) -> None:
    axes = figure.subplots()
    for row, colour in zip(result["rows"], (COLOURS["new kernel"], COLOURS["ours"], *OTHERS), strict=False):
        axes.plot(row["seconds"], row["mib"], color=colour, label=row["engine"])
    axes.set(xlabel="time since the request was sent, s", ylabel="memory of the scheduler process, MiB")
    axes.legend()
    axes.grid(alpha=0.3)


def draw_jct(figure: Any, result: Result) -> None:
    models = list(result["figures"])
    for axes, model in zip(figure.subplots(1, len(models), squeeze=False)[0], models, strict=True):
        rows = [row for row in result["rows"] if row["model"] == model]
        actual_ms = [row["actual_ms"] for row in rows]
        axes.scatter(actual_ms, [row["predicted_jct_ms"] for row in rows], s=8, color=COLOURS["ours"])
        axes.plot([min(actual_ms), max(actual_ms)], [min(actual_ms), max(actual_ms)], color="gray", linewidth=1)
        axes.set(xlabel="actual, ms", ylabel="predicted, ms", xscale="log", yscale="log", title=model)
        axes.grid(alpha=0.3)


def draw_steps(figure: Any, result: Result) -> None:
    """Of the workload with the most new tokens: ours, and the fastest of the others."""
    workload = max((row["workload"] for row in result["medians"] if "new tokens" in row["workload"]), key=_n_new_tokens)
    rows = [row for row in result["medians"] if row["workload"] == workload]
    rows = [row for row in rows if f"{row['engine']}, {workload}, {row['file']}" in result["step_tokens"]]
    rows.sort(key=lambda row: (not row["engine"].startswith("ours"), -row["rows_per_s"]))
    for place, (row, axes) in enumerate(zip(rows[:2], figure.subplots(1, 2, sharey=True), strict=False)):
        tokens = result["step_tokens"][f"{row['engine']}, {workload}, {row['file']}"]
        axes.plot(range(1, len(tokens) + 1), tokens, color=colour_of(row["engine"], place), linewidth=0.8)
        axes.set(xlabel="step", ylabel="tokens computed")
        axes.set_title(f"{label_of(row['engine'])}\n{workload}", fontsize="small")
        axes.grid(alpha=0.3)


def _n_new_tokens(workload: str) -> int:
    return int(workload.rpartition(", ")[2].split()[0])


FIGURES: dict[str, Figure] = {
    "latency": Figure("load", "Figs. 6 and 7, WL1", draw_latency, "wl1"),
    "long_latency": Figure("load", "Figs. 6 and 7, WL2", draw_latency, "wl2"),
    "throughput": Figure("load", "Fig. 9", draw_throughput, "wl1"),
    "cdf": Figure("load", "Fig. 11", draw_cdf, "fairness"),
    "steps": Figure("batch", "BatchLLM, Figs. 2 and 9", draw_steps, "decode"),
    "mil": Figure("mil", "Table 2 and Fig. 10", draw_mil),
    "memory": Figure("memory_trace", "Fig. 3", draw_memory),
    "jct": Figure("jct_model", "section 6.3", draw_jct),
}


def draw(name: str, folder: Path = HERE) -> Path | None:
    """The picture's path; None where its benchmark, or the part of it, has no result."""
    chosen = FIGURES[name]
    path = folder / chosen.benchmark / "result.json"
    if not path.exists():
        return None
    result = json.loads(path.read_text())
    conditions, commit = result["conditions"], result["conditions"]["commit"]
    hardware = conditions["hardware"]
    if chosen.part is not None:
        if chosen.part not in result["parts"]:
            return None
        commit, result = conditions["commit_of"][chosen.part], result["parts"][chosen.part]
        hardware = {**hardware, "processor": conditions.get("processor_of", {}).get(chosen.part, hardware["processor"])}
    figure = pyplot.figure(figsize=(9, 4.5), layout="constrained")
    chosen.draw(figure, result)
    scale = result.get("conditions", conditions).get("scaled_by", 1)
    figure.suptitle(
        f"{chosen.of_paper}: {conditions['command']}, {machine_of(hardware)}, commit {commit[:10]}"
        + (f", lengths divided by {scale}" if scale != 1 else ""),
        fontsize="x-small",
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
