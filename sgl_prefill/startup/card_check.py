"""Whether a card has room for a model, before its weights are loaded, and what a start says where it has not.

The weights are counted from the headers of the model's safetensors files, or from its config where they are made up; a model
of which neither says enough is loaded, and `out_of_memory` says what has happened where that fails.
"""

from __future__ import annotations

import json
import logging
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sgl_prefill.core import gpu_memory
from sgl_prefill.core.gpu_memory import GIB
from sgl_prefill.device import Device
from sgl_prefill.errors import MemoryPlanError

logger = logging.getLogger(__name__)

# Numbers of these types become numbers of the model's dtype, which has at least two bytes; all others are loaded as they are.
FLOATS, FLOAT_BYTES = ("F64", "F32", "F16", "BF16"), 2
# What others hold of a card is named from this share on: less is a desktop, or CUDA's own.
NAMED_SHARE = 0.05


def check(device: Device, model_path: str, n_ranks: int, *, loads_all_as_it_is: bool = True) -> None:
    """Raise MemoryPlanError where the weights with a margin are more than what is free on a device, if the weights are loaded as
    they are.
    """
    free_bytes, total_bytes = device.free_bytes(), device.total_bytes()
    held_bytes = total_bytes - free_bytes
    if held_bytes > NAMED_SHARE * total_bytes:
        logger.warning("%s", _held_by_others(device, free_bytes, total_bytes))
    weights_bytes = least_weights_bytes(Path(model_path)) if loads_all_as_it_is else None
    if weights_bytes is None:
        return
    needed_bytes = weights_bytes // n_ranks + gpu_memory.margin_bytes(total_bytes)
    if needed_bytes > free_bytes:
        name = gpu_memory.model_name(model_path)
        raise MemoryPlanError(_why_not(device, name, weights_bytes // n_ranks, needed_bytes - free_bytes, free_bytes))


def out_of_memory(device: Device, model_path: str, free_at_start_bytes: int, error: BaseException) -> str:
    """Says what it means that a start has run out of memory. free_at_start_bytes: before the weights."""
    name, total_bytes = gpu_memory.model_name(model_path), device.total_bytes()
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    weights_bytes = least_weights_bytes(Path(model_path))
    weights = "" if weights_bytes is None else f" Its weights take {weights_bytes / GIB:.1f} GiB."
    held = ""
    if total_bytes - free_at_start_bytes > NAMED_SHARE * total_bytes:
        held = f" {_held_by_others(device, free_at_start_bytes, total_bytes)}"
    return (
        f"{name} ran out of memory on {device.model()} while it started ({reason}): {free_at_start_bytes / GIB:.1f} of"
        f" {total_bytes / GIB:.1f} GiB were free at the start.{weights}{held} Take a card with more memory, more cards with"
        " --tp-size, or a smaller or quantized model"
    )


def no_room_for_kv(device: Device, model: str, weights_bytes: int, free_bytes: int, fraction: float) -> str:
    """Says what it means that SGLang finds no memory for KV beside the weights. free_bytes: now, the weights being loaded."""
    spare_bytes = free_bytes - gpu_memory.margin_bytes(device.total_bytes())
    if spare_bytes > 0:
        return (
            f"--mem-fraction-static {fraction:g} leaves no memory for KV beside the weights of {model}"
            f" ({weights_bytes / GIB:.1f} GiB) on {device.model()}, of which {free_bytes / GIB:.1f} GiB are free: raise it"
        )
    return _why_not(device, model, weights_bytes, GIB // 10 - spare_bytes, free_bytes + weights_bytes)


def _why_not(device: Device, model: str, weights_bytes: int, missing_bytes: int, free_bytes: int) -> str:
    total_bytes = device.total_bytes()
    message = gpu_memory.too_small(model, device.model(), total_bytes, weights_bytes, missing_bytes)
    if total_bytes - free_bytes <= NAMED_SHARE * total_bytes:
        return message
    if missing_bytes > total_bytes - free_bytes:
        return f"{message}. {_held_by_others(device, free_bytes, total_bytes)}"
    return (
        f"{model} does not fit what is free of this {device.model()}: {missing_bytes / GIB:.1f} GiB are missing for"
        f" {weights_bytes / GIB:.1f} GiB of weights and a margin. {_held_by_others(device, free_bytes, total_bytes)}"
    )


def _held_by_others(device: Device, free_bytes: int, total_bytes: int) -> str:
    return (
        f"{free_bytes / GIB:.1f} of the {total_bytes / GIB:.1f} GiB of {device.model()} are free, and"
        f" {(total_bytes - free_bytes) / GIB:.1f} GiB are held by other processes (nvidia-smi lists them): start those with a"
        " smaller --mem-fraction-static, which is a share of what is free when an engine starts, or take another card with"
        " CUDA_VISIBLE_DEVICES"
    )


def least_weights_bytes(folder: Path) -> int | None:
    """Counts the bytes that the weights take at least, in numbers of two bytes where they are not quantized; None where that
    cannot be told.
    """
    try:
        if files := _safetensors_files(folder):
            return sum(_least_bytes(tensor) for file in files for tensor in _tensors(file))
        config = json.loads((folder / "config.json").read_text())
        return gpu_memory.shape_of(folder.name, config).weights_bytes if not any(folder.glob("*.bin")) else None
    except (OSError, ValueError, KeyError, struct.error):  # on a hub, or of another kind
        return None


def _safetensors_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        return [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    single = folder / "model.safetensors"
    return [single] if single.exists() else []


def _tensors(file: Path) -> Iterator[dict[str, Any]]:
    """Reads what the header of a safetensors file says of each tensor."""
    with file.open("rb") as opened:
        (n_bytes,) = struct.unpack("<Q", opened.read(8))
        header: dict[str, Any] = json.loads(opened.read(n_bytes))
    yield from (tensor for name, tensor in header.items() if name != "__metadata__")


def _least_bytes(tensor: dict[str, Any]) -> int:
    shape: list[int] = tensor["shape"]
    if tensor["dtype"] in FLOATS:
        return math.prod(shape) * FLOAT_BYTES
    start, end = tensor["data_offsets"]
    return int(end - start)
