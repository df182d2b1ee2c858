"""The actors that answer units: each with an engine of its own, or asking one server."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import pyarrow as pa
import ray
from ray.data import ActorPoolStrategy, Dataset

from sgl_prefill.batch.api import Engine, RowScore, score
from sgl_prefill.batch.tables import ERROR, MASS
from sgl_prefill.ray.prompts import PROMPT, REFUSED
from sgl_prefill.ray.register import Register
from sgl_prefill.ray.resources import Share

# A unit that an actor died of so often is answered row by row, so that the next death names the row.
DEATHS = 2
DIED = 70  # exit status


class Arguments(NamedTuple):
    """What every actor of a job is told."""

    labels: tuple[str, ...]
    engine: dict[str, Any]
    urls: tuple[str, ...]
    max_inflight: int
    share: Share
    usage: bool


def scored(units: Dataset, arguments: Arguments, n_actors: int, remote_args: Mapping[str, Any]) -> Dataset:
    """Returns the answered rows of a dataset whose blocks are units."""
    register = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(Register).remote(arguments.urls)
    return units.map_batches(
        Scorer,
        fn_constructor_args=(arguments, register),
        batch_size=None,  # a block
        batch_format="pyarrow",
        zero_copy_batch=True,
        # A second unit in an actor's queue would wait there while others have nothing to do.
        # "Multi-threading" with one call at a time means: in the thread that made the engine, in which it must be used.
        compute=ActorPoolStrategy(size=n_actors, max_tasks_in_flight_per_actor=1, enable_true_multi_threading=True),
        **remote_args,
    )


class Scorer:
    """Answers one unit after the other."""

    def __init__(self, arguments: Arguments, register: Any) -> None:
        self._arguments, self._register = arguments, register
        self._engine: Engine | str
        if arguments.urls:
            self._engine = ray.get(register.url_of.remote(ray.get_runtime_context().get_actor_id()))
        else:
            options = arguments.share.apply(arguments.engine)
            from sgl_prefill.examples import demo_model

            self._engine = Engine(**{"model_path": options.get("model_path") or str(demo_model.ensure()), **options})

    def __call__(self, rows: pa.Table) -> pa.Table:
        unit = ray.get_runtime_context().get_task_id()
        begun = ray.get(self._register.begin.remote(unit))
        prompts, refused = rows[PROMPT].to_pylist(), rows[REFUSED].to_pylist()
        errors = {row: message for row, message in enumerate(refused) if message is not None} | begun.killers
        left = [row for row in range(len(prompts)) if row not in errors]
        scores = {row: RowScore(row, None, None, message) for row, message in errors.items()}
        for some in [left] if begun.n_before < DEATHS else ([row] for row in left):
            if len(some) == 1:
                ray.get(self._register.alone.remote(unit, some[0]))
            scores |= {some[one.number]: one for one in self._answers(unit, some, [prompts[row] for row in some])}
        self._register.end.remote(unit)
        return self._with_columns(rows, [scores[row] for row in range(len(prompts))])

    def _answers(self, unit: str, rows: list[int], prompts: list[Any]) -> Iterator[RowScore]:
        """Ends this process where the engine fails as a whole: another one begins anew, without the row that it failed with."""
        try:
            yield from score(
                prompts, labels=self._arguments.labels, engine=self._engine, max_inflight=self._arguments.max_inflight
            )
        except Exception as error:
            traceback.print_exc()
            if len(rows) == 1:
                message = f"the engine failed with this row: {type(error).__name__}: {error}"
                ray.get(self._register.failed.remote(unit, rows[0], message))
            sys.stderr.flush()
            os._exit(DIED)

    def _with_columns(self, rows: pa.Table, scores: list[RowScore]) -> pa.Table:
        for name, arrow_type, values in self._columns(scores):
            rows = rows.append_column(name, pa.array(values, arrow_type))
        return rows.drop_columns([PROMPT, REFUSED])

    def _columns(self, scores: list[RowScore]) -> Iterator[tuple[str, pa.DataType, Iterable[Any]]]:
        for label in self._arguments.labels:
            yield label, pa.float64(), [one.probabilities and one.probabilities[label] for one in scores]
        yield MASS, pa.float64(), [one.label_mass for one in scores]
        yield ERROR, pa.string(), [one.error for one in scores]
        if self._arguments.usage:
            yield "prompt_tokens", pa.int64(), [one.prompt_tokens for one in scores]
            yield "cached_tokens", pa.int64(), [one.cached_tokens for one in scores]
