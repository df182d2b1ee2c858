"""How large is this environment's PyTorch with the code of one GPU, and does it run on the CUDA packages of an older one?

    OLDER_PYTHON=PYTHON python benchmarks/gpu_kit/of_torch.py [--quick] [--json PATH]

PYTHON is one of an environment with an older PyTorch. Needs xz, gcc and binutils, no GPU. See the README beside this file.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import report
from scripts import gpu_kit

MOST_MIB = 200.0  # with a kit of SGLang, 250 MiB
LEFT_OUT = ("include", "test", "__pycache__", "*.a", "*.pyi")
PROGRAM = "import torch; x = torch.ones(8, 8, dtype=torch.bfloat16); print(torch.__version__, (x @ x).sum().item())"


def main() -> int:
    arguments = report.arguments(__doc__, Path(__file__).with_name("of_torch.json"))
    older = Path(os.environ["OLDER_PYTHON"])
    installed = Path(str(importlib.metadata.distribution("torch").locate_file("torch")))
    with tempfile.TemporaryDirectory() as scratch:
        tree = Path(scratch, "tree")
        shutil.copytree(installed, tree / "torch", ignore=shutil.ignore_patterns(*LEFT_OUT))
        rows = [reduced(library) for library in sorted((tree / "torch/lib").glob("*.so*"))]
        others = sum(packed(path) for path in (tree / "torch").rglob("*.so") if path.parent.name != "lib")
        rows.append({"what": "other files", "packed_mib": others + packed(tree / "torch", "--exclude=*.so*")})
        missing = missing_functions(tree / "torch/lib/libtorch_cuda.so", older)
        said = run(older, tree, missing)
    mib = sum(row["packed_mib"] for row in rows)
    print(f"{mib:.1f} MiB; {missing} are missing; {said}", file=sys.stderr)
    targets = [
        report.Target.at_most("PyTorch for one GPU: MiB", mib, MOST_MIB),
        report.Target.at_least("runs on the CUDA packages of an older one", said["status"] == 0, 1),
    ]
    found = {"conditions": report.conditions(), "rows": rows, "nccl_functions_missing": missing, "run": said}
    report.finish(found, targets, arguments.json)
    return 0


def reduced(library: Path) -> dict[str, Any]:
    """Empties a library of other GPUs' code. Returns its sizes in MiB."""
    whole = library.stat().st_size
    code = any(gpu_kit.images(library.read_bytes()))
    kept = gpu_kit.trim(library) if code else 0
    subprocess.run(["strip", "--strip-unneeded", str(library)], check=True)
    row = {"what": library.name, "mib": whole / 2**20, "device_mib": kept / 2**20, "packed_mib": packed(library)}
    print(row, file=sys.stderr)
    return row


def packed(path: Path, *options: str) -> float:
    command = ["tar", *options, "-I", "xz -T2 -6", "-C", str(path.parent), "-cf", "-", path.name]
    return len(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout) / 2**20


def missing_functions(library: Path, older: Path) -> list[str]:
    """Functions of NCCL that the library calls and the older environment's NCCL lacks."""
    (nccl,) = older.parents[1].glob("lib/python*/site-packages/nvidia/nccl/lib/libnccl.so.2")
    called, there = (
        {line.split()[-1].split("@")[0] for line in symbols(path, which)}
        for path, which in ((library, "--undefined-only"), (nccl, "--defined-only"))
    )
    return sorted(name for name in called - there if name.startswith("nccl"))


def symbols(library: Path, which: str) -> list[str]:
    command = ["nm", "-D", which, str(library)]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()


def run(older: Path, tree: Path, missing: list[str]) -> dict[str, Any]:
    """Multiplies two matrices with the reduced PyTorch, where missing functions only fail when they are called."""
    rest = tree / "libnccl_rest.so"
    source = "".join(f"int {name}(void) {{ return 4; }}\n" for name in missing)
    subprocess.run(["gcc", "-shared", "-fPIC", "-w", "-o", str(rest), "-xc", "-"], input=source, text=True, check=True)
    environment = {**os.environ, "PYTHONPATH": str(tree), "LD_PRELOAD": str(rest)}
    done = subprocess.run([str(older), "-c", PROGRAM], env=environment, capture_output=True, text=True, check=False)
    return {"status": done.returncode, "output": done.stdout.strip() or done.stderr.strip()[-300:]}


if __name__ == "__main__":
    sys.exit(main())
