"""What the start of a scheduler process finds out, and its form in /server_info."""

from __future__ import annotations

import dataclasses
import importlib.metadata
from typing import Any

from sgl_prefill.config import PrefillConfig
from sgl_prefill.core import memory_plan
from sgl_prefill.core.jct import FittedJct
from sgl_prefill.core.memory_plan import MemoryPlan
from sgl_prefill.core.packing import StepSize

# Keys of the dictionary that the scheduler process sends to the HTTP process at its start.
RECORD_KEY = "sgl_prefill"
PACKS_WEIGHTS_KEY = "sgl_prefill_packs_weights"
ANSWERS_KEY = "sgl_prefill_no_long_answers"  # why answers of several tokens cannot be computed, or None


@dataclasses.dataclass
class StartRecord:
    """A fact is None until the start has found it; in the HTTP and detokenizer processes all of them stay None."""

    config: PrefillConfig
    hooks: list[str] = dataclasses.field(default_factory=list)  # targets that were verified to be in place
    memory_beyond_weights_bytes: int | None = None
    stepped_back: dict[str, str] = dataclasses.field(default_factory=dict)  # techniques that are off, and why
    model_notes: list[str] = dataclasses.field(default_factory=list)  # what SGLang ignores of the model's configuration
    cpu_kernel: dict[str, Any] | None = None
    packed_weights: dict[str, Any] | None = None
    stable_answers: dict[str, Any] | None = None  # what was checked for them; None: answers depend on their company
    unstable_answers: str | None = None  # why
    passes: dict[str, Any] | None = None  # which numbers of tokens run how
    memory_plan: MemoryPlan | None = None
    parity_differences: dict[str, float] | None = None
    jct_ms: FittedJct | None = None
    step_size: StepSize | None = None
    no_branches: str | None = None  # why the engine computes no branches and lets no request follow another
    ranks: dict[str, int] | None = None  # of tensor parallelism; None for one rank

    def shown(self) -> dict[str, Any]:
        found = {
            "memory_beyond_weights_bytes": self.memory_beyond_weights_bytes,
            "cpu_kernel": self.cpu_kernel,
            "packed_weights": self.packed_weights,
            "stable_answers": self.stable_answers,
            "unstable_answers": self.unstable_answers,
            "passes": self.passes,
            "memory": None if self.memory_plan is None else memory_plan.shown(self.memory_plan),
            "parity_gate": self.parity_differences,
            "jct_model": None if self.jct_ms is None else self.jct_ms._asdict(),
            "ranks": self.ranks,
            "step_size": None if self.step_size is None else self.step_size._asdict(),
        }
        return {
            "version": importlib.metadata.version("sgl-prefill"),
            "sglang_version": importlib.metadata.version("sglang"),
            "config": dataclasses.asdict(self.config),
            "hooks": self.hooks,
            "left_to_sglang": self.stepped_back,
            "model_notes": self.model_notes,
            **{name: fact for name, fact in found.items() if fact is not None},
        }
