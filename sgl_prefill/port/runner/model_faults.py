"""Where SGLang's code for a model does not do what the model's configuration asks for, which gives wrong answers without a word.

`mend` changes what a line can change; `ignored` names the rest, in the log and in /server_info. The tests of families
(tests/integration/test_families.py) compare answers with transformers.

Long rotary factors (Phi-3 and others): a sequence of more than k positions turns by other factors than a shorter one, from its
first token on. SGLang decides once for all sequences of a step, and reuses KV of the one kind for the other. Here each sequence's
positions name its factors: SGLang's table has the long factors behind the k short ones. KV of long sequences has a namespace of
its own.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from sgl_prefill.port.runner import logits
from sgl_prefill.port.runner.runner_state import RunnerState

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)


def mend(state: RunnerState, runner: ModelRunner) -> None:
    """Call it once the weights are loaded, before the attention backends read the window."""
    model, config = runner.model, runner.model_config.hf_text_config
    window_tokens, notes = _mend_windows(model, config, runner.model_config.context_len)
    if window_tokens is not None:
        runner.sliding_window_size = window_tokens - 1
    notes += _mend_activations(model, config)
    _mend_rows(model)
    state.long_rope_tokens = _long_rope_tokens(model)
    if logits.bias_of(getattr(model, "lm_head", None)) is not None:
        notes.append("the LM head's bias is added to the logits, and SGLang leaves it out")  # by `logits`
    notes += ignored(model, config)
    for note in notes:
        logger.warning("%s: %s", runner.model_config.hf_config.architectures[0], note)
    state.record.model_notes = notes


def _attentions(model: torch.nn.Module) -> list[RadixAttention]:
    from sglang.srt.layers.radix_attention import AttentionType, RadixAttention

    found = [module for module in model.modules() if isinstance(module, RadixAttention)]
    return [layer for layer in found if layer.attn_type == AttentionType.DECODER and not layer.is_cross_attention]


def _mend_windows(model: torch.nn.Module, config: Any, context_tokens: int) -> tuple[int | None, list[str]]:
    """Sets the sliding windows that the configuration names. Returns the window, None without a change, and notes.

    A window of n tokens holds the token itself and n - 1 before it; SGLang counts those before it.
    """
    window_tokens = getattr(config, "sliding_window", None)
    is_used = getattr(config, "use_sliding_window", None) is not False
    if not isinstance(window_tokens, int) or not is_used or not 0 < window_tokens < context_tokens:
        return None, []
    kinds = getattr(config, "layer_types", None)
    wrong = [
        layer
        for layer in _attentions(model)
        if (kinds is None or (layer.layer_id < len(kinds) and kinds[layer.layer_id] == "sliding_attention"))
        and layer.sliding_window_size != window_tokens - 1
    ]
    if not wrong:
        return None, []
    before = {layer.sliding_window_size for layer in wrong}
    for layer in wrong:
        layer.sliding_window_size = window_tokens - 1
    had = "no window" if before <= {-1, None} else f"a window of {', '.join(str((n or 0) + 1) for n in sorted(before))}"
    return window_tokens, [
        f"{len(wrong)} layers attend to a window of {window_tokens} tokens, as the model's configuration says; SGLang gives them"
        f" {had}"
    ]


def _mend_activations(model: torch.nn.Module, config: Any) -> list[str]:
    """Sets the approximation of GELU by tanh where the configuration names it."""
    from sglang.srt.layers.activation import GeluAndMul

    name = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None)
    exact = [one for one in model.modules() if isinstance(one, GeluAndMul) and one.approximate == "none"]
    if name != "gelu_pytorch_tanh" or not exact:
        return []
    for one in exact:
        one.approximate = "tanh"
    return [f"{len(exact)} layers compute {name}, as the model's configuration says; SGLang gives them the exact gelu"]


def _mend_rows(model: torch.nn.Module) -> None:
    """HunYuan hands its attention a row for each head of a token. SGLang takes the rows beyond the number of tokens for padding,
    and cuts them away."""
    for module in model.modules():
        if type(module).__name__ == "HunYuanAttention":
            whole: Any = module
            whole.attn.forward = functools.partial(_in_rows_of_tokens, whole.attn.forward, whole.q_size)


def _in_rows_of_tokens(forward: Any, q_size: int, q: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
    found: torch.Tensor = forward(q.reshape(-1, q_size), *arguments, **options)
    return found


def _long_rope_tokens(model: torch.nn.Module) -> int | None:
    """Returns the length up to which sequences turn by the short factors; None where there is one kind. From now on positions
    choose the factors: see `shifted`."""
    from sglang.srt.layers.rotary_embedding.rope_variant import Phi3LongRoPEScaledRotaryEmbedding

    short_tokens = None
    for module in model.modules():
        if isinstance(module, Phi3LongRoPEScaledRotaryEmbedding):
            short_tokens = len(module.short_cos_sin_cache)
            # SGLang adds the offset of the long factors where a position is larger than this.
            module.original_max_position_embeddings = len(module.long_short_cos_sin_cache)
    return short_tokens


def shifted(state: RunnerState, batch: ForwardBatch) -> ForwardBatch:
    """Moves the positions of long sequences to the long factors."""
    short_tokens = state.long_rope_tokens
    if short_tokens is None or batch.positions is None:
        return batch
    is_long = batch.seq_lens > short_tokens
    if not batch.forward_mode.is_decode():
        is_long = torch.repeat_interleave(is_long, batch.extend_seq_lens)
    batch.positions.add_(short_tokens * is_long.to(batch.positions.dtype))
    return batch


def ignored(model: torch.nn.Module, config: Any) -> list[str]:
    """Returns what the configuration asks for and no module does."""
    return [
        *_ignored_by_attention(model, config),
        *_ignored_by_rope(model, config),
        *_ignored_by_experts(model, config),
    ]


def _ignored_by_attention(model: torch.nn.Module, config: Any) -> Iterator[str]:
    layers = _attentions(model)
    cap = getattr(config, "attn_logit_softcapping", None)
    if cap and any(abs(layer.logit_cap - cap) > 1e-6 for layer in layers):
        yield f"attention logits are not capped at {cap}, as the model's configuration asks (attn_logit_softcapping)"
    wants_bias = getattr(config, "attention_bias", False) or getattr(config, "qkv_bias", False)
    projections = [
        module
        for name, module in model.named_modules()
        if name.rpartition(".")[2] in ("qkv_proj", "q_proj", "query_key_value")
    ]
    if wants_bias is True and projections and all(getattr(one, "bias", None) is None for one in projections):
        yield "queries, keys and values have no bias, and the model's configuration asks for one (attention_bias)"


def _ignored_by_rope(model: torch.nn.Module, config: Any) -> Iterator[str]:
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding

    asked = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kind = asked.get("rope_type", asked.get("type"))
    modules = [module for module in model.modules() if isinstance(module, RotaryEmbedding)]
    if (
        kind not in (None, "default", "mrope")
        and modules
        and all(type(module) is RotaryEmbedding for module in modules)
    ):
        yield f"positions are not scaled, and the model's configuration asks for {kind} (rope_scaling)"


def _ignored_by_experts(model: torch.nn.Module, config: Any) -> Iterator[str]:
    from sglang.srt.layers.moe.topk import TopK

    asked = getattr(config, "norm_topk_prob", None)
    if asked is not None and any(
        module.topk_config.renormalize != asked for module in model.modules() if isinstance(module, TopK)
    ):
        done = "not " if asked else ""
        yield f"the weights of experts are {done}scaled to a sum of 1, and norm_topk_prob is {str(asked).lower()}"
