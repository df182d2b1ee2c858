"""A device that runs forward passes late, in the order of their launches, and then fills every KV slot that is free with NaN."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sgl_prefill.port.steps import request_state
from tests.support.in_process import InProcessScheduler

STEP_MS = 2.0


class LateDevice:
    """Stands in for a CUDA stream: a forward pass runs when its result is read, or by chance when its end is asked for."""

    def __init__(self, engine: InProcessScheduler, seed: int = 0) -> None:
        self._engine, self._rng = engine, random.Random(seed)
        self._passes: list[Callable[[], None]] = []
        self.n_run = self.n_behind = 0  # passes that have run; that were launched while another had not
        worker = engine.scheduler.model_worker
        self._forward, worker.forward_batch_generation = worker.forward_batch_generation, self._launch

    def mark(self) -> int:
        return len(self._passes)

    def is_reached(self, mark: int) -> bool:
        """Runs a pass now and then."""
        if self.n_run < mark and self._rng.random() < 0.03:
            self._run_to(self.n_run + 1)
        return self.n_run >= mark

    def ms_between(self, begin: int, end: int) -> float:
        return STEP_MS * (end - begin)

    @contextmanager
    def reading_after(self, mark: int) -> Iterator[None]:
        self._run_to(mark)
        n_run = self.n_run
        yield
        assert self.n_run == n_run, "a result was read that belongs to a later step"

    def _run_to(self, mark: int) -> None:
        while self.n_run < mark:
            self.n_run += 1
            self._passes[self.n_run - 1]()

    def _launch(self, batch: Any, **options: Any) -> Any:
        launched, result = copy.copy(batch), _LateResult()
        launched.out_cache_loc = batch.out_cache_loc.clone()  # the allocator reuses that memory
        leaders = [request_state.of(req).leader for req in batch.reqs]  # read at the launch

        def run() -> None:
            states = [request_state.of(req) for req in launched.reqs]
            for state, leader in zip(states, leaders, strict=True):
                state.leader = leader
            result.become(self._forward(launched, **options))
            for state in states:
                state.leader = None if state.is_published else state.leader
            self._poison()

        self.n_behind += self.n_run < len(self._passes)
        self._passes.append(run)
        place = len(self._passes)
        result.run = lambda: self._run_to(place)
        if any((req.sampling_params.max_new_tokens or 0) > 1 for req in batch.reqs):
            self._run_to(place)  # SGLang computes with the new tokens
            return result.found
        return result

    def _poison(self) -> None:
        allocator = self._engine.allocator
        pool = allocator.get_kvcache()
        pool.fill_scratch(math.nan)
        for layer in range(pool.layer_num):
            for buffer in pool.get_kv_buffer(layer):
                buffer[allocator.free_pages] = math.nan


class _LateResult:
    """A forward pass's result, which runs it when it is read."""

    run: Callable[[], None]
    found: Any

    has_sampled_token_ids = False  # the next token goes nowhere
    logits_output = None  # until it has run

    def become(self, result: Any) -> None:
        self.found = result
        del self.run
        for name, value in vars(result).items():
            self.__dict__.setdefault(name, value)

    def __getattr__(self, name: str) -> Any:
        run = self.__dict__.get("run")
        if run is None or name.startswith("__"):
            raise AttributeError(name)
        run()
        return getattr(self, name)
