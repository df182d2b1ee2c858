"""What runs in processes of its own (`children.run_scenario`): schedulers without a server.

SGLang keeps process-wide state, which the test process must not get.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from sgl_prefill.config import PrefillConfig
from sgl_prefill.core.branches import Asked, Branches, asked_of_label
from sgl_prefill.core.jct import FittedJct
from sgl_prefill.cpu.native.library import native
from sgl_prefill.errors import SglPrefillError
from sgl_prefill.port.runner import branch_rows
from sgl_prefill.port.runner.sglang_model import SglangModel
from sgl_prefill.startup import memory_profile, parity_gate
from tests.support import tiny_models
from tests.support.in_process import Answer, InProcessScheduler

LABELS = tuple(range(5, 25))
CHUNK = 64
DURABLE = 300
PLAIN = 10**9  # a chunk that no prompt exceeds


# What a start would measure, were these tests to depend on what else the machine does.
MACHINE = FittedJct(step_ms=5.0, miss_token_ms=0.05, pair_ms=1e-6, cached_token_ms=1e-4, request_ms=0.1)


def start(folder: Path, family: str, *, config: dict[str, Any] | None = None, **options: Any) -> InProcessScheduler:
    defaults: dict[str, Any] = {"hybrid_prefill": "on", "hybrid_chunk_tokens": CHUNK, "memory_budget_gb": 1}
    server = {"dtype": "float32", "max_total_tokens": 2000, **options}
    model = tiny_models.write(folder / family, family)
    return InProcessScheduler(PrefillConfig(**{**defaults, **(config or {})}), model, jct_ms=MACHINE, **server)


def prompt(rng: random.Random, n_tokens: int) -> list[int]:
    return [rng.randrange(30, 500) for _ in range(n_tokens)]


def replace_run(engine: InProcessScheduler, run: Callable[..., Any]) -> None:
    engine.hybrid.run = run  # type: ignore[method-assign]


@contextmanager
def chunks_of(engine: InProcessScheduler, n_tokens: int) -> Iterator[None]:
    engine.hybrid.chunk_tokens = n_tokens
    yield
    engine.hybrid.chunk_tokens = CHUNK


def largest_difference(left: list[float], right: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(left, right, strict=True))


def families(folder: Path) -> dict[str, Any]:
    """Each family: plain and whole against hybrid, evicting, and both, cold and behind a cached prefix."""
    return {family: one_family(folder, family) for family in tiny_models.FAMILIES}


@contextmanager
def unpacked() -> Iterator[None]:
    """A start within it leaves the model's weights as they are, so that SGLang's own layers can be asked too."""
    with mock.patch.object(SglangModel, "pack_weights", return_value=(None, None)):
        yield


@contextmanager
def sglangs_own_layers(engine: InProcessScheduler) -> Iterator[None]:
    serves_short, engine.hybrid.serves_short = engine.hybrid.serves_short, False
    with chunks_of(engine, PLAIN):
        yield
    engine.hybrid.serves_short = serves_short


def one_family(folder: Path, family: str) -> dict[str, Any]:
    with unpacked():
        engine = start(folder, family)
    rng = random.Random(0)
    long = prompt(rng, 777)
    sharer = [*long[:760], *prompt(rng, 20)]
    as_wide_as_a_weight = prompt(rng, 160)  # the MLP's width: a comparison of sizes would take it for the tokens
    runs: list[int] = []
    run = engine.hybrid.run

    def counted(*arguments: Any) -> torch.Tensor:
        runs.append(1)
        return run(*arguments)

    replace_run(engine, counted)
    with sglangs_own_layers(engine):
        expected = [fresh(engine, text, 2000) for text in (long, sharer, as_wide_as_a_weight)]
    assert not runs, "the reference must not be hybrid"
    engine.model.pack_weights()
    result: dict[str, Any] = {"spread": max(expected[0].label_logprobs) - min(expected[0].label_logprobs)}
    switches = (("hybrid", CHUNK, 2000), ("evict", PLAIN, DURABLE), ("both", CHUNK, DURABLE))
    for name, chunk, durable in switches:
        with chunks_of(engine, chunk):
            engine.set_durable(durable)
            answers = []
            for text in (long, sharer):
                engine.poison_scratch()
                answers.append(engine.ask(text, label_ids=LABELS))
                engine.check_slots()
        result[name] = {
            "cold": largest_difference(answers[0].label_logprobs, expected[0].label_logprobs),
            "sharer": largest_difference(answers[1].label_logprobs, expected[1].label_logprobs),
            "cached_tokens": answers[1].cached_tokens,
            **{key: value for key, value in answers[0].meta.items() if key in ("kept_tokens", "evicted_tokens")},
        }
    result["hybrid_runs"], result["serves_short"] = len(runs), engine.hybrid.serves_short
    for name, chunk, durable in switches:
        result[name]["answers"] = answers_differ_by(engine, long, chunk, durable)
    answer = fresh(engine, as_wide_as_a_weight, 2000)
    result["as_wide_as_a_weight"] = largest_difference(answer.label_logprobs, expected[2].label_logprobs)
    return result


LABEL_TOKENS = ((30, 31, 32), (30, 31, 33), (30,), (40, 41), (50,))
QUESTIONS: list[Asked] = [[(tuple(range(60, 90)), (5, 6))], [((*range(60, 80), 7, 8, 9), (5,))], [((60, 61), (8, 9))]]
ASKED = [*map(asked_of_label, LABEL_TOKENS), *QUESTIONS]


def answers_differ_by(engine: InProcessScheduler, text: list[int], chunk: int, durable: int) -> float:
    """Labels and questions as branches of their prompt, cold and cached, against one request for each sequence."""
    found = []
    with chunks_of(engine, chunk):
        engine.set_durable(durable)
        for _ in range(2):
            engine.poison_scratch()
            found.append(answer_logprobs(engine, text))
            engine.check_slots()
    engine.set_durable(2000)
    expected = asked_one_by_one(engine, text)
    return max(largest_difference(one, expected) for one in found)


def answer_logprobs(engine: InProcessScheduler, text: list[int]) -> list[float]:
    branches = Branches(ASKED)
    answer = engine.ask(text, label_ids=branches.first, branches=branches)
    behind = answer.meta[branch_rows.FACT]
    return [x for one in ASKED for x in branches.logprobs(one, answer.label_logprobs, behind)]


def asked_one_by_one(engine: InProcessScheduler, text: list[int]) -> list[float]:
    return [
        x
        for asked in ASKED
        for sequence, tokens in asked
        for x in engine.ask([*text, *sequence], label_ids=tokens).label_logprobs
    ]


def fresh(engine: InProcessScheduler, text: list[int], durable: int, **options: Any) -> Answer:
    engine.set_durable(durable)
    return engine.ask(text, label_ids=LABELS, **options)


def storm(folder: Path) -> dict[str, Any]:
    """500 random requests on 512 durable slots, some cancelled, some with a logprob tail; then each one alone."""
    engine = start(folder, "llama")
    rng = random.Random(1)
    engine.set_durable(512)
    stems = [prompt(rng, rng.randrange(1, 1200)) for _ in range(12)]
    queued: dict[str, tuple[list[int], int]] = {}
    finished: dict[str, Answer] = {}
    n_cancelled = 0
    for _ in range(500):
        stem = rng.choice(stems)
        text = [*stem[: rng.randrange(0, len(stem) + 1)], *prompt(rng, rng.randrange(1, 340))][: 3 * 512]
        start_len = rng.randrange(len(text)) if rng.random() < 0.15 else -1
        rid = engine.submit(text, LABELS, logprob_start_len=start_len)
        queued[rid] = (text, start_len)
        if rng.random() < 0.08:
            victim = rng.choice(list(queued))
            engine.cancel(victim)
            queued.pop(victim)
            n_cancelled += 1
        while len(queued) > 6:
            collect(engine, queued, finished)
    while queued:
        collect(engine, queued, finished)
    engine.run_all()
    everything: dict[str, tuple[list[int], int]] = collect.seen  # type: ignore[attr-defined]
    worst = 0.0
    for rid, answer in finished.items():
        text, start_len = everything[rid]
        with chunks_of(engine, PLAIN):
            expected = fresh(engine, text, 2000, logprob_start_len=start_len)
        worst = max(worst, largest_difference(answer.label_logprobs, expected.label_logprobs))
        assert len(answer.input_logprobs) == len(expected.input_logprobs)
        if answer.input_logprobs:
            worst = max(worst, largest_difference(answer.input_logprobs, expected.input_logprobs))
    engine.flush()
    return {
        "finished": len(finished),
        "cancelled": n_cancelled,
        "worst": worst,
        "with_tail": sum(bool(answer.input_logprobs) for answer in finished.values()),
        "evicting": sum(answer.meta["evicted_tokens"] > 0 for answer in finished.values()),
        "cached": sum(answer.cached_tokens > 0 for answer in finished.values()),
        "free_after_flush": engine.allocator.available_size(),
        "scratch_lent_after_flush": engine.allocator.n_scratch_lent,
    }


def collect(engine: InProcessScheduler, queued: dict[str, tuple[list[int], int]], finished: dict[str, Answer]) -> None:
    """One step, with scratch of NaN before it and the invariants after it."""
    engine.poison_scratch()
    engine.step()
    engine.check_slots()
    seen: dict[str, tuple[list[int], int]] = collect.__dict__.setdefault("seen", {})
    for rid in [rid for rid in queued if engine.has_answer(rid)]:
        seen[rid] = queued.pop(rid)
        finished[rid] = engine.answer(rid)


def faults(folder: Path) -> dict[str, Any]:
    """Limits, an out-of-memory in the forward, requests that decode, a gate that must fail, an N that cannot fit."""
    result: dict[str, Any] = {}
    engine = start(folder, "llama", config={"max_input_length": 900, "allow_generation": True}, max_total_tokens=400)
    rng = random.Random(2)
    result["exact"] = engine.ask(prompt(rng, 900)).finish_reason
    result["one_over"] = engine.ask(prompt(rng, 901)).finish_reason
    result["memory"] = engine.parts.record.shown()["memory"]

    run = engine.hybrid.run

    def fail(*_: Any) -> torch.Tensor:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: 99 bytes")

    engine.flush()
    before = engine.allocator.available_size()
    replace_run(engine, fail)
    result["out_of_memory"] = engine.ask(prompt(rng, 800)).finish_reason
    engine.check_slots()
    tokens = prompt(rng, 200)
    rids = [engine.submit([*tokens, *prompt(rng, 20)]) for _ in range(3)]
    sizes: list[int] = []

    def fail_together(token_rows: Any, *rest: Any) -> torch.Tensor:
        sizes.append(len(token_rows["input_ids"]))
        return fail() if sizes[-1] > 220 else run(token_rows, *rest)

    replace_run(engine, fail_together)
    engine.run_all()
    engine.check_slots()
    result["together"] = {"sizes": sizes, "answers": [engine.answer(rid).finish_reason["type"] for rid in rids]}
    engine.flush()
    replace_run(engine, run)
    result["nothing_leaked"] = engine.allocator.available_size() == before
    result["next_one"] = engine.ask(prompt(rng, 800)).finish_reason

    result["decodes_and_fits"] = engine.ask(prompt(rng, 100), max_new_tokens=5).finish_reason
    engine.check_slots()
    result["decodes_and_does_not"] = engine.ask(prompt(rng, 500), max_new_tokens=5).finish_reason
    result["one_token_beyond_durable"] = engine.ask(prompt(rng, 500), max_new_tokens=1).finish_reason

    engine.flush()
    own = {parity_gate.SHORT_TOKENS: [parity_gate.answer(engine.model, seed, 60) for seed in parity_gate.SEEDS]}
    gate = functools.partial(parity_gate.run, engine.model, own, 4_000)
    result["gate"] = gate()
    replace_run(engine, lambda *a: run(*a) * 1.5)
    result["gate_with_wrong_hybrid"] = raised(gate)
    replace_run(engine, run)
    result["gate_with_scratch_in_the_cache"] = raised(lambda: gate_with_unshared_reads(engine, gate))
    tight = {"suffix_kv": "keep", "max_input_length": 900, "memory_budget_gb": 0.06}
    keeping = start(folder, "llama", config=tight, max_total_tokens=10**6)
    result["kept_whole"] = keeping.ask(prompt(rng, 900)).finish_reason
    keeping.scheduler.invariant_checker.self_check_during_busy()
    result["kept_slots"] = keeping.scheduler.max_total_num_tokens
    pool = keeping.allocator.get_kvcache()
    result["kept_slots_without_a_plan"] = pool.size
    keeping.flush()
    result["kept_slots_free"] = keeping.allocator.available_size()
    automatic = start(folder, "mixtral", config={"hybrid_chunk_tokens": None})
    result["chunk_tokens_of_experts"] = automatic.hybrid.chunk_tokens
    plain = start(folder, "gpt2", config={"hybrid_prefill": "auto", "hybrid_chunk_tokens": None})
    result["plain_family"] = plain.ask(prompt(rng, 300)).finish_reason
    result["plain_family_answers"] = largest_difference(
        answer_logprobs(plain, text := prompt(rng, 300)), asked_one_by_one(plain, text)
    )
    result["plain_family_is_hybrid"] = plain.parts.runner.hybrid is not None
    result["plain_family_on"] = raised(lambda: start(folder, "gpt2"))
    result["too_long"] = raised(lambda: start(folder, "llama", config={"max_input_length": 4096}))
    small = {"memory_budget_gb": 0.004, "max_input_length": 4000}
    result["waiting"], result["kept"] = waiting(folder), kept(folder)
    result["does_not_fit"] = raised(lambda: start(folder, "llama", config=small))
    return result


def gate_with_unshared_reads(engine: InProcessScheduler, gate: Callable[[], Any]) -> None:
    """Attention reads scratch a slot too far: the trap of KV that is not what was written."""
    pool = engine.allocator.get_kvcache()
    read = pool.get_key_buffer

    def shifted(layer_id: int) -> torch.Tensor:
        keys: torch.Tensor = read(layer_id).clone()
        keys[pool.first_scratch_slot :] = keys[pool.first_scratch_slot :].roll(1, 0)
        return keys

    pool.get_key_buffer = shifted
    try:
        gate()
    finally:
        pool.get_key_buffer = read


def raised(call: Callable[[], Any]) -> str:
    try:
        call()
    except SglPrefillError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def waiting(folder: Path) -> dict[str, Any]:
    """What waiting requests will use stays; and of a burst with one new prefix the prefix is computed once."""
    engine = start(folder, "llama", config={"fairness_lambda": 0.0, "jct_model": "fitted", "pack_step_tokens": 0})
    rng = random.Random(3)
    engine.set_durable(DURABLE)
    shared = prompt(rng, 200)
    engine.ask(shared)
    lone = engine.submit(prompt(rng, 400))
    sharers = [engine.submit([*shared, *prompt(rng, 450 + n)]) for n in range(2)]
    engine.run_all()
    engine.set_durable(2000)
    new = prompt(rng, 300)
    burst = [engine.submit([*new, *prompt(rng, 20)]) for _ in range(5)]
    engine.run_all()
    engine.check_slots()
    return {
        "lone": engine.answer(lone).meta,
        "sharers": [engine.answer(rid).cached_tokens for rid in sharers],
        "burst": [engine.answer(rid).cached_tokens for rid in burst],
    }


def kept(folder: Path) -> dict[str, Any]:
    """--suffix-kv keep: 420 slots hold two prefixes of 150, the older of which a waiting request will use, when one of 130
    runs."""
    config = {"suffix_kv": "keep", "max_input_length": 300, "fairness_lambda": 0.0, "pack_step_tokens": 0}
    engine = start(folder, "llama", config=config, max_total_tokens=420)
    rng = random.Random(4)
    wanted, other = prompt(rng, 150), prompt(rng, 150)
    engine.ask(wanted)
    engine.ask(other)
    first = engine.submit(prompt(rng, 130))
    sharer = engine.submit([*wanted, *prompt(rng, 140)])
    engine.run_all()
    result = {
        "ran_first": engine.answered[2] == first,
        "sharer": engine.answer(sharer).cached_tokens,
        "other": engine.ask([*other, 7]).cached_tokens,
    }
    n_held = engine.scheduler.tree_cache.total_size()
    answer_logprobs(engine, [*other, 7])
    engine.scheduler.invariant_checker.self_check_during_busy()
    return {**result, "answers_left_nothing": engine.scheduler.tree_cache.total_size() == n_held}


def unusual(folder: Path) -> dict[str, Any]:
    """Pages of 16 tokens, sharers that count together, no prefix cache, embeddings, many deadlines at once."""
    rng = random.Random(5)
    result: dict[str, Any] = {}
    few, many = prompt(rng, 200), prompt(rng, 240)
    for sharers in ("count", "ignore"):
        config = {"fairness_lambda": 0.0, "pack_step_tokens": 0, "sharers": sharers}
        engine = start(folder, "llama", config=config, page_size=16)
        named = {engine.submit([*few, *prompt(rng, 10)]): "few"}
        named |= {engine.submit([*many, *prompt(rng, 10)]): "many" for _ in range(4)}
        engine.run_all()
        engine.check_slots()
        result[f"order_{sharers}"] = " ".join(named[rid] for rid in engine.answered)
        result[f"cached_{sharers}"] = sorted(engine.answer(rid).cached_tokens for rid in named)

    engine = start(folder, "llama", disable_radix_cache=True)
    again = prompt(rng, 300)
    answers = [engine.ask(again, label_ids=LABELS) for _ in range(2)]
    result["no_cache"] = [one.cached_tokens for one in answers]
    result["no_cache_difference"] = largest_difference(answers[0].label_logprobs, answers[1].label_logprobs)
    result["no_cache_scratch"] = engine.allocator.n_scratch_lent

    engine = start(folder, "llama", config={"jct_model": "fitted"})
    jct_ms = engine.live.predictor.model(100, 0) if engine.live.predictor is not None else 0.0
    prompts = [prompt(rng, 100) for _ in range(300)]  # made before the deadlines begin
    rids = [engine.submit(one, deadline_ms=20 * jct_ms) for one in prompts]
    engine.step()
    refused = sum(rid in engine.refusals for rid in rids)
    engine.run_all()
    result["burst"] = {
        "refused_at_once": refused,
        "answered": sum(engine.has_answer(rid) for rid in rids),
        "refused": len(engine.refusals),
        "waiting": len(engine.live.policy.waiting),
    }

    embedding = start(folder, "llama-embedding", config={"hybrid_prefill": "auto"}, is_embedding=True)
    expected = tiny_models.last_hidden_state(folder / "llama-embedding", again)
    for name, durable in (("embedding", 2000), ("embedding_evicting", 128)):
        embedding.set_durable(durable)
        result[name] = largest_difference(embedding.embed(again), expected)
    result["has_kernels"] = native().kernels is not None
    if result["has_kernels"]:
        result["stable"] = stable(folder)
        result["unstable"] = raised(lambda: start(folder, "mixtral", config={"stable_answers": "on"}))
        result["unstable_by_itself"] = start(folder, "mixtral").parts.record.shown()["unstable_answers"]
    return result


def stable(folder: Path) -> dict[str, Any]:
    """Answers with --stable-answers in random company, cache states (evicting too) and chunk sizes, against each alone."""
    torch.set_num_threads(2)
    engine = start(folder, "qwen3", config={"stable_answers": "on", "pack_step_tokens": 400})
    rng = random.Random(6)
    shared = [prompt(rng, n) for n in (90, 310)]
    texts = [[*rng.choice(shared)[: rng.randint(1, 310)], *prompt(rng, rng.randint(1, 40))] for _ in range(20)]
    alone = [(fresh(engine, text, 2000).label_logprobs, answer_logprobs(engine, text)) for text in texts]
    apart = sum(asked_one_by_one(engine, text) != of_text[1] for text, of_text in zip(texts, alone, strict=True))
    differing, n_answers, n_cached = 0, 0, 0
    while n_answers < 100:
        engine.set_durable(rng.choice((DURABLE, 2000)))
        for _ in range(3):
            engine.hybrid.chunk_tokens = rng.choice((16, 50, CHUNK, 200))
            rids = {
                engine.submit(texts[one], label_ids=LABELS): one
                for one in rng.sample(range(len(texts)), rng.randint(1, 8))
            }
            engine.run_all()
            for rid, one in rids.items():
                answer = engine.answer(rid)
                differing += answer.label_logprobs != alone[one][0]
                n_answers += 1
                n_cached += answer.cached_tokens > 0
        differing += answer_logprobs(engine, texts[one]) != alone[one][1]
    return {
        "differing": differing,
        "apart": apart,
        "cached": n_cached,
        "record": engine.parts.record.shown()["stable_answers"],
    }


def profile(folder: Path) -> dict[str, Any]:
    """The pass that computes only what decides memory takes the memory of a whole one; and what a token retains."""
    wide = {"hidden_size": 512, "intermediate_size": 1792, "num_attention_heads": 8, "head_dim": 64}
    model = tiny_models.write(folder / "wide", "llama", **wide, num_hidden_layers=6, max_position_embeddings=40000)
    config = PrefillConfig(hybrid_prefill="on", hybrid_chunk_tokens=256, memory_budget_gb=2, max_input_length=24000)
    engine = InProcessScheduler(config, model, dtype="bfloat16", max_total_tokens=100)
    engine.allocator.resize_durable(0)
    whole = memory_profile.peak_tensor_bytes(lambda: memory_profile._run(engine.model, 12001))
    with memory_profile._memory_decides_only(engine.model):
        short = memory_profile._tensor_bytes(engine.model, 12001)
    rows = {row["what"].split(" of ")[0]: row for row in engine.parts.record.shown()["memory"]["rows"]}
    planned_mib = rows["activations, fixed"]["mib"] + rows["activations"]["bytes_per_token"] * 12001 / 2**20
    return {
        "whole": whole,
        "decides": short,
        "resident": memory_profile._peak_bytes(engine.model, 12001),
        "planned": planned_mib * 2**20,
        "measured_bytes_per_token": rows["activations"]["bytes_per_token"],
        "retained_bytes_per_token": engine.hybrid.retained_bytes_per_token,
    }


SCENARIOS: dict[str, Callable[[Path], Any]] = {
    "families": families,
    "storm": storm,
    "faults": faults,
    "profile": profile,
    "unusual": unusual,
}
