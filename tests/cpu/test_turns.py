"""Clients take turns at the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from sgl_prefill.api.turns import Turns


class Door:
    """Turns, and who was let in; who is in stays until it is told to go."""

    def __init__(self) -> None:
        self.turns = Turns()
        self.entered: list[str] = []
        self.inside: list[Any] = []

    async def enter(self, client: str) -> None:
        turn = await self.turns.take(client)
        self.entered.append(client)
        self.inside.append(turn)

    async def empty(self) -> None:
        """Ends one turn after the other, until nobody comes."""
        while self.inside:
            self.inside.pop().end()
            await settled()


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def run(what: Coroutine[Any, Any, None]) -> None:
    asyncio.run(what)


def test_one_is_let_in_at_a_time_and_clients_take_turns() -> None:
    """Of a flood of five and two others, which come last, each is second to one of the flood at most."""

    async def enter() -> None:
        door = Door()
        tasks = [asyncio.create_task(door.enter(client)) for client in (*"aaaaa", "b", "c", "b")]
        await settled()
        assert door.entered == ["a"]
        await door.empty()
        assert "".join(door.entered) == "aabcabaa"
        assert all(task.done() for task in tasks)

    run(enter())


def test_who_leaves_while_it_waits_takes_no_turn() -> None:
    async def leave() -> None:
        door = Door()
        _, gone, other = (asyncio.create_task(door.enter(client)) for client in "abc")
        await settled()
        gone.cancel()
        await settled()
        await door.empty()
        assert door.entered == ["a", "c"]
        assert other.done()

    run(leave())


def test_who_leaves_as_it_is_called_hands_its_turn_on() -> None:
    async def leave() -> None:
        door = Door()
        _, gone, other = (asyncio.create_task(door.enter(client)) for client in "abc")
        await settled()
        door.inside.pop().end()  # calls b, which does not run before it is cancelled
        gone.cancel()
        await settled()
        assert door.entered == ["a", "c"]
        assert other.done()

    run(leave())


def test_a_turn_that_is_ended_twice_lets_one_in() -> None:
    async def end_twice() -> None:
        door = Door()
        for client in "abc":
            asyncio.create_task(door.enter(client))  # noqa: RUF006
        await settled()
        turn = door.inside.pop()
        turn.end()
        turn.end()
        await settled()
        assert door.entered == ["a", "b"]

    run(end_twice())


def test_who_waits_for_something_itself_keeps_nobody_out() -> None:
    """Its turn ends by a timer, which runs only while the event loop has nothing of its to do."""

    async def wait() -> None:
        turns = Turns()
        await turns.take("a")
        await asyncio.wait_for(turns.take("b"), 10)

    run(wait())
