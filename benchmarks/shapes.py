"""The models of the benchmarks: configs in `models/`, random weights from SGLang's dummy loader, the demo tokenizer."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch

from sgl_prefill import demo_model

MODELS = Path(__file__).with_name("models")
HAS_CUDA = torch.cuda.is_available()


def config(model: str) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((MODELS / f"{model}.json").read_text())
    return read


def write(model: str, folder: Path) -> Path:
    """A model folder for `--load-format dummy`; no weights are written. The prompts use ids below 49,000."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config(model)))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text((demo_model.ensure() / name).read_text())
    return folder


def token_ids(rng: random.Random, n_tokens: int) -> list[int]:
    """A prompt of random tokens, none of them special."""
    return [rng.randrange(1000, 49_000) for _ in range(n_tokens)]


def dummy_flags(folder: Path) -> list[str]:
    """The flags that load such a folder."""
    return ["--model-path", str(folder), "--load-format", "dummy", "--dtype", "bfloat16"]


def budget(gib: float) -> list[str]:
    """Weights and KV pool of our engine on a host; a device is used whole."""
    return [] if HAS_CUDA else ["--memory-budget-gb", str(gib)]


def stock_budget() -> list[str]:
    """Of stock SGLang; generous, since `--max-total-tokens` sets the KV pool."""
    return [] if HAS_CUDA else ["--mem-fraction-static", "0.3"]
