"""Apply the hook list and prove that it took. SGLang logs and swallows errors in plugins and hooks; here they are fatal.

Order in a process: register our hooks, let SGLang load all plugins and apply all hooks, then verify. A
half-loaded engine looks exactly like stock SGLang, so any doubt is a SeamError before a model is loaded.
"""

from __future__ import annotations

import functools
import pkgutil
from collections.abc import Callable
from typing import Any

from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType

from sgl_prefill.config import PrefillConfig
from sgl_prefill.device import this_device
from sgl_prefill.engine_state import EngineState
from sgl_prefill.errors import SeamError
from sgl_prefill.port import hybrid, kv, radix_cache
from sgl_prefill.port.declare import Hook
from sgl_prefill.port.fingerprints import check_source
from sgl_prefill.port.hooks import hooks_for

SOURCE = HookSource(plugin_name="sgl_prefill", dist_name="sgl-prefill")

# SGLang calls a hook with its own arguments only, so that this is where hooks find the state of their process: that of the
# last activation, since a process may start several engines, one after the other.
_state: EngineState | None = None


def activate(config: PrefillConfig, process: str) -> EngineState:
    """Put this configuration's hooks in place in this process, verify them, and make the process's state.

    Raises SeamError with all problems in one message. The HTTP process also has its routes replaced, by `api.routes`.
    """
    global _state
    check_source()
    hooks = hooks_for(config, process)
    for hook in hooks:
        entry = (HookType(hook.kind), registered(hook), SOURCE)
        if entry not in HookRegistry._hooks[hook.target]:  # a second Engine in this process
            HookRegistry.register(hook.target, entry[1], entry[0], source=SOURCE)
    load_plugins()
    if process == "scheduler" and config.evicts_suffix_kv:
        kv.use_live_inputs()
    if process == "scheduler" and (config.evicts_suffix_kv or config.has_policy):
        radix_cache.register()
    if process == "scheduler" and config.hybrid_prefill != "off":
        hybrid.use_small_logprob_chunks()
    if process == "scheduler" and not this_device().is_host:
        _register_attention(config.shared_prefix_attention)
    HookRegistry.apply_hooks()  # plugins may have been loaded before; targets that are already patched are skipped
    problems = [problem for hook in hooks for problem in _problems_of(hook)]
    if problems:
        raise SeamError("hooks are not in place:\n  " + "\n  ".join(problems))
    _state = EngineState(config, [hook.target for hook in hooks])
    return _state


def _register_attention(switch: str) -> None:
    from sgl_prefill.port import shared_prefix_attention

    shared_prefix_attention.register(switch)


def registered(hook: Hook) -> Callable[..., Any]:
    """Returns the function that SGLang calls for a hook; the same object each time."""
    return _with_state(hook.function) if hook.takes_state else hook.function


@functools.cache
def _with_state(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def hook(*arguments: Any, **options: Any) -> Any:
        assert _state is not None, "nothing was activated in this process"
        return function(_state, *arguments, **options)

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
    """Tells whether `hook` sits in the closure of one of the wrappers around `function`."""
    while function is not None:
        cells = getattr(function, "__closure__", None) or ()
        if any(cell.cell_contents is hook for cell in cells):
            return True
        function = getattr(function, "__wrapped__", None)
    return False
