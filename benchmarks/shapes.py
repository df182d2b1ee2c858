"""The models of the benchmarks: configs in `models/`, random weights from SGLang's dummy loader, made-up words."""

from __future__ import annotations

import importlib
import json
import os
import random
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from sgl_prefill.cpu import detect
from sgl_prefill.examples import demo_model

MODELS = Path(__file__).with_name("models")
INITIALIZER_RANGE = 0.1
HAS_CUDA = torch.cuda.is_available()
# On a device these choose another model or attention backend of the same benchmark.
DEVICE_MODEL = os.environ.get("BENCH_MODEL", "llama-3.1-8b")
DEVICE_BACKEND = os.environ.get("BENCH_ATTENTION_BACKEND")
DTYPE = detect.fast_dtype()


def attention_backends() -> list[str]:
    """Those of SGLang that this device and environment have, the fastest first."""
    if not HAS_CUDA:
        return []
    is_hopper = torch.cuda.get_device_capability()[0] == 9
    needs = {"fa3": "sgl_kernel.flash_attn" if is_hopper else None, "flashinfer": "flashinfer", "triton": "triton"}
    return [backend for backend, module in needs.items() if module is not None and _can_import(module)]


def _can_import(module: str) -> bool:
    try:
        importlib.import_module(module)
    except ImportError:
        return False
    return True


def config(model: str) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((MODELS / f"{model}.json").read_text())
    return read


def write(model: str, folder: Path) -> Path:
    """A model folder for `--load-format dummy`; no weights are written. The prompts use ids below 49,000."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config(model)))
    write_tokenizer(folder, config(model)["vocab_size"])
    return folder


def write_tokenizer(folder: Path, n_vocabulary: int) -> None:
    """Made-up words, t0 to tN, so that a machine without a network can serve a model of any shape."""
    words = Tokenizer(WordLevel({f"t{number}": number for number in range(n_vocabulary)}, unk_token="t0"))
    words.pre_tokenizer = WhitespaceSplit()
    words.save(str(folder / "tokenizer.json"))
    special = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "t0", "bos_token": "t1", "eos_token": "t2"}
    (folder / "tokenizer_config.json").write_text(json.dumps(special))


def token_ids(rng: random.Random, n_tokens: int) -> list[int]:
    """A prompt of random tokens, none of them special."""
    return [rng.randrange(1000, 49_000) for _ in range(n_tokens)]


def write_weights(folder: Path, initializer_range: float = INITIALIZER_RANGE) -> None:
    """Random weights that make answers differ: with SGLang's dummy ones all labels are equally likely, right or wrong.

    Large enough that attention is not a plain average, so that an answer shows whose prefix it was computed with. The more
    layers, the smaller: in bfloat16 rounding grows with both.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {**json.loads((folder / "config.json").read_text()), "initializer_range": initializer_range}
    torch.manual_seed(0)
    made: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings), dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    made.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(settings))


def weight_flags(folder: Path, dtype: detect.Dtype = "bfloat16") -> list[str]:
    """The flags that load a folder with weights."""
    return ["--model-path", str(folder), "--dtype", dtype]


def demo_flags() -> list[str]:
    """The flags that load the demo model, alike for every engine: left alone, stock serves float32 weights in float16."""
    return weight_flags(demo_model.ensure(), DTYPE)


def dummy_flags(folder: Path) -> list[str]:
    """The flags that load such a folder."""
    backend = ["--attention-backend", DEVICE_BACKEND] if HAS_CUDA and DEVICE_BACKEND else []
    return [*weight_flags(folder), "--load-format", "dummy", *backend]


def budget(gib: float) -> list[str]:
    """Weights and KV pool of our engine on a host; a device is used whole."""
    return [] if HAS_CUDA else ["--memory-budget-gb", str(gib)]


def stock_budget() -> list[str]:
    """Gives stock SGLang its memory; generous, since `--max-total-tokens` sets the KV pool.

    A device is used whole, without graphs for decoding, which nothing here does: they take memory and much of a start.
    """
    return ["--disable-decode-cuda-graph"] if HAS_CUDA else ["--mem-fraction-static", "0.3"]
