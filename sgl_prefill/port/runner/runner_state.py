"""State that the hooks on SGLang's model runner share."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from sgl_prefill.startup.record import StartRecord

if TYPE_CHECKING:
    from sgl_prefill.hybrid.body import HybridBody
    from sgl_prefill.port.runner.branch_rows import BranchRows


@dataclasses.dataclass
class RunnerState:
    """Shared by the hooks on SGLang's model runner."""

    record: StartRecord
    hybrid: HybridBody | None = None  # None: the model runs in SGLang's layers
    branch_rows: BranchRows | None = None  # None: branches cannot be computed
    long_rope_tokens: int | None = None  # longest sequence that turns by short rotary factors; None: there is one kind
    has_followers: bool = False  # of the running pass: a request reads KV that another one of it writes
    runs_eagerly: bool = False  # no step is replayed from a CUDA graph, while the start compares and measures paths
