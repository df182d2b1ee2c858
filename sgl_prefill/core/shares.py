"""How much each client has been served, and who is too far ahead of the others: virtual counters, as in "Fairness in Serving
Large Language Models" (OSDI'24), and a virtual time, as in fair queueing.

The virtual time advances by what is served, divided by the clients that wait: where a client would stand that always got its
share. Who begins to wait starts there, or where it stood, if that is more: nobody saves up a share by staying away, and a stream
of newcomers takes no more than theirs. Who is ahead of the least served by more than its own advance does not run.

An advance is some times what the most expensive job of a client has cost, since a shared prefix is computed once and makes the
jobs behind it cheap: clients that took turns job by job would evict each other's prefixes, and compute nothing else. So of two
clients that begin together and both wait, none is served more than the other by its advance and one job.
"""

from __future__ import annotations

from collections.abc import Mapping

from sgl_prefill.core.lazy_heap import LazyHeap

# A client whose prefix was evicted computes it anew once in so much service: a quarter is lost where all clients always wait.
ADVANCE_JOBS = 4.0
LITTLE = 1 / 8  # of the least advance


class Shares:
    """Counters of clients, in any unit of cost; each method costs O(log n) of those that wait.

    Args:
        least_advance: how far ahead of the least served any client may be and still run.
    """

    def __init__(self, least_advance: float) -> None:
        assert least_advance >= 0
        self.least_advance = least_advance
        self._time = 0.0
        self._present: dict[str, bool] = {}  # those that wait; whether they have been served since they began
        self._served: dict[str, float] = {}
        self._largest: dict[str, float] = {}  # of the jobs that each has been charged for
        self._waiting: LazyHeap[str] = LazyHeap()  # by what they have been served
        self._held_back: LazyHeap[str] = LazyHeap()  # of those, who was found to be ahead, by when it may run
        self._absent: LazyHeap[str] = LazyHeap()  # who left and was ahead of the time, by what it has been served

    def begin(self, client: str) -> None:
        """Takes in a client that begins to wait."""
        self._absent.discard(client)
        self._present[client] = False
        self.restore({client: max(self._served.get(client, self._time), self._time)})

    def end(self, client: str) -> None:
        """Takes out one that waits no longer. It is remembered while it is ahead of the time."""
        self.pass_over(client)
        del self._present[client]
        self._absent.put(client, self._served[client])
        while (first := self._absent.first()) is not None and self._served[first] <= self._time:
            self._absent.discard(first)
            del self._served[first]
            self._largest.pop(first, None)

    def charge(self, client: str, cost: float) -> None:
        """Counts what a client that waits is served."""
        self._time += cost / len(self._present)
        self._present[client] = True
        self._largest[client] = max(self._largest.get(client, 0.0), cost)
        self.restore({client: self._served[client] + cost})

    def pass_over(self, client: str) -> None:
        """Lets a client count as one that does not wait, until `restore`."""
        self._waiting.discard(client)
        self._held_back.discard(client)

    def restore(self, served: Mapping[str, float]) -> None:
        """Sets what clients that wait have been served, for a while or again."""
        for client, amount in served.items():
            self._served[client] = amount
            self._waiting.put(client, amount)
            if client in self._held_back:
                self.hold_back(client)

    def served(self, client: str) -> float:
        return self._served[client]

    def is_new(self, client: str) -> bool:
        """Says whether a client that waits has not been served since it began."""
        return not self._present[client]

    @property
    def little(self) -> float:
        """Returns what a newcomer may ask and go first: whoever waits meanwhile, little is lost."""
        return self.least_advance * LITTLE

    def advance(self, client: str) -> float:
        """Returns how far ahead of the least served a client may be and still run."""
        return max(self.least_advance, ADVANCE_JOBS * self._largest.get(client, 0.0))

    def may_run(self, client: str) -> bool:
        """Says whether a client that waits is not too far ahead."""
        first = self._waiting.first()
        return first is None or self._served[client] <= self._served[first] + self.advance(client)

    def hold_back(self, client: str) -> None:
        """Hears that a client that waits is passed over: `let_go` names it once it may run."""
        self._held_back.put(client, self._served[client] - self.advance(client))

    def let_go(self) -> list[str]:
        """Returns those that were held back and may run again."""
        found = []
        while (first := self._held_back.first()) is not None and self.may_run(first):
            self._held_back.discard(first)
            found.append(first)
        return found
