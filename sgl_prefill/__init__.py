"""sgl_prefill: a prefill-only LLM engine on stock SGLang.

Importing this package imports neither torch nor sglang; `Engine` is imported at its first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sgl_prefill.entry.engine import Engine

__all__ = ["Engine"]


def __getattr__(name: str) -> Any:
    if name == "Engine":
        from sgl_prefill.entry.engine import Engine

        return Engine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
