"""Small models of each family with random weights from a fixed seed, as Hugging Face folders.

The weights are large enough that answers differ: SGLang's own dummy weights make all labels equally likely.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tests.support.families import MORE_FAMILIES

_COMMON: dict[str, Any] = {
    "torch_dtype": "float32",
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.12,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "llama-tied": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "tie_word_embeddings": True},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False},
    "mistral": {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None},
    "gemma2": {
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 16,
        "sliding_window": 64,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
    },
    "phi3": {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "pad_token_id": 0},
    "mixtral": {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "qwen2-moe": {
        "architectures": ["Qwen2MoeForCausalLM"],
        "model_type": "qwen2_moe",
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 96,
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
        "mlp_only_layers": [],
    },
}
EMBEDDING_FAMILIES: dict[str, dict[str, Any]] = {
    "llama-embedding": {"architectures": ["LlamaModel"], "model_type": "llama"},
}

# Served on SGLang's own path: the body is not `model.model`.
PLAIN_FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_embd": 64,
        "n_head": 4,
        "n_layer": 4,
        "n_positions": 4096,
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
    },
}


ALL_FAMILIES: dict[str, dict[str, Any]] = {**FAMILIES, **EMBEDDING_FAMILIES, **PLAIN_FAMILIES, **MORE_FAMILIES}


def write(folder: Path, family: str, **changes: Any) -> Path:
    """The model's folder; made once."""
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    kind = AutoModel if family in EMBEDDING_FAMILIES else AutoModelForCausalLM
    if (folder / "config.json").exists():
        return folder
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        settings = {**_COMMON, **ALL_FAMILIES[family], **changes}
        torch.manual_seed(0)
        model = kind.from_config(AutoConfig.for_model(**settings), dtype=torch.float32)  # type: ignore[no-untyped-call]
        if family in MORE_FAMILIES:
            _vary(model)
        model.save_pretrained(folder)
    # As real checkpoints have it: SGLang reads names that transformers' own config class may rename or drop.
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**written, **settings}))
    return folder


@torch.no_grad()
def _vary(model: torch.nn.Module) -> None:
    """Norms, biases and sinks begin as ones and zeros: a model that ignored them would give the same answers."""
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1 and "norm" in name:
            parameter.add_(torch.randn_like(parameter) * 0.1)
        elif parameter.ndim == 1 and ("bias" in name or "sinks" in name):
            parameter.normal_(0, 0.2)


def next_logprobs(folder: Path, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
    """What transformers says in float32 of the token after each prompt: log-probabilities of the vocabulary."""
    from transformers import AutoModelForCausalLM

    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("ignore")
        # "eager": other kinds of attention leave soft caps out.
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        model.eval()  # type: ignore[no-untyped-call]
        return [model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1).tolist() for prompt in prompts]


def last_hidden_state(folder: Path, token_ids: list[int]) -> list[float]:
    """What transformers says of the last token, normalized: the embedding that SGLang makes of a prompt."""
    from transformers import AutoModel

    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("ignore")
        hidden = AutoModel.from_pretrained(folder).eval()(torch.tensor([token_ids])).last_hidden_state[0, -1]
    normalized: list[float] = torch.nn.functional.normalize(hidden, dim=0).tolist()
    return normalized
