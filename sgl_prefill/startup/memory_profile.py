"""Measures how much memory an input takes besides durable KV (PrefillOnly, section 5: the profile run).

Activations grow linearly with the input: the peaks of two synthetic inputs give the fixed part and the part per token.

- On a device the longest input and one of half its length run. Where memory runs out and the user has set no length, a shorter
  one becomes the longest.
- On a host the longest input would take minutes. There PyTorch's profiler gives the peak of the tensors, from passes that compute
  only what decides it: the first and the last chunk of a few pieces, and the last block of their attention
  (`HybridBody.only_what_decides_memory`, `LoadedModel.only_last_block`). Memory beside tensors (scratch of libraries, malloc's
  fragments) is this process's resident memory less the tensors, at one length.

The result is stored on disk with everything that it depends on.
"""

from __future__ import annotations

import functools
import gc
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

from torch.autograd.profiler import profile

from sgl_prefill.config import PrefillConfig
from sgl_prefill.core.memory_plan import MemoryUse
from sgl_prefill.core.ranks import smallest
from sgl_prefill.errors import MemoryPlanError, NoMemoryLeftError
from sgl_prefill.startup import disk_cache
from sgl_prefill.startup.device import Accelerator, is_out_of_memory
from sgl_prefill.startup.loaded_model import LoadedModel

logger = logging.getLogger(__name__)
Measured = TypeVar("Measured")

# Memory beside tensors varies from run to run: by this factor, and with any model up to so much.
HOST_MARGIN = 1.5
HOST_RESERVE_BYTES = 48 << 20
# Lengths of inputs.
HOST_FIRST_TOKENS = 8192  # for memory beside tensors: the CPU attention's tiles grow up to here
HOST_LONGEST_TOKENS = 32768  # for the slope, with half of it
HOST_PLAIN_PATH_TOKENS = 1024  # in SGLang's layers, which are slow
DEVICE_FIRST_TOKENS = Accelerator.plain_tokens
SHORTER = 0.75  # factor of the next length where memory runs out
FEWEST_TOKENS = 16
UNBOUNDED_TOKENS = sys.maxsize


class Activations(NamedTuple):
    """Memory of one forward pass."""

    fixed_bytes: int
    bytes_per_token: float
    longest_tokens: int = UNBOUNDED_TOKENS  # longer inputs run out of memory, or may do so


def measure_activations(model: LoadedModel, config: PrefillConfig, limit_tokens: int, kv_bytes: int) -> Activations:
    """Returns the stored profile, or runs inputs of at most `limit_tokens`. kv_bytes: SGLang's size of its KV pool.

    Raises MemoryPlanError where the user's --max-input-length, or any input, is too long.
    """
    if model.device.extrapolates_memory:
        return _of_host(model, config, limit_tokens)
    return _of_device(model, config, limit_tokens, kv_bytes)


def _of_host(model: LoadedModel, config: PrefillConfig, limit_tokens: int) -> Activations:
    hybrid = model.hybrid
    longest = min(limit_tokens, HOST_PLAIN_PATH_TOKENS if hybrid is None else HOST_LONGEST_TOKENS)
    depends_on = _circumstances(model, config, None)
    fields = {"fixed_bytes": int, "bytes_per_token": float, "longest_tokens": int}
    stored = disk_cache.load_for_all(
        model.ranks, "memory profile", depends_on, fields, lambda found: bool(found["longest_tokens"] >= longest)
    )
    if stored is not None:
        return Activations(stored["fixed_bytes"], stored["bytes_per_token"])
    activations = _measure_on_host(model, longest)
    disk_cache.store("memory profile", depends_on, {**activations._asdict(), "longest_tokens": longest})
    return activations


def _of_device(model: LoadedModel, config: PrefillConfig, limit_tokens: int, kv_bytes: int) -> Activations:
    # Also for a stored profile: it allocates kernels and workspaces, and the plan reads the free memory after it.
    first_tokens, first_bytes = _first_that_runs(model, min(limit_tokens, DEVICE_FIRST_TOKENS))
    (room_bytes,) = smallest(model.ranks, [model.room_bytes(kv_bytes)])
    lengths = (config.max_input_length, limit_tokens, room_bytes >> 30)
    depends_on = _circumstances(model, config, lengths)
    fields = {"fixed_bytes": int, "bytes_per_token": float, "longest_tokens": int}
    if (stored := disk_cache.load_for_all(model.ranks, "memory profile", depends_on, fields)) is not None:
        return Activations(**stored)
    activations = _measure_on_device(
        model, config.max_input_length, limit_tokens, room_bytes, first_tokens, first_bytes
    )
    disk_cache.store("memory profile", depends_on, activations._asdict())
    return activations


def _circumstances(
    model: LoadedModel, config: PrefillConfig, device_lengths: tuple[int | None, ...] | None
) -> dict[str, Any]:
    return {
        **model.circumstances,
        "chunk_tokens": None if model.hybrid is None else model.hybrid.chunk_tokens,
        "options": (config.suffix_kv, config.logits_dtype),
        "device_lengths": device_lengths,
    }


def _measure_on_host(model: LoadedModel, longest_tokens: int) -> Activations:
    if model.hybrid is None:
        # In SGLang's layers all tensors grow with the input, and so do malloc's fragments between them.
        return Activations(0, _peak_bytes(model, longest_tokens) / longest_tokens)
    first = min(longest_tokens, HOST_FIRST_TOKENS)
    with _memory_decides_only(model):
        beside_tensors = _peak_bytes(model, first) - _tensor_bytes(model, first)
        fixed, per_token = _line(model, longest_tokens, _tensor_bytes)
    return Activations(fixed + int(max(HOST_MARGIN * beside_tensors, HOST_RESERVE_BYTES)), per_token)


def _first_that_runs(model: LoadedModel, n_tokens: int) -> tuple[int, int]:
    """Returns (tokens, peak bytes) of a short input that does not run out of memory."""
    while True:
        first_bytes = _unless_memory_runs_out(model, functools.partial(_peak_once_warm, model, n_tokens))
        if not isinstance(first_bytes, _RanOut):
            return n_tokens, first_bytes
        if model.ranks.count > 1 or n_tokens // 2 < FEWEST_TOKENS:
            raise MemoryPlanError(
                f"an input of {n_tokens} tokens runs out of memory beside the weights of {model.name} on {model.device.model()}"
                f" ({first_bytes.reason}): {_free(model)}. Take a card with more memory, more cards with --tp-size, or a smaller"
                " or quantized model"
            )
        n_tokens //= 2


def _peak_once_warm(model: LoadedModel, n_tokens: int) -> int:
    _run(model, n_tokens)
    return _peak_bytes(model, n_tokens)


def _measure_on_device(
    model: LoadedModel,
    wanted_tokens: int | None,
    limit_tokens: int,
    room_bytes: int,
    first_tokens: int,
    first_bytes: int,
) -> Activations:
    """Runs the user's longest input, or the longest that may fit, and one of half its length."""
    one_layer, _ = model.kv_bytes_per_token()
    scratch = (one_layer if model.is_evicting else 0) + model.gathered_kv_bytes_per_token()
    grows_by = first_bytes / first_tokens if model.hybrid is None else model.hybrid.retained_bytes_per_token
    base_bytes = first_bytes - first_tokens * grows_by
    fits = int(max(room_bytes - base_bytes, 0) / (grows_by + scratch))
    (fits,) = smallest(model.ranks, [fits])
    longest = min(wanted_tokens or fits, limit_tokens)
    if longest > fits:
        raise MemoryPlanError(
            f"an input of {longest} tokens needs about {(base_bytes + longest * (grows_by + scratch)) / 2**20:.0f} MiB beyond the"
            f" weights, and there are {room_bytes / 2**20:.0f} MiB: the longest that fits has about {fits} tokens."
            " Lower --max-input-length, or give the engine more memory"
        )
    longest = max(longest, 1)
    limit_tokens = UNBOUNDED_TOKENS
    while True:
        line = _unless_memory_runs_out(model, functools.partial(_line, model, longest, _peak_bytes))
        if not isinstance(line, _RanOut):
            fixed_bytes, per_token = line
            # The first input ran in SGLang's layers.
            fixed_bytes = max(fixed_bytes, int(first_bytes - first_tokens * per_token))
            return Activations(fixed_bytes, per_token, limit_tokens)
        if wanted_tokens is not None or model.ranks.count > 1 or longest <= first_tokens:
            raise MemoryPlanError(
                f"an input of {longest} tokens runs out of memory ({line.reason}): {_free(model)}. Name a shorter"
                " --max-input-length, or give the engine more memory"
            )
        logger.warning("an input of %d tokens runs out of memory, a shorter one is tried: %s", longest, line.reason)
        limit_tokens = longest = max(int(longest * SHORTER), first_tokens)


class _RanOut(NamedTuple):
    """The result of a measurement that ran out of memory."""

    reason: str


def _unless_memory_runs_out(model: LoadedModel, measure: Callable[[], Measured]) -> Measured | _RanOut:
    """Where memory runs out, frees everything that the measurement held."""
    try:
        return measure()
    except (MemoryError, RuntimeError, NoMemoryLeftError) as error:
        if not is_out_of_memory(error):
            raise
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    # Outside the handler: the exception's traceback would keep the failed pass's tensors alive.
    gc.collect()
    model.forget_slots()
    model.device.release_unused()
    return _RanOut(reason)


def _free(model: LoadedModel) -> str:
    free, total = model.device.free_bytes() / 2**30, model.device.total_bytes() / 2**30
    return f"{free:.1f} of its {total:.1f} GiB are free beside {model.weights_bytes() / 2**30:.1f} GiB of weights"


def _line(model: LoadedModel, n_long: int, measure: Callable[[LoadedModel, int], int]) -> tuple[int, float]:
    """Returns (fixed bytes, bytes per token) from the peaks at this length and half of it. A negative slope is noise: 0."""
    n_short = max(n_long // 2, 1)
    short_bytes, long_bytes = measure(model, n_short), measure(model, n_long)
    per_token = max(long_bytes - short_bytes, 0) / max(n_long - n_short, 1)
    return int(max(long_bytes - per_token * n_long, 0)), per_token


def _run(model: LoadedModel, n_tokens: int) -> None:
    # Each run uses the same slots, whose memory the first run commits and the memory plan counts.
    model.forget_slots()
    step = model.step([[1] * n_tokens])
    try:
        step.run()
    finally:
        step.release()


def peak_tensor_bytes(run: Callable[[], None]) -> int:
    """Peak bytes of the host tensors of `run`: exact, unlike resident memory."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it reports a machine without a GPU as an error
    with profile(profile_memory=True) as profiled:
        run()
    events = [event for event in profiled.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    alive_bytes: list[int] = list(accumulate((event.nbytes() for event in events), initial=0))
    return max(alive_bytes)


def _tensor_bytes(model: LoadedModel, n_tokens: int) -> int:
    """Peak bytes of the host tensors of one input."""
    with model.only_last_block():
        return peak_tensor_bytes(lambda: _run(model, n_tokens))


def _peak_bytes(model: LoadedModel, n_tokens: int) -> int:
    return model.device.peak_bytes(lambda: _run(model, n_tokens))


@contextmanager
def _memory_decides_only(model: LoadedModel) -> Iterator[None]:
    """Within the block hybrid passes compute only what decides their peak memory; answers are meaningless."""
    hybrid = model.hybrid
    assert hybrid is not None
    hybrid.only_what_decides_memory = True
    try:
        yield
    finally:
        hybrid.only_what_decides_memory = False


def memory_use(model: LoadedModel, activations: Activations, budget_bytes: int) -> MemoryUse:
    one_layer, all_layers = model.kv_bytes_per_token()
    return MemoryUse(
        weights_bytes=model.weights_bytes(),
        budget_bytes=budget_bytes,
        fixed_bytes=activations.fixed_bytes,
        activation_bytes_per_token=activations.bytes_per_token + model.gathered_kv_bytes_per_token(),
        scratch_bytes_per_token=one_layer if model.is_evicting else 0,
        durable_bytes_per_token=all_layers,
    )
