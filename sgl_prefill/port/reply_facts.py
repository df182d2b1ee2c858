"""What the scheduler knows of a request and its reply shall show: `kept_tokens`, `evicted_tokens`.

SGLang has no place for such facts in the reply of a prefill-only request. Its time stats do travel from the scheduler with
every request, and what they say of themselves is put into the reply's `meta_info`: the facts ride along.
"""

from __future__ import annotations

from typing import Any

FIELD = "sgl_prefill_facts"


def add(time_stats: Any, **facts: Any) -> None:
    """Adds facts, in the scheduler, to `req.time_stats`."""
    time_stats.__dict__.setdefault(FIELD, {}).update(facts)


def read(time_stats: Any) -> dict[str, Any]:
    """Returns all facts of a request."""
    facts: dict[str, Any] = time_stats.__dict__.get(FIELD, {})
    return facts


def after_getstate(result: dict[str, Any], time_stats: Any) -> dict[str, Any]:
    """Hook: what leaves the scheduler."""
    return {**result, FIELD: read(time_stats)}


def after_convert_to_output_meta_info(result: dict[str, Any], time_stats: Any) -> dict[str, Any]:
    """Hook: what the reply's `meta_info` gets, in the HTTP process."""
    return {**result, **read(time_stats)}
