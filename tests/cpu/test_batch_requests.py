"""Requests of many prompts: no answer is too early, and who leaves is noticed once."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from sglang.srt.managers.tokenizer_manager import TokenizerManager

from sgl_prefill.http import tokenizer_manager
from sgl_prefill.http.tokenizer_manager import PrefillTokenizerManager


def manager(**attributes: Any) -> Any:
    """One without a model or sockets."""
    made: Any = PrefillTokenizerManager.__new__(PrefillTokenizerManager)
    known: dict[str, Any] = {
        "rid_to_state": {},
        "child_rid_to_logical_rid": {},
        "logical_rid_to_child_rids": {},
        "incremental_streaming_output": False,
        "request_logger": mock.Mock(),
        "request_metrics_exporter_manager": SimpleNamespace(exporter_enabled=lambda: False),
        "_watched": set(),
    }
    made.__dict__.update(known | attributes)
    return made


def test_all_prompts_of_a_client_that_left_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []
    monkeypatch.setattr(tokenizer_manager, "LOOK_FOR_CLIENT_S", 0)
    monkeypatch.setattr(TokenizerManager, "abort_request", lambda _, rid: ended.append(rid))
    request: Any = SimpleNamespace(is_disconnected=mock.AsyncMock(side_effect=[False, False, True]))
    asyncio.run(manager()._watch(request, ["a", "b"]))
    assert ended == ["a", "b"]
