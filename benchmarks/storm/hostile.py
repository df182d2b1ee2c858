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
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import orjson
from aiohttp import web

from benchmarks import report
from benchmarks.batch.job import MODULE
from benchmarks.storm.part import Part

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

    @contextlib.contextmanager
    def running(self) -> Iterator[str]:
        """Serves in a thread. Yields the address."""
        loop, ended = asyncio.new_event_loop(), asyncio.Event()
        address: list[str] = []
        is_up = threading.Event()

        async def serve() -> None:
            application = web.Application()
            application.router.add_post("/v1/completions", self.answer)
            application.router.add_route("*", "/elsewhere", self.elsewhere)
            runner = web.AppRunner(application, access_log=None)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0, shutdown_timeout=1)
            await site.start()
            host, port = runner.addresses[0][:2]
            address.append(f"http://{host}:{port}")
            is_up.set()
            await ended.wait()
            await runner.cleanup()

        thread = threading.Thread(target=loop.run_until_complete, args=[serve()])
        thread.start()
        is_up.wait()
        try:
            yield address[0]
        finally:
            loop.call_soon_threadsafe(ended.set)
            thread.join()
            loop.close()


class Rows(NamedTuple):
    """What became of the rows of a job."""

    lost: int
    doubled: int
    corrupt: int
    tracebacks: int
    sent_elsewhere: int


def measure(quick: bool, model: Path, folder: Path) -> Part:
    """model: not used."""
    n_rows = QUICK_ROWS if quick else N_ROWS
    hostile = Hostile(replies(gzip.compress(bytes(BOMB_BYTES), 6)))
    with hostile.running() as url, tempfile.TemporaryDirectory() as place:
        found, command, status = run(url, n_rows, Path(place), hostile)
    rows = [{"part": "hostile", "rows": n_rows, "said": dict(hostile.said), "exit_status": status, **found._asdict()}]
    names = {"lost": "rows lost", "doubled": "rows answered twice", "corrupt": "corrupt or wrong lines"}
    names |= {"tracebacks": "tracebacks", "sent_elsewhere": "rows sent where a redirect points"}
    targets = [
        report.Target.at_most(f"a batch job against a hostile server: {shown}", getattr(found, name), 0)
        for name, shown in names.items()
    ]
    return Part(rows, targets, {"hostile": command})


def run(url: str, n_rows: int, folder: Path, hostile: Hostile) -> tuple[Rows, str, int]:
    job, output, errors = folder / "job.jsonl", folder / "answers.jsonl", folder / "errors.jsonl"
    with job.open("wb") as file:
        for row in range(n_rows):
            body = {"model": "m", "prompt": str(row), "max_tokens": 1}
            file.write(orjson.dumps({"custom_id": str(row), "url": "/v1/completions", "body": body}) + b"\n")
    command = [sys.executable, "-m", MODULE, "-i", str(job), "-o", str(output), "--error-file", str(errors)]
    command += ["--base-url", url]
    done = subprocess.run(
        command, cwd=report.REPOSITORY, capture_output=True, text=True, check=False, timeout=COMMAND_TIMEOUT_S
    )
    seen: Counter[int] = Counter()
    n_corrupt = 0
    for path, is_answer in ((output, True), (errors, False)):
        for line in path.read_bytes().splitlines() if path.exists() else ():
            try:
                found = orjson.loads(line)
                row = int(found["custom_id"])
                is_right = is_answer == hostile.answers(row)
                if is_answer:
                    is_right &= found["response"]["body"]["choices"][0]["text"] == f"answer {row}"
            except (ValueError, KeyError, TypeError):
                n_corrupt += 1
                continue
            seen[row] += 1
            n_corrupt += not is_right
    return (
        Rows(
            lost=sum(row not in seen for row in range(n_rows)),
            doubled=sum(n - 1 for n in seen.values()),
            corrupt=n_corrupt,
            tracebacks=(done.stdout + done.stderr).count("Traceback"),
            sent_elsewhere=hostile.n_elsewhere,
        ),
        report.portable(command),
        done.returncode,
    )
