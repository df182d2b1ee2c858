"""A dataset divided into units: each a block of rows that one actor answers, in the order that computes least.

A unit is a block of a source that Ray reads, so that Ray's own checkpoints leave out rows that were answered before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import ray
from ray.data import Dataset, Datasource
from ray.data.block import BlockAccessor, BlockMetadata
from ray.data.datasource import ReadTask

from sgl_prefill.core.batch.plan import depth_first
from sgl_prefill.core.batch.token_rows import IntArray, TokenRows
from sgl_prefill.core.batch.units import divide
from sgl_prefill.ray.prompts import PROMPT, REFUSED, Prompt


class PlannedRows(Datasource):  # type: ignore[misc]
    """The units of a job. Each is one read task, and one block."""

    def __init__(self, units: list[Any], metadata: list[BlockMetadata], schema: pa.Schema) -> None:
        super().__init__()
        self._units, self._metadata, self._schema = units, metadata, schema

    def get_name(self) -> str:
        return "PlannedRows"

    def estimate_inmemory_data_size(self) -> int | None:
        return sum(one.size_bytes or 0 for one in self._metadata)

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: Any = None
    ) -> list[ReadTask]:
        """Ignores how many are asked for: units stay whole."""
        return [
            ReadTask(_Get(unit), metadata, self._schema, per_task_row_limit)
            for unit, metadata in zip(self._units, self._metadata, strict=True)
        ]


class _Get:
    """Fetches one unit from the object store."""

    def __init__(self, unit: Any) -> None:
        self._unit = unit

    def __call__(self) -> list[pa.Table]:
        return [ray.get(self._unit)]


def units(dataset: Dataset, prompt: Prompt, n_engines: int) -> Dataset:
    """Reads a dataset, and returns its rows with their prompts as units in the order of a plan."""
    rows = _read(dataset, prompt)
    prompts = _compared(rows[PROMPT])
    plan = depth_first(prompts)
    blocks, metadata = [], []
    for first, end in divide(plan, prompts.lengths, n_engines):
        block = BlockAccessor.for_block(rows).take(plan.rows[first:end].tolist())
        blocks.append(ray.put(block))
        metadata.append(BlockMetadata(num_rows=end - first, size_bytes=block.nbytes, input_files=None, exec_stats=None))
    read = ray.data.read_datasource(PlannedRows(blocks, metadata, rows.schema), override_num_blocks=max(1, len(blocks)))
    read.context.checkpoint_config = dataset.context.checkpoint_config
    return read


def _read(dataset: Dataset, prompt: Prompt) -> pa.Table:
    # Ray's checkpoints are of what is written: reading has none, and Ray would warn of that.
    with _without_checkpoint(dataset.context):
        tables = ray.get(dataset.map_batches(prompt, batch_format="pyarrow", zero_copy_batch=True).to_arrow_refs())
    tables = [table for table in tables if table.num_columns]
    if not tables:
        return pa.table({PROMPT: pa.array([], pa.string()), REFUSED: pa.array([], pa.string())})
    return pa.concat_tables(tables, promote_options="permissive").combine_chunks()


@contextlib.contextmanager
def _without_checkpoint(context: Any) -> Iterator[None]:
    config, context.checkpoint_config = context.checkpoint_config, None
    try:
        yield
    finally:
        context.checkpoint_config = config


def _compared(prompts: pa.ChunkedArray) -> TokenRows:
    """Returns what prompts are compared by: bytes of text, without a copy where they lie together, or token ids."""
    parts = [_values(chunk) for chunk in prompts.chunks]
    lengths = np.concatenate([np.diff(offsets) for _, offsets in parts]) if parts else np.empty(0, np.int64)
    values = [values[offsets[0] : offsets[-1]] for values, offsets in parts]
    tokens = values[0] if len(values) == 1 else np.concatenate(values) if values else np.empty(0, np.uint8)
    return TokenRows.one_after_the_other(tokens, lengths)


def _values(chunk: pa.Array) -> tuple[IntArray, IntArray]:
    """Returns all values of an array of texts or lists, and where each row begins among them."""
    if not pa.types.is_string(chunk.type):
        return np.asarray(chunk.values, np.int32), np.asarray(chunk.offsets, np.int64)
    _, offsets, data = chunk.buffers()
    begins = np.frombuffer(offsets, np.int32)[chunk.offset : chunk.offset + len(chunk) + 1].astype(np.int64)
    return np.frombuffer(data or b"", np.uint8), begins
