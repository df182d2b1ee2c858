"""Isolation of tenants in the prefix cache: a request finds prefixes of its own tenant, and public ones.

The namespace, a hash of the caller's user name or API key, comes before SGLang's `extra_key` (salts, adapters), on all routes.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from sgl_prefill.port.runner.runner_state import RunnerState
from sgl_prefill.port.steps import custom_params

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

    from sgl_prefill.port.steps.clients import Caller

PARAMETER = f"{custom_params.OURS}namespace"
PUBLIC_PARAMETER = f"{custom_params.OURS}public"


class Namespace(str):
    """An `extra_key` of SGLang's for a request whose prompt may begin with a public prefix."""

    __slots__ = ()


def of_caller(caller: Caller, by: str) -> str:
    """Returns the caller's namespace; unnamed callers share one. by: as --isolate-by; "" for "none"."""
    if by == "none":
        return ""
    return hashlib.sha256(caller.name(by).encode()).hexdigest()[:32] + "/"


def after_req_init(state: RunnerState, result: None, req: Req, *_: Any, **__: Any) -> None:
    """Hook: sets the namespace before SGLang looks up the request's prefix."""
    namespace = custom_params.of(req, PARAMETER)
    if req.cache_salt is not None:  # one key says all
        namespace, req.cache_salt = f"{namespace or ''}{req.cache_salt}", None
    if namespace is not None:
        key = f"{namespace}{req.extra_key or ''}"
        # KV that was computed with an adapter is never public.
        req.extra_key = key if req.lora_id is not None else Namespace(key)
    if state.long_rope_tokens is not None and len(req.origin_input_ids) > state.long_rope_tokens:
        req.extra_key = f"long/{req.extra_key or ''}"  # its KV differs from a short prompt's: see `model_faults`


def is_public(req: Req) -> bool:
    """Whether the request's prompt becomes a public prefix."""
    return custom_params.of(req, PUBLIC_PARAMETER) is True
