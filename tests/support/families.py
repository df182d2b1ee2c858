"""Tiny models of the causal families that both SGLang and transformers have, for `tiny_models.write`.

Windows and original context lengths are shorter than the prompts of the tests, so that ignoring one shows.
"""

from __future__ import annotations

from typing import Any

_EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
}
_GROUPS: dict[str, Any] = {
    **_EXPERTS,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.0,
}
_LATENT: dict[str, Any] = {
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}
_INDEX: dict[str, Any] = {**_LATENT, "index_head_dim": 128, "index_n_heads": 4, "index_topk": 64}
_WINDOWS: dict[str, Any] = {"sliding_window": 32, "layer_types": [*["sliding_attention"] * 3, "full_attention"]}
_LINEAR: dict[str, Any] = {
    "layer_types": [*["linear_attention"] * 3, "full_attention"],
    "full_attention_interval": 4,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "partial_rotary_factor": 0.5,
}
_GPT: dict[str, Any] = {"n_embd": 64, "n_head": 4, "n_layer": 4, "n_positions": 4096, "num_key_value_heads": 4}
_MULTIPLIERS: dict[str, Any] = {
    "embedding_multiplier": 2.0,
    "logits_scaling": 2.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.2,
}
_TANH: dict[str, Any] = {"hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True}
_STARCODER: dict[str, Any] = {"use_bias": True, "hidden_act": "gelu_pytorch_tanh"}
_CONVOLUTIONS: dict[str, Any] = {
    "layer_types": ["conv", "conv", "full_attention", "conv"],
    "conv_L_cache": 3,
    "norm_eps": 1e-5,
}


def _one(architecture: str, model_type: str, **settings: Any) -> dict[str, Any]:
    return {"architectures": [architecture], "model_type": model_type, "pad_token_id": 0, **settings}


MORE_FAMILIES: dict[str, dict[str, Any]] = {
    "afmoe": _one("AfmoeForCausalLM", "afmoe", **_EXPERTS, **_WINDOWS, num_dense_layers=1, num_shared_experts=1),
    "apertus": _one("ApertusForCausalLM", "apertus", hidden_act="xielu"),
    "arcee": _one("ArceeForCausalLM", "arcee", hidden_act="relu2"),
    "cohere": _one("CohereForCausalLM", "cohere", tie_word_embeddings=True),
    "cohere2": _one("Cohere2ForCausalLM", "cohere2", **_WINDOWS, tie_word_embeddings=True),
    "cohere2-moe": _one("Cohere2MoeForCausalLM", "cohere2_moe", **_EXPERTS, **_WINDOWS, tie_word_embeddings=True),
    "deepseek-v2": _one("DeepseekV2ForCausalLM", "deepseek_v2", **_GROUPS, **_LATENT, topk_method="greedy"),
    "deepseek-v3": _one("DeepseekV3ForCausalLM", "deepseek_v3", **_GROUPS, **_LATENT),
    "deepseek-v32": _one("DeepseekV32ForCausalLM", "deepseek_v32", **_GROUPS, **_INDEX),
    "ernie4.5": _one("Ernie4_5_ForCausalLM", "ernie4_5", use_bias=False),
    "ernie4.5-moe": _one(
        "Ernie4_5_MoeForCausalLM",
        "ernie4_5_moe",
        moe_num_experts=8,
        moe_k=2,
        moe_intermediate_size=64,
        moe_num_shared_experts=1,
        moe_layer_start_index=1,
        moe_layer_end_index=3,
        use_bias=False,
    ),
    "exaone4": _one("Exaone4ForCausalLM", "exaone4", **_WINDOWS, sliding_window_pattern="LLLG"),
    "gemma": _one("GemmaForCausalLM", "gemma", **_TANH, hidden_act="gelu_pytorch_tanh"),
    "gemma3": _one("Gemma3ForCausalLM", "gemma3_text", **_TANH, **_WINDOWS, query_pre_attn_scalar=16),
    "gemma4": _one(
        "Gemma4ForCausalLM", "gemma4_text", **_TANH, **_WINDOWS, global_head_dim=32, vocab_size_per_layer_input=512
    ),
    "glm4": _one("Glm4ForCausalLM", "glm4", attention_bias=True, partial_rotary_factor=0.5),
    "glm4-moe": _one(
        "Glm4MoeForCausalLM", "glm4_moe", **_GROUPS, attention_bias=True, partial_rotary_factor=0.5, use_qk_norm=True
    ),
    "glm4-moe-lite": _one("Glm4MoeLiteForCausalLM", "glm4_moe_lite", **_GROUPS, **_LATENT),
    "glm-moe-dsa": _one("GlmMoeDsaForCausalLM", "glm_moe_dsa", **_GROUPS, **_INDEX),
    "gpt-bigcode": _one("GPTBigCodeForCausalLM", "gpt_bigcode", **_GPT, n_inner=256, tie_word_embeddings=True),
    "gpt-j": _one("GPTJForCausalLM", "gptj", **_GPT, rotary_dim=8),
    "gpt-oss": _one("GptOssForCausalLM", "gpt_oss", **_EXPERTS, **_WINDOWS, rope_scaling=None, attention_bias=True),
    "granite": _one("GraniteForCausalLM", "granite", **_MULTIPLIERS),
    "granite-moe": _one("GraniteMoeForCausalLM", "granitemoe", **_EXPERTS, **_MULTIPLIERS),
    "hunyuan": _one("HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense", use_qk_norm=True),
    "laguna": _one("LagunaForCausalLM", "laguna", **_EXPERTS, **_WINDOWS),
    "lfm2": _one("Lfm2ForCausalLM", "lfm2", **_CONVOLUTIONS, block_multiple_of=32),
    "lfm2-moe": _one("Lfm2MoeForCausalLM", "lfm2_moe", **_EXPERTS, **_CONVOLUTIONS, num_dense_layers=1),
    "mellum": _one("MellumForCausalLM", "mellum", **_EXPERTS, **_WINDOWS),
    "minimax-m2": _one(
        "MiniMaxM2ForCausalLM", "minimax_m2", **_EXPERTS, rotary_dim=8, use_qk_norm=True, scoring_func="sigmoid"
    ),
    "ministral3": _one("Ministral3ForCausalLM", "ministral3"),
    "mistral-window": _one("MistralForCausalLM", "mistral", sliding_window=32),
    "olmo": _one("OlmoForCausalLM", "olmo", num_key_value_heads=4, clip_qkv=None),
    "olmo2": _one("Olmo2ForCausalLM", "olmo2"),
    "olmo3": _one("Olmo3ForCausalLM", "olmo3", **_WINDOWS),
    "olmoe": _one("OlmoeForCausalLM", "olmoe", **{**_EXPERTS, "norm_topk_prob": False}, num_key_value_heads=4),
    "opt": _one("OPTForCausalLM", "opt", num_key_value_heads=4, ffn_dim=160, word_embed_proj_dim=64),
    "persimmon": _one(
        "PersimmonForCausalLM", "persimmon", num_key_value_heads=4, partial_rotary_factor=0.5, hidden_act="relu2"
    ),
    "phi": _one(
        "PhiForCausalLM",
        "phi",
        num_key_value_heads=4,
        intermediate_size=256,
        partial_rotary_factor=0.5,
        hidden_act="gelu_new",
    ),
    "phi3-long": _one(
        "Phi3ForCausalLM",
        "phi3",
        sliding_window=None,
        original_max_position_embeddings=128,
        rope_scaling={
            "type": "longrope",
            "rope_type": "longrope",
            "short_factor": [1.0 + 0.1 * place for place in range(8)],
            "long_factor": [2.0 + 0.5 * place for place in range(8)],
        },
    ),
    "qwen3-moe": _one("Qwen3MoeForCausalLM", "qwen3_moe", **_EXPERTS, decoder_sparse_step=1, mlp_only_layers=[]),
    "qwen3-next": _one(
        "Qwen3NextForCausalLM",
        "qwen3_next",
        **_EXPERTS,
        **_LINEAR,
        shared_expert_intermediate_size=64,
        decoder_sparse_step=1,
        mlp_only_layers=[],
    ),
    "qwen3.5": _one("Qwen3_5ForCausalLM", "qwen3_5_text", **_LINEAR),
    "stablelm": _one("StableLmForCausalLM", "stablelm", partial_rotary_factor=0.5, use_qkv_bias=False),
    "starcoder2": _one("Starcoder2ForCausalLM", "starcoder2", **_STARCODER, sliding_window=None),
    "starcoder2-window": _one("Starcoder2ForCausalLM", "starcoder2", **_STARCODER, sliding_window=32),
}
