"""Warnings are errors in the tests; SGLang and what it imports are excepted by importing them once, here, in silence."""

from __future__ import annotations

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import sglang.srt.entrypoints.http_server
    import sglang.srt.managers.scheduler  # noqa: F401
