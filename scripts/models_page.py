"""Generates the table of `sgl_prefill/MODELS.md` from `benchmarks/families/result.json`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from scripts.generated_part import GeneratedPart

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "sgl_prefill/MODELS.md"
RESULT = ROOT / "benchmarks/families/result.json"
HEAD = (
    "| architecture | SGLang | this package | its techniques | largest difference from transformers, SGLang / this package |\n"
    "| --- | --- | --- | --- | --- |\n"
)


def table() -> str:
    return HEAD + "".join(map(_row, json.loads(RESULT.read_text())["rows"]))


def _row(row: dict[str, Any]) -> str:
    family, architecture = row["family"], row["architecture"]
    name = architecture if not family.endswith(("-window", "-tied", "-long")) else f"{architecture} ({family})"
    starts = ["yes" if row[f"{engine}_starts"] else "no" for engine in ("stock", "ours")]
    differences = [_shown(row[f"{engine}_difference"]) for engine in ("stock", "ours")]
    return f"| {name} | {' | '.join(starts)} | {_techniques(row)} | {' / '.join(differences)} |\n"


def _techniques(row: dict[str, Any]) -> str:
    if not row["ours_starts"]:
        return ""
    left = row["left_to_sglang"]
    on = {
        "scheduling": "scheduling" not in left,
        "eviction": row["evicts"],
        "hybrid": row["is_hybrid"],
        "mended": bool(row["model_notes"]),
    }
    return ", ".join(name for name, is_on in on.items() if is_on)


def _shown(difference: float | None) -> str:
    return "-" if difference is None else f"{difference:.0e}"


PART = GeneratedPart(PAGE, "families", table)

if __name__ == "__main__":
    sys.exit(PART.main())
