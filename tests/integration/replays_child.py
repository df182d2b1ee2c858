"""SGLang's runner of prefill graphs on a host, with our hooks: in the place of a graph's replay the same layers run over the
runner's static inputs. All around a replay is SGLang's own: padding, static batch, plan of attention, logits behind the graph.

Run by `test_replays` in a process of its own (`children.run_scenario`).
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

os.environ["PREFILL_CPU_KERNEL"] = "off"  # as on a device: short steps are for SGLang's own layers

import torch
from sglang.srt.model_executor.model_runner_components.layer_setup import compute_attention_and_moe_layers
from sglang.srt.model_executor.runner import PrefillCudaGraphRunner, prefill_cuda_graph_runner
from sglang.srt.model_executor.runner_backend.breakable_cuda_graph_backend import BreakableCudaGraphBackend
from sglang.srt.runtime_context import get_exec

from sgl_prefill.port.runner import branch_rows, replays
from sgl_prefill.startup import parity_gate
from tests.integration.memory_child import answer_logprobs, prompt, start
from tests.support import quiet_imports  # noqa: F401  (before all else that imports SGLang)
from tests.support.in_process import Answer, InProcessScheduler

SIZES = [16, 64, 128]


class Recorded(BreakableCudaGraphBackend):  # type: ignore[misc]
    """Runs the layers again where a graph would be replayed."""

    def __init__(self, body: torch.nn.Module) -> None:
        self._forward = body.forward
        self.sizes: list[int] = []

    @contextlib.contextmanager
    def capture_session(self, stream: Any) -> Any:
        with self.replay_session():
            yield

    def capture_one(self, shape_key: Any, forward_fn: Any, **_: Any) -> None:
        forward_fn()

    def replay(self, shape_key: Any, batch: Any, **_: Any) -> torch.Tensor:
        self.sizes.append(shape_key.size)
        hidden: torch.Tensor = self._forward(batch.input_ids, batch.positions, batch)
        return hidden


def with_graphs(engine: InProcessScheduler) -> Recorded:
    """Lets SGLang record its sizes, as its start on a device does."""
    runner = engine.scheduler.tp_worker.model_runner
    found = compute_attention_and_moe_layers(runner.model.model)
    (
        runner.attention_layers,
        runner.moe_layers,
        runner.moe_fusions,
        runner.dsa_indexers,
        runner.mha_companion_layers,
    ) = found
    prefill = get_exec().graph.cuda_graph_config.prefill
    prefill.backend, prefill.bs = "breakable", list(SIZES)
    recorded = Recorded(runner.model.model)
    capture = contextlib.nullcontext(SimpleNamespace(stream=None))
    with (
        mock.patch.object(prefill_cuda_graph_runner, "resolve_prefill_backend", return_value=recorded),
        mock.patch.object(prefill_cuda_graph_runner, "graph_capture", return_value=capture),
    ):
        runner.prefill_cuda_graph_runner = PrefillCudaGraphRunner(runner)
    return recorded


def asked(engine: InProcessScheduler, prefix: list[int], tails: list[list[int]], **options: Any) -> list[list[float]]:
    """Answers behind a cached prefix, all in one step."""
    engine.flush()
    engine.ask(prefix)
    engine.poison_scratch()
    rids = [engine.submit([*prefix, *tail], **options) for tail in tails]
    engine.run_all()
    answers: list[Answer] = [engine.answer(rid) for rid in rids]
    assert all(answer.cached_tokens > 0 for answer in answers)
    engine.check_slots()
    return [[*answer.label_logprobs, *answer.input_logprobs] for answer in answers]


def eager_and_replayed(folder: Path) -> dict[str, Any]:
    """Each step eagerly and with graphs."""
    engine = start(folder, "llama")
    rng = random.Random(3)
    prefix, tails = prompt(rng, 320), [prompt(rng, n) for n in (1, 15, 40, 100)]
    steps: dict[str, Any] = {
        "one": lambda: [asked(engine, prefix, [tail])[0] for tail in tails],
        "several": lambda: asked(engine, prefix, tails[:3]),
        "tail": lambda: asked(engine, prefix, tails[2:3], logprob_start_len=330),
        "in scratch": lambda: in_scratch(engine, prefix, tails[3]),
        "answers": lambda: [answer_logprobs(engine, prompt(random.Random(5), 40))],
    }
    eager = {name: step() for name, step in steps.items()}
    recorded = with_graphs(engine)
    original = PrefillCudaGraphRunner.can_run_graph
    result: dict[str, Any] = {}

    def can_run_graph(graphs: Any, batch: Any) -> bool:
        return replays.around_can_run_graph(engine.parts.runner, original, graphs, batch)

    with mock.patch.object(PrefillCudaGraphRunner, "can_run_graph", can_run_graph):
        for name, step in steps.items():
            recorded.sizes.clear()
            found = step()
            pairs = zip(eager[name], found, strict=True)
            difference = max(abs(a - b) for ours, theirs in pairs for a, b in zip(ours, theirs, strict=True))
            result[name] = {"difference": difference, "sizes": list(recorded.sizes)}
        engine.flush()
        recorded.sizes.clear()
        references = parity_gate.reference(engine.model, 4000)
        assert recorded.sizes == []
        result["gate"] = parity_gate.run(engine.model, references, 4000)
        result["gate replays"] = list(recorded.sizes)
        right = recorded._forward
        recorded._forward = lambda *arguments: right(*arguments).roll(1, 0)
        result["wrong replay"] = abs(asked(engine, prefix, tails[2:3])[0][0] - eager["one"][2][0])
        recorded._forward = right
    with mock.patch.object(branch_rows, "are_in", return_value=False):
        try:
            steps["answers"]()
        except (AssertionError, IndexError) as error:  # SGLang looks for the input log-probabilities of branches
            result["answers replayed"] = str(error)
    return result


def in_scratch(engine: InProcessScheduler, prefix: list[int], tail: list[int]) -> list[list[float]]:
    """A hit whose new tokens find no durable slot."""
    engine.set_durable(len(prefix))
    engine.ask(prefix)
    engine.poison_scratch()
    answer = engine.ask([*prefix, *tail])
    assert (answer.cached_tokens, answer.meta["evicted_tokens"]) == (len(prefix), len(tail))
    engine.set_durable(2000)
    return [answer.label_logprobs]


SCENARIOS: dict[str, Callable[[Path], Any]] = {"replays": eager_and_replayed}
