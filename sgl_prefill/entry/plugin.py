"""Entry point of `sglang.srt.plugins`: SGLang calls `register` in every process that loads plugins."""

from __future__ import annotations


def register() -> None:
    """Adds the CPU attention backend to SGLang's choices of flags. Hooks are applied by `activation` only."""
    from sglang.srt.server_args import ATTENTION_BACKEND_CHOICES, add_attention_backend_choices

    from sgl_prefill.cpu.detect import ATTENTION_BACKEND_NAME
    from sgl_prefill.startup.device import this_device

    if this_device().is_host and ATTENTION_BACKEND_NAME not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices([ATTENTION_BACKEND_NAME])
