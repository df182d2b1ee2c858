"""What the comparison benchmarks compute from a run, and the runs that they refuse, on made-up outcomes and a fake engine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from benchmarks import report
from benchmarks.harness import client, kept, profile


def outcome(at_s: float, finish_s: float, cached_tokens: int = 0) -> client.Outcome:
    return client.Outcome(at_s, at_s, finish_s, finish_s, 100, cached_tokens, [0.0])


def test_figures_of_a_run_whose_latencies_are_known() -> None:
    """Latencies 1 to 100 s, each from when the request was due; a quarter of all tokens cached."""
    outcomes = [outcome(float(n), 2.0 * n, cached_tokens=25) for n in range(100, 0, -1)]
    figures = client.figures(outcomes)
    assert (figures.mean_s, figures.p50_s, figures.p99_s, figures.longest_s) == (50.5, 50.0, 99.0, 100.0)
    assert figures.requests_per_s == 100 / (200.0 - 1.0)
    assert figures.cached_share == 0.25


@contextmanager
def fake_engine(answer: Any) -> Iterator[str]:
    """An HTTP server on a free port of this machine, in a thread; `answer(number)` makes each reply, None drops it."""
    loop = asyncio.new_event_loop()
    urls: list[str] = []
    is_up = threading.Event()
    n_seen = 0

    async def generate(request: web.Request) -> web.StreamResponse:
        nonlocal n_seen
        n_seen += 1
        await request.read()
        reply: web.StreamResponse | None = await answer(n_seen)
        if reply is None and request.transport is not None:
            request.transport.abort()
        return reply or web.Response()

    async def start() -> web.AppRunner:
        app = web.Application()
        app.router.add_post("/generate", generate)
        app.router.add_post("/v1/completions", generate)
        runner = web.AppRunner(app, shutdown_timeout=0)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        urls.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
        return runner

    def serve() -> None:
        asyncio.set_event_loop(loop)
        runner = loop.run_until_complete(start())
        is_up.set()
        loop.run_forever()
        unanswered = asyncio.all_tasks(loop)
        for task in unanswered:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*unanswered, return_exceptions=True))
        loop.run_until_complete(runner.cleanup())

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    is_up.wait()
    try:
        yield urls[0]
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(timeout=30)


def scored(logprob: float = -1.0) -> web.Response:
    meta = {"prompt_tokens": 3, "cached_tokens": 1, "output_token_ids_logprobs": [[[logprob, 100, None]]]}
    return web.json_response({"meta_info": meta})


def test_arrivals_do_not_wait_for_answers() -> None:
    """The first answer comes only after the second request has arrived: a closed loop would wait for ever."""
    both_are_here = asyncio.Event()

    async def answer(number: int) -> web.Response:
        if number == 2:
            both_are_here.set()
        await asyncio.wait_for(both_are_here.wait(), 30)
        return scored()

    with fake_engine(answer) as url:
        outcomes = client.run(url, [client.Due(0.0, [1, 2, 3]), client.Due(0.05, [1, 2, 3])], "fake")
    assert [one.at_s for one in outcomes] == [0.0, 0.05]
    assert outcomes[1].sent_s >= 0.05
    assert all(one.sent_s <= one.first_byte_s <= one.finish_s for one in outcomes)
    assert [one.logprobs for one in outcomes] == [[-1.0], [-1.0]]


def test_vllm_is_asked_for_the_same_labels() -> None:
    """By token id; it says how much was cached, or nothing where none was."""
    top = [{"token_id:200": -2.5, "token_id:7": -0.1, "token_id:100": -1.5}]

    async def answer(number: int) -> web.Response:
        details = {"cached_tokens": 2} if number == 2 else None
        usage = {"prompt_tokens": 3, "prompt_tokens_details": details}
        return web.json_response({"choices": [{"logprobs": {"top_logprobs": top}}], "usage": usage})

    dues = [client.Due(0.0, [1, 2, 3], (100, 200)), client.Due(0.2, [1, 2, 4], (100, 200))]
    with fake_engine(answer) as url:
        outcomes = client.run(url, dues, "fake", client.VLLM)
    asked = client.VLLM.body_of(dues[0])
    assert [one.logprobs for one in outcomes] == [[-1.5, -2.5]] * 2
    assert [one.cached_tokens for one in outcomes] == [0, 2]
    assert (asked["prompt"], asked["max_tokens"], asked["logprob_token_ids"]) == ([1, 2, 3], 1, [100, 200])


def test_a_refused_request_fails_the_run() -> None:
    """It must not count as a fast one."""

    async def answer(number: int) -> web.Response:
        return scored() if number != 2 else web.json_response({"message": "full"}, status=503)

    with fake_engine(answer) as url, pytest.raises(report.InvalidRunError, match="503"):
        client.run(url, [client.Due(0.0, [1])] * 3, "fake")


def test_a_request_whose_connection_is_dropped_fails_the_run() -> None:
    """As where the server dies. It is not sent again: a second answer would hide the loss of the first."""
    seen = []

    async def answer(number: int) -> web.Response | None:
        seen.append(number)
        return scored() if number != 3 else None

    with fake_engine(answer) as url, pytest.raises(report.InvalidRunError, match="no answer"):
        client.run(url, [client.Due(0.0, [1])] * 3, "fake")
    assert len(seen) == 3


def test_a_request_that_is_never_answered_fails_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that hangs."""
    monkeypatch.setattr(client, "TIMEOUT_S", 0.2)

    async def answer(number: int) -> web.Response:
        await asyncio.sleep(3600 if number == 1 else 0)
        return scored()

    with fake_engine(answer) as url, pytest.raises(report.InvalidRunError, match="no answer"):
        client.run(url, [client.Due(0.0, [1])] * 2, "fake")


@pytest.mark.parametrize("wrong", [-3.0, float("nan")])
def test_engines_that_disagree_fail_the_run(wrong: float) -> None:
    """The answers to the same prompts are compared one by one, and their average distance with less."""
    right = [[-1.0, -2.0], [-0.5, -2.0]]
    client.check_agreement([[-1.2, -2.0], [-0.5, -2.0]], right, 0.25, "second")
    with pytest.raises(report.InvalidRunError, match="third disagrees"):
        client.check_agreement([[-1.0, -2.0], [-0.5, wrong]], right, 0.25, "third")
    with pytest.raises(report.InvalidRunError, match=r"fourth disagrees .* on average"):
        client.check_agreement([[-1.2, -2.0], [-0.3, -2.0]], right, 0.25, "fourth")


def test_how_many_wrong_answers_would_be_seen() -> None:
    """Each answer taken for the one before: of four that are 0.2, 0.2 and 1 apart, one would be found at 0.25."""
    answers = [[-1.0, -2.0], [-1.2, -2.0], [-1.2, -2.2], [-2.2, -2.2]]
    assert client.told_apart(answers, 0.25) == pytest.approx(1 / 3)
    assert client.told_apart(answers, 0.1) == 1.0


def test_a_benchmark_that_was_cut_off_goes_on_where_it_stopped(tmp_path: Path) -> None:
    """What one run kept the next finds, but not at another commit; nothing is left of a run that was completed."""
    path = tmp_path / "result.json"
    kept.Kept(path, "a")["ours, 1x"] = {"mean_s": 1.5}
    again = kept.Kept(path, "a")
    assert again["ours, 1x"] == {"mean_s": 1.5}
    assert "ours, 2x" not in again
    assert "ours, 1x" not in kept.Kept(path, "b")
    again.forget()
    assert list(tmp_path.iterdir()) == []


def test_the_time_of_an_operator_is_its_own() -> None:
    """Without what it calls, in each thread for itself; what is no operator does not count."""

    def event(name: str, ts: float, dur: float, tid: int = 1, cat: str = "cpu_op") -> dict[str, Any]:
        return {"name": name, "cat": cat, "ts": ts * 1e6, "dur": dur * 1e6, "pid": 1, "tid": tid}

    found = profile.by_group(
        [
            event("step", 0, 100, cat="user_annotation"),
            event("aten::linear", 1, 10),
            event("aten::matmul", 2, 8),
            event("aten::mm", 3, 6),
            event("aten::add", 11, 2),
            event("aten::_scaled_dot_product_flash_attention_for_cpu", 20, 5),
            event("aten::mm", 12, 3, tid=2),
        ]
    )
    assert found == pytest.approx({"matrix products": 9, "attention": 5, "other operators": 2 + 2 + 2})
