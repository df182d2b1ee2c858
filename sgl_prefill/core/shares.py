"""How much each client has been served, and who is too far ahead of the others: virtual counters, as in "Fairness in Serving
Large Language Models" (OSDI'24).

A client that begins to wait starts where the least served of those that wait is: nobody saves up a share by staying away, and
nobody owes for a time in which no other waited. Who is more than a bound ahead of the least served does not run, so that while
two clients both wait, what they are served differs by at most twice (bound + the cost of the largest job).
"""

from __future__ import annotations

from collections.abc import Mapping

from sgl_prefill.core.lazy_heap import LazyHeap


class Shares:
    """Counters of clients, in any unit of cost; each method costs O(log n) of those that wait.

    Args:
        bound: how far ahead of the least served a client may be and still run.
    """

    def __init__(self, bound: float) -> None:
        assert bound >= 0
        self.bound = bound
        self._served: dict[str, float] = {}
        self._waiting: LazyHeap[str] = LazyHeap()  # by what they have been served
        self._held_back: LazyHeap[str] = LazyHeap()  # the same, of those that were found to be ahead
        self._absent: LazyHeap[str] = LazyHeap()  # the same, of those that left and were ahead
        self._least = 0.0  # of those that waited last

    def begin(self, client: str) -> None:
        """Takes in a client that begins to wait."""
        self._absent.discard(client)
        self.restore({client: max(self.served(client), self.least)})

    def end(self, client: str) -> None:
        """Takes out one that waits no longer. It is remembered while it is ahead."""
        self._least = self.least
        self.pass_over(client)
        self._absent.put(client, self._served[client])
        while (first := self._absent.first()) is not None and self._served[first] <= self._least:
            self._absent.discard(first)
            del self._served[first]

    def pass_over(self, client: str) -> None:
        """Lets a client count as one that does not wait, until `restore`."""
        self._waiting.discard(client)
        self._held_back.discard(client)

    def charge(self, client: str, cost: float) -> None:
        """Counts what a client is served."""
        self._served[client] = self.served(client) + cost
        if client in self._waiting:
            self.restore({client: self._served[client]})

    def restore(self, served: Mapping[str, float]) -> None:
        """Sets what clients that wait have been served."""
        for client, amount in served.items():
            self._served[client] = amount
            self._waiting.put(client, amount)
            if client in self._held_back:
                self._held_back.put(client, amount)

    @property
    def least(self) -> float:
        """Returns what the least served of those that wait has been served."""
        first = self._waiting.first()
        return self._least if first is None else max(self._served[first], self._least)

    def served(self, client: str) -> float:
        return self._served.get(client, self._least)

    def may_run(self, client: str) -> bool:
        """Says whether a client is not too far ahead."""
        return self.served(client) <= self.least + self.bound

    def hold_back(self, client: str) -> None:
        """Hears that a client that waits is passed over: `let_go` names it once it may run."""
        self._held_back.put(client, self._served[client])

    def let_go(self) -> list[str]:
        """Returns those that were held back and may run again."""
        found = []
        while (first := self._held_back.first()) is not None and self.may_run(first):
            self._held_back.discard(first)
            found.append(first)
        return found
