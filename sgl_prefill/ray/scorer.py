"""`score`: a Ray Dataset in, the same rows with their label probabilities out.

The driver sorts rows by their prefixes and divides them into units. A unit is a block of a source that Ray reads, so that
Ray's own checkpoints leave out rows that were answered before. Actors answer one unit at a time.
"""

from __future__ import annotations

import importlib.metadata
import math
import os
import sys
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from sgl_prefill.batch.asked import ERROR, Asked
from sgl_prefill.batch.options import INFLIGHT_OWN_ENGINE, INFLIGHT_SERVER
from sgl_prefill.batch.tables import columns_of, texts_of
from sgl_prefill.core.batch.batch_plan import depth_first
from sgl_prefill.core.batch.token_rows import IntArray, TokenRows
from sgl_prefill.core.batch.units import divide
from sgl_prefill.errors import ConfigurationError

if TYPE_CHECKING:
    import pyarrow as pa
    from ray.data import Dataset

    from sgl_prefill.batch.api import RowScore

RAY_VERSION = "2.60.0"
INSTALL = "pip install '.[ray]'"
USAGE = ("prompt_tokens", "cached_tokens")
PROMPT, REFUSED = "__sgl_prefill_prompt", "__sgl_prefill_refused"  # columns until a row is answered
CPUS_OF_TASKS = 2  # for Ray's own tasks: if actors claimed all, nothing could be read or written
DEATHS = 2  # a unit that so many actors died with is answered row by row, so that the next death names the row
EXIT_STATUS = 70  # of an actor whose engine failed
DIED = "the engine ended while it answered this row"


def score(
    dataset: Dataset,
    *,
    prompt: str | Callable[[dict[str, Any]], str],
    labels: Sequence[str] = (),
    questions: dict[str, Any] | None = None,
    concurrency: int | None = None,
    engine: Mapping[str, Any] | None = None,
    base_urls: Sequence[str] = (),
    max_inflight: int | None = None,
    usage: bool = False,
    threads: int | None = None,
    ray_remote_args: Mapping[str, Any] | None = None,
) -> Dataset:
    """Returns a dataset of the same rows with a column for each label, `label_mass` and `error`; or with those of questions.

    Reads the whole dataset at once, and plans: rows that share a prefix are answered one after the other by one actor. The
    engines start, and rows are answered, when the result is consumed or written. Raises ConfigurationError or BatchJobError.

    Args:
        prompt: a column, of text or of token ids; a template that names columns in braces; or a function of a row.
        labels: the allowed answers, of any length.
        questions: in their place, as `questions` of /v1/systemone; each prompt is a state, as text.
        concurrency: number of actors, each with an engine of its own or asking one server; default: 1, or one for each server.
        engine: arguments of `sgl_prefill.batch.Engine`, the same for each actor.
        base_urls: running servers that answer in place of engines.
        max_inflight: rows with each engine or server at a time.
        usage: adds the columns `prompt_tokens` and `cached_tokens`.
        threads: of each engine on a machine without an accelerator; default: an equal share of the node's cores.
        ray_remote_args: of the actors, as `num_cpus`, `num_gpus` or `runtime_env`.
    """
    check_ray()
    urls = (base_urls,) if isinstance(base_urls, str) else tuple(base_urls)
    n_actors = (len(urls) or 1) if concurrency is None else concurrency
    asked = Asked(labels if isinstance(labels, str) else tuple(labels), questions)
    _check(asked, n_actors, engine, urls)
    wanted = Prompt.of(prompt, _names_of(dataset.schema()))
    _check_columns(dataset, (*asked.columns(), ERROR, *(USAGE if usage else ())))
    units = units_of(dataset, wanted, n_actors)
    arguments = Arguments(
        asked=asked,
        engine=dict(engine or {}),
        urls=urls,
        max_inflight=max_inflight or (INFLIGHT_SERVER if urls else INFLIGHT_OWN_ENGINE),
        usage=usage,
        n_on_node=math.ceil(n_actors / _n_nodes()),
        threads=threads,
    )
    return map_units(
        units, Scorer, arguments, n_actors, **{**_remote_args(n_actors, bool(urls)), **(ray_remote_args or {})}
    )


def check_ray() -> None:
    """Raises ConfigurationError where ray is missing, of another version, or not initialised."""
    try:
        version = importlib.metadata.version("ray")
    except importlib.metadata.PackageNotFoundError as error:
        raise ConfigurationError(f"ray is not installed, and sgl_prefill.ray needs it: {INSTALL}") from error
    if version != RAY_VERSION:
        raise ConfigurationError(f"ray is {version}, and sgl_prefill.ray is written for {RAY_VERSION}: {INSTALL}")
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise ConfigurationError(f"ray.data cannot be imported ({error}): {INSTALL}") from error
    if not ray.is_initialized():
        raise ConfigurationError("Ray is not initialised: call ray.init() before the dataset is made")


def _check(asked: Asked, n_actors: int, engine: Mapping[str, Any] | None, urls: Sequence[str]) -> None:
    problems = []
    labels = asked.labels
    if asked.questions is not None:
        if labels:
            problems.append("labels and questions are both given: ask for one of the two")
    elif isinstance(labels, str) or not labels:
        problems.append(f"labels is {labels!r}: give a list of the allowed answers")
    elif len(set(labels)) < len(labels):
        problems.append("labels holds the same answer twice: each is a column of the result")
    if n_actors < 1:
        problems.append(f"concurrency is {n_actors}: it must be at least 1")
    if engine is not None and urls:
        problems.append("engine and base_urls are both given: either actors own engines or they ask servers")
    if problems:
        raise ConfigurationError("\n".join(problems))


def _check_columns(dataset: Dataset, added: Sequence[str]) -> None:
    names = _names_of(dataset.schema())
    if taken := [name for name in added if name in names]:
        raise ConfigurationError(
            f"the dataset has a column {taken[0]!r} already, and the result would have one of that name too: rename it first"
        )
    checkpoint = dataset.context.checkpoint_config
    if checkpoint is not None and checkpoint.id_column not in names:
        raise ConfigurationError(
            f"CheckpointConfig names the id column {checkpoint.id_column!r}, and the dataset has {', '.join(names)}"
        )


def _names_of(schema: Any) -> list[str]:
    return [] if schema is None else list(schema.names)


def _n_nodes() -> int:
    import ray

    return max(1, sum(bool(node["Alive"] and node["Resources"].get("CPU")) for node in ray.nodes()))


def _remote_args(n_actors: int, asks_servers: bool) -> dict[str, Any]:
    """What an actor asks Ray for by default. Raises ConfigurationError where there are too few GPUs."""
    import ray

    if asks_servers:
        return {"num_cpus": 0}
    cluster = ray.cluster_resources()
    n_gpus = int(cluster.get("GPU", 0))
    if 0 < n_gpus < n_actors:
        raise ConfigurationError(
            f"concurrency is {n_actors}, and the cluster has {n_gpus} GPUs, one for each engine: ask for at most {n_gpus} actors"
        )
    n_cpus = max(0, int(cluster.get("CPU", 0)) - CPUS_OF_TASKS) // n_actors
    return {"num_cpus": n_cpus, **({"num_gpus": 1} if n_gpus else {})}


class Prompt(NamedTuple):
    """Makes the prompts of rows, in Ray's tasks, from one of these three."""

    column: str | None = None
    template: str | None = None
    function: Callable[[dict[str, Any]], str] | None = None

    @classmethod
    def of(cls, given: str | Callable[[dict[str, Any]], str], columns: Sequence[str]) -> Prompt:
        """A string that names no column is a template.

        Raises BatchJobError for a malformed template, and ConfigurationError for one of other columns.
        """
        if callable(given):
            return cls(function=given)
        if given in columns:
            return cls(column=given)
        if missing := [name for name in columns_of(given, "prompt") if name not in columns]:
            raise ConfigurationError(
                f"prompt names the column {missing[0]!r}, and the dataset has {', '.join(columns)}"
            )
        return cls(template=given)

    def __call__(self, rows: pa.Table) -> pa.Table:
        """Adds two columns: the prompt, and why there is none."""
        import pyarrow as pa

        if self.column is not None and _holds_token_ids(rows.schema.field(self.column).type):
            nothing = pa.nulls(rows.num_rows, pa.string())
            return rows.append_column(PROMPT, rows[self.column]).append_column(REFUSED, nothing)
        made = list(self._texts(rows))
        texts, refused = zip(*made, strict=True) if made else ((), ())
        rows = rows.append_column(PROMPT, pa.array(texts, pa.string()))
        return rows.append_column(REFUSED, pa.array(refused, pa.string()))

    def _texts(self, rows: pa.Table) -> Iterator[tuple[str | None, str | None]]:
        if self.column is not None:
            yield from ((text, None) for text in texts_of(rows[self.column], f"column {self.column!r}"))
        elif self.template is not None:
            names = columns_of(self.template)
            for row in zip(*(texts_of(rows[name], f"column {name!r}") for name in names), strict=True):
                yield self.template.format_map(dict(zip(names, row, strict=True))), None
        else:
            assert self.function is not None
            yield from (_called(self.function, row) for row in rows.to_pylist())


def _called(function: Callable[[dict[str, Any]], Any], row: dict[str, Any]) -> tuple[str | None, str | None]:
    try:
        text = function(row)
    except Exception as error:  # a user's function may raise anything; the other rows are answered
        return None, f"prompt failed: {type(error).__name__}: {error}"
    return (text, None) if isinstance(text, str) else (None, f"prompt returned {type(text).__name__} and no text")


def _holds_token_ids(arrow_type: Any) -> bool:
    import pyarrow as pa

    is_list: bool = pa.types.is_list(arrow_type) or pa.types.is_large_list(arrow_type)
    return is_list and bool(pa.types.is_integer(arrow_type.value_type))


def units_of(dataset: Dataset, prompt: Prompt, n_engines: int) -> Dataset:
    """Reads a dataset, and returns its rows with their prompts, a block for each unit, in the order of a plan."""
    import ray
    from ray.data import Datasource
    from ray.data.block import BlockAccessor, BlockMetadata
    from ray.data.datasource import ReadTask

    rows = _read(dataset, prompt)
    prompts = _compared(rows[PROMPT])
    plan = depth_first(prompts)
    tasks = []
    for first, end in divide(plan, prompts.lengths, n_engines):
        block = BlockAccessor.for_block(rows).take(plan.rows[first:end].tolist())
        metadata = BlockMetadata(num_rows=end - first, size_bytes=block.nbytes, input_files=None, exec_stats=None)
        tasks.append((_Get(ray.put(block)), metadata))

    class PlannedRows(Datasource):  # type: ignore[misc]
        def estimate_inmemory_data_size(self) -> int | None:
            return sum(metadata.size_bytes or 0 for _, metadata in tasks)

        def get_read_tasks(
            self, parallelism: int, per_task_row_limit: int | None = None, data_context: Any = None
        ) -> list[ReadTask]:
            """One for each unit, whatever parallelism is asked for."""
            return [ReadTask(get, metadata, rows.schema, per_task_row_limit) for get, metadata in tasks]

    read = ray.data.read_datasource(PlannedRows(), override_num_blocks=max(1, len(tasks)))
    read.context.checkpoint_config = dataset.context.checkpoint_config
    return read


class _Get:
    """Fetches one unit from the object store."""

    def __init__(self, unit: Any) -> None:
        self._unit = unit

    def __call__(self) -> list[pa.Table]:
        import ray

        return [ray.get(self._unit)]


def _read(dataset: Dataset, prompt: Prompt) -> pa.Table:
    import pyarrow as pa
    import ray

    # Ray warns of a checkpoint where nothing is written, as here.
    config, dataset.context.checkpoint_config = dataset.context.checkpoint_config, None
    try:
        tables = ray.get(dataset.map_batches(prompt, batch_format="pyarrow", zero_copy_batch=True).to_arrow_refs())
    finally:
        dataset.context.checkpoint_config = config
    tables = [table for table in tables if table.num_columns]
    if not tables:
        return pa.table({PROMPT: pa.array([], pa.string()), REFUSED: pa.array([], pa.string())})
    return pa.concat_tables(tables, promote_options="permissive").combine_chunks()


def _compared(prompts: pa.ChunkedArray) -> TokenRows:
    """What prompts are compared by: token ids, or bytes of text, without a copy where one chunk holds them."""
    parts = [_values(chunk) for chunk in prompts.chunks]
    lengths = np.concatenate([np.diff(offsets) for _, offsets in parts]) if parts else np.empty(0, np.int64)
    values = [values[offsets[0] : offsets[-1]] for values, offsets in parts]
    tokens = values[0] if len(values) == 1 else np.concatenate(values) if values else np.empty(0, np.uint8)
    return TokenRows.one_after_the_other(tokens, lengths)


def _values(chunk: pa.Array) -> tuple[IntArray, IntArray]:
    """All values of an array of texts or lists, and where each row begins among them."""
    import pyarrow as pa

    if not pa.types.is_string(chunk.type):
        return np.asarray(chunk.values, np.int32), np.asarray(chunk.offsets, np.int64)
    _, offsets, data = chunk.buffers()
    begins = np.frombuffer(offsets, np.int32)[chunk.offset : chunk.offset + len(chunk) + 1].astype(np.int64)
    return np.frombuffer(data or b"", np.uint8), begins


class Begun(NamedTuple):
    n_before: int  # earlier tries of the unit, by actors that died
    killers: dict[int, str]  # rows that an engine died of while they ran alone, with the message


class Register:
    """Each scorer's server, and the rows that kill engines; an actor of its own, which survives the death of a scorer."""

    def __init__(self, urls: Sequence[str] = ()) -> None:
        self._urls = urls
        self._url_of: dict[str, str] = {}
        self._begun: dict[str, int] = defaultdict(int)
        self._alone: dict[str, int] = {}  # unit -> the row that runs alone
        self._killers: dict[str, dict[int, str]] = defaultdict(dict)

    def url_of(self, actor: str) -> str:
        """The server that an actor asks: the same after a restart, and for a new one the server with the fewest actors."""
        if actor not in self._url_of:
            taken = list(self._url_of.values())
            self._url_of[actor] = min(self._urls, key=taken.count)
        return self._url_of[actor]

    def begin(self, unit: str) -> Begun:
        """Counts a try. The row that ran alone when the last try ended is a killer."""
        if (row := self._alone.pop(unit, None)) is not None:
            self._killers[unit].setdefault(row, DIED)
        n_before = self._begun[unit]
        self._begun[unit] += 1
        return Begun(n_before, self._killers[unit])

    def alone(self, unit: str, row: int) -> None:
        """Records that the engine has this row alone."""
        self._alone[unit] = row

    def failed(self, unit: str, row: int, message: str) -> None:
        """Records the error of an engine that had this row alone."""
        self._killers[unit][row] = message

    def end(self, unit: str) -> None:
        """Forgets a unit that was answered."""
        self._begun.pop(unit, None)
        self._alone.pop(unit, None)
        self._killers.pop(unit, None)


class Arguments(NamedTuple):
    """The same for every actor of a job."""

    asked: Asked
    engine: dict[str, Any]
    urls: tuple[str, ...]
    max_inflight: int
    usage: bool
    n_on_node: int  # actors on each node
    threads: int | None  # None: an equal share of the node's cores


def map_units(units: Dataset, actor: type[Scorer], arguments: Arguments, n_actors: int, **options: Any) -> Dataset:
    """The answered rows of a dataset whose blocks are units. options: of `map_batches`, in the place of those here."""
    import ray
    from ray.data import ActorPoolStrategy

    register = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(Register).remote(arguments.urls)
    ours = {
        "fn_constructor_args": (arguments, register),
        "batch_size": None,  # a block
        "batch_format": "pyarrow",
        "zero_copy_batch": True,
        # More than one unit in an actor's queue would wait while other actors are idle. "Multi-threading" with one call at a
        # time means: in the thread that made the engine, where it must be used.
        "compute": ActorPoolStrategy(size=n_actors, max_tasks_in_flight_per_actor=1, enable_true_multi_threading=True),
    }
    return units.map_batches(actor, **{**ours, **options})


class Scorer:
    """The actor: answers one unit after the other, by an engine of its own or by one server."""

    def __init__(self, arguments: Arguments, register: Any) -> None:
        import ray

        self._arguments, self._register = arguments, register
        self._engine: Any
        if arguments.urls:
            self._engine = ray.get(register.url_of.remote(ray.get_runtime_context().get_actor_id()))
        else:
            self._engine = _own_engine(arguments)

    def __call__(self, rows: pa.Table) -> pa.Table:
        import ray

        from sgl_prefill.batch.api import RowScore

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
        """Ends this process if the engine fails as a whole: Ray starts another one, which skips a row that failed alone."""
        import ray

        from sgl_prefill.batch.api import score as answers

        (labels, questions), max_inflight = self._arguments.asked, self._arguments.max_inflight
        try:
            yield from answers(
                prompts, labels=labels, questions=questions, engine=self._engine, max_inflight=max_inflight
            )
        except Exception as error:
            traceback.print_exc()
            if len(rows) == 1:
                message = f"the engine failed with this row: {type(error).__name__}: {error}"
                ray.get(self._register.failed.remote(unit, rows[0], message))
            sys.stderr.flush()
            os._exit(EXIT_STATUS)

    def _with_columns(self, rows: pa.Table, scores: list[RowScore]) -> pa.Table:
        import pyarrow as pa

        columns: list[tuple[str, Any, list[Any]]] = [
            (
                name,
                pa.float64() if kind is float else pa.string(),
                [one.columns and one.columns[name] for one in scores],
            )
            for name, kind in self._arguments.asked.columns().items()
        ]
        columns.append((ERROR, pa.string(), [one.error for one in scores]))
        for name in USAGE if self._arguments.usage else ():
            columns.append((name, pa.int64(), [getattr(one, name) for one in scores]))
        for name, arrow_type, values in columns:
            rows = rows.append_column(name, pa.array(values, arrow_type))
        return rows.drop_columns([PROMPT, REFUSED])


def _own_engine(arguments: Arguments) -> Any:
    """An engine with this actor's share of the node. The environment is set before torch is imported."""
    from sgl_prefill.launch_server import SPIN_COUNT

    n_threads = arguments.threads or max(1, len(os.sched_getaffinity(0)) // arguments.n_on_node)
    os.environ["OMP_NUM_THREADS"] = str(n_threads)
    os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
    from sgl_prefill.batch.api import Engine
    from sgl_prefill.examples import demo_model
    from sgl_prefill.startup import examine
    from sgl_prefill.startup.device import this_device

    options = dict(arguments.engine)
    if this_device().is_host and "memory_budget_gb" not in options:
        free_gb, _ = examine.free_memory_gb()
        options["memory_budget_gb"] = round(free_gb / 2 / arguments.n_on_node, 3)
    return Engine(**{"model_path": options.get("model_path") or str(demo_model.ensure()), **options})
