"""REPORT.md from the committed results: conditions, targets, rows, figures, and a verdict per claim of the papers.

    python benchmarks/make_report.py [--folder benchmarks]           # after python benchmarks/figures.py

Reads every result.json of the folder and the README.md of its benchmark; runs nothing, so that a committed REPORT.md can be
compared with what this writes.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
Result = dict[str, Any]
NOT_TESTED = "not tested here"
SIMULATED = "planner"  # replays on a simulated clock: a verdict that rests on it says so
LEAST_GAIN = 1.1  # a ratio of less is within what the throughputs of identical runs differ by


class Claim(NamedTuple):
    """Something that a paper says, PrefillOnly's where its name is not given, and the targets whose numbers bear on it."""

    text: str
    benchmark: str
    targets: str  # a pattern over the targets' names


CLAIMS = (
    Claim(
        "Up to 4 times the load of chunked prefill at one latency (abstract, Figs. 6, 7)",
        "post_recommendation",
        "fcfs",
    ),
    Claim("Several times longer inputs on the same memory (Table 2)", "mil", "longest input, ours"),
    Claim("Hybrid prefilling costs next to no throughput (section 4)", "hybrid_overhead", "unchunked"),
    Claim("Hybrid prefilling beats chunked prefill in throughput (Fig. 10)", "hybrid_overhead", "best chunk size"),
    Claim(
        "Long requests that share nothing: more throughput (WL2, Figs. 6 and 7)",
        "credit_verification",
        "throughput, ours / ",
    ),
    Claim("The time of a prefill can be predicted (section 6.3)", "jct_model", "Pearson"),
    Claim("Calibration keeps the hit rate when the cache is small (Fig. 5, section 6.2)", "planner", "tokens saved"),
    Claim(
        "One request a step loses nothing against batches (section 6.1; tried on hits of 15 tokens)",
        "bursts",
        "(one a step|--paper): mean",
    ),
    Claim(
        "Shortest remaining job first lowers the mean latency (section 6)",
        "live_policy",
        "fcfs / ours(, --paper| one a step)",
    ),
    Claim("lambda trades mean against P99 (Fig. 11)", "planner", "lambda 2000"),
    Claim(
        "BatchLLM: whole jobs are answered 1.3 to 10.8 times as fast (abstract, Fig. 5)",
        "batch_job",
        "best of stock, new kernel",
    ),
    Claim(
        "BatchLLM: one level of prefixes saves nearly what all levels do (section 4.2)", "batch_job", "one level saves"
    ),
    Claim("BatchLLM: planning costs next to nothing (section 6.3.4)", "batch_plan", "^planning .* industry"),
)

COMPARED = (
    "* *ours*: no flag at all; *ours, --paper*: exactly the paper's engine (one request a step)",
    "* *torch_native*: stock SGLang as a user gets it, on the CPU platform alone",
    "* *PyTorch path*: stock SGLang with this package's attention before it had a kernel of its own",
    "* *new kernel*: stock SGLang with the kernel too: what is left to ours is order and packing; without a target",
    "\nA ratio is to the best policy of a reference, of either version of SGLang, where a benchmark measures several. Rows that"
    " name an engine *one a step* or *packed*, or stock SGLang without a reference, are from before the kernel, on the PyTorch"
    " path.",
)

FIGURES = {
    "post_recommendation": ("latency", "throughput"),
    "credit_verification": ("long_latency",),
    "mil": ("mil",),
    "planner": ("cdf",),
    "memory_trace": ("memory",),
    "jct_model": ("jct",),
}


def text(folder: Path = HERE) -> str:
    """The whole page."""
    results = {path.parent.name: json.loads(path.read_text()) for path in sorted(folder.glob("*/result.json"))}
    missing = sorted(path.parent.name for path in HERE.glob("*/run.py") if path.parent.name not in results)
    parts = [
        "# What was measured\n",
        "Written by `python benchmarks/make_report.py` from each `result.json`; nothing is typed by hand.\n",
        "## The papers' claims\n",
        "On the machines of this page, at its scale. A claim holds where every target that bears on it is met, and"
        " partly where the numbers go its way.\n",
        *_table(["claim", "verdict", "measured"], ([claim.text, *verdict(claim, results)] for claim in CLAIMS)),
        "\n## What is compared\n",
        *COMPARED,
        "\n## Processors\n",
        *_processors(results),
        "\n## Lost or wrong answers\n",
        lost_or_wrong(results),
        "\n## Not measured\n",
        *(f"* `{name}`" for name in missing),
        *_accelerators(results),
        _spread(results),
        "\n## Results\n",
    ]
    for name, result in results.items():
        parts += _section(folder, name, result)
    return "\n".join(parts) + "\n"


def verdict(claim: Claim, results: dict[str, Result]) -> tuple[str, str]:
    """(verdict, the numbers that it rests on)."""
    targets = [
        target
        for target in results.get(claim.benchmark, {"targets": []})["targets"]
        if re.search(claim.targets, target["name"])
    ]
    if not targets:
        return NOT_TESTED, f"no result of `{claim.benchmark}`"
    numbers = "; ".join(f"{target['name']}: {_shown(target['value'])} (target {wanted(target)})" for target in targets)
    n_met = sum(target["met"] for target in targets)
    where = "simulated: " if claim.benchmark == SIMULATED else ""
    if n_met == len(targets):
        return where + "holds", numbers
    # A missed target still supports its claim if it is a ratio above 1: better, but by less than the target.
    goes_its_way = n_met > 0 or any(LEAST_GAIN < target["value"] < target["target"] for target in targets)
    return where + ("holds partly" if goes_its_way else "does not hold"), numbers


def wanted(target: dict[str, Any]) -> str:
    """The target with the direction that is good: ">= 2.2". target: as a result holds it."""
    value, limit = target["value"], target["target"]
    is_least = limit > 0 if value == limit else (value > limit) == target["met"]  # a count that is 0 may be at most 0
    return f"{'>=' if is_least else '<='} {limit:g}"


def lost_or_wrong(results: dict[str, Result]) -> str:
    """Counts over the comparisons of engines under load, which have rows only where every answer came and was right.

    Those with SGLang's dummy weights are left out: they answer all prompts alike.
    """
    compared = [
        [row for row in result.get("rows", []) if {"requests", "p99_s"} <= row.keys()]
        for result in results.values()
        if "--load-format dummy" not in str(result["conditions"].get("commands"))
    ]
    text = (
        f"0 of {sum(row['requests'] for rows in compared for row in rows):,} requests in {sum(map(bool, compared))}"
        " comparisons (target 0). A comparison in which a request is lost, or in which two engines' log-probabilities"
        " differ by more than it allows, ends with an error and writes no result."
    )
    shares = [(row["told_apart"], row["engine"]) for rows in compared for row in rows if "told_apart" in row]
    if shares:
        share, engine = min(shares)
        text += (
            " Of answers that were those of the request before, it would find"
            f" {statistics.median(share for share, _ in shares):.0%} in the median run, and {share:.0%} at least ({engine})."
        )
    return text


def _section(folder: Path, name: str, result: Result) -> list[str]:
    readme = (HERE / name / "README.md").read_text()
    title, question = readme.partition("\n")[0].lstrip("# "), re.search(r"^Question: (.*?)\n\n", readme, re.M | re.S)
    conditions = result["conditions"]
    machine, versions = conditions["hardware"], conditions["versions"]
    lines = [
        f"### {title}\n",
        f"`{conditions['command']}`: [conditions and caveats]({_link(folder, name)}/README.md), [raw]({name}/result.json)\n",
    ]
    if question is not None:
        lines.append(" ".join(question.group(1).split()) + "\n")
    accelerator = machine["accelerator"] or "no accelerator"
    sglangs = dict.fromkeys([versions["sglang"], *filter(None, conditions.get("sglang_of", {}).values())])
    lines.append(
        f"{_processors_of(conditions)}, {machine['cores']} cores, {accelerator}; SGLang {' and '.join(sglangs)}, PyTorch"
        f" {versions['torch']}, commit {_commit(conditions)}, OMP_NUM_THREADS={conditions['OMP_NUM_THREADS']}."
        f"{_setting(conditions)}{_kernels(conditions)}\n"
    )
    targets = result["targets"]
    shown = ([one["name"], _shown(one["value"]), wanted(one), "met" if one["met"] else "**missed**"] for one in targets)
    if targets:
        lines += _table(["row", "value", "target", ""], shown)
    for paragraph in re.findall(
        r"^(?:Missed|What this does not show|Conditions? that (?:flatter|mislead)).*?(?=\n\n|\Z)", readme, re.M | re.S
    ):
        lines.append("\n" + " ".join(paragraph.split()))
    for rows in _tables_of(name, result):
        lines += [
            "",
            *_table(
                [_headed(column) for column in rows[0]], ([_shown(value) for value in row.values()] for row in rows)
            ),
        ]
    for figure in FIGURES.get(name, ()):
        if (folder / "figures" / f"{figure}.png").exists():
            lines.append(f"\n![{title}](figures/{figure}.png)")
    return [*lines, ""]


# The lists of a result that are shown as tables, and the benchmarks whose "rows" are too many to show.
TABLES = ("steps", "rows", "medians", "means", "rivals", "capacities", "long_request", "failed")
WITHOUT_ROWS = ("planner", "jct_model", "memory_trace")
# Columns with a run's conditions, which have no good direction.
CONDITION_COLUMNS = ("offered_per_s", "load")
MORE_IS_BETTER = re.compile(r"(.*(_per_s|_share|_saving)|times|hit_rate|of_ceiling|longest_input_tokens)")
LESS_IS_BETTER = re.compile(r"(.*(_s|_ms|, (CPU )?ms|_calls|mib)|ms|seconds|mean|p99|largest)")
RUN_COLUMNS = ("engine", "offered_per_s", "requests_per_s", "mean_s", "p50_s", "p99_s", "cached_share")


def _tables_of(name: str, result: Result) -> list[list[dict[str, Any]]]:
    """Runs under load show RUN_COLUMNS, other rows every column without lists."""
    tables = []
    for key in TABLES:
        rows: list[dict[str, Any]] = [_flat(row) for row in result.get(key, []) if not row.get("turn")]
        if not rows or (key == "rows" and name in WITHOUT_ROWS):
            continue
        columns = [key for key in rows[0] if all(not isinstance(row.get(key), list | dict) for row in rows)]
        if set(RUN_COLUMNS) <= set(columns):
            columns = [*RUN_COLUMNS, *(["turns"] if "turns" in columns else [])]
        shown = [{key: row.get(key) for key in columns} for row in rows]
        for row in shown:
            row.update({what: "all at once" for what in CONDITION_COLUMNS if row.get(what, 0) is None})
            row.update({what: "not measured" for what, value in row.items() if value is None})
        tables.append(shown)
    return tables


def _headed(column: str) -> str:
    """A column's name with the direction that is good."""
    if column in CONDITION_COLUMNS:
        return column
    if MORE_IS_BETTER.fullmatch(column):
        return f"{column}, more is better"
    return f"{column}, less is better" if LESS_IS_BETTER.fullmatch(column) else column


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    """With what tells how a longest input was served, and the commit as it is shown."""
    served = {key: row["served"][key] for key in ("peak_mib", "answered")} if row.get("served") else {}
    return {**row, **served, **({"commit": _commit(row)} if "commit" in row else {})}


def _setting(conditions: dict[str, Any]) -> str:
    """The model, and the numbers that the benchmark adds to the conditions of all."""
    said = []
    if isinstance(model := conditions.get("model"), dict):
        said.append(
            f"a model of {model['num_hidden_layers']} layers, hidden size {model['hidden_size']}, random weights"
        )
    elif model is not None:
        said.append(f"model {model}")
    if said and "dtype" in conditions:
        said[0] += f" in {conditions['dtype']}"
    said += [
        f"{name.replace('_', ' ')} {_shown(value)}"
        for name, value in conditions.items()
        if name != "model" and isinstance(value, int | float)
    ]
    return f" Here: {', '.join(said)}." if said else ""


def _kernels(conditions: dict[str, Any]) -> str:
    """Which engines ran a build of the native kernel, where the result tells."""
    engines_of: dict[str, list[str]] = {}
    for engine, build in conditions.get("kernel_of", {}).items():
        if build is not None:
            engines_of.setdefault(build, []).append(engine)
    said = [f"{build} ({', '.join(engines)})" for build, engines in engines_of.items()]
    return f" Native kernel: {'; '.join(said)}; none in the others." if said else ""


def _processors_of(conditions: dict[str, Any]) -> str:
    """Where the parts of a benchmark were measured on several, with the parts of each."""
    parts_on: dict[str, list[str]] = {}
    for part, processor in conditions.get("processor_of", {}).items():
        parts_on.setdefault(processor, []).append(part)
    if len(parts_on) < 2:
        return str(conditions["hardware"]["processor"])
    return "; ".join(f"{processor} for {', '.join(parts)}" for processor, parts in parts_on.items())


def _processors(results: dict[str, Result]) -> list[str]:
    """Numbers of two kinds of processor are not to be compared: bfloat16 is fast on one alone."""
    measured: dict[str, list[str]] = {}
    for name, result in results.items():
        conditions = result["conditions"]
        parts = conditions.get("processor_of") or {"": conditions["hardware"]["processor"]}
        for processor in dict.fromkeys(parts.values()):
            some = [part for part, other in parts.items() if other == processor]
            all_or_some = "" if len(some) == len(parts) else f" ({', '.join(some)})"
            measured.setdefault(processor, []).append(f"`{name}`{all_or_some}")
    return [f"* {processor}: {', '.join(names)}" for processor, names in measured.items()]


def _link(folder: Path, name: str) -> str:
    """Makes the link from the report to the benchmark."""
    return name if folder == HERE else f"{os.path.relpath(HERE, folder)}/{name}"


def _commit(conditions: dict[str, Any]) -> str:
    digest, _, rest = str(conditions["commit"]).partition(" ")
    return f"{digest[:10]} {rest}".strip()


def _spread(results: dict[str, Result]) -> str:
    said = (
        "* the spread: most cells are one run, one engine after the other, and at saturation the queue is what the machine's"
        " speed leaves just then"
    )
    in_turns = [
        f"`{name}`" for name, result in results.items() if any(row.get("turn") for row in result.get("rows", []))
    ]
    if not in_turns:
        return said
    return f"{said}; engines take turns in {', '.join(in_turns)}, whose raw rows show how far one engine's turns differ"


def _accelerators(results: dict[str, Result]) -> list[str]:
    if any(result["conditions"]["hardware"]["accelerator"] for result in results.values()):
        return []
    return ["* anything on a GPU: none was at hand; `scripts/gpu_bench.sh` runs the set on one"]


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
