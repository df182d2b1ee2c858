"""The policy in a real scheduler, without a server; in processes of its own, like `memory_child`."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from sgl_prefill.port import loop
from tests.integration.memory_child import largest_difference, prompt, start
from tests.support import toy_policy
from tests.support.in_process import InProcessScheduler


def order(folder: Path) -> dict[str, Any]:
    """Figure 5; a bound on waiting; a clock that jumps; a cache change that reverses the order; cancellation; deadlines."""
    config = {"fairness_lambda": 0.0, "max_queue_s": 100.0, "pack_step_tokens": 0, "sharers": "ignore"}
    engine = start(folder, "llama", config=config)
    return {
        "figure_5": figure_5(engine),
        "starvation": starvation(engine),
        "backwards": [order_of_three(engine, seconds) for seconds in (0.0, -1e6)],
        "reversed": reversed_order(engine),
        "cancelled": cancelled(engine),
        "deadlines": deadlines(engine),
        "while_a_step_runs": while_a_step_runs(engine),
        "told": told(engine),
        "newest_first": newest_first(folder),
        "credit": [credit(folder, fairness_lambda) for fairness_lambda in (0.0, 500.0)],
    }


def figure_5(engine: InProcessScheduler) -> dict[str, Any]:
    """A < C < B < D; A and D share 80 tokens, B and C others; 160 slots hold one request."""
    engine.set_durable(160)
    rng = random.Random(5)
    prefixes = {"ad": prompt(rng, 80), "bc": prompt(rng, 80)}
    jobs = {"A": ("ad", 100), "B": ("bc", 140), "C": ("bc", 120), "D": ("ad", 160)}
    rids = {engine.submit([*prefixes[key], *prompt(rng, n - 80)]): name for name, (key, n) in jobs.items()}
    engine.run_all()
    hits = {name: engine.has_answer(rid) and engine.answer(rid).cached_tokens for rid, name in rids.items()}
    return {"order": "".join(rids[rid] for rid in engine.answered), "hits": hits}


def while_a_step_runs(engine: InProcessScheduler) -> dict[str, Any]:
    """Three sharers of what runs, and a prompt shorter than they were without it, come with a flush of the cache."""
    from sglang.srt.managers.io_struct import FlushCacheReqInput
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.scheduler_components.request_receiver import SchedulerRequestReceiver

    engine.set_durable(2000)
    rng = random.Random(9)
    shared = prompt(rng, 300)
    rids = {engine.submit([*shared, *prompt(rng, 10)]): "first"}
    come = {
        name: engine.message(tokens)
        for name, tokens in (
            *((f"sharer {number}", [*shared, *prompt(rng, 10 + number)]) for number in range(3)),
            ("short", prompt(rng, 100)),
        )
    }
    rids |= {message.rid: name for name, message in come.items()}
    socket: list[Any] = []
    seen: dict[str, Any] = {}
    run_batch, processor = Scheduler.run_batch, type(engine.scheduler.batch_result_processor)
    process = processor.process_batch_result_prefill

    def launching(scheduler: Scheduler, batch: Any, *rest: Any) -> Any:
        if not seen:
            socket.extend([*come.values(), FlushCacheReqInput(), engine.message(prompt(rng, 5))])
        return run_batch(scheduler, batch, *rest)

    def reading(*arguments: Any, **options: Any) -> Any:
        seen.setdefault("waiting_when_the_result_is_read", len(engine.live.policy.waiting))
        return process(*arguments, **options)

    def pulled(_: Any) -> list[Any]:
        found = list(socket)
        socket.clear()
        return found

    with (
        mock.patch.object(SchedulerRequestReceiver, "_pull_raw_reqs", pulled),
        mock.patch.object(Scheduler, "run_batch", launching),
        mock.patch.object(processor, "process_batch_result_prefill", reading),
    ):
        engine.step()
        left = engine.scheduler.request_receiver.recv_requests()
        engine.run_all()
    return {
        **seen,
        "left_for_sglang": [type(message).__name__ for message in left],
        "order": [rids[rid] for rid in engine.answered],
        "cached": {rids[rid]: engine.answer(rid).cached_tokens for rid in list(engine.answered)},
    }


def told(engine: InProcessScheduler) -> dict[str, Any]:
    """What the HTTP process is told of 20 who wait, and whether they were looked at for it."""
    from sglang.srt.managers.schedule_batch import Req

    engine.flush()
    scheduler, rng = engine.scheduler, random.Random(10)
    for n_tokens in range(20, 40):
        engine.submit(prompt(rng, n_tokens))
    written: list[Any] = []
    looked_at: list[Any] = []
    length = Req.seqlen.fget

    def seqlen(req: Any) -> int:
        looked_at.append(req)
        found: int = length(req)
        return found

    writer = SimpleNamespace(write=written.append, publish_counter=0, publish_interval=1)
    with (
        mock.patch.object(scheduler, "load_snapshot_writer", writer),
        mock.patch.object(Req, "seqlen", property(seqlen)),
    ):
        scheduler.publish_load_snapshot(force=True)
        n_looked_at = len(looked_at)
        expected = scheduler.load_inquirer.get_loads()
    engine.run_all()
    names = ("num_waiting_reqs", "num_total_tokens", "num_waiting_uncached_tokens")
    return {
        "looked_at": n_looked_at,
        "told": [getattr(written[0], name) for name in names],
        "sglangs": [getattr(expected, name) for name in names],  # the last: rounded for each request
        "answered": len(engine.answered),
    }


def starvation(engine: InProcessScheduler) -> dict[str, Any]:
    """One long request under an endless stream of short ones: taken as soon as it is overdue, and not before."""
    engine.set_durable(2000)
    rng = random.Random(6)
    long = engine.submit(prompt(rng, 1500))
    n_short = 0
    with clock_ahead(0.0) as clock:
        for n_steps in range(60):
            clock.seconds = 0.0 if n_steps < 40 else 101.0
            for _ in range(2):
                engine.submit(prompt(rng, 10))
            engine.step()
            if engine.has_answer(long):
                break
            n_short += 1
    engine.run_all()
    engine.flush()
    return {"short_ones_before": n_short}


def order_of_three(engine: InProcessScheduler, jump_s: float) -> str:
    """The clock jumps between the first step and the others."""
    rng = random.Random(7)
    engine.flush()
    rids = {engine.submit(prompt(rng, n)): name for name, n in (("L", 600), ("M", 400), ("S", 200))}
    with clock_ahead(0.0) as clock:
        engine.step()
        clock.seconds = jump_s
        engine.run_all()
    return "".join(rids[rid] for rid in engine.answered)


def reversed_order(engine: InProcessScheduler) -> str:
    """`long` would run after `short`, until the prompt that runs first caches most of it."""
    rng = random.Random(8)
    engine.flush()
    first = prompt(rng, 250)
    named = {"first": first, "short": prompt(rng, 300), "long": [*first, *prompt(rng, 200)]}
    rids = {engine.submit(tokens): name for name, tokens in named.items()}
    engine.run_all()
    return " ".join(rids[rid] for rid in engine.answered)


def cancelled(engine: InProcessScheduler) -> dict[str, Any]:
    """A client that leaves gives its place up at once, and its prompt is never computed."""
    rng = random.Random(9)
    engine.flush()
    gone, stays = prompt(rng, 100), prompt(rng, 200)
    rid, other = engine.submit(gone), engine.submit(stays)
    engine.cancel(rid)
    engine.step()
    cached = engine.ask([*gone, 7]).cached_tokens
    return {"other_ran_first": engine.answered[0] == other, "cached_of_it": cached}


def deadlines(engine: InProcessScheduler) -> dict[str, Any]:
    """Refused on arrival, met, and passed in the queue."""
    rng = random.Random(10)
    engine.flush()
    live = engine.live
    assert live.predictor is not None
    live.predictor.drift.__init__()  # type: ignore[misc]  # earlier scenarios were slow for other reasons
    for _ in range(20):
        engine.submit(prompt(rng, 1000))
    refused = engine.submit(prompt(rng, 1500), deadline_ms=10 * live.predictor.model(1000, 0))
    met = engine.submit(prompt(rng, 50), deadline_ms=60_000.0)
    late = engine.submit(prompt(rng, 1400), deadline_ms=60_000.0)
    engine.step()
    with clock_ahead(61.0):
        engine.run_all()
    n_left = len(live.policy.waiting), live.n_pending_tokens
    sharers = prompt(rng, 1000)
    group = [engine.submit([*sharers, *prompt(rng, 10)]) for _ in range(5)]
    assert engine.parts.steps.scheduling is not None
    engine.parts.steps.scheduling.follow(engine.scheduler.waiting_queue)
    forecast = live.policy.forecast(list(live.policy.waiting)[-1])
    assert forecast is not None
    model = live.predictor.model
    shared_ms, apart_ms = (
        live.predictor.ms(model.work(5, 5, model.tokens_ms(1010, 0) + 4 * model.tokens_ms(1010, n_cached)))
        for n_cached in (1000, 0)
    )
    engine.run_all()
    assert all(engine.has_answer(rid) for rid in group)
    return {
        "refused": engine.refusals[refused],
        "met": engine.answer(met).finish_reason["type"],
        "late": engine.refusals[late],
        "n_left": n_left,
        "burst_ms": forecast.ms,
        "shared_ms": shared_ms,
        "apart_ms": apart_ms,
        "n_before": forecast.n_before,
    }


def newest_first(folder: Path) -> str:
    """The policy that STRUCTURE.md shows."""
    engine = start(folder, "llama", config={"scheduling": toy_policy.register(), "pack_step_tokens": 0})
    rng = random.Random(12)
    rids = {engine.submit(prompt(rng, n)): name for name, n in (("A", 30), ("B", 20), ("C", 40))}
    engine.run_all()
    return "".join(rids[rid] for rid in engine.answered)


def credit(folder: Path, fairness_lambda: float) -> str:
    """Of two that wait, the one of 301 tokens came before 30 others and so some milliseconds before the one of 300."""
    config = {"fairness_lambda": fairness_lambda, "pack_step_tokens": 0, "jct_model": "cache-miss"}
    engine = start(folder, "llama", config=config)
    rng = random.Random(13)
    rids = {engine.submit(prompt(rng, 301)): "older"}
    for _ in range(30):
        engine.submit(prompt(rng, 1000))
    rids[engine.submit(prompt(rng, 300))] = "shorter"
    engine.run_all()
    return rids[next(rid for rid in engine.answered if rid in rids)]


@contextmanager
def clock_ahead(seconds: float) -> Iterator[SimpleNamespace]:
    """The policy's clock, and nobody else's, runs so many seconds ahead; they may be changed on the way."""
    clock = SimpleNamespace(seconds=seconds)
    with mock.patch.object(loop, "time", SimpleNamespace(perf_counter=lambda: time.perf_counter() + clock.seconds)):
        yield clock


PACKED_FAMILIES = ("llama", "gemma2", "qwen2-moe")


def packing(folder: Path) -> dict[str, Any]:
    """Of each family, one scheduler after the other."""
    return {family: packed(folder, family) for family in PACKED_FAMILIES}


def packed(folder: Path, family: str) -> dict[str, Any]:
    """Packed steps give what the requests give alone, in fewer steps, and compute nothing twice."""
    config = {"fairness_lambda": 0.0, "pack_step_tokens": 300}
    engine = start(folder, family, config=config, prefill_max_requests=16, max_running_requests=16)
    rng = random.Random(11)
    profiles = [prompt(rng, 150), prompt(rng, 220)]
    prompts = [[*profiles[n % 2], *prompt(rng, 5 + n)] for n in range(20)]
    prompts += [prompt(rng, n) for n in (40, 90, 700)]
    results: dict[str, Any] = {"aborted": aborted_leader(engine)}
    for durable_tokens in (2000, 260, 100):
        engine.set_durable(durable_tokens)
        alone = [one_at_a_time(engine, tokens) for tokens in prompts]
        engine.set_durable(durable_tokens)
        engine.poison_scratch()
        rids = [engine.submit(tokens) for tokens in prompts]
        n_steps, most = 0, 0
        while engine.scheduler.waiting_queue:
            engine.poison_scratch()
            n_before = len(engine.answered)
            engine.step()
            engine.check_slots()
            n_steps, most = n_steps + 1, max(most, len(engine.answered) - n_before)
        engine.run_all()
        answers = [engine.answer(rid) for rid in rids]
        results[str(durable_tokens)] = {
            "steps": n_steps,
            "most": most,
            "worst": max(
                largest_difference(one.label_logprobs, other) for one, other in zip(answers, alone, strict=True)
            ),
            "computed": sum(len(t) - one.cached_tokens for t, one in zip(prompts, answers, strict=True)),
            "least": sum(map(len, profiles)) + sum(5 + n for n in range(20)) + 830,
            "with_tail": sum(one.meta["evicted_tokens"] > 0 for one in answers),
        }
    return results


def aborted_leader(engine: InProcessScheduler) -> dict[str, Any]:
    """Five requests of one new prefix, the first of which is cancelled while its step runs; again as often as slots last."""
    rng = random.Random(12)
    shared = prompt(rng, 120)
    prompts = [[*shared, *prompt(rng, 10 + n)] for n in range(5)]
    alone = [one_at_a_time(engine, tokens) for tokens in prompts]
    engine.set_durable(400)
    worst, run = 0.0, engine.hybrid.run
    for _ in range(4):
        engine.flush()
        rids = [engine.submit(tokens) for tokens in prompts]

        def cancelling(*args: Any, first: str = rids[0]) -> Any:
            engine.cancel(first)
            return run(*args)

        with mock.patch.object(engine.hybrid, "run", cancelling):
            engine.step()
        engine.check_slots()
        engine.run_all()
        engine.check_slots()
        answers = [engine.answer(rid) for rid in rids]
        others = zip(answers[1:], alone[1:], strict=True)
        worst = max(worst, *(largest_difference(one.label_logprobs, other) for one, other in others))
    return {"worst": worst, "cached": [one.cached_tokens for one in answers]}


def one_at_a_time(engine: InProcessScheduler, tokens: list[int]) -> list[float]:
    engine.flush()
    return engine.ask(tokens).label_logprobs


SCENARIOS: dict[str, Callable[[Path], Any]] = {"order": order, "packing": packing}
