"""Generates the tables of `sgl_prefill/OPTIONS.md` from `sgl_prefill/config.py`."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

from scripts.generated_part import GeneratedPart
from sgl_prefill.config import PrefillConfig, choices_of, flag_of, help_of, is_setting, shown

PAGE = Path(__file__).resolve().parents[1] / "sgl_prefill/OPTIONS.md"


def tables() -> str:
    fields = dataclasses.fields(PrefillConfig)
    flags = [_row(f"`{flag_of(field.name)}{_choices(field)}`", field) for field in fields if not is_setting(field)]
    settings = [_row(f"`{field.name}`{_choices(field)}", field) for field in fields if is_setting(field)]
    head = "| {} | default | meaning |\n| --- | --- | --- |\n"
    set_flag = (
        "Settings for experiments, whose defaults are measured at start or proven: `--set NAME=VALUE`, repeatable.\n"
    )
    return f"{head.format('flag')}{''.join(flags)}\n{set_flag}\n{head.format('setting')}{''.join(settings)}"


def _row(name: str, field: dataclasses.Field[Any]) -> str:
    default = field.metadata["default"]
    is_switch = isinstance(default, bool)
    return (
        f"| {name} | {('off' if not default else 'on') if is_switch else shown(field, default)} | {help_of(field)} |\n"
    )


def _choices(field: dataclasses.Field[Any]) -> str:
    choices = choices_of(field)
    return "" if choices is None or is_setting(field) else f" {{{','.join(choices)}}}"


PART = GeneratedPart(PAGE, "options", tables)

if __name__ == "__main__":
    sys.exit(PART.main())
