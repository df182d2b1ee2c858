"""Whose prefixes a request may find: those of its own tenant, and those that all share.

A namespace is put before whatever SGLang itself tells prefixes apart by (`extra_key`: salts, adapters), in one place, whatever
route a request came by. No body can name it: the tenant comes from the caller, hashed to a fixed length.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from sgl_prefill.port.steps import custom_params

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

    from sgl_prefill.port.steps.clients import Caller

PARAMETER = f"{custom_params.OURS}namespace"
PUBLIC_PARAMETER = f"{custom_params.OURS}public"


class Namespace(str):
    """What SGLang tells prefixes apart by, of a tenant's request. It may begin by a prefix that all share."""

    __slots__ = ()


def of_caller(caller: Caller, by: str) -> str:
    """Returns the tenant of a request; the callers that name nobody are one. "" where all are. by: as --isolate-by."""
    if by == "none":
        return ""
    return hashlib.sha256(caller.name(by).encode()).hexdigest()[:32] + "/"


def after_req_init(result: None, req: Req, *_: Any, **__: Any) -> None:
    """Hook: before anything looks for the prefix of a request."""
    told = custom_params.of(req, PARAMETER)
    if told is not None:
        key = f"{told}{req.extra_key or ''}"
        # What adapters compute is theirs.
        req.extra_key = key if req.lora_id is not None else Namespace(key)


def is_public(req: Req) -> bool:
    """Says whether a request makes the prefix known that all share."""
    return custom_params.of(req, PUBLIC_PARAMETER) is True
