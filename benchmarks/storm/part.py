"""What the parts of the storm share: a small model whose answers tell prompts apart, our server, and what a part returns."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from benchmarks import report, shapes
from benchmarks.harness import engines
from sgl_prefill.examples import demo_model

SAME = 1e-3  # float32, log-probabilities near -11: in steps of other requests sums differ in their last bits
KV_TOKENS = 20_000


class Part(NamedTuple):
    """What one part of the storm has found."""

    rows: list[dict[str, Any]]
    targets: list[report.Target]
    commands: dict[str, str]  # full, of each server


def write_model(folder: Path) -> Path:
    """Two layers with random weights, and the demo model's tokenizer and chat template: requests take milliseconds."""
    folder.mkdir(exist_ok=True)
    demo = demo_model.ensure()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).write_text((demo / name).read_text())
    config = json.loads((demo / "config.json").read_text())
    small = {"num_hidden_layers": 2, "hidden_size": 144, "head_dim": 16}
    (folder / "config.json").write_text(json.dumps({**config, **small}))
    shapes.write_weights(folder)
    return folder


def flags_of(model: Path, *flags: str, kv_tokens: int = KV_TOKENS) -> list[str]:
    """A server of this model in float32, so that the same prompt has the same answer whatever runs beside it."""
    common = ["--context-length", "8192", "--max-total-tokens", str(kv_tokens), "--sleep-on-idle"]
    common += ["--set", "skip_parity_gate=true"]
    return [*shapes.weight_flags(model, "float32"), *common, *shapes.budget(2), *flags]


@contextmanager
def serving(model: Path, log: Path, *flags: str, kv_tokens: int = KV_TOKENS) -> Iterator[engines.Running]:
    """Our server; ends with the block."""
    with engines.running(engines.OURS, flags_of(model, *flags, kv_tokens=kv_tokens), log) as server:
        yield server


def processes(pid: int) -> list[psutil.Process]:
    """The launcher and what it has started."""
    launcher = psutil.Process(pid)
    return [launcher, *launcher.children(recursive=True)]


def differs(one: list[float], other: list[float]) -> bool:
    """Says whether two answers to the same prompt are not the same; NaN is no agreement."""
    return not all(abs(a - b) <= SAME for a, b in zip(one, other, strict=True))
