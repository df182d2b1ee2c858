"""The activation record of this process: which version with which options and hooks runs here."""

from __future__ import annotations

import dataclasses
import importlib.metadata
from typing import Any

from sgl_prefill.config import PrefillConfig

RECORD_KEY = "sgl_prefill"

_record: dict[str, Any] | None = None
_config: PrefillConfig | None = None


def write(config: PrefillConfig, hooked_targets: list[str]) -> None:
    """Called once, after every hook was verified."""
    global _config, _record
    _config = config
    _record = {
        "version": importlib.metadata.version("sgl-prefill"),
        "sglang_version": importlib.metadata.version("sglang"),
        "config": dataclasses.asdict(config),
        "hooks": hooked_targets,
    }


def add(**facts: Any) -> None:
    """What the start has found out, for /server_info."""
    assert _record is not None
    _record.update(facts)


def get(name: str) -> Any:
    """A fact that `add` has put there."""
    assert _record is not None
    return _record[name]


def read() -> dict[str, Any] | None:
    """The record, or None in a process in which nothing was activated."""
    return _record


def config() -> PrefillConfig:
    """The options of this process. Hooks run only after activation."""
    assert _config is not None, "nothing was activated in this process"
    return _config


def after_get_init_info(result: dict[str, Any], scheduler: Any) -> dict[str, Any]:
    """Hook: SGLang sends this dict to the HTTP process, where /server_info shows it."""
    return {**result, RECORD_KEY: _record}
