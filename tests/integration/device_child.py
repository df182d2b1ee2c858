"""What runs in a process of its own (`children.run_scenario`): starts of SGLang's scheduler on a GPU that is none.

Everything is real but the card: tensors lie in host memory, SGLang believes in a host, and only this package believes in a GPU.
"""

from __future__ import annotations

import gc
import random
from pathlib import Path
from typing import Any

from sgl_prefill.errors import SglPrefillError
from tests.integration import memory_child
from tests.support.fake_cuda_driver import FakeCard, installed
from tests.support.in_process import InProcessScheduler

MIB = 1 << 20
CARD_BYTES = 2048 * MIB
MARGIN_BYTES = 533 * MIB
EVERY = 9  # of the allocations of a start one fails
N_TOKENS = 777


def start(folder: Path, **config: Any) -> InProcessScheduler:
    options = {"memory_budget_gb": None, "max_input_length": 900, **config}
    return memory_child.start(folder, "llama", config=options, max_total_tokens=None, mem_fraction_static=0.9)


def card_with(free_bytes: int, fail_at: int | None = None) -> FakeCard:
    return FakeCard(CARD_BYTES, held_bytes=CARD_BYTES - free_bytes, fail_at=fail_at)


def device(folder: Path) -> dict[str, Any]:
    """Answers on 64 MiB beyond the margin, then on what leaves a prompt no room; then starts that run out of memory."""
    text = memory_child.prompt(random.Random(0), N_TOKENS)
    on_host = memory_child.start(folder, "llama").ask(text, label_ids=memory_child.LABELS)
    result: dict[str, Any] = {"on_host": on_host.label_logprobs}
    for name, room_bytes in (("roomy", 64 * MIB), ("tight", 7 * MIB // 10)):
        with installed(card_with(MARGIN_BYTES + room_bytes)) as card:
            engine = start(folder)
            answers = [engine.ask(text, label_ids=memory_child.LABELS) for _ in range(2)]
            engine.check_slots()
            result[name] = {
                "answers": [answer.label_logprobs for answer in answers],
                "cached": answers[1].cached_tokens,
                "kept": answers[0].meta["kept_tokens"],
                "memory": engine.parts.record.shown()["memory"],
                "free_bytes": card.free_bytes,
                "n_allocations": card.n_allocations,
            }
            engine.model.close()
            result[name]["is_empty"] = card.is_empty
    gc.collect()
    gc.freeze()
    result["failures"] = [fails(folder, at) for at in range(1, result["tight"]["n_allocations"], EVERY)]
    return result


def fails(folder: Path, fail_at: int) -> dict[str, Any]:
    """A start whose allocation of this number is refused."""
    with installed(card_with(MARGIN_BYTES + 2 * MIB, fail_at)) as card:
        message = None
        try:
            start(folder).model.close()
        except SglPrefillError as error:
            message = f"{type(error).__name__}: {error}"
        return {"message": message, "is_empty": card.is_empty}


SCENARIOS = {"device": device}
