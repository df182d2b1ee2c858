"""Measurements of one start kept for the next, under the user's cache directory."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sgl_prefill import demo_model
from sgl_prefill.cpu.native.build import digest
from sgl_prefill.cpu.native.library import native

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)

FORMAT = 6


def load(kind: str, depends_on: dict[str, Any]) -> dict[str, Any] | None:
    """What `store` wrote for exactly these circumstances; None where it did not, or where the file cannot be read."""
    path = _path(kind, depends_on)
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        logger.warning("the stored %s in %s cannot be read (%s): measuring again", kind, path, error)
        return None
    return found


def store(kind: str, depends_on: dict[str, Any], value: dict[str, Any]) -> None:
    """A directory that cannot be written costs a measurement at the next start, and a line in the log."""
    path = _path(kind, depends_on)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(value))
    except OSError as error:
        logger.warning("the %s cannot be kept in %s (%s)", kind, path, error)


def circumstances(model_runner: ModelRunner) -> dict[str, Any]:
    """Versions, machine and model: what every measurement depends on."""
    device = model_runner.device
    is_host = device == "cpu"
    return {
        "format": FORMAT,
        "versions": {name: importlib.metadata.version(name) for name in ("sgl-prefill", "sglang", "torch")},
        "device": "cpu" if is_host else torch.get_device_module(device).get_device_name(),
        "threads": torch.get_num_threads(),
        "model": model_runner.model_config.hf_config.to_dict(),
        "dtype": str(model_runner.dtype),
        "attention": model_runner.prefill_attention_backend_str,
        "kernels": (digest(), native().shown()) if is_host else None,
    }


def _path(kind: str, depends_on: dict[str, Any]) -> Path:
    digest = hashlib.sha256(json.dumps(depends_on, sort_keys=True, default=str).encode()).hexdigest()[:24]
    return demo_model.cache_root() / "profiles" / f"{kind.replace(' ', '-')}-{digest}.json"
