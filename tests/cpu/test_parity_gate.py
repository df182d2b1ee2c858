"""The gate of a start over a model that is not there: which prompts take which path, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sgl_prefill.errors import ParityError
from sgl_prefill.startup import parity_gate
from sgl_prefill.startup.parity_gate import DEVICE_TOKENS, SEEDS, SHORT_TOKENS

VOCABULARY = 512
GRAPH_TOKENS = 2048
LONGEST = 20_000


class FakeStep:
    """A forward pass whose answer depends on its prompt, and on the path that is wrong."""

    def __init__(self, model: FakeModel, token_ids: list[int], n_cached: int) -> None:
        self.model, self.token_ids, self.n_new = model, token_ids, len(token_ids) - n_cached
        self.was_replayed = False

    def run(self) -> torch.Tensor:
        model, path = self.model, "plain"
        if model.graphs_on and self.n_new <= max(model.graphed_tokens):
            self.was_replayed, path = True, "replay"
        elif self.n_new > max(model.hybrid.chunk_tokens, model.hybrid.plain_tokens) and model.hybrid_is_reached:
            model.hybrid.n_passes += 1
            path = "hybrid"
            model.chunks.append(-(-self.n_new // model.hybrid.chunk_tokens))
        model.paths.append((len(self.token_ids), path))
        logits = torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(sum(self.token_ids)))
        flips = path in model.wrong_paths and model.seed_of(self.token_ids) in model.wrong_seeds
        return logits.roll(1) if flips else logits

    def slots(self, index: int) -> torch.Tensor:
        return torch.arange(len(self.token_ids))

    def release(self) -> None:
        pass


class FakeModel:
    """`LoadedModel` as far as the gate asks."""

    is_generation, is_evicting, page_size, vocab_size = True, True, 1, VOCABULARY
    dtype, durable_tokens = torch.bfloat16, 100_000

    def __init__(
        self,
        *,
        is_host: bool = False,
        chunk_tokens: int = 8192,
        most_replayed_tokens: int = GRAPH_TOKENS,
        wrong_paths: tuple[str, ...] = (),
        wrong_seeds: tuple[int, ...] = SEEDS,
        hybrid_is_reached: bool = True,
    ) -> None:
        self.device = SimpleNamespace(is_host=is_host)
        self.hybrid = SimpleNamespace(serves_short=False, chunk_tokens=chunk_tokens, plain_tokens=8192, n_passes=0)
        self.graphed_tokens = [most_replayed_tokens]
        self.wrong_paths, self.wrong_seeds = wrong_paths, wrong_seeds
        self.hybrid_is_reached = hybrid_is_reached
        self.graphs_on = True
        self.paths: list[tuple[int, str]] = []  # (tokens of the prompt, path)
        self.chunks: list[int] = []  # of hybrid passes
        self.cleaned: list[int] = []

    def seed_of(self, token_ids: list[int]) -> int:
        made: Any = self
        return next(seed for seed in SEEDS if parity_gate._token_ids(made, seed, len(token_ids)) == token_ids)

    @contextmanager
    def without_graphs(self) -> Iterator[None]:
        before, self.graphs_on = self.graphs_on, False
        try:
            yield
        finally:
            self.graphs_on = before

    def only_durable(self, n_tokens: int) -> Any:
        return nullcontext()

    def poison_scratch(self, n_tokens: int) -> None:
        pass

    def clean_scratch(self, n_tokens: int) -> None:
        self.cleaned.append(n_tokens)

    def step(self, prompts: list[list[int]], cached_slots: torch.Tensor | None = None) -> FakeStep:
        return FakeStep(self, prompts[0], 0 if cached_slots is None else len(cached_slots))


def gate(model: FakeModel, longest_tokens: int = LONGEST) -> dict[str, float]:
    """The gate as a start runs it."""
    loaded: Any = model
    references = parity_gate.reference(loaded, longest_tokens)
    assert {path for _, path in model.paths} == {"plain"}
    model.paths.clear()
    return parity_gate.run(loaded, references, longest_tokens)


@pytest.mark.parametrize("is_host", [True, False])
@pytest.mark.parametrize("chunk_tokens", [256, 1024, 8192])
def test_a_prompt_runs_in_three_chunks_at_least_and_is_not_replayed(is_host: bool, chunk_tokens: int) -> None:
    """A graph of 2,048 tokens would take the gate's 60 tokens, and the hybrid pass would never be compared."""
    model = FakeModel(is_host=is_host, chunk_tokens=chunk_tokens)
    found = gate(model)
    assert set(found) == {
        "hybrid and plain",
        "cache hit and miss",
        "scratch and durable slots",
        "replay and plain",
    }
    n_tokens = SHORT_TOKENS if is_host else DEVICE_TOKENS
    assert model.paths.count((n_tokens, "hybrid")) >= 3 * len(SEEDS)
    assert max(model.chunks) >= 3
    assert model.cleaned == [n_tokens] * len(SEEDS)
    assert model.hybrid.chunk_tokens == chunk_tokens  # as it was


def test_on_a_device_chunks_are_as_long_as_those_that_serve() -> None:
    """Kernels are chosen by the number of rows: up to 2,048."""
    model = FakeModel(chunk_tokens=1024)
    gate(model)
    assert max(model.chunks) == DEVICE_TOKENS // 1024
    model = FakeModel(chunk_tokens=8192)
    gate(model)
    assert max(model.chunks) == 3


def test_a_replay_is_compared_where_there_are_graphs_alone() -> None:
    """Of the short prompt, with the plain path of the same prompt."""
    model = FakeModel()
    gate(model)
    assert model.paths.count((SHORT_TOKENS, "replay")) == len(SEEDS)
    assert "replay and plain" not in gate(FakeModel(most_replayed_tokens=0))
    with pytest.raises(ParityError, match=r"replay and plain differ by .* --disable-prefill-cuda-graph"):
        gate(FakeModel(wrong_paths=("replay",)))


def test_an_input_limit_shortens_the_prompt() -> None:
    """Where the longest input is shorter than the gate's prompt on a device, before and after memory is planned."""
    model = FakeModel()
    gate(model, longest_tokens=900)
    assert max(n for n, _ in model.paths) == 900
    planned: Any = FakeModel()
    references = parity_gate.reference(planned, LONGEST)
    planned.paths.clear()
    parity_gate.run(planned, references, 900)
    assert max(n for n, _ in planned.paths) == SHORT_TOKENS


def test_a_hybrid_pass_that_is_not_reached_is_no_pass() -> None:
    """Equal answers of the same path twice prove nothing."""
    with pytest.raises(ParityError, match="has run in SGLang's own layers"):
        gate(FakeModel(hybrid_is_reached=False))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_router_that_flips_for_one_prompt_is_served(seed: int) -> None:
    """Experts of bfloat16 with two close ones: the median of three prompts decides."""
    found = gate(FakeModel(wrong_paths=("hybrid",), wrong_seeds=(seed,)))
    assert max(found.values()) == 0


def test_a_path_that_is_wrong_for_two_prompts_is_refused() -> None:
    """It is no flip any more."""
    with pytest.raises(ParityError, match="hybrid and plain differ by"):
        gate(FakeModel(wrong_paths=("hybrid",), wrong_seeds=SEEDS[:2]))


def test_a_row_that_was_never_written_is_refused_whatever_the_others_say() -> None:
    """NaN of one prompt has no median that would be fine."""
    model = FakeModel()
    run = FakeStep.run

    def poisoned(step: FakeStep) -> torch.Tensor:
        output = run(step)
        is_last = model.paths[-1] == (DEVICE_TOKENS, "hybrid") and model.seed_of(step.token_ids) == SEEDS[0]
        return output * float("nan") if is_last else output

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(FakeStep, "run", poisoned)
        with pytest.raises(ParityError, match="differ by nan"):
            gate(model)
