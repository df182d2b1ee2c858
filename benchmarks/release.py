"""All benchmarks that a release needs, one after the other, then the pictures and the report.

    VLLM_CPU_PYTHON=PYTHON python benchmarks/release.py [--list] [NAME...]

`--list` says what would run and how long it takes on 2 cores. One that fails is named at the end, and stops nothing. A run that
was cut off goes on where it stopped: those with parts keep each part that has ended.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
# What the first page and the claims of the report rest on; then what tells whether a release is worse than the last.
NAMES = (
    "load",
    "rivals",
    "hybrid",
    "batch",
    "mil",
    "front",
    "branches",
    "decisions",
    "answers",
    "storm",
    "start",
    "families",
)


def minutes(name: str) -> int:
    """As the README of a benchmark says behind its command."""
    text = (HERE / name / "README.md").read_text()
    said = re.search(rf"benchmarks/{name}/run\.py +# (\d+) minutes", text)
    if said is None:
        raise ValueError(f"{name}/README.md does not say behind its command how many minutes it takes")
    return int(said.group(1))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", choices=[*NAMES, []], help=f"default: {' '.join(NAMES)}")
    parser.add_argument("--list", action="store_true", help="only say what would run")
    arguments = parser.parse_args()
    names = arguments.names or NAMES
    for name in names:
        print(f"{name:12} {minutes(name):4} minutes")
    print(f"{'together':12} {sum(map(minutes, names)):4} minutes on 2 cores")
    if arguments.list:
        return 0
    scripts = [HERE / name / "run.py" for name in names]
    failed = [
        script.parent.name for script in scripts if subprocess.run([sys.executable, script], check=False).returncode
    ]
    for script in (HERE / "figures.py", HERE / "make_report.py"):
        subprocess.run([sys.executable, script], check=True)
    print(f"failed: {', '.join(failed)}" if failed else "all have ended")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
