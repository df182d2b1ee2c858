"""Running servers that answer a job: gone, slow, busy, or talking nonsense."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any
from unittest import mock

import numpy as np
import orjson
import pytest
from aiohttp import web

from sgl_prefill.batch import replies, servers
from sgl_prefill.batch.backends import beginning_of, tokens_of

N_ROWS = 40
Behaviour = Callable[[int], web.Response]  # of a row


def good(row: int) -> web.Response:
    usage = {"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}}
    return web.json_response({"row": row, "choices": [{"text": "a"}], "usage": usage})


@asynccontextmanager
async def server(behave: Behaviour) -> AsyncIterator[tuple[str, list[int]]]:
    """A server, and the rows that it was asked for."""
    asked: list[int] = []

    async def answer(request: web.Request) -> web.Response:
        row = (await request.json())["row"]
        asked.append(row)
        return behave(row)

    application = web.Application()
    application.router.add_post("/v1/completions", answer)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    assert site._server is not None
    port = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
    try:
        yield f"http://127.0.0.1:{port}", asked
    finally:
        await runner.cleanup()


class Ran:
    """What came of a job."""

    def __init__(self) -> None:
        self.answers: dict[int, tuple[int, Any]] = {}
        self.told: list[str] = []
        self.asked: list[list[int]] = []  # rows by server, in the order in which it read them
        self.sent: list[int] = []  # rows of all servers, in the order in which they were sent


async def run(*behaviours: Behaviour | None, max_inflight: int = 4, begins: Sequence[int] = range(0, N_ROWS, 5)) -> Ran:
    """Runs a job of N_ROWS rows on servers that behave so; None: nobody listens there."""
    ran = Ran()

    def body_of(row: int) -> tuple[str, dict[str, Any]]:
        ran.sent.append(row)
        return "/v1/completions", {"row": row}

    pauses = mock.patch.multiple(servers, FIRST_PAUSE_S=0.01, LONGEST_PAUSE_S=0.02, ANSWERS_EVERY_S=0.01)
    async with _all(behaviours) as running:
        ran.asked = [asked for _, asked in running]
        with pauses:
            async for answered in servers.answers(
                [url for url, _ in running],
                np.arange(N_ROWS),
                np.array(begins),
                body_of,
                max_inflight,
                tell=ran.told.append,
            ):
                for row, answer in answered:
                    assert row not in ran.answers
                    ran.answers[row] = (answer.status, answer.body)
    return ran


@asynccontextmanager
async def _all(behaviours: Sequence[Behaviour | None]) -> AsyncIterator[list[tuple[str, list[int]]]]:
    if not behaviours:
        yield []
        return
    first, *others = behaviours
    if first is None:
        async with _all(others) as running:
            yield [("http://127.0.0.1:9", []), *running]
        return
    async with server(first) as one, _all(others) as running:
        yield [one, *running]


def all_good(ran: Ran) -> bool:
    return {row: orjson.loads(body)["row"] for row, (_, body) in ran.answers.items()} == {
        row: row for row in range(N_ROWS)
    }


def test_each_server_gets_whole_groups_in_order() -> None:
    ran = asyncio.run(run(good, good, max_inflight=5))
    assert all_good(ran)
    for asked in ran.asked:
        assert [row for row in ran.sent if row in asked] == sorted(asked)
    first, second = ({row // 5 for row in asked} for asked in ran.asked)
    assert not first & second
    assert first
    assert second


def failing(times: int, how: Callable[[], web.Response]) -> Behaviour:
    left = itertools.count()

    def behave(row: int) -> web.Response:
        return how() if next(left) < times else good(row)

    return behave


class NoHttp(web.Response):
    """Bytes that are no HTTP, then the end of the connection."""

    async def prepare(self, request: web.BaseRequest) -> None:
        assert request.transport is not None
        request.transport.write(b"no HTTP at all\r\n\r\n")
        request.transport.close()
        raise ConnectionResetError


@pytest.mark.parametrize(
    "how",
    [
        NoHttp,
        lambda: web.Response(status=429),
        lambda: web.Response(status=500, text="oops"),
        lambda: web.Response(status=200, text='{"cut'),
        lambda: web.Response(status=200, text="<html>", content_type="text/html"),
        lambda: web.json_response(None),
        lambda: web.json_response({"error": {"message": "busy"}}),
        lambda: web.json_response({"choices": [], "usage": None}),
        lambda: web.json_response({"choices": [{"text": "a"}], "usage": [3]}),
        lambda: web.json_response({"choices": [{"text": "a"}], "usage": {"prompt_tokens": "3"}}),
        lambda: web.Response(status=503),
        lambda: web.Response(status=302, headers={"Location": "/elsewhere"}),
        lambda: web.Response(text='{"choices": [{"text": "a"}]}' * 2),
        lambda: web.Response(text='{"choices": [{"text": NaN}]}'),
        lambda: web.Response(text="[" * 100_000),
        lambda: web.Response(body=b'{"choices": [{"text": "\xff"}]}'),
    ],
)
def test_what_a_server_could_not_answer_is_asked_for_again_and_answered_once(how: Callable[[], web.Response]) -> None:
    ran = asyncio.run(run(failing(7, how)))
    assert all_good(ran)
    assert ran.told


def test_an_answer_is_kept_in_one_line() -> None:
    """The file of answers has one line a row."""

    def in_lines(row: int) -> web.Response:
        lines = f'{{\n  "choices": [1],\n  "row": {row}\n}}\n'
        return web.Response(text=lines, content_type="application/json")

    ran = asyncio.run(run(in_lines))
    assert all_good(ran)
    assert all(b"\n" not in body for _, body in ran.answers.values())


def test_a_body_without_end_is_not_read_to_its_end() -> None:
    """Nor one that is small while it is packed."""

    def behave(row: int) -> web.Response:
        if row != 3:
            return good(row)
        much = web.json_response({"choices": ["a" * 4_000]})
        much.enable_compression(web.ContentCoding.gzip)
        return much

    with mock.patch.object(servers, "MOST_REPLY_BYTES", 2_000):
        ran = asyncio.run(run(behave))
    assert ran.answers.pop(3)[0] == 502
    assert all(status == 200 for status, _ in ran.answers.values())
    assert any("sends more than" in line for line in ran.told)


def test_bodies_without_end_do_not_fill_the_memory_together() -> None:
    """Each is below the limit of one row; a short one is read beside them."""

    def reply(n_bytes: int) -> Any:
        async def pieces() -> AsyncIterator[bytes]:
            for _ in range(n_bytes // 100):
                yield bytes(100)
                await asyncio.sleep(0)

        return mock.Mock(content=mock.Mock(iter_any=pieces))

    async def story() -> list[Any]:
        read = servers._Replies()
        return await asyncio.gather(*(read.whole(reply(n)) for n in (4_000, 4_000, 500)), return_exceptions=True)

    with mock.patch.multiple(servers, MOST_BYTES_AT_ONCE=5_000, FEW=4):
        *long, short = asyncio.run(story())
    assert sorted(map(type, long), key=str) == [bytes, servers.NonsenseError]
    assert len(short) == 500


LABELS = {"allowed_tokens": [" yes"]}
SCORED = {"label_scores": {"labels": [{"label": " yes", "probability": 1.0}], "label_mass": 0.5}}
REFUSED = {"error": {"message": "too long"}}
QUESTIONS: dict[str, Any] = {"questions": {"a": {}}}


@pytest.mark.parametrize(
    ("route", "body", "reply", "wrong"),
    [
        ("/v1/completions", LABELS, {"choices": [SCORED]}, None),
        ("/v1/completions", LABELS, {"choices": [SCORED, REFUSED]}, None),
        ("/v1/completions", LABELS, {"choices": [{"text": "yes"}]}, "no label_scores"),
        (
            "/v1/completions",
            LABELS,
            {"choices": [{"label_scores": {"labels": [{"label": " yes"}]}}]},
            "no label_scores",
        ),
        ("/v1/completions", {"prompt": ["a", "b"]}, {"choices": [{"text": "yes"}]}, "1 answers to 2 prompts"),
        ("/v1/chat/completions", {}, [{"choices": [1]}], "no choices"),
        ("/generate", LABELS, {"meta_info": SCORED}, None),
        ("/generate", {**LABELS, "text": ["a", "b"]}, [{"meta_info": SCORED}, REFUSED], None),
        ("/generate", {"text": ["a", "b"]}, [{"meta_info": {"prompt_tokens": 1}}], "1 answers to 2 prompts"),
        ("/generate", {}, {"text": "a"}, "no meta_info"),
        ("/generate", {}, {"meta_info": {"prompt_tokens": -1}}, "prompt_tokens -1"),
        ("/v1/score", {}, {"scores": [None, [0.5]]}, None),
        ("/v1/rerank", {}, [{"index": 0, "score": 0.5}], None),
        ("/v1/rerank", {}, [{"index": 0, "score": 0.5}, {"index": 1, "score": None, "error": "too long"}], None),
        ("/v1/rerank", {}, {"results": [{"index": 0, "relevance_score": 0.5}]}, None),
        ("/v1/rerank", {}, [{"index": 0, "score": None}], "no score of a document"),
        ("/v1/rerank", {}, {"error": {"message": "busy"}}, "no results"),
        ("/generate", {}, {"error": {"message": "busy"}, "meta_info": None}, "no meta_info"),
        ("/generate", LABELS, {"error": {"message": "busy"}, "meta_info": {"id": "a"}}, "no label_scores"),
        ("/generate", {"text": ["a"]}, [], "empty meta_info"),
        ("/v2/rerank", {}, {"results": []}, None),
        ("/v1/decisions", {}, {"answers": {"a": 1}}, "no answers"),
        ("/v1/systemone", QUESTIONS, {"answers": {"a": {"type": "noul", "noul": 0.5}}}, None),
        ("/v1/systemone", QUESTIONS, {"answers": {"b": {"type": "noul", "noul": 0.5}}}, "no answer to a question"),
        ("/v1/systemone", QUESTIONS, {"answers": {"a": {"type": "choice", "choice": "x"}}}, "no answer to a question"),
        ("/v1/embeddings", {}, {"data": [{"embedding": [1]}]}, None),
    ],
)
def test_a_reply_has_the_shape_of_its_route(route: str, body: dict[str, Any], reply: Any, wrong: str | None) -> None:
    found = replies.problem(route, body, reply)
    assert found is None if wrong is None else wrong in (found or "")


def test_prompts_do_not_go_where_a_redirect_points() -> None:
    async def story() -> tuple[Ran, list[int]]:
        async with server(good) as (other, asked):
            away = {"Location": f"{other}/v1/completions"}
            return await run(lambda row: web.Response(status=307, headers=away) if row == 3 else good(row)), asked

    ran, asked = asyncio.run(story())
    assert not asked
    assert ran.answers.pop(3)[0] == 502
    assert all(status == 200 for status, _ in ran.answers.values())
    assert any("answers 307 and names http://127.0.0.1" in line for line in ran.told)


def test_where_one_server_is_gone_the_others_answer_its_rows() -> None:
    ran = asyncio.run(run(None, good))
    assert all_good(ran)
    assert any("127.0.0.1:9" in line for line in ran.told)


def test_a_row_that_no_server_can_answer_fails_and_the_others_do_not() -> None:
    def refuses_three(row: int) -> web.Response:
        return web.Response(status=500, text="this one") if row == 3 else good(row)

    ran = asyncio.run(run(refuses_three))
    assert ran.answers.pop(3) == (500, b"this one")
    assert all(status == 200 for status, _ in ran.answers.values())
    assert len(ran.answers) == N_ROWS - 1
    assert Counter(ran.asked[0])[3] == servers.MOST_TRIES


def test_a_row_that_is_wrong_is_not_asked_for_again() -> None:
    def refuses_three(row: int) -> web.Response:
        return web.json_response({"message": "no such label"}, status=400) if row == 3 else good(row)

    ran = asyncio.run(run(refuses_three))
    assert ran.answers[3][0] == 400
    assert Counter(ran.asked[0])[3] == 1


def test_the_job_pauses_where_no_server_lives_and_goes_on_when_one_does() -> None:
    """Nobody listens until the job has said that it pauses."""

    async def story() -> tuple[list[str], int]:
        told: list[str] = []
        async with server(good) as (url, _):
            pass  # its port is free again
        n_answered = 0
        port = int(url.rsplit(":", 1)[1])
        runner = None
        with mock.patch.multiple(servers, FIRST_PAUSE_S=0.01, LONGEST_PAUSE_S=0.02, ANSWERS_EVERY_S=0.01):
            answers = servers.answers(
                [url], np.arange(3), np.array([0]), lambda row: ("/v1/completions", {"row": row}), 2, tell=told.append
            )
            waiting = asyncio.ensure_future(anext(answers))
            while not any("pauses" in line for line in told):
                await asyncio.sleep(0.01)
            application = web.Application()
            application.router.add_post("/v1/completions", _echo)
            runner = web.AppRunner(application)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", port).start()
            n_answered += len(await waiting)
            async for answered in answers:
                n_answered += len(answered)
            await runner.cleanup()
        return told, n_answered

    told, n_answered = asyncio.run(story())
    assert n_answered == 3
    assert any("goes on" in line for line in told)


async def _echo(request: web.Request) -> web.Response:
    return web.json_response({**await request.json(), "choices": [1]})


@pytest.mark.parametrize(
    ("url", "body", "beginning"),
    [
        ("/v1/completions", {"prompt": "ab"}, b"ab"),
        ("/v1/completions", {"prompt": ["ab", "cd"]}, b"ab"),
        ("/v1/completions", {"prompt": [3, 4]}, [3, 4]),
        ("/v1/completions", {"prompt": [[3, 4], [5]]}, [3, 4]),
        ("/generate", {"text": "é"}, "é".encode()),
        ("/generate", {"input_ids": [5]}, [5]),
        ("/v1/rerank", {"query": "q", "documents": ["d"]}, b"q"),
        ("/v1/embeddings", {"input": "x"}, b"x"),
        ("/v1/decisions", {"input": "x"}, b"x"),
        ("/v1/systemone", {"state": {"a": 1}}, b'{"a":1}'),
        ("/v1/completions", {}, b"null"),
    ],
)
def test_requests_are_compared_by_the_beginning_of_their_prompts(
    url: str, body: dict[str, Any], beginning: bytes | list[int]
) -> None:
    assert list(beginning_of(url, body)) == list(beginning)


def test_tokens_are_read_from_answers_of_all_shapes() -> None:
    usage = {"usage": {"prompt_tokens": 7, "prompt_tokens_details": {"cached_tokens": 4}}}
    meta = {"meta_info": {"prompt_tokens": 5, "cached_tokens": 1}}
    decided = {"usage": {"input_tokens": 3}, "x_cached_tokens": 2}
    for body, expected in (
        (usage, (7, 4)),
        (decided, (3, 2)),
        (meta, (5, 1)),
        ([meta, meta], (10, 2)),
        ({}, (0, 0)),
        ("x", (0, 0)),
    ):
        assert tokens_of(orjson.dumps(body)) == expected


def test_small_groups_go_together_and_large_ones_alone() -> None:
    groups: Iterator[tuple[int, int]] = iter(servers._groups(20, np.array([0, 2, 4, 12]), 5))
    assert list(groups) == [(0, 4), (4, 12), (12, 20)]
