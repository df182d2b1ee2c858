"""The system prompt that all tenants share (`--shared-prefix`): computed at start, so that hits reveal no tenant's requests."""

from __future__ import annotations

import os.path
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from sgl_prefill.errors import ConfigurationError

if TYPE_CHECKING:
    from sgl_prefill.http.tokenizer_manager import PrefillTokenizerManager


async def share(manager: PrefillTokenizerManager, serving_chat: Any, text: str) -> None:
    """Computes the prefix of a text and, if the model has a chat template, of a chat. Raises ConfigurationError if the prefix
    cache cannot hold it."""
    prefixes = [manager.tokenizer.encode(text), _of_chat(manager, serving_chat, text)]
    for tokens in filter(None, prefixes):
        result = await manager.share_prefix(tokens)
        if result.get("evicted_tokens"):
            raise ConfigurationError(
                f"--shared-prefix has {len(tokens)} tokens, and the prefix cache can hold {result['kept_tokens']}: shorten it, or"
                " give the server more memory"
            )


def _of_chat(manager: PrefillTokenizerManager, serving_chat: Any, text: str) -> list[int]:
    """The tokens that all chats with this system prompt begin with; empty if the template takes no system prompt."""
    from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest

    rendered = []
    for user_text in ("a", "1, 2"):
        messages = [{"role": "system", "content": text}, {"role": "user", "content": user_text}]
        chat = ChatCompletionRequest(model="default", messages=messages, max_tokens=1)
        try:
            obj, _ = serving_chat._convert_to_internal_request(chat, None)
        except (ValueError, TemplateError):  # no chats, or none with a system prompt
            return []
        rendered.append(list(obj.input_ids if obj.input_ids is not None else manager.tokenizer.encode(obj.text)))
    return list(os.path.commonprefix(rendered))
