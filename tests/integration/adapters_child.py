"""Two LoRA adapters on a tiny model in our scheduler, against transformers with the adapters merged into the weights."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import safetensors.torch
import torch

from sgl_prefill.config import PrefillConfig
from tests.support import tiny_models
from tests.support.in_process import InProcessScheduler

RANK, ALPHA = 4, 8
TARGETS = ("q_proj", "v_proj")


@contextmanager
def no_pinned_memory() -> Iterator[None]:
    """SGLang pins the memory of adapters, which needs a driver."""

    def unpinned(function: Callable[..., torch.Tensor], *arguments: Any, **options: Any) -> torch.Tensor:
        return function(*arguments, **{**options, "pin_memory": False})

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch.Tensor, "pin_memory", lambda tensor, *_: tensor))
        for name in ("zeros", "tensor", "empty"):
            stack.enter_context(mock.patch.object(torch, name, functools.partial(unpinned, getattr(torch, name))))
        yield


def write_adapter(folder: Path, model: Path, seed: int) -> Path:
    weights = safetensors.torch.load_file(model / "model.safetensors")
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for name, weight in weights.items():
        if name.split(".")[-2] in TARGETS:
            base = f"base_model.model.{name.removesuffix('.weight')}"
            made[f"{base}.lora_A.weight"] = torch.randn(RANK, weight.shape[1], generator=generator) * 0.3
            made[f"{base}.lora_B.weight"] = torch.randn(weight.shape[0], RANK, generator=generator) * 0.3
    folder.mkdir()
    safetensors.torch.save_file(made, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": list(TARGETS), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": str(model)}))
    return folder


def merged(folder: Path, model: Path, adapter: Path) -> Path:
    """The model with an adapter in its weights."""
    weights = safetensors.torch.load_file(model / "model.safetensors")
    parts = safetensors.torch.load_file(adapter / "adapter_model.safetensors")
    for name in weights:
        base = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{base}.lora_A.weight" in parts:
            weights[name] += ALPHA / RANK * parts[f"{base}.lora_B.weight"] @ parts[f"{base}.lora_A.weight"]
    folder.mkdir()
    safetensors.torch.save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text((model / "config.json").read_text())
    return folder


def adapters(folder: Path) -> dict[str, Any]:
    from sglang.srt.lora.lora_registry import LoRARef

    model = tiny_models.write(folder / "model", "llama")
    paths = [write_adapter(folder / f"adapter-{seed}", model, seed) for seed in (1, 2)]
    lora_paths = [LoRARef(lora_name=path.name, lora_path=str(path), pinned=False) for path in paths]
    rng = random.Random(0)
    prompt = [rng.randrange(30, 500) for _ in range(300)]
    # Before the scheduler, which changes what transformers computes in this process.
    folders = [model, *(merged(folder / f"merged-{path.name}", model, path) for path in paths)]
    expected = [tiny_models.next_logprobs(one, [prompt])[0] for one in folders]
    ids = [None, *(one.lora_id for one in lora_paths)]
    with no_pinned_memory():
        engine = InProcessScheduler(
            PrefillConfig(memory_budget_gb=1, max_input_length=1000),
            model,
            dtype="float32",
            max_total_tokens=2000,
            enable_lora=True,
            lora_paths=lora_paths,
            lora_backend="torch_native",
            max_loras_per_batch=3,
        )
        labels = list(range(30, 60))
        rounds = []
        for _ in range(2):
            rids = [engine.submit(prompt, labels, lora_id=lora_id) for lora_id in ids]
            engine.run_all()
            found = [engine.answer(rid) for rid in rids]
            rounds.append(
                {"logprobs": [one.label_logprobs for one in found], "cached": [one.cached_tokens for one in found]}
            )
    return {
        "rounds": rounds,
        "expected": [[row[label] for label in labels] for row in expected],
        "policy": engine.parts.steps.scheduling is not None,
    }


SCENARIOS: dict[str, Callable[[Path], Any]] = {"adapters": adapters}
