"""REPORT.md from the committed results: the papers' claims with verdicts, headline rows, misses, and what was not measured.

    python benchmarks/make_report.py [--folder benchmarks]           # after python benchmarks/figures.py

Reads every result.json of the folder and the README.md of its benchmark; runs nothing, so that a committed REPORT.md can be
compared with what this writes. Rows, conditions and caveats stay in the folders.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from sgl_prefill.core import gpu_memory

HERE = Path(__file__).resolve().parent
Result = dict[str, Any]
SIMULATED = "planner"  # replays on a simulated clock: a verdict that rests on it says so
LEAST_GAIN = 1.1  # a ratio of less is within what the throughputs of identical runs differ by


class Claim(NamedTuple):
    """Something that a paper says."""

    place: str  # figure, table or section
    says: str  # with the paper's figure
    benchmark: str = ""  # "": not measured
    targets: str = ""  # a pattern over the names of the targets that bear on it
    also: Callable[[Result], str] | None = None  # numbers of the result that have no target
    otherwise: str = ""  # the verdict where not all of the targets are met; "": computed
    picture: str = ""


def at_once(engine: str, column: str) -> Callable[[Result], float]:
    """The median of an engine's turns of WL1 with all requests submitted at once."""

    def of(result: Result) -> float:
        rows = [*result["parts"]["wl1"]["medians"], *result["parts"]["wl1"]["rows"]]
        return next(float(row[column]) for row in rows if row["engine"] == engine and row["offered_per_s"] is None)

    return of


def order(result: Result) -> str:
    fcfs, paper = (at_once(engine, "mean_s")(result) for engine in ("stock fcfs, new kernel", "ours, --paper"))
    return f"mean, `fcfs` with the same kernels / `--paper`: {fcfs / paper:.3g}"


def caching(result: Result) -> str:
    fcfs, ours = (at_once(engine, "cached_share")(result) for engine in ("stock fcfs, new kernel", "ours"))
    return f"cached all at once: `fcfs` {fcfs:.0%}, ours {ours:.0%}"


def longest(one: str, other: str) -> Callable[[Result], str]:
    """The ratio of two engines' longest inputs of the first model."""

    def of(result: Result) -> str:
        model = result["rows"][0]["model"]
        tokens = {row["engine"]: row["longest_input_tokens"] for row in result["rows"] if row["model"] == model}
        return f"{one} / {other}: {tokens[one] / tokens[other]:.3g}"

    return of


def saved(result: Result) -> str:
    rows = [
        row
        for row in result["parts"]["whole"]["medians"]
        if row["engine"] == "ours" and row["workload"] == "200/20 at 16"
    ]
    return f"lengths / 10: {rows[0]['cached_share']:.1%}"


CHUNKED = "stock, chunks of 256"  # its best chunk size
PREFILL_ONLY = (
    Claim(
        "Figs. 6, 7, WL1", "1.4 to 4.0 times the load at equal mean and P99", "load", "load carried", picture="latency"
    ),
    Claim("Figs. 6, 7, WL2", "the same for long requests that share nothing", "load", "WL2", picture="long_latency"),
    Claim(
        "Fig. 3", "hybrid prefilling flattens the peaks of memory", "memory_trace", "hybrid / plain", picture="memory"
    ),
    Claim("Fig. 5", "calibration keeps the hit rate of a small cache", "planner", "tokens saved"),
    Claim("Fig. 9", "`fcfs` loses the prefix cache under load", "load", also=caching, picture="throughput"),
    Claim(
        "Fig. 10", "dropping KV alone: 1.6 times the input", "mil", also=longest("ours, eviction only", "ours, neither")
    ),
    Claim(
        "Fig. 10",
        "all techniques: 8.7 times chunked prefill",
        "mil",
        "quarter: longest input, ours / stock at",
        picture="mil",
    ),
    Claim("Table 2", "up to 5 times the input of engines on one card", "mil", "stock unchunked"),
    Claim(
        "Table 2",
        "chunked prefill: less than twice the input",
        "mil",
        also=longest("stock, chunks of 256", "stock, unchunked"),
    ),
    Claim("section 2.5", "chunks of 512 cost 14 % of throughput", "hybrid", "chunks of 512 / unchunked"),
    Claim("section 4", "hybrid prefilling costs no throughput", "hybrid", "throughput, hybrid / unchunked"),
    Claim("section 4.3", "preallocated outputs, in place: longer inputs", "hybrid", "longest input .* / not-"),
    Claim("section 4", "and beats chunked prefill", "hybrid", "hybrid / chunks of"),
    Claim(
        "section 6.1",
        "one request a step loses nothing",
        "load",
        "bursts at .*--paper: mean",
        otherwise="refuted where hits are short",
    ),
    Claim("section 6", "shortest job first lowers the mean", "load", also=order),
    Claim("section 6.3", "time follows cache-miss tokens, r 0.987", "jct_model", "Pearson", picture="jct"),
    Claim("Fig. 11", "a higher lambda: better P99, worse mean", "load", "lambda", picture="cdf"),
    Claim("Fig. 8", "2 cards: tensor and pipeline parallel, NVLink, crossover at low load"),
)
BATCH_LLM = (
    Claim("Figs. 5, 6", "jobs are 1.2 to 10.8 times as fast", "batch", "at .*job / .*(new kernel|vLLM)"),
    Claim("Fig. 8", "saves 85.2 % of 2,000/200 at 16", "batch", also=saved),
    Claim("section 4.2", "one level of prefixes saves 1 % less than all", "batch", "one level saves"),
    Claim("section 6.3.4", "planning takes next to no time", "batch", "^planning .* industry"),
    Claim("Table 1", "industry workload: 1.3 times the best engine", "batch", "^industry: .*(new kernel|vLLM)"),
    Claim("Figs. 2, 9, Table 2", "steps of equal size: 1.04 times", "batch", "at .*100 new tokens", picture="steps"),
    Claim(
        "Fig. 10",
        "attention of shared prefixes",
        "batch",
        "shared attention / each alone",
        otherwise="refuted on a CPU",
    ),
)


class Headline(NamedTuple):
    """Targets of a benchmark that its users ask for first."""

    benchmark: str
    targets: str


HEADLINES = (
    Headline("load", "WL1, all at once"),
    Headline("rivals", "requests a second"),
    Headline("front", "as text"),
    Headline("decisions", "accuracy"),
    Headline("two_commits", "a request: ms"),
)
NOT_MEASURED = (
    "Two cards: TP2, PP2, NVLink, and the low load at which they win (Figs. 6 and 8).",
    "Table 2 on the paper's cards: calculated. A GPU was lent for ten minutes (rows marked H200).",
    "A real model above 135M parameters: others have random weights, so answers are compared, not accuracy.",
    "FP8; full lengths: ours are divided by 10 to 30, where a step's fixed cost weighs more.",
)
FIGURES = ("latency", "long_latency", "throughput", "cdf", "steps", "mil", "memory", "jct")


def text(folder: Path = HERE) -> str:
    """The whole page."""
    results = {path.parent.name: json.loads(path.read_text()) for path in sorted(folder.glob("*/result.json"))}
    missing = sorted(path.parent.name for path in HERE.glob("*/run.py") if path.parent.name not in results)
    targets = [target for result in results.values() for target in result["targets"]]
    n_met = sum(target["met"] for target in targets)
    parts = [
        "# What was measured\n",
        "Written by `python benchmarks/make_report.py` from each `result.json`. A ratio names what is divided by what; behind it"
        " stands what was asked. Rows, conditions and caveats: in the folders.\n",
        f"**{n_met} of {len(targets)} targets are met, {len(targets) - n_met} missed;"
        f" {len(missing)} benchmarks have no result.** {answers(results)}\n",
        "## The papers' claims\n",
        "On this hardware, at this scale. *Holds*: every target is met; *holds partly*: some, or all go its way; *refuted*:"
        " none does. *As installed* (`torch_native`) and *PyTorch path* are stock SGLang with other attention, *new kernel*"
        " stock SGLang with our kernels.\n",
    ]
    for paper, claims in (("PrefillOnly", PREFILL_ONLY), ("BatchLLM", BATCH_LLM)):
        parts += [
            *_table([paper, "claim", "here", "verdict"], (_claim_row(claim, results, folder) for claim in claims)),
            "",
        ]
    parts += [
        "Longest inputs in tokens, *calculated* ([GPU.md](../sgl_prefill/GPU.md)), the paper's Table 2 behind: "
        + table_2(),
        "\n## First asked\n\nRatios of requests a second, where nothing else stands.\n",
        *_table(["row", "value", "asked", "commit, processor"], _headline_rows(results)),
        "\n## Not measured\n",
        *(f"* {line}" for line in NOT_MEASURED),
        *([f"* Without a result: {', '.join(f'`{name}`' for name in missing)}."] if missing else []),
        "\n## Missed\n",
        *(f"* {line}" for name, result in results.items() for line in missed(folder, name, result)),
        "\n## All benchmarks\n",
        *_table(["folder", "met", "SGLang", "commit"], (_benchmark_row(folder, *one) for one in results.items())),
    ]
    shown = [name for name in FIGURES if (folder / "figures" / f"{name}.png").exists()]
    parts += ["\n## Pictures\n", *(f"![{name}](figures/{name}.png)" for name in shown)]
    return "\n".join(parts) + "\n"


def _claim_row(claim: Claim, results: dict[str, Result], folder: Path) -> list[str]:
    said, numbers = verdict(claim, results)
    link = f" ([`{claim.benchmark}`]({_link(folder, claim.benchmark)}/README.md))" if claim.benchmark else ""
    has_picture = claim.picture and (folder / "figures" / f"{claim.picture}.png").exists()
    picture = f" [picture](figures/{claim.picture}.png)" if has_picture else ""
    return [claim.place, claim.says, f"{numbers}{link}{picture}", said]


def verdict(claim: Claim, results: dict[str, Result]) -> tuple[str, str]:
    """(verdict, the numbers that it rests on)."""
    if claim.benchmark not in results:
        return "not measured", ""
    result = results[claim.benchmark]
    also = claim.also(result) if claim.also is not None else ""
    if not claim.targets:
        return "measured", also
    targets = [target for target in result["targets"] if re.search(claim.targets, target["name"])]
    if not targets:
        return "not measured", ""
    numbers = "; ".join(filter(None, [*ranges(targets), also]))
    where = "simulated: " if claim.benchmark == SIMULATED else ""
    n_met = sum(target["met"] for target in targets)
    if n_met == len(targets):
        return where + "holds", numbers
    if claim.otherwise:
        return claim.otherwise, numbers
    goes_its_way = n_met > 0 or any(
        target["direction"] == ">=" and LEAST_GAIN < target["value"] < target["target"] for target in targets
    )
    return where + ("holds partly" if goes_its_way else "refuted"), numbers


def ranges(targets: Sequence[dict[str, Any]]) -> list[str]:
    """Each value, or the lowest and highest of those whose names end alike (behind the last ": ", from "ours / " on)."""
    by_end: dict[tuple[str, str], list[float]] = {}
    for target in targets:
        end = target["name"].rpartition(": ")[2]
        end = end[max(end.find("ours / "), 0) :]
        by_end.setdefault((end, wanted(target)), []).append(target["value"])
    return [
        f"{end}: {_shown(min(values))}{f' to {_shown(max(values))}' if len(values) > 1 else ''} ({asked})"
        for (end, asked), values in by_end.items()
    ]


def wanted(target: dict[str, Any]) -> str:
    """What was asked, with the direction that is good: "≥ 2.2"."""
    return f"{'≥' if target['direction'] == '>=' else '≤'} {target['target']:g}"


def answers(results: dict[str, Result]) -> str:
    """Counts over the comparisons of engines under load, which have rows only where every answer came and was right.

    Those with SGLang's dummy weights are left out: they answer all prompts alike.
    """
    compared = [
        row
        for result in results.values()
        for part in [result, *result.get("parts", {}).values()]
        if isinstance(part, dict) and "--load-format dummy" not in str(result["conditions"].get("commands"))
        for row in part.get("rows", [])
        if {"requests", "p99_s"} <= row.keys()
    ]
    n_requests = sum(row["requests"] for row in compared)
    return f"Of {n_requests:,} answers under load none was lost and none differed from another engine's by more than is allowed."


def table_2() -> str:
    """The longest inputs that the memory of the paper's cards would allow."""
    said = []
    for name, card_gb, paper in (
        ("llama-3.1-8b", 24, "130,000"),
        ("qwen-32b-fp8", 40, "87,000"),
        ("llama-3.3-70b-fp8", 80, "97,000"),
    ):
        (card,) = [card for card in gpu_memory.CARDS if card.gb == card_gb]
        config = json.loads((HERE / "models" / f"{name}.json").read_text())
        tokens = gpu_memory.plan(gpu_memory.shape_of(name, config), card).largest_input_tokens
        said.append(f"{card.name}, {name}: {tokens:,} ({paper})")
    return "; ".join(said) + "."


def _headline_rows(results: dict[str, Result]) -> Iterable[list[str]]:
    for headline in HEADLINES:
        if (result := results.get(headline.benchmark)) is None:
            continue
        for target in result["targets"]:
            if re.search(headline.targets, target["name"]):
                met = "" if target["met"] else ", missed"
                name = target["name"].replace("requests a second, ", "")
                yield [name, _shown(target["value"]), wanted(target) + met, _measured_on(result, target)]


def _measured_on(result: Result, target: dict[str, Any]) -> str:
    """The commit and the processor of the part that has this target, or of the whole."""
    conditions = result["conditions"]
    of_parts = conditions.get("processor_of", {})
    part = next((one for one in of_parts if target in result["parts"][one]["targets"]), None)
    if part is None:
        return f"{_commit(conditions)}, {_short(conditions['hardware'])}"
    hardware = {**conditions["hardware"], "processor": of_parts[part]}
    return f"{conditions['commit_of'][part][:7]}, {_short(hardware)}"


def missed(folder: Path, name: str, result: Result) -> list[str]:
    """The README's paragraph that says what is missed and why, or the targets."""
    targets = [target for target in result["targets"] if not target["met"]]
    if not targets:
        return []
    readme = (HERE / name / "README.md").read_text()
    why = [" ".join(found.split()) for found in re.findall(r"^\*\*Missed.*?(?=\n\n|\Z)", readme, re.M | re.S)]
    said = re.sub(r"^\*\*Missed:?\*\*:? ?", "", " ".join(why))
    if not said:
        said = "; ".join(f"{one['name']} {_shown(one['value'])} ({wanted(one)})" for one in targets)
    return [f"[`{name}`]({_link(folder, name)}/README.md), {len(targets)} of {len(result['targets'])}: {said}"]


def _benchmark_row(folder: Path, name: str, result: Result) -> list[str]:
    conditions = result["conditions"]
    n_met = sum(target["met"] for target in result["targets"])
    versions = dict.fromkeys(
        [conditions["versions"]["sglang"], *filter(None, conditions.get("sglang_of", {}).values())]
    )
    return [
        f"[`{name}`]({_link(folder, name)}/README.md)",
        f"{n_met} of {len(result['targets'])}",
        ", ".join(versions),
        f"{_commit(conditions)}, {_short(conditions['hardware'])}",
    ]


def _short(hardware: dict[str, Any]) -> str:
    """The accelerator, or what the processor computes bfloat16 with."""
    if hardware["accelerator"]:
        return "H200" if "H200" in hardware["accelerator"] else str(hardware["accelerator"])
    sets = ("amx_bf16", "AMX"), ("avx512_bf16", "AVX-512"), ("avx2", "AVX2")
    return next((short for flag, short in sets if flag in hardware["processor"]), str(hardware["processor"]))


def _link(folder: Path, name: str) -> str:
    """Makes the link from the report to the benchmark."""
    return name if folder == HERE else f"{os.path.relpath(HERE, folder)}/{name}"


def _commit(conditions: dict[str, Any]) -> str:
    return str(conditions["commit"])[:7]


def _shown(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) and abs(value) < 1000 else f"{value}"


def _table(head: list[str], rows: Iterable[list[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=HERE, help="where the results are (default: beside this file)")
    folder = parser.parse_args().folder
    (folder / "REPORT.md").write_text(text(folder))
    print(folder / "REPORT.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
