"""Times of single steps in this process, as one JSON line: python benchmarks/step_profile/steps.py [--quick]

What runs is chosen by the environment (PREFILL_CPU_KERNEL), so that run.py starts one process for each setting.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "2")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from benchmarks import ceiling as machine
from benchmarks import shapes
from benchmarks.harness import profile
from sgl_prefill.config import PrefillConfig
from sgl_prefill.examples import demo_model
from tests.support.in_process import InProcessScheduler

N_STEPS, QUICK_STEPS, N_WARM_UP = 20, 3, 2
LABEL_IDS = (100, 200, 300)


class Step(NamedTuple):
    """Requests of one forward pass, behind one cached prefix."""

    name: str
    model: str | None  # of benchmarks/models; None: the demo model
    n_requests: int
    own_tokens: int  # of each request
    cached_tokens: int


STEPS = (
    Step("8 x 20 behind 290", None, 8, 20, 290),
    Step("8 x 64 behind 1200", None, 8, 64, 1200),
    Step("16 x 15 behind 1400, 4 layers of 512", "llama-small", 16, 15, 1400),
    Step("one request of 20", None, 1, 20, 0),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    n_steps = QUICK_STEPS if parser.parse_args().quick else N_STEPS
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for model in dict.fromkeys(step.model for step in STEPS):
            scheduler = start(model, Path(scratch))
            rows += [measure(scheduler, step, n_steps) for step in STEPS if step.model == model]
        kernel = scheduler.parts.record.cpu_kernel
    print(json.dumps({"rows": rows, "ceiling": ceiling(), "cpu_kernel": kernel}))
    return 0


def start(model: str | None, scratch: Path) -> InProcessScheduler:
    folder = demo_model.ensure() if model is None else shapes.write(model, scratch / model)
    if model is not None:
        shapes.write_weights(folder)
    # All that wait go into one step, whatever the policy would have them do.
    config = PrefillConfig(pack_step_tokens=100_000, max_input_length=4000, memory_budget_gb=3)
    scheduler = InProcessScheduler(
        config,
        folder,
        dtype=shapes.DTYPE,
        context_length=4096,
        max_total_tokens=20_000,
        max_running_requests=64,
    )
    # Who uses a KV slot for the first time pays for its memory; measured is what comes after.
    pool = scheduler.scheduler.tp_worker.model_runner.token_to_kv_pool
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        buffer.zero_()
    return scheduler


def measure(scheduler: InProcessScheduler, step: Step, n_steps: int) -> dict[str, Any]:
    """Median milliseconds of a step from the waiting requests to what the detokenizer gets, and what it consists of."""
    rng = random.Random(0)
    scheduler.flush()
    prefix = shapes.token_ids(rng, step.cached_tokens)
    # Two requests that went on with the same token would find that one cached too.
    first_tokens = itertools.count(1000)
    if prefix:
        scheduler.ask([*prefix, next(first_tokens)], label_ids=LABEL_IDS)

    def one() -> float:
        prompts = [
            [*prefix, next(first_tokens), *shapes.token_ids(rng, step.own_tokens - 1)] for _ in range(step.n_requests)
        ]
        rids = [scheduler.submit(prompt, LABEL_IDS) for prompt in prompts]
        started = time.perf_counter()
        scheduler.step()
        seconds = time.perf_counter() - started
        # Raises KeyError where the step did not hold them all.
        cached = {scheduler.answer(rid).cached_tokens for rid in rids}
        assert cached == {step.cached_tokens}, cached
        scheduler.run_all()
        return seconds

    for _ in range(N_WARM_UP):
        one()
    seconds = [one() for _ in range(n_steps)]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
        profiled_s = one()
    with tempfile.TemporaryDirectory() as scratch:
        profiled.export_chrome_trace(str(Path(scratch) / "trace.json"))
        events = json.loads((Path(scratch) / "trace.json").read_text())["traceEvents"]
    operators_s = profile.by_group(events)
    operators_s[profile.BETWEEN] = profiled_s - sum(operators_s.values())
    return {
        "step": step.name,
        "ms": round(1000 * statistics.median(seconds), 3),
        "operator_calls": sum(event.get("cat") == "cpu_op" for event in events),
        **{f"{group}, ms": round(1000 * spent, 3) for group, spent in operators_s.items()},
        "work": work(scheduler, step),
    }


def work(scheduler: InProcessScheduler, step: Step) -> dict[str, int]:
    """Of one step: see `arithmetic`; and the bytes of weights that it reads."""
    config = scheduler.scheduler.tp_worker.model_config.hf_config.to_dict()
    found = arithmetic(config, step.n_requests, step.n_requests * step.own_tokens, step.n_requests * pairs(step))
    return {**found, "weight_bytes": (2 if shapes.DTYPE == "bfloat16" else 4) * weights(config)}


def pairs(step: Step) -> int:
    return step.own_tokens * step.cached_tokens + step.own_tokens * (step.own_tokens + 1) // 2


def arithmetic(config: dict[str, Any], n_requests: int, n_new_tokens: int, n_pairs: int) -> dict[str, int]:
    """Floating-point operations of matrix products and of attention.

    Args:
        config: of a Llama.
        n_pairs: of a query and a key that it attends to, over all requests.
    """
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    head_dim = config.get("head_dim") or hidden // heads
    of_head = hidden * config["vocab_size"]
    linear = 2 * ((weights(config) - of_head) * n_new_tokens + of_head * n_requests)
    return {"linear_flop": linear, "attention_flop": 4 * config["num_hidden_layers"] * heads * head_dim * n_pairs}


def weights(config: dict[str, Any]) -> int:
    """Elements of all matrices, the one of the logits once."""
    heads, kv_heads, hidden = config["num_attention_heads"], config["num_key_value_heads"], config["hidden_size"]
    head_dim = config.get("head_dim") or hidden // heads
    of_layer = hidden * (2 * heads + 2 * kv_heads) * head_dim + 3 * hidden * config["intermediate_size"]
    return int(config["num_hidden_layers"] * of_layer + hidden * config["vocab_size"])


def ceiling() -> dict[str, float]:
    """Measures what this machine reaches alone: a large matrix product in the dtype of all, and reading memory in a row."""
    memory = torch.zeros(64 << 20)  # 256 MiB of float32: more than caches hold
    read_s = machine.best_of(memory.sum, 5)
    return {
        "flop_per_s": machine.matrix_product_flop_per_s(),
        "read_bytes_per_s": memory.numel() * memory.element_size() / read_s,
    }


if __name__ == "__main__":
    sys.exit(main())
