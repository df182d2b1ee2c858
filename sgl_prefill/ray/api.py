"""`score`: a Ray Dataset in, the same rows with their label probabilities out."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sgl_prefill.batch.options import INFLIGHT_OWN_ENGINE, INFLIGHT_SERVER
from sgl_prefill.batch.tables import ERROR, MASS
from sgl_prefill.errors import ConfigurationError

if TYPE_CHECKING:
    from ray.data import Dataset

RAY_VERSION = "2.60.0"
INSTALL = "pip install 'sgl-prefill[ray]'"
USAGE = ("prompt_tokens", "cached_tokens")


def score(
    dataset: Dataset,
    *,
    prompt: str | Callable[[dict[str, Any]], str],
    labels: Sequence[str],
    concurrency: int | None = None,
    engine: Mapping[str, Any] | None = None,
    base_urls: Sequence[str] = (),
    max_inflight: int | None = None,
    usage: bool = False,
    threads: int | None = None,
    ray_remote_args: Mapping[str, Any] | None = None,
) -> Dataset:
    """Returns a dataset of the same rows with a column for each label, `label_mass` and `error`.

    Reads the whole dataset at once, and plans: rows that share a prefix are answered one after the other by one actor. The
    engines start, and rows are answered, when the result is consumed or written. Raises ConfigurationError or BatchJobError.

    Args:
        prompt: a column, of text or of token ids; a template that names columns in braces; or a function of a row.
        labels: the allowed answers, of any length.
        concurrency: so many actors, each with an engine of its own or asking one server; default: 1, or one for each server.
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
    _check(labels, n_actors, engine, urls)
    from sgl_prefill.ray import planned, prompts, resources, scorer

    wanted = prompts.Prompt.of(prompt, _names_of(dataset.schema()))
    added = (*labels, MASS, ERROR, *(USAGE if usage else ()))
    _check_columns(dataset, added)
    units = planned.units(dataset, wanted, n_actors)
    share = resources.share(n_actors, threads)
    arguments = scorer.Arguments(
        labels=tuple(labels),
        engine=dict(engine or {}),
        urls=urls,
        max_inflight=max_inflight or (INFLIGHT_SERVER if urls else INFLIGHT_OWN_ENGINE),
        share=share,
        usage=usage,
    )
    return scorer.scored(
        units, arguments, n_actors, {**resources.remote_args(n_actors, bool(urls)), **(ray_remote_args or {})}
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


def _check(labels: Sequence[str], n_actors: int, engine: Mapping[str, Any] | None, urls: Sequence[str]) -> None:
    problems = []
    if isinstance(labels, str) or not labels:
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
