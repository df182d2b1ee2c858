"""How many bytes of host tensors are alive at once, counted by PyTorch's own allocator: exact, unlike resident memory."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import accumulate

from torch.autograd.profiler import profile


def peak_bytes(run: Callable[[], None]) -> int:
    """Returns the highest sum of tensors that `run` allocates and has not yet freed. Tensors that were there before do not
    count.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it reports a machine without a GPU as an error
    with profile(profile_memory=True) as profiled:
        run()
    events = [event for event in profiled.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    alive_bytes: list[int] = list(accumulate((event.nbytes() for event in events), initial=0))
    return max(alive_bytes)
