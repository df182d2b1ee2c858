"""Tiny decision checkpoints with random weights: Kev (a pointer head), Clef (a joint-schema head), and pplx-decider (a readout;
causal attention or not).

All layers have full attention without an output gate: real ones have linear attention, whose kernels need an accelerator.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

KINDS = ("kev", "clef", "decider", "decider-noncausal")
HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, DIM, LAYERS = 64, 160, 4, 2, 16, 4
POINTER_DIM, N_CODES = 32, 26
VISION = ("vision_start", "vision_end", "image_pad", "video_pad")
OF_KEV = ("fim_prefix", "fim_middle", "fim_suffix", "box_start", "box_end")  # its delimiters
SPECIAL = [f"<|{name}|>" for name in ("endoftext", "im_start", "im_end", *OF_KEV, *VISION)]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n\n</think>\n\n{% endif %}"
)
TEXT = "State: the chain broke after two days. Question: is money asked back? Options: A B C. yes no true false option"


def write(folder: Path, kind: str) -> Path:
    """The model's folder."""
    torch.manual_seed(0)
    folder.mkdir(parents=True)
    tokenizer = _tokenizer(folder)
    n_vocab = -(-len(tokenizer) // 64) * 64
    text, body = _text_config(n_vocab), _body(n_vocab)
    whole = {
        "model_type": "qwen3_5",
        "dtype": "float32",
        "tie_word_embeddings": False,
        "language_model_only": True,
        "text_config": text,
        "vision_config": {
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_heads": 1,
            "out_hidden_size": HIDDEN,
        },
        **{f"{name.removesuffix('_pad')}_token_id": tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in VISION},
    }
    if kind == "kev":
        _save(folder, {**text, "architectures": ["Qwen3_5TextModel"]}, body)
        head = {name: torch.randn(size) * 0.3 for name, size in _head_sizes()}
        options = {"option_isolation": False, "special_embeddings": False, "weights_dtype": "fp32"}
        torch.save({"head": head, "head_dim": POINTER_DIM, "temperature": 0.7, **options}, folder / "head.pt")
    elif kind == "clef":
        weights = {f"model.language_model.{name}": value for name, value in body.items()}
        weights["lm_head.weight"] = torch.randn(n_vocab, HIDDEN) * 0.12
        _save(folder, {**whole, "architectures": ["Qwen3_5ForConditionalGeneration"]}, weights)
        _add_joint_head(folder)
    else:
        weights = {f"language_model.{name}": value for name, value in body.items()}
        _save(folder, {**whole, "architectures": ["Qwen3_5Model"]}, weights)
        _add_readout(folder, tokenizer, is_causal=kind == "decider")
    return folder


def _head_sizes() -> list[tuple[str, tuple[int, ...]]]:
    return [
        (f"{one}.{part}", size)
        for one in "qk"
        for part, size in (("weight", (POINTER_DIM, HIDDEN)), ("bias", (POINTER_DIM,)))
    ]


def _add_joint_head(folder: Path) -> None:
    from sglang.srt.layers.joint_schema_head import JointSchemaHead

    config = {"hidden_size": HIDDEN, "width": 32, "routing_layers": 1, "layers": 1, "heads": 2, "feedforward": 64}
    (folder / "joint_head_config.json").write_text(json.dumps(config))
    state = JointSchemaHead(**config).state_dict()
    varied = {
        name: value if value.dim() > 1 else value + torch.randn_like(value) * 0.1 for name, value in state.items()
    }
    save_file({name: value.contiguous() for name, value in varied.items()}, folder / "joint_head.safetensors")


def _add_readout(folder: Path, tokenizer: Any, *, is_causal: bool) -> None:
    codes = [chr(ord("A") + place) for place in range(N_CODES)]
    config = {
        "format_version": 1,
        "codes": codes,
        "token_ids": [tokenizer.encode(code, add_special_tokens=False)[0] for code in codes],
        "temperature": 0.8,
        "attention_mode": "causal" if is_causal else "noncausal_full_attention",
        "pooling": "last",
    }
    (folder / "decision_config.json").write_text(json.dumps(config))
    save_file({"weight": torch.randn(N_CODES, HIDDEN) * 0.3}, folder / "readout.safetensors")


def _tokenizer(folder: Path) -> Any:
    raw: Any = Tokenizer(BPE())
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    raw.train_from_iterator(
        [TEXT] * 4, trainers.BpeTrainer(vocab_size=480, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer_class: Any = PreTrainedTokenizerFast
    made: Any = tokenizer_class(
        tokenizer_object=raw, eos_token="<|im_end|>", pad_token="<|endoftext|>", model_max_length=4096
    )
    made.add_special_tokens({"additional_special_tokens": [*SPECIAL, "<think>", "</think>"]})
    made.chat_template = TEMPLATE
    made.save_pretrained(folder)
    return made


def _text_config(n_vocab: int) -> dict[str, Any]:
    return {
        "model_type": "qwen3_5_text",
        "dtype": "float32",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": DIM,
        "vocab_size": n_vocab,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "attention_bias": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
        "partial_rotary_factor": 0.5,
        "full_attention_interval": 1,  # what SGLang reads
        "layer_types": ["full_attention"] * LAYERS,  # what transformers reads
        "attn_output_gate": False,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4,
    }


def _body(n_vocab: int) -> dict[str, torch.Tensor]:
    """Names of a bare text model."""
    found = {"embed_tokens.weight": torch.randn(n_vocab, HIDDEN) * 0.5, "norm.weight": torch.randn(HIDDEN) * 0.1}
    for layer in range(LAYERS):
        shapes = {
            "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
            "mlp.up_proj": (INTERMEDIATE, HIDDEN),
            "mlp.down_proj": (HIDDEN, INTERMEDIATE),
            "self_attn.q_proj": (HEADS * DIM, HIDDEN),
            "self_attn.k_proj": (KV_HEADS * DIM, HIDDEN),
            "self_attn.v_proj": (KV_HEADS * DIM, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HEADS * DIM),
            "input_layernorm": (HIDDEN,),
            "post_attention_layernorm": (HIDDEN,),
            "self_attn.q_norm": (DIM,),
            "self_attn.k_norm": (DIM,),
        }
        found |= {f"layers.{layer}.{name}.weight": torch.randn(shape) * 0.11 for name, shape in shapes.items()}
    return found


def _save(folder: Path, config: dict[str, Any], weights: dict[str, torch.Tensor]) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    # With an index SGLang's loader does not read the files of heads as parts of the model.
    index = {"metadata": {}, "weight_map": dict.fromkeys(weights, "model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
