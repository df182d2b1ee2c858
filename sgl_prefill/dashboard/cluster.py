"""The engines of the cluster that this one belongs to: which of them answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

if TYPE_CHECKING:
    import aiohttp

PERIOD_S = 5.0
TIMEOUT_S = 2.0


class Cluster:
    """Asks each engine whether it is there, every PERIOD_S while somebody wants to know."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._urls = urls
        self._is_up: dict[str, bool] = {}
        self._asked_s = -PERIOD_S
        self._asking: asyncio.Task[None] | None = None

    def shown(self) -> list[dict[str, Any]]:
        """Returns what is known, and asks anew where that is old. is_up: None where nobody has answered yet."""
        is_asking = self._asking is not None and not self._asking.done()
        if self._urls and not is_asking and time.monotonic() - self._asked_s >= PERIOD_S:
            self._asked_s = time.monotonic()
            self._asking = asyncio.create_task(self._ask())
        return [{"url": url, "is_up": self._is_up.get(url)} for url in self._urls]

    async def _ask(self) -> None:
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            found = await asyncio.gather(*(_answers(session, url) for url in self._urls))
        self._is_up = dict(zip(self._urls, found, strict=True))


async def _answers(session: aiohttp.ClientSession, url: str) -> bool:
    """Asks for /ping, which waits for no step. An engine that asks for its key is there, too."""
    import aiohttp

    try:
        async with session.get(f"{url}/ping") as reply:
            return reply.status < HTTPStatus.INTERNAL_SERVER_ERROR
    except (aiohttp.ClientError, TimeoutError, OSError):
        return False


def urls_of(text: str | None) -> list[str]:
    """Reads `--cluster-engines`: addresses with commas between them. Raises ValueError, which names the one that is none."""
    urls = [] if text is None else [url.strip().rstrip("/") for url in text.split(",")]
    for url in urls:
        parts = urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise ValueError(f"{url!r} is no address of an engine: it must be such as http://127.0.0.1:30001")
    return urls
