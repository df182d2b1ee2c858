"""Which processes give way on a host, where a step wants all cores."""

from __future__ import annotations

import os

from sgl_prefill.startup.device import this_device

# A tenth of a core against a step. All threads of a step wait for its slowest one, some three hundred times: beside an HTTP
# process of the same priority that was busy, a step of 40 ms took up to 1.1 s.
NICENESS = 10


def give_way() -> None:
    """Lowers the priority of this process, and of the threads that it starts from now on. Called once, by its main thread."""
    if this_device().is_host:
        os.nice(NICENESS)
