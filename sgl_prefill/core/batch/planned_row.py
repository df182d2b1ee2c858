"""What a policy knows of a row of a job."""

from __future__ import annotations

from typing import NamedTuple


class PlannedRow(NamedTuple):
    """What the plan says of one row. All tokens are counted from its beginning."""

    place: int  # in the order of the plan
    n_reused_tokens: int  # that a row before it has computed
    n_shared_tokens: int  # that a row after it reuses
    end: int  # the rows from the next place to before this one reuse more than this row does: they wait for it
