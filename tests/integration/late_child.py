"""Scenarios of steps that are launched behind one that has not run yet."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sgl_prefill.port.launched import Pipeline
from tests.integration.memory_child import largest_difference, prompt, start
from tests.support.in_process import InProcessScheduler
from tests.support.late_device import LateDevice

N_REQUESTS = 500


@contextmanager
def late(engine: InProcessScheduler) -> Iterator[tuple[LateDevice, Pipeline]]:
    device = LateDevice(engine)
    engine.parts.steps.pipeline = pipeline = Pipeline(device)
    yield device, pipeline
    engine.parts.steps.pipeline = None
    del engine.scheduler.model_worker.forward_batch_generation


def launched(folder: Path, n_prompts: int = 300) -> dict[str, Any]:
    config = {"fairness_lambda": 0.0, "pack_step_tokens": 300, "jct_model": "fitted"}
    engine = start(folder, "llama", config=config, prefill_max_requests=16, max_running_requests=16)
    return {"storm": [storm(engine, n_tokens) for n_tokens in (2000, 300)], "order": order(engine, n_prompts)}


def storm(engine: InProcessScheduler, durable_tokens: int) -> dict[str, Any]:
    """Bursts of hits, misses, generations, requests that leave, and flushes of the cache, against each request alone."""
    engine.set_durable(durable_tokens)
    rng = random.Random(durable_tokens)
    prefixes = [prompt(rng, n_tokens) for n_tokens in (20, 64, 100, 150, 220)]
    asked: dict[str, tuple[list[int], dict[str, Any]]] = {}
    left = set()
    with late(engine) as (device, pipeline):
        while len(asked) < N_REQUESTS:
            burst = []
            for _ in range(rng.choice((1, 2, 30, 60))):
                tokens = [*rng.choice(prefixes), *prompt(rng, rng.choice((1, 5, 15, 60)))]
                options: dict[str, Any] = {"max_new_tokens": rng.choices((0, 1, 4), (60, 60, 1))[0]}
                burst.append(engine.submit(tokens, **options))
                asked[burst[-1]] = tokens, options
            for _ in range(rng.randrange(8)):
                engine.step()
            if rng.random() < 0.2:
                left.add(rid := rng.choice(burst))
                pipeline.finish()  # as a message that is no request does
                engine.cancel(rid)
            if rng.random() < 0.3:
                engine.run_all()
                engine.check_slots()
                engine.scheduler.flush_cache(empty_cache=False)
        engine.run_all()
        engine.check_slots()
    answers = {rid: engine.answer(rid) for rid in asked if engine.has_answer(rid)}
    alone = {rid: engine.ask(asked[rid][0], **asked[rid][1]) for rid in answers}
    return {
        "unanswered": len(set(asked) - set(answers) - left),
        "not_a_number": sum(not all(map(math.isfinite, one.label_logprobs)) for one in answers.values()),
        "worst": max(largest_difference(one.label_logprobs, alone[rid].label_logprobs) for rid, one in answers.items()),
        "passes": device.n_run,
        "behind": device.n_behind,
    }


def order(engine: InProcessScheduler, n_prompts: int) -> dict[str, Any]:
    """What is chosen, and found in the cache, where steps are launched late and where each is awaited."""
    rng = random.Random(1)
    engine.set_durable(700)
    shared = [prompt(rng, n_tokens) for n_tokens in (90, 140, 200)]
    prompts = [[*rng.choice(shared), *prompt(rng, rng.randrange(5, 290))] for _ in range(n_prompts)]
    found = []
    for is_late in (False, True):
        engine.flush()
        if is_late:
            with late(engine) as (device, _):
                found.append(ran(engine, prompts))
        else:
            found.append(ran(engine, prompts))
    same = sum(one == other for one, other in zip(*found, strict=True))
    return {"requests": n_prompts, "differ": n_prompts - same, "behind": device.n_behind, "passes": device.n_run}


def ran(engine: InProcessScheduler, prompts: list[list[int]]) -> list[tuple[int, int]]:
    """The requests in the order of their answers, with their cached tokens."""
    number = {engine.submit(tokens): place for place, tokens in enumerate(prompts)}
    engine.run_all()
    return [(number[rid], engine.answer(rid).cached_tokens) for rid in list(engine.answered)]


SCENARIOS: dict[str, Callable[[Path], Any]] = {"launched": launched}
