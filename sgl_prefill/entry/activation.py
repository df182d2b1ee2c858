"""Applies the hooks of `hooks` in a process and verifies that they are in place. SGLang only logs errors in plugins and hooks,
and an engine without a hook looks like stock SGLang: here each error is a SeamError before a model is loaded.
"""

from __future__ import annotations

import functools
import pkgutil
from collections.abc import Callable
from typing import Any, NamedTuple

from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType

from sgl_prefill.config import PrefillConfig
from sgl_prefill.entry.fingerprints import check_source
from sgl_prefill.entry.hooks import Hook, hooks_for
from sgl_prefill.entry.processes import ProcessState
from sgl_prefill.errors import SeamError
from sgl_prefill.gpu import two_parts
from sgl_prefill.port.kv import admission, radix_cache
from sgl_prefill.port.runner import forward
from sgl_prefill.port.runner.runner_state import RunnerState
from sgl_prefill.port.steps.step_state import StepState
from sgl_prefill.startup.device import this_device
from sgl_prefill.startup.record import StartRecord

SOURCE = HookSource(plugin_name="sgl_prefill", dist_name="sgl-prefill")


class Parts(NamedTuple):
    """State that the hooks of one process share. A hook that `takes` one of these classes gets its object as first argument."""

    record: StartRecord
    processes: ProcessState
    runner: RunnerState
    steps: StepState


_parts: Parts | None = None  # of the last activation: a process may start several engines in turn


def activate(config: PrefillConfig, process: str) -> Parts:
    """Registers, applies and verifies this configuration's hooks, and makes their state. `http.routes` replaces routes besides.

    Raises SeamError with all problems in one message.
    """
    global _parts
    check_source()
    hooks = hooks_for(config, process)
    for hook in hooks:
        entry = (HookType(hook.kind), registered(hook), SOURCE)
        if entry not in HookRegistry._hooks[hook.target]:  # it is there for a second Engine in this process
            HookRegistry.register(hook.target, entry[1], entry[0], source=SOURCE)
    load_plugins()
    if process == "scheduler" and config.evicts_suffix_kv:
        admission.use_live_inputs()
    if process == "scheduler" and (config.evicts_suffix_kv or config.has_policy):
        radix_cache.register()
    if process == "scheduler" and config.hybrid_prefill != "off":
        forward.use_small_logprob_chunks()
    if process == "scheduler" and not this_device().is_host:
        from sgl_prefill.port.runner import shared_prefix_attention  # its imports need an accelerator

        shared_prefix_attention.register(two_parts.asked_for(config.shared_prefix_attention))
    HookRegistry.apply_hooks()  # `load_plugins` does so only in its first call; patched targets are skipped
    problems = [problem for hook in hooks for problem in _problems_of(hook)]
    if problems:
        raise SeamError("hooks are not in place:\n  " + "\n  ".join(problems))
    record = StartRecord(config, [hook.target for hook in hooks], stepped_back=dict(config.stepped_back))
    _parts = Parts(record, ProcessState(), RunnerState(record), StepState(record))
    return _parts


def registered(hook: Hook) -> Callable[..., Any]:
    """Returns the function that SGLang calls for a hook; the same object each time."""
    return hook.function if hook.takes is None else _with_part(hook.function, hook.takes)


@functools.cache
def _with_part(function: Callable[..., Any], kind: type) -> Callable[..., Any]:
    @functools.wraps(function)
    def hook(*arguments: Any, **options: Any) -> Any:
        assert _parts is not None, "nothing was activated in this process"
        return function(next(part for part in _parts if type(part) is kind), *arguments, **options)

    return hook


def _problems_of(hook: Hook) -> list[str]:
    problems = []
    foreign = {
        source
        for target, entries in HookRegistry._hooks.items()
        if hook.target == target or hook.target.startswith(target + ".")  # the function, or the class that holds it
        for _, _, source in entries
        if source != SOURCE
    }
    if foreign:
        names = ", ".join(sorted(source.plugin_name if source else "an unnamed plugin" for source in foreign))
        problems.append(f"{hook.target} is also hooked by {names}: uninstall it or name the plugins in SGLANG_PLUGINS")
    if not is_wrapped_by(pkgutil.resolve_name(hook.target), registered(hook)):
        problems.append(f"{hook.target} was not wrapped ({hook.reason}); SGLang's log above names the cause")
    return problems


def is_wrapped_by(function: Any, hook: Any) -> bool:
    """Whether `hook` is in the closure of one of the wrappers around `function`."""
    while function is not None:
        cells = getattr(function, "__closure__", None) or ()
        if any(cell.cell_contents is hook for cell in cells):
            return True
        function = getattr(function, "__wrapped__", None)
    return False
