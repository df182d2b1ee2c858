"""Apply the hook list and prove that it took. SGLang logs and swallows errors in plugins and hooks; here they are fatal.

Order in a process: register our hooks, let SGLang load all plugins and apply all hooks, then verify. A
half-loaded engine looks exactly like stock SGLang, so any doubt is a SeamError before a model is loaded.
"""

from __future__ import annotations

import pkgutil
from typing import Any

from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType

from sgl_prefill.config import PrefillConfig
from sgl_prefill.errors import SeamError
from sgl_prefill.hybrid import install as hybrid
from sgl_prefill.kv import install as kv
from sgl_prefill.seam import record
from sgl_prefill.seam.declare import Hook
from sgl_prefill.seam.fingerprints import check_source
from sgl_prefill.seam.hooks import hooks_for

SOURCE = HookSource(plugin_name="sgl_prefill", dist_name="sgl-prefill")


def activate(config: PrefillConfig, process: str) -> None:
    """Put this configuration's hooks in place in this process, verify them, and write the activation record.

    Raises SeamError with all problems in one message. The HTTP process also has its routes replaced, by `api.routes`.
    """
    check_source()
    hooks = hooks_for(config, process)
    for hook in hooks:
        entry = (HookType(hook.kind), hook.function, SOURCE)
        if entry not in HookRegistry._hooks[hook.target]:  # a second Engine in this process
            HookRegistry.register(hook.target, hook.function, entry[0], source=SOURCE)
    load_plugins()
    if process == "scheduler" and config.suffix_kv == "evict":
        kv.use_live_inputs()
    if process == "scheduler" and (config.suffix_kv == "evict" or config.scheduling == "calibrated-srjf"):
        kv.register_prefix_cache()
    if process == "scheduler" and config.hybrid_prefill != "off":
        hybrid.use_small_logprob_chunks()
    HookRegistry.apply_hooks()  # plugins may have been loaded before; targets that are already patched are skipped
    problems = [problem for hook in hooks for problem in _problems_of(hook)]
    if problems:
        raise SeamError("hooks are not in place:\n  " + "\n  ".join(problems))
    record.write(config, [hook.target for hook in hooks])


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
    if not _is_wrapped_by(pkgutil.resolve_name(hook.target), hook.function):
        problems.append(f"{hook.target} was not wrapped ({hook.reason}); SGLang's log above names the cause")
    return problems


def _is_wrapped_by(function: Any, hook: Any) -> bool:
    """Whether `hook` sits in the closure of one of the wrappers around `function`."""
    while function is not None:
        cells = getattr(function, "__closure__", None) or ()
        if any(cell.cell_contents is hook for cell in cells):
            return True
        function = getattr(function, "__wrapped__", None)
    return False
