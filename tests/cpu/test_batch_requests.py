"""Requests of many prompts: no answer is too early, and who leaves is noticed once."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any
from unittest import mock

import fastapi
import pytest
from sglang.srt.managers.tokenizer_manager import TokenizerManager

from sgl_prefill.config import PrefillConfig
from sgl_prefill.http import tokenizer_manager
from sgl_prefill.http.tokenizer_manager import PrefillTokenizerManager
from sgl_prefill.port.steps import clients
from sgl_prefill.port.steps.clients import Caller, Sent


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
    }
    made.__dict__.update(known | attributes)
    return made


def test_all_prompts_of_a_client_that_left_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those too that were sent to the scheduler after it had left."""
    ended: list[str] = []
    monkeypatch.setattr(tokenizer_manager, "LOOK_FOR_CLIENT_S", 0)
    monkeypatch.setattr(TokenizerManager, "abort_request", lambda _, rid: ended.append(rid))
    request: Any = SimpleNamespace(is_disconnected=mock.AsyncMock(side_effect=[False, False, *[True] * 1000]))

    async def story() -> None:
        sent = Sent(has_samples=False, rids=["a", "b"])
        watch = asyncio.create_task(manager()._watch(request, sent))
        while not ended:
            await asyncio.sleep(0)
        sent.rids.append("c")
        while "c" not in ended:
            await asyncio.sleep(0)
        watch.cancel()

    asyncio.run(story())
    assert ended[:2] == ["a", "b"]


def test_sglang_looks_for_the_client_of_a_prompt_that_is_not_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a thousand samples it would do so a thousand times at the same moment."""
    monkeypatch.setattr(TokenizerManager, "_wait_one_response", lambda _, obj, request: (obj.rid, request))
    request, caller = object(), Caller(sent=Sent(has_samples=True, rids=["sample 1"]))
    sample = SimpleNamespace(rid="sample 2")
    assert caller.sent is not None
    with clients.calling(caller):
        assert manager()._wait_one_response(sample, request) == ("sample 2", None)
        assert caller.sent.rids == ["sample 1", "sample 2"]
        caller.sent = None
        assert manager()._wait_one_response(sample, request) == ("sample 2", request)


def test_few_samples_of_a_request_wait_in_the_scheduler_and_none_is_sent_for_a_client_that_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tokenizer_manager, "MOST_UNANSWERED_SAMPLES", 2)
    monkeypatch.setattr(tokenizer_manager, "PAUSE_S", 0)
    sent: list[str] = []

    async def send(_: Any, rid: str) -> None:
        sent.append(rid)

    monkeypatch.setattr(TokenizerManager, "_send_one_request", send)
    made = manager(rid_to_state={"a": None, "b": None}, prefill_config=PrefillConfig())
    caller = Caller(sent=Sent(has_samples=True, rids=["a", "b"]))
    assert caller.sent is not None
    known = caller.sent

    async def story() -> None:
        third = asyncio.create_task(made._send_one_request("c"))
        for _ in range(10):
            await asyncio.sleep(0)
        assert sent == []
        del made.rid_to_state["a"]  # answered
        await third
        assert (sent, known.rids) == (["c"], ["b"])
        known.rids.append("c")
        made.rid_to_state["c"] = None
        known.client_has_left = True
        with pytest.raises(fastapi.HTTPException, match="the client has left"):
            await made._send_one_request("d")
        made.prefill_config = PrefillConfig(allow_generation=True)
        await made._send_one_request("e")

    with clients.calling(caller):
        asyncio.run(story())
    assert sent == ["c", "e"]
