"""How much memory an input takes besides durable KV, measured (PrefillOnly, section 5: the profile run).

Made-up inputs of several lengths run, each with no durable slot. Activations grow linearly with the input, so that two lengths
give the fixed part and the part for each token.

- On a device the longest input runs in full, and one of half its length, and the allocator names the peak of each.
- On a host a whole run of the longest input would take minutes. There the tensors' part comes from what PyTorch's profiler
  says of its allocator, which is exact, at lengths that show the slope, from passes that compute what decides the peak: the
  first and the last chunk of a few pieces and the last block of their attention (`HybridBody.only_what_decides_memory`,
  `LoadedModel.only_last_block`). What lies beside tensors (libraries' scratch, pieces that malloc cannot give back) comes from
  this process's resident memory, at one length.

The result is kept on disk under everything that it depends on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from sgl_prefill import disk_cache, tensor_memory
from sgl_prefill.config import PrefillConfig
from sgl_prefill.core.memory_plan import MemoryUse
from sgl_prefill.core.ranks import smallest
from sgl_prefill.errors import MemoryPlanError
from sgl_prefill.startup.loaded_model import LoadedModel

# What malloc holds beside the tensors varies from run to run: by this factor, and with any model up to so much.
HOST_MARGIN = 1.5
HOST_RESERVE_BYTES = 48 << 20
# On a host: one input of the first length, two from which the slope is read, and one for the plain path, which is slow.
HOST_FIRST_TOKENS = 8192  # the CPU attention's tiles grow up to here
HOST_LONGEST_TOKENS = 32768
HOST_PLAIN_PATH_TOKENS = 1024
DEVICE_FIRST_TOKENS = 8192


class Activations(NamedTuple):
    """What one forward pass takes, in bytes."""

    fixed_bytes: int
    bytes_per_token: float


def measure_activations(model: LoadedModel, config: PrefillConfig, limit_tokens: int, budget_bytes: int) -> Activations:
    """Measures activations: from this model's cached profile, or by running inputs of at most `limit_tokens`.

    Raises MemoryPlanError before running an input that shorter ones show to be far over `budget_bytes`.
    """
    hybrid, extrapolates = model.hybrid, model.device.extrapolates_memory
    depends_on = {
        **model.circumstances,
        "chunk_tokens": None if hybrid is None else hybrid.chunk_tokens,
        "options": (config.suffix_kv, config.logits_dtype),
        "device_lengths": None if extrapolates else (config.max_input_length, limit_tokens, budget_bytes >> 20),
    }
    longest = limit_tokens
    if extrapolates:
        longest = min(limit_tokens, HOST_PLAIN_PATH_TOKENS if hybrid is None else HOST_LONGEST_TOKENS)
    fields = {"fixed_bytes": int, "bytes_per_token": float, "longest_tokens": int}
    stored = disk_cache.load_for_all(
        model.ranks, "memory profile", depends_on, fields, lambda found: bool(found["longest_tokens"] >= longest)
    )
    if stored is not None:
        return Activations(stored["fixed_bytes"], stored["bytes_per_token"])
    if not extrapolates:
        activations = _measure_on_device(model, config.max_input_length, limit_tokens, budget_bytes)
    elif hybrid is None:
        # All tensors of the plain path grow with the input, and malloc's free pieces between them too (as much again).
        activations = Activations(0, _peak_bytes(model, longest) / longest)
    else:
        activations = _measure_on_host(model, longest)
    disk_cache.store("memory profile", depends_on, {**activations._asdict(), "longest_tokens": longest})
    return activations


def _measure_on_host(model: LoadedModel, longest_tokens: int) -> Activations:
    first = min(longest_tokens, HOST_FIRST_TOKENS)
    with _memory_decides_only(model):
        beside_tensors = _peak_bytes(model, first) - _tensor_bytes(model, first)
        fixed, per_token = _fit(model, longest_tokens, _tensor_bytes)
    return Activations(fixed + int(max(HOST_MARGIN * beside_tensors, HOST_RESERVE_BYTES)), per_token)


def _measure_on_device(
    model: LoadedModel, wanted_tokens: int | None, limit_tokens: int, budget_bytes: int
) -> Activations:
    """Runs the longest input that is wanted or may fit, and one of half its length: a line through both."""
    one_layer, _ = model.kv_bytes_per_token()
    first = min(limit_tokens, DEVICE_FIRST_TOKENS)
    _run(model, first)  # pays for what stays: kernels, workspaces
    first_bytes = _peak_bytes(model, first)
    grows_by = first_bytes / first if model.hybrid is None else model.hybrid.retained_bytes_per_token + one_layer
    fits = first + int(max(budget_bytes - first_bytes, 0) / grows_by)
    (fits,) = smallest(model.ranks, [fits])
    longest = wanted_tokens or min(limit_tokens, fits)
    if longest > fits:
        raise MemoryPlanError(
            f"an input of {longest} tokens needs about"
            f" {(first_bytes + (longest - first) * grows_by) / 2**20:.0f} MiB beyond the weights, and there are"
            f" {budget_bytes / 2**20:.0f} MiB: the longest that fits has about {fits} tokens."
            " Lower --max-input-length, or give the engine more memory"
        )
    # No more than the KV pool holds; the plan says so if that is too little.
    return _fit(model, min(longest, limit_tokens), _peak_bytes)


def _fit(model: LoadedModel, n_long: int, measure: Callable[[LoadedModel, int], int]) -> Activations:
    """Returns the line through the peaks at this length and half of it; where noise makes the slope negative, all is fixed."""
    n_short = max(n_long // 2, 1)
    short_bytes, long_bytes = measure(model, n_short), measure(model, n_long)
    per_token = max(long_bytes - short_bytes, 0) / max(n_long - n_short, 1)
    return Activations(int(max(long_bytes - per_token * n_long, 0)), per_token)


def _run(model: LoadedModel, n_tokens: int) -> None:
    # Nobody holds a slot yet. The same slots each time: their memory is committed at the first, and counted elsewhere.
    model.forget_slots()
    step = model.step([[1] * n_tokens])
    step.run()
    step.release()


def _tensor_bytes(model: LoadedModel, n_tokens: int) -> int:
    """Measures, on a host, the peak of the tensors that one input allocates."""
    with model.only_last_block():
        return tensor_memory.peak_bytes(lambda: _run(model, n_tokens))


def _peak_bytes(model: LoadedModel, n_tokens: int) -> int:
    """Measures the peak memory of one input above the idle process."""
    return model.device.peak_bytes(lambda: _run(model, n_tokens))


@contextmanager
def _memory_decides_only(model: LoadedModel) -> Iterator[None]:
    """Compute only what decides the peak of hybrid prefilling; answers are meaningless."""
    hybrid = model.hybrid
    assert hybrid is not None
    hybrid.only_what_decides_memory = True
    try:
        yield
    finally:
        hybrid.only_what_decides_memory = False


def memory_use(model: LoadedModel, activations: Activations, budget_bytes: int) -> MemoryUse:
    """Returns all that the plan needs to know."""
    one_layer, all_layers = model.kv_bytes_per_token()
    return MemoryUse(
        weights_bytes=model.weights_bytes(),
        budget_bytes=budget_bytes,
        fixed_bytes=activations.fixed_bytes,
        activation_bytes_per_token=activations.bytes_per_token,
        scratch_bytes_per_token=one_layer if model.is_evicting else 0,
        durable_bytes_per_token=all_layers,
    )
