"""A batch job against a server that means harm: what becomes of its rows?"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web

from benchmarks import report
from benchmarks.batch.job import MODULE

N_ROWS, QUICK_ROWS = 200, 32
BOMB_BYTES = 1 << 30  # unpacked
PIECE = b" " * (1 << 20)
HOSTILE_SHARE, MOST_HOSTILE = 0.5, 2  # of the replies to a row, before the right one
NEVER = ("null", "307")  # what the first rows always get: a row fails after six tries, with pauses that double
COMMAND_TIMEOUT_S = 3_000
Reply = Callable[[web.Request, int], Awaitable[web.StreamResponse]]


def right(row: int) -> dict[str, Any]:
    usage = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
    return {"id": "a", "choices": [{"index": 0, "text": f"answer {row}"}], "usage": usage}


def says(body: Callable[[int], bytes | str], **options: Any) -> Reply:
    async def reply(request: web.Request, row: int) -> web.StreamResponse:
        found = body(row)
        found = found.encode() if isinstance(found, str) else found
        return web.Response(body=found, **{"content_type": "application/json", **options})

    return reply


async def without_end(request: web.Request, row: int) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    with contextlib.suppress(ConnectionError):
        while True:
            await response.write(PIECE)
    return response


async def hangs_up(request: web.Request, row: int) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.write(b"no HTTP at all\r\n\r\n")
    request.transport.close()
    return web.Response()


def redirect(status: int) -> Reply:
    return says(lambda row: "", status=status, headers={"Location": "/elsewhere"})


def with_usage(usage: Any) -> Reply:
    return says(lambda row: orjson.dumps({**right(row), "usage": usage}))


def replies(packed: bytes) -> dict[str, Reply]:
    """What is no answer, by name."""
    return {
        "null": says(lambda row: "null"),
        "an error with status 200": says(lambda row: '{"error": {"message": "busy"}}'),
        "HTML": says(lambda row: "<html>ok</html>", content_type="text/html"),
        "usage: a list": with_usage([3]),
        "usage: a text": with_usage({"prompt_tokens": "3"}),
        "no choices": says(lambda row: orjson.dumps({**right(row), "choices": []})),
        "cut": says(lambda row: orjson.dumps(right(row))[:-5]),
        "two answers": says(lambda row: orjson.dumps(right(row)) * 2),
        "NaN": says(lambda row: '{"choices": [{"text": NaN}]}'),
        "100,000 lists in each other": says(lambda row: "[" * 100_000),
        "not UTF-8": says(lambda row: b'{"choices": [{"text": "\xff"}]}'),
        "302": redirect(302),
        "307": redirect(307),
        "a body without end": without_end,
        "a gzip bomb": says(lambda row: packed, headers={"Content-Encoding": "gzip"}),
        "no HTTP": hangs_up,
        "500": says(lambda row: "oops", status=500),
    }


def odd(row: int) -> list[bytes]:
    """Right answers, written oddly."""
    good = orjson.dumps(right(row))
    return [
        json.dumps(right(row), indent=2).encode(),
        good + b"\r\n\n",
        b"\xe2\x80\xa8".join([b'{"x": "', b'", ' + good[1:]]),
        orjson.dumps({**right(row), "custom_id": str(row + 1), "id": "row-0", "row": row + 1}),
    ]


class Hostile:
    """A server that never answers the first rows, and the others in the end."""

    def __init__(self, kinds: dict[str, Reply]) -> None:
        self._kinds = list(kinds.items())
        self._never = [(name, kinds[name]) for name in NEVER]
        self._asked: Counter[int] = Counter()
        self._rng = random.Random("hostile")
        self.said: Counter[str] = Counter()
        self.n_elsewhere = 0

    def answers(self, row: int) -> bool:
        return row >= len(self._never)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        row = int((await request.json())["prompt"])
        self._asked[row] += 1
        if not self.answers(row):
            name, reply = self._never[row]
        elif self._asked[row] <= MOST_HOSTILE and self._rng.random() < HOSTILE_SHARE:
            name, reply = self._rng.choice(self._kinds)
        else:
            self.said["an answer"] += 1
            bodies = odd(row)
            return web.Response(body=bodies[row % len(bodies)], content_type="application/json")
        self.said[name] += 1
        return await reply(request, row)

    async def elsewhere(self, request: web.Request) -> web.StreamResponse:
        self.n_elsewhere += 1
        return web.json_response(right(0))

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        """Serves. Yields the address."""
        application = web.Application()
        application.router.add_post("/v1/completions", self.answer)
        application.router.add_route("*", "/elsewhere", self.elsewhere)
        runner = web.AppRunner(application, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, shutdown_timeout=1).start()
        host, port = runner.addresses[0][:2]
        try:
            yield f"http://{host}:{port}"
        finally:
            await runner.cleanup()


def measure(quick: bool) -> dict[str, Any]:
    n_rows = QUICK_ROWS if quick else N_ROWS
    hostile = Hostile(replies(gzip.compress(bytes(BOMB_BYTES), 6)))
    with tempfile.TemporaryDirectory() as folder:
        job, output, errors = (Path(folder) / name for name in ("job.jsonl", "answers.jsonl", "errors.jsonl"))
        with job.open("wb") as file:
            for row in range(n_rows):
                body = {"model": "m", "prompt": str(row), "max_tokens": 1}
                file.write(orjson.dumps({"custom_id": str(row), "url": "/v1/completions", "body": body}) + b"\n")
        command = [sys.executable, "-m", MODULE, "-i", str(job), "-o", str(output), "--error-file", str(errors)]
        command, status, said = asyncio.run(run(command, hostile))
        seen: Counter[int] = Counter()
        n_corrupt = 0
        for path, is_answer in ((output, True), (errors, False)):
            for line in path.read_bytes().splitlines() if path.exists() else ():
                try:
                    row, is_right = read(line, is_answer, hostile)
                except (ValueError, KeyError, TypeError):
                    n_corrupt += 1
                else:
                    seen[row] += 1
                    n_corrupt += not is_right
    found = {
        "rows lost": sum(row not in seen for row in range(n_rows)),
        "rows answered twice": sum(n - 1 for n in seen.values()),
        "corrupt or wrong lines": n_corrupt,
        "tracebacks": said.count(b"Traceback"),
        "rows sent where a redirect points": hostile.n_elsewhere,
    }
    targets = [
        report.Target.at_most(f"a batch job against a hostile server: {what}", n, 0) for what, n in found.items()
    ]
    rows = [{"rows": n_rows, "said": dict(hostile.said), "exit_status": status, **found}]
    return report.part(rows, targets, commands={"hostile": report.portable(command)})


async def run(command: list[str], hostile: Hostile) -> tuple[list[str], int | None, bytes]:
    """Returns the whole command, its exit status and what it printed."""
    async with hostile.running() as url:
        whole = [*command, "--base-url", url]
        process = await asyncio.create_subprocess_exec(
            *whole, cwd=report.REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        said, _ = await asyncio.wait_for(process.communicate(), COMMAND_TIMEOUT_S)
    return whole, process.returncode, said


def read(line: bytes, is_answer: bool, hostile: Hostile) -> tuple[int, bool]:
    """Returns the row of a line of the output or of the errors, and whether it is right."""
    found = orjson.loads(line)
    row = int(found["custom_id"])
    is_right = not is_answer or found["response"]["body"]["choices"][0]["text"] == f"answer {row}"
    return row, is_right and is_answer == hostile.answers(row)
