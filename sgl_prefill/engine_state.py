"""Everything that one process of ours knows of itself. Made at activation, and handed to what needs it."""

from __future__ import annotations

import dataclasses
import importlib.metadata
from typing import TYPE_CHECKING, Any

from sgl_prefill.config import PrefillConfig
from sgl_prefill.core import memory_plan

if TYPE_CHECKING:
    from sgl_prefill.core.jct import FittedJct
    from sgl_prefill.core.memory_plan import MemoryPlan
    from sgl_prefill.core.packing import StepSize
    from sgl_prefill.hybrid.body import HybridBody
    from sgl_prefill.port.answer_trees import AnswerRows
    from sgl_prefill.port.dashboard import Watch
    from sgl_prefill.port.prefork import Launcher
    from sgl_prefill.port.scheduler import SchedulerPort

SUM_OVER_RANKS = "sglang.inplace_all_reduce"  # in a recorded body

# Of the dictionary that the scheduler process sends to the HTTP process once it has started.
RECORD_KEY = "sgl_prefill"
PACKS_WEIGHTS_KEY = "sgl_prefill_packs_weights"
ANSWERS_KEY = "sgl_prefill_no_long_answers"  # why answers of several tokens cannot be computed, or None


@dataclasses.dataclass
class EngineState:
    """What one process knows. What the start finds out is None until it has; in the HTTP and detokenizer processes most
    remains so."""

    config: PrefillConfig
    hooks: list[str] = dataclasses.field(default_factory=list)  # targets that were verified to be in place
    is_of_server: bool = False  # in the HTTP process of our launcher, which is ours to end; else it is a user's program
    launcher: Launcher | None = None  # in the processes that it started
    memory_beyond_weights_bytes: int | None = None
    hybrid: HybridBody | None = None  # None where SGLang's own layers serve
    cpu_kernel: dict[str, Any] | None = None
    packed_weights: dict[str, Any] | None = None
    stable_answers: dict[str, Any] | None = None  # what was checked for them; None where they were not asked for
    memory_plan: MemoryPlan | None = None
    parity_differences: dict[str, float] | None = None
    jct_ms: FittedJct | None = None
    step_size: StepSize | None = None
    answer_rows: AnswerRows | None = None  # None where answers of several tokens cannot be computed
    runs_eagerly: bool = False  # no step is replayed from a CUDA graph: while the start compares and measures paths
    scheduling: SchedulerPort | None = None  # None under SGLang's own scheduler
    watch: Watch | None = None  # None until somebody looks at the dashboard
    n_ranks: int = 1  # of tensor parallelism
    n_steps_when_memory_was_released: int = 0

    def _exchanges(self) -> dict[str, int]:
        """Counts how often ranks wait for each other in a pass over one chunk; nothing where SGLang's layers serve."""
        if self.hybrid is None:
            return {}
        split = self.hybrid.split
        return {"sums_a_chunk": split.count_of(SUM_OVER_RANKS), "gathers_a_chunk": split.n_reads(self.hybrid.shared)}

    def record(self) -> dict[str, Any]:
        """Makes the activation record, as /server_info shows it: which version with which options and hooks runs here, and what
        its start has found out."""
        found = {
            "memory_beyond_weights_bytes": self.memory_beyond_weights_bytes,
            "cpu_kernel": self.cpu_kernel,
            "packed_weights": self.packed_weights,
            "stable_answers": self.stable_answers,
            "memory": None if self.memory_plan is None else memory_plan.shown(self.memory_plan),
            "parity_gate": self.parity_differences,
            "jct_model": None if self.jct_ms is None else self.jct_ms._asdict(),
            "ranks": None if self.n_ranks == 1 else {"count": self.n_ranks, **self._exchanges()},
            "step_size": None if self.step_size is None else self.step_size._asdict(),
        }
        return {
            "version": importlib.metadata.version("sgl-prefill"),
            "sglang_version": importlib.metadata.version("sglang"),
            "config": dataclasses.asdict(self.config),
            "hooks": self.hooks,
            **{name: fact for name, fact in found.items() if fact is not None},
        }
