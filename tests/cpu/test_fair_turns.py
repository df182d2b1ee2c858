"""Whose request begins next."""

from __future__ import annotations

import asyncio

from sgl_prefill.http.fair_turns import AT_ONCE, FairTurns


async def request(turns: FairTurns, begun: list[int], number: int) -> None:
    await turns.mine(1)
    begun.append(number)


def test_one_request_begins_soon_although_another_client_has_sent_a_thousand() -> None:
    async def test() -> list[str]:
        turns, begun = FairTurns(), list[str]()

        async def request_of(client: str) -> None:
            await turns.mine(hash(client))
            begun.append(client)

        many = [asyncio.ensure_future(request_of("many")) for _ in range(1000)]
        await asyncio.sleep(0)
        one = asyncio.ensure_future(request_of("one"))
        await asyncio.gather(*many, one)
        return begun

    begun = asyncio.run(test())
    assert begun.count("many") == 1000
    assert begun.index("one") <= 3 * AT_ONCE


def test_no_more_begin_in_one_turn_of_the_loop_and_none_is_forgotten() -> None:
    async def test() -> None:
        turns, begun = FairTurns(), list[int]()

        tasks = [asyncio.ensure_future(request(turns, begun, number)) for number in range(50)]
        for _ in range(200):
            before = len(begun)
            await asyncio.sleep(0)
            assert len(begun) - before <= AT_ONCE
        assert begun == list(range(50))
        await asyncio.gather(*tasks)
        late = asyncio.ensure_future(request(turns, begun, 50))
        await asyncio.sleep(0)
        assert late.done(), "with nothing waiting a request begins at once"

    asyncio.run(test())


def test_a_client_that_has_left_takes_no_turn() -> None:
    async def test() -> None:
        turns, begun = FairTurns(), list[int]()

        tasks = [asyncio.ensure_future(request(turns, begun, number)) for number in range(10 * AT_ONCE)]
        await asyncio.sleep(0)
        for task in tasks[AT_ONCE:-1]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert begun == [*range(AT_ONCE), 10 * AT_ONCE - 1]

    asyncio.run(test())
