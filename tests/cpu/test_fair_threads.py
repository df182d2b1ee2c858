"""Whose text is tokenised next."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from sgl_prefill.http.fair_threads import LONG_CHARACTERS, FairThreads


class Texts:
    """Texts whose work ends when the test says so, in the order in which they began."""

    def __init__(self, n_threads: int) -> None:
        self.threads = FairThreads(n_threads, "test")
        self.began: list[str] = []
        self.open: dict[str, threading.Event] = {}

    def work(self, name: str) -> Callable[[], str]:
        self.open[name] = threading.Event()

        def work() -> str:
            self.began.append(name)
            assert self.open[name].wait(60)
            return name

        return work

    def send(self, name: str, client: str, n_characters: int) -> asyncio.Task[str]:
        return asyncio.ensure_future(self.threads.run(hash(client), n_characters, self.work(name)))

    async def until(self, *began: str) -> None:
        async with asyncio.timeout(60):
            while set(self.began) != set(began):
                await asyncio.sleep(0.001)


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(test)


def test_a_client_with_many_texts_does_not_go_before_another_with_one() -> None:
    async def test() -> None:
        texts = Texts(1)
        many = [texts.send(f"many {n}", "many", 1000) for n in range(5)]
        await texts.until("many 0")
        one = texts.send("one", "one", 1000)
        await asyncio.sleep(0)
        for event in texts.open.values():
            event.set()
        assert await asyncio.gather(*many, one) == [*(f"many {n}" for n in range(5)), "one"]
        assert texts.began.index("one") <= 2

    run(test())


def test_turns_are_by_characters() -> None:
    async def test() -> None:
        texts = Texts(1)
        tasks = [texts.send("first", "other", 10)]
        await texts.until("first")
        tasks += [texts.send(f"long {n}", "long", 9000) for n in range(3)]
        tasks += [texts.send(f"short {n}", "short", 1000) for n in range(9)]
        await asyncio.sleep(0)
        for event in texts.open.values():
            event.set()
        await asyncio.gather(*tasks)
        assert texts.began.index("long 1") >= texts.began.index("short 7")
        assert texts.began.index("long 0") <= 2

    run(test())


def test_one_thread_is_left_for_short_texts() -> None:
    async def test() -> None:
        texts = Texts(2)
        long = [texts.send(f"long {n}", "a", LONG_CHARACTERS) for n in range(2)]
        await texts.until("long 0")
        short = texts.send("short", "a", 10)
        await texts.until("long 0", "short")
        for event in texts.open.values():
            event.set()
        assert await asyncio.gather(*long, short) == ["long 0", "long 1", "short"]

    run(test())


def test_a_text_whose_client_has_left_takes_no_thread_and_gives_its_own_back() -> None:
    async def test() -> None:
        texts = Texts(1)
        running, waiting, last = (texts.send(name, "a", 10) for name in ("running", "waiting", "last"))
        await texts.until("running")
        for task in (waiting, running):
            task.cancel()
        await asyncio.gather(running, waiting, return_exceptions=True)
        assert texts.began == ["running"], "the thread is busy until the text is done"
        texts.open["running"].set()
        texts.open["last"].set()
        assert await last == "last"
        assert texts.began == ["running", "last"]
        assert texts.threads.n_waiting == 0
        assert not texts.threads._ends, "an idle server remembers no client"

    run(test())


def test_an_error_of_the_work_is_the_callers() -> None:
    async def test() -> None:
        threads = FairThreads(1, "test")
        for _ in range(2):
            try:
                await threads.run(1, 1, lambda: 1 // 0)
            except ZeroDivisionError:
                continue
            raise AssertionError

    run(test())
