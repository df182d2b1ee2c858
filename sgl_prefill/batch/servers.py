"""Sends the rows of a job to running servers, group by group, with a limit of rows in flight for each."""

from __future__ import annotations

import asyncio
import itertools
import random
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Any

import aiohttp
import orjson

from sgl_prefill.answer import Answer
from sgl_prefill.batch import replies
from sgl_prefill.batch.run import RowAnswer
from sgl_prefill.core.batch.token_rows import IntArray

# Statuses of servers that may answer the same request later.
BUSY = {
    HTTPStatus.REQUEST_TIMEOUT,
    HTTPStatus.TOO_MANY_REQUESTS,
    HTTPStatus.INTERNAL_SERVER_ERROR,
    HTTPStatus.BAD_GATEWAY,
    HTTPStatus.SERVICE_UNAVAILABLE,
    HTTPStatus.GATEWAY_TIMEOUT,
}
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
# After so many such statuses a row fails, and the job goes on.
MOST_TRIES = 6
TIMEOUT_S = 3600.0
MOST_REPLY_BYTES = 256 << 20  # of one row, unpacked: a million labels of 250 bytes
# Of all rows at a time; beyond it only replies of less than 1 / FEW of it are read on.
MOST_BYTES_AT_ONCE, FEW = 1 << 30, 256
ANSWERS_EVERY_S = 0.25


class NonsenseError(Exception):
    """A body that is no answer of its route, or does not end; a redirect."""


class Server:
    """One server. Each failure doubles its pause; other servers do not wait for it."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self.is_gone = False
        self._pause_s = FIRST_PAUSE_S
        self._open = asyncio.Event()
        self._open.set()

    @property
    def is_open(self) -> bool:
        return self._open.is_set()

    async def ready(self) -> None:
        await self._open.wait()

    def room(self, n_asked: int, most: int) -> bool:
        """Whether it may be sent one more row. A server that failed last is tried with a single row."""
        return self.is_open and n_asked < (1 if self.is_gone else most)

    def answered(self) -> None:
        self.is_gone, self._pause_s = False, FIRST_PAUSE_S

    def pause(self, reason: str, tell: Callable[[str], None]) -> None:
        """Stops sending to it for a while."""
        if not self._open.is_set():
            return
        pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, LONGEST_PAUSE_S)
        tell(f"{self.url}: {reason}; asked again in {pause_s:g} s")
        self._open.clear()
        asyncio.get_running_loop().call_later(pause_s * random.uniform(0.8, 1.2), self._open.set)


async def answers(
    urls: Sequence[str],
    rows_in_order: IntArray,
    group_begins: IntArray,
    request_of: Callable[[int], tuple[str, dict[str, Any]]],
    max_inflight: int,
    *,
    headers: Mapping[str, str] | None = None,
    tell: Callable[[str], None] = lambda line: print(line, file=sys.stderr),
) -> AsyncIterator[list[RowAnswer]]:
    """Yields answers as they come. A row that failed on one server is sent again to the first server with room.

    Args:
        rows_in_order: of the whole job, the rows of a group consecutive.
        group_begins: indices into that order; a server takes whole groups.
        max_inflight: rows with each server at a time.
    """
    done: list[RowAnswer] = []
    again: deque[int] = deque()  # rows to send once more
    tries: dict[int, int] = {}
    groups = deque(_groups(len(rows_in_order), group_begins, max_inflight))
    n_left = len(rows_in_order)
    servers, replies_now = [Server(url) for url in urls], _Replies()
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S, connect=10)
    connector = aiohttp.TCPConnector(limit=0)

    async def ask(session: aiohttp.ClientSession, server: Server, row: int) -> None:
        nonlocal n_left
        url, body = request_of(row)
        tries[row] = tries.get(row, 0) + 1
        try:
            data = orjson.dumps(body)
            async with session.post(server.url + url, data=data, allow_redirects=False) as response:
                text, status = await replies_now.whole(response), response.status
                if status < 400:
                    text = _answer(url, body, text, response)
        except (aiohttp.ClientError, TimeoutError, OSError, NonsenseError) as error:
            server.is_gone = True
            server.pause(f"{type(error).__name__} {error}".strip(), tell)
            tries[row] -= not isinstance(error, NonsenseError)  # the server did not process the row
            status, text = HTTPStatus.BAD_GATEWAY, str(error).encode()
        else:
            server.answered()
            if status in BUSY:
                server.pause(f"answers {status}", tell)
        if status in BUSY and tries[row] < MOST_TRIES:
            again.append(row)
            return
        n_left -= 1
        done.append(RowAnswer(row, Answer(status, text)))

    async def serve(session: aiohttp.ClientSession, server: Server) -> None:
        mine: deque[int] = deque()
        asking: set[asyncio.Task[None]] = set()
        while n_left:
            await server.ready()
            while server.room(len(asking), max_inflight):
                if not mine and groups:
                    first, end = groups.popleft()
                    mine.extend(rows_in_order[first:end].tolist())
                if not mine and not again:
                    break
                asking.add(asyncio.create_task(ask(session, server, mine.popleft() if mine else again.popleft())))
            if not asking:
                await asyncio.sleep(ANSWERS_EVERY_S)  # other servers have the last rows, and may fail
                continue
            ended, asking = await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                task.result()
            if server.is_gone:
                again.extend(mine)  # for the other servers
                mine.clear()

    async with aiohttp.ClientSession(
        headers={"Content-Type": "application/json", **(headers or {})}, timeout=timeout, connector=connector
    ) as session:
        serving = [asyncio.create_task(serve(session, server)) for server in servers]
        was_paused = False
        try:
            while not all(task.done() for task in serving):
                await asyncio.wait(serving, timeout=ANSWERS_EVERY_S)
                for task in serving:
                    if task.done():
                        task.result()
                if done:
                    answered, done[:] = list(done), []
                    yield answered
                is_paused = all(server.is_gone for server in servers) and n_left > 0
                if is_paused != was_paused:
                    tell("no server answers: the job pauses until one does" if is_paused else "the job goes on")
                    was_paused = is_paused
            if done:
                yield done
        finally:
            for task in serving:
                task.cancel()


def _groups(n_rows: int, begins: IntArray, most_rows: int) -> list[tuple[int, int]]:
    """Begin and end of the rows that a server takes at once: several small groups, up to `most_rows`."""
    found = []
    first = 0
    bounds = [*begins.tolist(), n_rows]
    for begin, end in itertools.pairwise(bounds):
        if end - first > most_rows and begin > first:
            found.append((first, begin))
            first = begin
    if first < n_rows:
        found.append((first, n_rows))
    return found


class _Replies:
    """The replies that are read."""

    def __init__(self) -> None:
        self._n_bytes = 0

    async def whole(self, response: aiohttp.ClientResponse) -> bytes:
        """Reads a body, unpacked. Raises NonsenseError for one that does not end."""
        read = bytearray()
        try:
            async for piece in response.content.iter_any():
                read += piece
                self._n_bytes += len(piece)
                if len(read) > MOST_REPLY_BYTES:
                    raise NonsenseError(f"sends more than {MOST_REPLY_BYTES >> 20} MiB for one row")
                if self._n_bytes > MOST_BYTES_AT_ONCE and len(read) * FEW > MOST_BYTES_AT_ONCE:
                    raise NonsenseError(
                        f"sends more than {MOST_BYTES_AT_ONCE >> 20} MiB for the rows that are asked for at a time: lower"
                        " --max-inflight if these are answers"
                    )
            return bytes(read)
        finally:
            self._n_bytes -= len(read)


def _answer(route: str, body: dict[str, Any], text: bytes, response: aiohttp.ClientResponse) -> bytes:
    """Returns a reply as JSON in one line, whatever white space the server writes. Raises NonsenseError."""
    if response.status >= HTTPStatus.MULTIPLE_CHOICES:
        place = response.headers.get("Location")
        raise NonsenseError(f"answers {response.status} and names {place}, to which a job sends nothing by itself")
    try:
        reply = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise NonsenseError(f"answers {response.status} with what is not JSON") from error
    if (wrong := replies.problem(route, body, reply)) is not None:
        raise NonsenseError(f"answers {response.status} to {route} with {wrong}")
    return orjson.dumps(reply)
