"""Says what a CUDA machine has, and compiles what SGLang compiles at first use, before anything is timed.

    python benchmarks/gpu_warm_up.py [--look]            # BENCH_MODEL, BENCH_ATTENTION_BACKEND: for which model and backend

Both engines serve the model cut to two layers, which calls the same kernels as the whole one. What has been compiled stays in the
caches of SGLang (`~/.cache/tvm-ffi`), flashinfer, Triton and DeepGEMM, so that a run that is cut off goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks import report, shapes
from benchmarks.cpu_attention.run import ask
from sgl_prefill.entry import local_server
from sgl_prefill.startup import examine

N_LAYERS = 2
# Longer than a chunk, and hits of it: one that a graph replays, and one that it does not.
PROMPT_TOKENS, SUFFIXES_TOKENS = 9_000, (1, 15, 150, 3_000)
CONTEXT_TOKENS = 16_384
MODULES = ("sgl_prefill.launch_server", "sglang.launch_server")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--look", action="store_true", help="only say what is here")
    only_look = parser.parse_args().look
    report.end_with_timeout()
    look()
    if not only_look:
        with tempfile.TemporaryDirectory() as name:
            model = two_layers(shapes.DEVICE_MODEL, Path(name) / "model")
            for module in MODULES:
                warm_up(module, model, Path(name) / "log")
    return 0


def look() -> None:
    """Prints driver, card, memory and compiler; what is missing is said, and decides nothing here."""
    print(f"PyTorch {torch.__version__}, CUDA {torch.version.cuda}, toolkit {examine.found_toolkit(os.environ)}")
    for tool in ("nvcc", "ninja", "nvidia-smi", "c++"):
        print(f"{tool}: {shutil.which(tool) or 'not on PATH'}")
    if torch.cuda.is_available():
        free_bytes, total_bytes = torch.cuda.mem_get_info()
        print(f"{torch.cuda.get_device_name()}: {free_bytes / 2**30:.1f} of {total_bytes / 2**30:.1f} GiB free")
        print(f"attention backends: {', '.join(shapes.attention_backends())}")
        subprocess.run(["nvidia-smi"], check=False)


def two_layers(model: str, folder: Path) -> Path:
    """Writes the model's config with two of its layers."""
    shapes.write(model, folder)
    (folder / "config.json").write_text(json.dumps({**shapes.config(model), "num_hidden_layers": N_LAYERS}))
    return folder


def warm_up(module: str, model: Path, log: Path) -> None:
    """Serves a long prompt and hits of it once. Raises ServerStartError and InvalidRunError."""
    flags = [*shapes.dummy_flags(model), "--context-length", str(CONTEXT_TOKENS), "--max-total-tokens", "40000"]
    if module.startswith("sgl_prefill"):
        flags += ["--max-input-length", str(PROMPT_TOKENS + max(SUFFIXES_TOKENS)), *shapes.budget(3)]
    else:
        flags += shapes.stock_budget()
    started_s = time.monotonic()
    rng = random.Random(0)
    prefix = shapes.token_ids(rng, PROMPT_TOKENS)
    with local_server.running(module, flags, log) as server:
        print(f"{module}: ready after {time.monotonic() - started_s:.0f} s", flush=True)
        for n_tokens in (0, *SUFFIXES_TOKENS):
            row = ask(server, [*prefix, *shapes.token_ids(rng, n_tokens)])
            print(f"{n_tokens} tokens behind {row['cached_tokens']} cached ones: {row['seconds']:.2f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
