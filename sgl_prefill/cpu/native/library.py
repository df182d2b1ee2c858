"""Loads the library of native kernels, selects the build for this processor, and tests it.

Without native kernels PyTorch's are used, and `Native.reason` says why and what to do. The variable PREFILL_CPU_KERNEL names a
build, `off`, or `auto` (the default): the best build that runs on this processor.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from typing import Any, NamedTuple

import torch

from sgl_prefill.core.shared_groups import Group
from sgl_prefill.cpu.attention import KVRows, attend, runs_of
from sgl_prefill.cpu.native.build import LIBRARY, digest
from sgl_prefill.cpu.native.calls import BuildTable, Kernels, StepRequests
from sgl_prefill.errors import ConfigurationError

logger = logging.getLogger(__name__)

VARIABLE = "PREFILL_CPU_KERNEL"
REBUILD = "python -m sgl_prefill.cpu.native.build"
MAX_ERROR = {torch.bfloat16: 0.03, torch.float32: 1e-4}


class Native(NamedTuple):
    kernels: Kernels | None
    reason: str | None  # why there are no kernels

    def shown(self) -> dict[str, Any]:
        """As in /server_info."""
        return {"build": None if self.kernels is None else self.kernels.build, "reason": self.reason}


@functools.cache
def native() -> Native:
    """Returns the kernels of this process, loaded and tested once. Raises ConfigurationError: see `find`."""
    found = find(os.environ.get(VARIABLE, "auto"))
    if found.kernels is None:
        logger.warning("PyTorch's own kernels serve, several times slower than the native ones: %s", found.reason)
    return found


def find(choice: str) -> Native:
    """choice: auto, off, or the name of a build. Raises ConfigurationError if the named build does not run here."""
    if choice == "off":
        return Native(None, f"{VARIABLE} is off")
    try:
        library = _load()
    except OSError as error:
        return _missing(choice, str(error))
    names: list[str] = library.sgl_prefill_builds().decode().split(",")
    if choice != "auto" and choice not in names:
        raise ConfigurationError(
            f"{VARIABLE} is {choice!r}, and here it must be auto, off, or one of {', '.join(names)}"
        )
    name = names[0] if choice == "auto" else choice
    kernels = Kernels(BuildTable.from_address(library.sgl_prefill_build(name.encode())))
    if problem := self_test(kernels):
        return _missing(choice, f"the self-test of build {name} failed ({problem}): please report it")
    return Native(kernels, None)


def _missing(choice: str, reason: str) -> Native:
    if choice != "auto":
        raise ConfigurationError(f"{VARIABLE} is {choice!r}, and {reason}")
    return Native(None, reason)


def _load() -> ctypes.CDLL:
    """Raises OSError, whose message names the remedy."""
    if not LIBRARY.exists():
        raise OSError(f"they were not built when the package was installed: with a C++ compiler, run `{REBUILD}`")
    try:
        library = ctypes.CDLL(str(LIBRARY))
    except OSError as error:
        raise OSError(f"{LIBRARY.name} cannot be loaded ({error}): run `{REBUILD}`") from error
    try:
        library.sgl_prefill_digest.restype = library.sgl_prefill_builds.restype = ctypes.c_char_p
        library.sgl_prefill_build.restype, library.sgl_prefill_build.argtypes = ctypes.c_void_p, [ctypes.c_char_p]
    except AttributeError as error:
        raise OSError(f"{LIBRARY.name} is not this package's ({error}): run `{REBUILD}`") from error
    if library.sgl_prefill_digest().decode() != digest():
        raise OSError(f"{LIBRARY.name} was built from other sources: run `{REBUILD}`")
    return library


def self_test(kernels: Kernels) -> str | None:
    """Compares each kernel on small inputs with PyTorch in float32, in milliseconds. Returns what is wrong, or None."""
    generator = torch.Generator().manual_seed(0)
    for dtype, tolerance in MAX_ERROR.items():

        def random(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(dtype)

        errors = {
            "attention": _attention_error(kernels, random),
            "rms_norm": _rms_norm_error(kernels, random),
            "gated": _gated_error(kernels, random),
            "rotate": _rotate_error(kernels, random),
            "store": _store_error(kernels, random),
            "logits": _logits_error(kernels, random),
            "product": _product_error(kernels, random),
        }
        for name, error in errors.items():
            if not error <= tolerance:
                return f"{name} in {dtype} is off by {error:.2g}"
    return None


def _attention_error(kernels: Kernels, random: Any) -> float:
    """Two requests of 9 and 40 new tokens after 70 shared positions, in shuffled slots; unused slots hold NaN."""
    n_shared, n_new, heads, kv_heads, dim = 70, (9, 40), 6, 2, 64
    n_slots = n_shared + sum(n_new)
    slots = torch.randperm(n_slots + 8, generator=torch.Generator().manual_seed(1)).to(torch.int32)
    key, value = random(n_slots + 8, kv_heads, dim), random(n_slots + 8, kv_heads, dim)
    key[slots[n_slots:].long()] = value[slots[n_slots:].long()] = float("nan")
    table = torch.zeros((2, n_shared + max(n_new)), dtype=torch.int32)
    table[:, :n_shared] = slots[:n_shared]
    table[0, n_shared : n_shared + n_new[0]] = slots[n_shared : n_shared + n_new[0]]
    table[1, n_shared:] = slots[n_shared + n_new[0] : n_slots]
    query = random(sum(n_new), heads, dim)
    output, kv_tokens = torch.empty_like(query), [n_shared + n for n in n_new]
    step = StepRequests(table, [0, 1], [0, n_new[0], sum(n_new)], kv_tokens, [Group((0, 1), n_shared)])
    kernels.attention(step, query, key, value, output, scale=dim**-0.5)
    errors = []
    for request, start in enumerate((0, n_new[0])):
        new = slice(start, start + n_new[request])
        rows = KVRows(key.float(), value.float(), runs_of(table[request, : kv_tokens[request]]))
        wanted = query[new].float()
        attend(wanted, rows, wanted, scale=dim**-0.5)
        errors.append((output[new].float() - wanted).abs().max())
    return float(torch.stack(errors).max())  # keeps a NaN, which Python's max may lose


def _rms_norm_error(kernels: Kernels, random: Any) -> float:
    x, residual, weight = random(3, 72), random(3, 72), random(72)
    total = x.float() + residual.float()
    wanted = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + 1e-5) * weight.float()
    return float((kernels.rms_norm(x, weight, 1e-5, residual).float() - wanted).abs().max() / 4)


def _gated_error(kernels: Kernels, random: Any) -> float:
    x = random(3, 2 * 72)
    gate, up = x.float().chunk(2, -1)
    return float((kernels.gated(x, "silu").float() - torch.nn.functional.silu(gate) * up).abs().max() / 4)


def _rotate_error(kernels: Kernels, random: Any) -> float:
    x, angles, positions = random(3, 2, 64), random(9, 32).float(), torch.tensor([2, 0, 8])
    cos, sin = angles.cos()[positions, None], angles.sin()[positions, None]
    one, other = x.float().chunk(2, -1)
    wanted = torch.cat([one * cos - other * sin, other * cos + one * sin], -1)
    kernels.rotate(x, positions, torch.cat([angles.cos(), angles.sin()], -1).contiguous(), is_neox=True)
    return float((x.float() - wanted).abs().max())


def _store_error(kernels: Kernels, random: Any) -> float:
    pools, rows, slots = random(2, 9, 2, 24), random(2, 3, 2, 24), torch.tensor([7, 0, 4])
    wanted = pools.clone()
    wanted[:, slots] = rows
    kernels.store(pools[0], pools[1], slots, rows[0], rows[1])
    return float((pools - wanted).abs().max())


def _product_error(kernels: Kernels, random: Any) -> float:
    x, weight, bias = random(35, 64) / 8, random(96, 64), random(96)
    if not kernels.fits_product(weight):
        return 0.0
    wanted = x.float() @ weight.float().T + bias.float()
    gate, up = wanted.chunk(2, -1)
    of_gate = kernels.product(x, kernels.pack_product(weight, has_gate=True), bias, "silu")
    errors = [(kernels.product(x, kernels.pack_product(weight, has_gate=False), bias).float() - wanted).abs().max()]
    errors.append((of_gate.float() - torch.nn.functional.silu(gate) * up).abs().max() / 4)
    return float(torch.stack(errors).max())


def _logits_error(kernels: Kernels, random: Any) -> float:
    hidden, weight = random(3, 64), random(41, 64)
    wanted = (hidden.double() @ weight.double().T).float()
    return float((kernels.logits(hidden, weight) - wanted).abs().max())
