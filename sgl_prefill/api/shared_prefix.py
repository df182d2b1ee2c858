"""The system prompt that all tenants share (`--shared-prefix`): computed before the first client comes, so that nobody can tell
whether another has used it.
"""

from __future__ import annotations

import os.path
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from sgl_prefill.errors import ConfigurationError

if TYPE_CHECKING:
    from sgl_prefill.api.tokenizer_manager import PrefillTokenizerManager


async def share(manager: PrefillTokenizerManager, serving_chat: Any, text: str) -> None:
    """Computes it as the beginning of a text and, where the model has a chat template, as that of a chat. Raises
    ConfigurationError where the prefix cache cannot hold it.
    """
    prefixes = [manager.tokenizer.encode(text), _of_chat(manager, serving_chat, text)]
    for tokens in filter(None, prefixes):
        told = await manager.share_prefix(tokens)
        if told.get("evicted_tokens"):
            raise ConfigurationError(
                f"--shared-prefix has {len(tokens)} tokens, and the prefix cache can hold {told['kept_tokens']}: shorten it, or"
                " give the server more memory"
            )


def _of_chat(manager: PrefillTokenizerManager, serving_chat: Any, text: str) -> list[int]:
    """Returns what all chats with this system prompt begin with, whatever the user says; nothing without such chats."""
    from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest

    rendered = []
    for said in ("a", "1, 2"):
        messages = [{"role": "system", "content": text}, {"role": "user", "content": said}]
        chat = ChatCompletionRequest(model="default", messages=messages, max_tokens=1)
        try:
            obj, _ = serving_chat._convert_to_internal_request(chat, None)
        except (ValueError, TemplateError):  # no chats, or none with a system prompt
            return []
        rendered.append(list(obj.input_ids if obj.input_ids is not None else manager.tokenizer.encode(obj.text)))
    return list(os.path.commonprefix(rendered))
