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
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.claims import BATCH_LLM, GAIN, PREFILL_ONLY, Claim, Found
from sgl_prefill.core import gpu_memory

HERE = Path(__file__).resolve().parent
Result = dict[str, Any]


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
    "PrefillOnly: two cards, so TP2, PP2, their lead at low load and NVLink (Figs. 6 to 9, Table 2; two ranks on a CPU:"
    " [`tensor_parallel`](tensor_parallel/README.md)); one token against 256 (2.3).",
    "BatchLLM: MI200, 7B to 70B, 100 tokens out but in one row, the token-batching ablation, kernels of GPUs.",
    "Table 2 on the paper's cards: calculated. A GPU was lent for ten minutes (H200).",
    "Real models: SmolLM2 135M, and Qwen2.5-Coder 0.5B for choices alone. Others have random weights: answers are compared, not"
    " accuracy.",
    "FP8. Lengths of `load` and `batch` are the papers' divided by 10 to 30.",
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
        "Written by `python benchmarks/make_report.py` from each `result.json`. Rows, conditions and caveats: in the folders.\n",
        f"**{n_met} of {len(targets)} targets are met, {len(targets) - n_met} missed;"
        f" {len(missing)} benchmarks have no result.** {answers(results)}\n",
        "## The papers' claims\n",
        f"On this hardware, at this scale, against the paper's figure. *Holds*: each value reaches it or nine tenths of it;"
        f" *holds partly*: one does, or is over {GAIN}; *refuted*: none. Stock SGLang *as installed* attends with"
        " `torch_native`; *PyTorch path* is our attention before its kernels; *our kernels* (below: *new kernel*) stock with"
        " ours. *Forecast*: lengths from memory plans.\n",
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
    found = Found("", "not measured")
    if claim.here is not None and results.keys() >= {*claim.benchmarks}:
        found = claim.here(results)
    links = ", ".join(f"[`{name}`]({_link(folder, name)}/README.md)" for name in claim.benchmarks)
    has_picture = claim.picture and (folder / "figures" / f"{claim.picture}.png").exists()
    picture = f" [picture](figures/{claim.picture}.png)" if has_picture else ""
    return [claim.place, claim.says, f"{found.numbers}{f' ({links})' if links else ''}{picture}", found.verdict]


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
