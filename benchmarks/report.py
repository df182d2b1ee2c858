"""The contract of every benchmark: arguments, conditions, targets and the JSON file.

    python benchmarks/<question>/run.py [--quick] [--json PATH]

exits 0 also when a target is missed, and non-zero when the run is invalid. The JSON holds `conditions` (commit,
versions, hardware, full commands), `targets` (name, value, target, met) and the raw rows.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import psutil
import torch

REPOSITORY = Path(__file__).resolve().parents[1]


Direction = Literal[">=", "<="]


class Target(NamedTuple):
    """A target value and the measured value."""

    name: str
    value: float
    target: float
    met: bool
    direction: Direction

    @classmethod
    def at_least(cls, name: str, value: float, target: float) -> Target:
        return cls(name, round(value, 4), target, value >= target, ">=")

    @classmethod
    def at_most(cls, name: str, value: float, target: float) -> Target:
        return cls(name, round(value, 4), target, value <= target, "<=")


class InvalidRunError(Exception):
    """The run does not measure what it claims: an engine not there, a request lost, answers that disagree."""


def arguments(description: str | None, default_json: Path) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smoke run on small lengths; proves nothing about speed")
    parser.add_argument("--json", type=Path, help="where to write (default: beside this script; none with --quick)")
    parsed = parser.parse_args()
    end_with_timeout()
    if parsed.json is None and not parsed.quick:
        parsed.json = default_json
    return parsed


def end_with_timeout() -> None:
    """Lets a signal that ends this program, as `timeout` sends it, end its servers too."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def conditions() -> dict[str, Any]:
    """Commit, versions and hardware, to be read before the run; the benchmark adds `commands` (see `portable`)."""
    return {
        "command": " ".join(
            ["python", str(Path(sys.argv[0]).resolve().relative_to(REPOSITORY)), *_without_json(sys.argv[1:])]
        ),
        "commit": _commit(),
        "versions": {
            name: importlib.metadata.version(name) for name in ("sgl-prefill", "sglang", "torch", "transformers")
        },
        "python": platform.python_version(),
        "hardware": {
            "processor": _processor(),
            "cores": os.cpu_count(),
            "memory_gib": round(psutil.virtual_memory().total / (1 << 30), 1),
            "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        },
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS"),
    }


def _commit() -> str:
    """What BENCH_COMMIT names, where the tree was copied to a machine without its repository, or else what git says."""
    if named := os.environ.get("BENCH_COMMIT"):
        return named
    git = ["git", "-C", str(REPOSITORY)]
    # Results beside the benchmarks are written by runs; they change nothing that another run measures.
    results = [":(exclude)benchmarks/*/result*", ":(exclude)benchmarks/figures", ":(exclude)benchmarks/REPORT.md"]
    status = [*git, "status", "--porcelain", "--", str(REPOSITORY), *results]
    try:
        commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        dirty = subprocess.run(status, capture_output=True, text=True, check=True).stdout.strip()
    except (FileNotFoundError, subprocess.CalledProcessError):
        return "unknown"
    return commit + (" with uncommitted changes" if dirty else "")


def portable(command: list[str]) -> str:
    """A full command without absolute paths of this machine, for a committed file."""
    return " ".join(Path(word).name if word.startswith("/") else word for word in command)


def finish(result: dict[str, Any], targets: list[Target], path: Path | None) -> None:
    """Print the targets and write the JSON."""
    for target in targets:
        print(
            f"{'met   ' if target.met else 'MISSED'}  {target.name}: {target.value} (target {target.direction} {target.target})"
        )
    if path is not None:
        whole = {"conditions": result.pop("conditions"), "targets": [target._asdict() for target in targets], **result}
        path.write_text(json.dumps(whole, indent=1) + "\n")
        print(f"written to {path}")


def beside(script: str, part: str, *, quick: bool) -> argparse.Namespace:
    """The arguments of a `Comparison` that is a part of a benchmark: the files of its requests and of what is kept."""
    return argparse.Namespace(json=None if quick else Path(script).with_name(f"result.{part}.json"))


def part(rows: list[dict[str, Any]], targets: list[Target], **more: Any) -> dict[str, Any]:
    """What a part of a benchmark has found, as `in_parts` keeps it."""
    return {**more, "rows": rows, "targets": [target._asdict() for target in targets]}


def in_parts(description: str | None, script: Path, parts: Mapping[str, Callable[[bool], dict[str, Any]]]) -> int:
    """Run the parts of a benchmark, and write the result after each.

    BENCH_PARTS names the parts to measure; the figures of the others are kept from the result that exists.

    Args:
        parts: by name; each takes whether the run is quick, and returns figures with "targets".
    """
    parsed = arguments(description, script.with_name("result.json"))
    asked = os.environ.get("BENCH_PARTS", "").split()
    if unknown := set(asked) - set(parts):
        raise InvalidRunError(f"BENCH_PARTS names {', '.join(sorted(unknown))}: the parts are {', '.join(parts)}")
    whole = conditions() | {"commit_of": {}, "processor_of": {}}
    found: dict[str, Any] = {}
    if asked and parsed.json is not None and parsed.json.exists():
        kept = json.loads(parsed.json.read_text())
        found, before = kept["parts"], kept["conditions"]
        whole["commit_of"] = before["commit_of"]
        whole["processor_of"] = before.get("processor_of") or dict.fromkeys(found, before["hardware"]["processor"])
    for name in asked or parts:
        print(f"== {name}", file=sys.stderr)
        found[name] = parts[name](parsed.quick)
        whole["commit_of"][name] = whole["commit"]
        whole["processor_of"][name] = whole["hardware"]["processor"]
        in_order = {one: found[one] for one in parts if one in found}
        targets = [Target(**target) for one in in_order.values() for target in one["targets"]]
        finish({"conditions": dict(whole), "parts": in_order}, targets, parsed.json)
    return 0


def _without_json(words: list[str]) -> list[str]:
    return [word for word in words if word == "--quick"]


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip() + _instruction_sets()
    return platform.processor() or platform.machine()


def _instruction_sets() -> str:
    flags = next(
        (line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")), ""
    ).split()
    wanted = [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if name in flags]
    return f" ({', '.join(wanted)})"
