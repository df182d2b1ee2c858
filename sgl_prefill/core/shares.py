"""Service counters of clients, and which clients are too far ahead: virtual counters, as in "Fairness in Serving Large Language
Models" (OSDI'24), and a virtual time, as in fair queueing.

The virtual time advances by the cost that is served divided by the number of waiting clients: it is the counter of a client that
always got its share. A client that begins to wait starts at the virtual time, or at its own counter if that is higher: staying
away saves up no share, and a stream of new clients gets no more than its share. A client that is ahead of the least served
one by more than its advance does not run.

An advance is a few times the cost of a client's most expensive job: a shared prefix is computed once and makes the jobs behind it
cheap, while clients that took turns job by job would evict each other's prefixes. Of two clients that begin together and keep
waiting, neither is ever ahead of the other by more than its advance and one job.
"""

from __future__ import annotations

from collections.abc import Mapping

from sgl_prefill.core.lazy_heap import LazyHeap

# A client whose prefix was evicted computes it again once per advance: at most a quarter of the service is lost to that.
ADVANCE_JOBS = 4.0
LITTLE = 1 / 8  # of the least advance: a new client's job of this cost goes first


class Shares:
    """Counters of clients, in any unit of cost; each method takes O(log n) of the waiting clients.

    Args:
        least_advance: how far ahead of the least served any client may be and still run.
    """

    def __init__(self, least_advance: float) -> None:
        assert least_advance >= 0
        self.least_advance = least_advance
        self._time = 0.0
        self._present: dict[str, bool] = {}  # waiting clients; True once served since they began to wait
        self._served: dict[str, float] = {}
        self._largest: dict[str, float] = {}  # cost of the most expensive job of each client
        self._waiting: LazyHeap[str] = LazyHeap()  # waiting clients by their counter
        self._held_back: LazyHeap[str] = (
            LazyHeap()
        )  # waiting clients that are ahead, by the counter at which they may run
        self._absent: LazyHeap[str] = LazyHeap()  # clients that left while ahead of the virtual time, by their counter

    def begin(self, client: str) -> None:
        """Adds a client that begins to wait."""
        self._absent.discard(client)
        self._present[client] = False
        self.restore({client: max(self._served.get(client, self._time), self._time)})

    def end(self, client: str) -> None:
        """Removes a client without waiting jobs. Its counter is kept while it is ahead of the virtual time."""
        self.pass_over(client)
        del self._present[client]
        self._absent.put(client, self._served[client])
        while (first := self._absent.first()) is not None and self._served[first] <= self._time:
            self._absent.discard(first)
            del self._served[first]
            self._largest.pop(first, None)

    def charge(self, client: str, cost: float) -> None:
        """Adds a cost to the counter of a waiting client."""
        self._time += cost / len(self._present)
        self._present[client] = True
        self._largest[client] = max(self._largest.get(client, 0.0), cost)
        self.restore({client: self._served[client] + cost})

    def pass_over(self, client: str) -> None:
        """Treats a client as not waiting, until `restore`."""
        self._waiting.discard(client)
        self._held_back.discard(client)

    def restore(self, served: Mapping[str, float]) -> None:
        """Sets the counters of waiting clients (forecasts change and reset them)."""
        for client, amount in served.items():
            self._served[client] = amount
            self._waiting.put(client, amount)
            if client in self._held_back:
                self.hold_back(client)

    def served(self, client: str) -> float:
        return self._served[client]

    def is_new(self, client: str) -> bool:
        """Tells whether a waiting client has not been served since it began to wait."""
        return not self._present[client]

    @property
    def little(self) -> float:
        """Largest cost of a new client's job that goes first: the others lose little by it."""
        return self.least_advance * LITTLE

    def advance(self, client: str) -> float:
        """How far ahead of the least served client this client may be and still run."""
        return max(self.least_advance, ADVANCE_JOBS * self._largest.get(client, 0.0))

    def may_run(self, client: str) -> bool:
        """Tells whether a waiting client is within its advance."""
        first = self._waiting.first()
        return first is None or self._served[client] <= self._served[first] + self.advance(client)

    def hold_back(self, client: str) -> None:
        """Marks a waiting client as skipped; `let_go` returns it once its advance allows it to run."""
        self._held_back.put(client, self._served[client] - self.advance(client))

    def let_go(self) -> list[str]:
        """Returns the skipped clients that may run again."""
        found = []
        while (first := self._held_back.first()) is not None and self.may_run(first):
            self._held_back.discard(first)
            found.append(first)
        return found
