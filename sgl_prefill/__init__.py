"""sgl_prefill: a prefill-only LLM engine on stock SGLang.

Importing this package imports neither torch nor sglang; `Engine` is imported at its first use.
"""

from __future__ import annotations

import multiprocessing
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sgl_prefill.entry.engine import Engine

__all__ = ["Engine"]


def __getattr__(name: str) -> Any:
    if name == "Engine":
        # A process that is being started imports the user's program again.
        if not getattr(multiprocessing.current_process(), "_inheriting", False):
            from sgl_prefill.entry import prefork

            prefork.begin()  # it imports SGLang for the engine's processes while this one does
        from sgl_prefill.entry.engine import Engine

        return Engine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
