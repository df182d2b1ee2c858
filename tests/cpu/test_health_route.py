"""GET /health: answered at once, by the last probe of the scheduler."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import Request
from fastapi.responses import Response
from sglang.srt.entrypoints import http_server
from sglang.srt.managers.tokenizer_manager import ServerStatus

from sgl_prefill.config import PrefillConfig
from sgl_prefill.http.routes import PrefillRoutes

SCOPE = {"type": "http", "method": "GET", "path": "/health", "headers": []}


def test_health_is_that_of_the_last_probe_and_probes_run_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = SimpleNamespace(gracefully_exit=False, server_status=ServerStatus.Starting)
    monkeypatch.setattr(http_server, "_global_state", SimpleNamespace(tokenizer_manager=manager))
    begun, found = list[Request](), asyncio.Queue[ServerStatus]()

    async def probe(request: Request) -> Response:
        """As SGLang's: it waits for the scheduler. `generate_request` reads the body, and its client must not count as gone."""
        begun.append(request)
        assert await request.body() == b""
        assert not await request.is_disconnected()
        manager.server_status = await found.get()
        return Response()

    routes: Any = PrefillRoutes(SimpleNamespace(state=None), PrefillConfig())
    routes._stock["/health"] = probe

    async def gone() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def ask() -> int:
        return int((await routes.health(Request(SCOPE, gone))).status_code)

    async def probe_finds(status: ServerStatus) -> None:
        found.put_nowait(status)
        await routes._probe

    async def story() -> None:
        assert await ask() == 503  # it starts
        assert not begun
        manager.server_status = ServerStatus.Up
        assert [await ask(), await ask()] == [200, 200]
        await probe_finds(ServerStatus.UnHealthy)
        assert len(begun) == 1
        assert await ask() == 503
        await probe_finds(ServerStatus.Up)
        assert await ask() == 200
        assert len(begun) == 2
        await probe_finds(ServerStatus.Up)
        manager.gracefully_exit = True
        assert await ask() == 503

    asyncio.run(asyncio.wait_for(story(), 60))  # not for ever, where a probe waits for what does not come


def test_a_probe_whose_clock_has_stepped_back_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's probe waits until the wall clock has passed its limit: after a step of a day backwards it would wait for a day."""
    manager = SimpleNamespace(gracefully_exit=False, server_status=ServerStatus.Up)
    monkeypatch.setattr(http_server, "_global_state", SimpleNamespace(tokenizer_manager=manager))
    monkeypatch.setattr(http_server, "HEALTH_CHECK_TIMEOUT", 0.01)
    routes: Any = PrefillRoutes(SimpleNamespace(state=None), PrefillConfig())

    begun = []

    async def probe(request: Request) -> Response:
        begun.append(request)
        await asyncio.Event().wait()
        return Response()

    routes._stock["/health"] = probe

    async def gone() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def story() -> None:
        for _ in range(2):
            assert (await routes.health(Request(SCOPE, gone))).status_code == 200
            await routes._probe

    asyncio.run(asyncio.wait_for(story(), 60))
    assert len(begun) == 2  # the next one goes by the new clock
