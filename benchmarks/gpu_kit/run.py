"""How large is the kit for a GPU machine without a package index, how long does it take, and can a bare environment import it?

    python benchmarks/gpu_kit/run.py [--quick] [--json PATH]

Needs a package index and CUDA 13.0 in /usr/local/cuda or CUDA_HOME, no GPU. See the README beside this file.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import report

# What such a machine has besides PyTorch, as far as servers import it.
BARE = """
torch==2.14.1 triton==3.8.0 torchaudio==2.11.0 torchvision==0.29.2 huggingface_hub==1.33.0 numpy
safetensors==0.8.0 sentencepiece==0.2.1 tiktoken==0.14.0 accelerate==1.15.0 aiohttp annotated-doc anyio attrs certifi
charset-normalizer click cloudpickle cuda-bindings cuda-pathfinder einops filelock fsspec grpcio h11 hf-xet httpcore
httpx idna jinja2 markdown-it-py markupsafe ml-dtypes mpmath msgpack multidict networkx ninja numba nvidia-ml-py
packaging pillow pluggy prometheus-client protobuf psutil pygments pytest python-dateutil pyyaml regex requests rich
scipy shellingham six sortedcontainers sympy tabulate tqdm typer typing-extensions urllib3 uvloop wrapt xxhash zipp
hypothesis
"""
MOST_MINUTES, MOST_MIB = 10.0, 60.0


def main() -> int:
    arguments = report.arguments(__doc__, Path(__file__).with_name("result.json"))
    with tempfile.TemporaryDirectory() as scratch:
        bare, kit = Path(scratch, "bare"), Path(scratch, "kit")
        subprocess.run(["uv", "venv", "--python", sys.executable, str(bare)], check=True)
        subprocess.run(["uv", "pip", "install", "--python", str(bare / "bin/python"), *BARE.split()], check=True)
        started = time.monotonic()
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        command = [sys.executable, "scripts/gpu_kit.py", "--out", str(kit), "--python", version]
        command += ["--bare", str(bare / "bin/python")]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, cwd=report.REPOSITORY)
        minutes = (time.monotonic() - started) / 60
        print(done.stdout, file=sys.stderr)
        mib = sum(archive.stat().st_size for archive in kit.glob("*.xz")) / 2**20
    compiled, imported = (counts(done.stdout, what) for what in ("kernels compiled", "modules imported"))
    row = {"minutes": minutes, "mib": mib, "kernels": compiled[1], "modules": imported[1], "status": done.returncode}
    targets = [
        report.Target.at_most("kit: minutes to make it", minutes, MOST_MINUTES),
        report.Target.at_most("kit: MiB of both archives", mib, MOST_MIB),
        report.Target.at_most("kit: kernels that do not compile", compiled[1] - compiled[0], 0),
        report.Target.at_most("kit: modules that a bare environment does not import", imported[1] - imported[0], 0),
    ]
    report.finish({"conditions": report.conditions(), "rows": [row]}, targets, arguments.json)
    return 0


def counts(output: str, what: str) -> tuple[int, int]:
    """Returns (how many succeeded, of how many)."""
    found = re.search(rf"{what}: (\d+) of (\d+)", output)
    if found is None:
        raise report.InvalidRunError(f"the kit says nothing of {what}")
    return int(found[1]), int(found[2])


if __name__ == "__main__":
    sys.exit(main())
