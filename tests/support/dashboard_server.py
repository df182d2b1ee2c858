"""The dashboard's page and stream on a local port, over an engine without a model."""

from __future__ import annotations

import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import uvicorn
from fastapi import FastAPI
from sglang.srt.runtime_context import get_context
from sglang.srt.utils.auth import add_api_key_middleware

from sgl_prefill.http import dashboard_routes as routes
from sgl_prefill.http.shutdown import Ending
from sgl_prefill.port.dashboard import watch
from tests.support.filled_engine import FilledEngine


class Manager:
    """In the place of the tokenizer manager: asks the engine in this process."""

    def __init__(self, engine: FilledEngine) -> None:
        self._engine = engine
        self.n_asked = 0

    def auto_create_handle_loop(self) -> None:
        pass

    async def get_internal_state_communicator(self, question: Any) -> list[Any]:
        assert question.rid == watch.NAME
        self.n_asked += 1
        text = watch.taken(self._engine.state, self._engine.scheduler).decode()
        return [SimpleNamespace(internal_state={watch.NAME: text})]


@contextmanager
def dashboard_server(engine: FilledEngine, *, port: int = 0, api_key: str | None = None) -> Iterator[str]:
    """Yields the address."""
    manager: Any = Manager(engine)
    ending = Ending(0)
    refused = Counter({"invalid": 3, "deadline_expired": 2})
    app = FastAPI()
    routes.add_routes(app, routes.Feed(lambda: manager, engine.state.record.config, ending, refused))
    if api_key is not None:
        add_api_key_middleware(app, api_key=api_key, admin_api_key=None)
    settings = uvicorn.Config(routes.AskForKey(app), log_level="error", lifespan="off")
    server = uvicorn.Server(settings)
    listener = socket.create_server(("127.0.0.1", port))
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        with get_context().override_server_args():  # a snapshot names the model
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        ending.reason = "the test is over"
        server.should_exit = True
        thread.join()
        listener.close()
