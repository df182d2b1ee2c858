"""Functions of SGLang's that compile themselves when they are first called, for which everyone who waits would wait."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def around_compiled(original: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Hook: runs the function as it was written. It works on a row of logits a request, and is over in a millisecond."""
    as_written = getattr(original, "_torchdynamo_orig_callable", original)
    return as_written(*arguments, **options)
