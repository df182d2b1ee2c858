"""A step's attention in two parts: each group's prefix, read once for all its queries, and each request's own positions.

    positions of a request       0 ... shared          shared ... cached          cached ... end
    who else reads them          its group             none of this group         none: its new tokens
    part                         shared, not causal    own, causal from the last query backwards

The softmax over both is the average of the two outputs, weighted by their sums of exponentials, which kernels return as a
logarithm (log-sum-exp, LSE). This module works on numbers of the host only.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sgl_prefill.core.kv_plan import ceil_to
from sgl_prefill.core.shared_groups import Group, shared_groups

# Groups are found from the slot at the end of each piece of so many positions, and share whole pieces. The pieces of 50 requests
# with 14,000 cached positions are 44 kB that come from the device in one copy, where all their slots would be 2.8 MB.
PIECE_TOKENS = 64

# Set once tests/gpu/test_shared_prefix.py has compared the answers on a card. Until then `auto` is `off`.
AUTO_IS_PROVED = False

# What two parts save and cost on an H100: arithmetic (GPU.md), not measured.
SAVED_BYTES_PER_S = 10e12  # K and V that need not be read again: half a tile of products each
MERGED_BYTES_PER_S = 3.35e12  # outputs go through the card's memory
FIXED_COST_S = 20e-6  # of a layer: two launches more, and its share of the plans
OUTPUTS_MOVED = 4  # the shared part's is written, the merge reads both and writes one

MIN_SHARED_TOKENS = 1_024  # of a prefix, for `auto`: 50 that share less save less than the fixed cost
MOST_SHARED_QUERY_TOKENS = 16_384  # 128 MiB more output in an 8B model, which no profile run has seen


class LayerBytes(NamedTuple):
    """Bytes of one layer on one rank."""

    kv_position: int  # K and V of a position
    output_token: int  # attention's output of a token


class Part(NamedTuple):
    """What one kernel computes, in rows of neighbouring queries."""

    requests: list[int]  # whose slots a row reads
    query_tokens: list[int]
    first_positions: list[int]  # of what it reads
    kv_tokens: list[int]  # that it reads; none: its output counts for nothing


class TwoParts(NamedTuple):
    """Which queries read which positions."""

    own: Part  # a row a request, of all queries: everything behind the shared part
    shared: Part  # a row for neighbours of one group; one that reads nothing for those of none between them
    first_shared_query: int  # in the step; queries outside the shared part are in no group

    @property
    def n_shared_queries(self) -> int:
        return sum(self.shared.query_tokens)

    @property
    def shared_queries(self) -> slice:
        """Returns the queries of the shared part: only these are merged."""
        return slice(self.first_shared_query, self.first_shared_query + self.n_shared_queries)

    @property
    def saved_positions(self) -> int:
        """Counts the positions that are read once instead of once per request."""
        return sum(self.own.first_positions) - sum(self.shared.kv_tokens)


def asked_for(switch: str) -> str:
    """Returns the switch on a GPU: `auto` means `off` until AUTO_IS_PROVED."""
    return "off" if switch == "auto" and not AUTO_IS_PROVED else switch


def are_worth_it(parts: TwoParts, layer: LayerBytes) -> bool:
    """Tells whether two parts are expected to take less time than each request on its own: the whole of `auto`."""
    saved_s = parts.saved_positions * layer.kv_position / SAVED_BYTES_PER_S
    merge_s = parts.n_shared_queries * OUTPUTS_MOVED * layer.output_token / MERGED_BYTES_PER_S
    return saved_s >= FIXED_COST_S + merge_s


def piece_tokens(page_tokens: int) -> int:
    """Returns how many positions a piece has: whole KV pages."""
    return ceil_to(PIECE_TOKENS, page_tokens)


def groups_by_pieces(
    last_slots: NDArray[np.int32], cached_tokens: Sequence[int], piece: int, min_shared_tokens: int
) -> list[Group]:
    """Groups requests by the slots at the ends of their pieces.

    last_slots: [requests, pieces]; what stands behind a request's cached positions is not looked at.
    """
    groups = shared_groups(
        lambda request, position: int(last_slots[request, position]),
        [n_cached // piece for n_cached in cached_tokens],
        max(ceil_to(min_shared_tokens, piece) // piece, 1),
    )
    return [group._replace(shared_tokens=piece * group.shared_tokens) for group in groups]


def divide(groups: Sequence[Group], cached_tokens: Sequence[int], new_tokens: Sequence[int]) -> TwoParts | None:
    """Divides a step; None where no requests share a prefix.

    The queries of a row lie side by side, so members of a group that are not neighbours read the prefix once per run of
    neighbours. The order of the requests changes only what is saved.
    """
    group_of = {member: group for group in groups for member in group.members}
    shared_tokens = [group_of[request].shared_tokens for request in range(len(new_tokens))]
    sharing = [request for request, n_shared in enumerate(shared_tokens) if n_shared]
    if not sharing:
        return None
    shared = Part([], [], [], [])
    for _, run in itertools.groupby(
        range(sharing[0], sharing[-1] + 1),
        lambda request: group_of[request].members if shared_tokens[request] else None,
    ):
        members = list(run)
        shared.requests.append(members[0])
        shared.query_tokens.append(sum(new_tokens[request] for request in members))
        shared.first_positions.append(0)
        shared.kv_tokens.append(shared_tokens[members[0]])
    ends = [n_cached + n_new for n_cached, n_new in zip(cached_tokens, new_tokens, strict=True)]
    own_tokens = [end - n_shared for end, n_shared in zip(ends, shared_tokens, strict=True)]
    own = Part(list(range(len(new_tokens))), list(new_tokens), shared_tokens, own_tokens)
    return TwoParts(own, shared, sum(new_tokens[: sharing[0]]))
