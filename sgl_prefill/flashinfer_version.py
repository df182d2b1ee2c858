"""Whether the installed FlashInfer is the one that SGLang wants, where attention is to run in it.

SGLang looks only at a backend that is named for both kinds of passes, and ends with a traceback; what lies beside FlashInfer
(`flashinfer-cubin`, `flashinfer-jit-cache`) is looked at by FlashInfer itself, when the scheduler imports it.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
from collections.abc import Iterable

BACKEND = "flashinfer"
PACKAGE = "flashinfer-python"
BESIDE = ("flashinfer-cubin", "flashinfer-jit-cache")
# Of SGLang and of FlashInfer: a user who has built packages of their own says with these that they know.
UNCHECKED, UNCHECKED_BESIDE = "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK", "FLASHINFER_DISABLE_VERSION_CHECK"


def problem(backends: Iterable[str | None]) -> str | None:
    """Says what is wrong with the installed packages, or None. backends: of attention, as SGLang has resolved them."""
    if BACKEND not in backends or os.environ.get(UNCHECKED, "").lower() in ("1", "true"):
        return None
    needed, found = _needed(), _installed(PACKAGE)
    if found is None:
        return f"--attention-backend is {BACKEND}, and {PACKAGE} is not installed: {_remedy(needed)}"
    if needed is not None and _is_older(found, needed):
        return f"{PACKAGE} {found} is installed, and SGLang needs {needed}: {_remedy(needed)}"
    if os.environ.get(UNCHECKED_BESIDE):
        return None
    for package in BESIDE:
        other = _installed(package)
        if other is not None and other.split("+")[0] != found.split("+")[0]:
            return (
                f"{package} {other} is installed beside {PACKAGE} {found}, and FlashInfer wants the same version of both:"
                f" run `pip install {package}=={found}` or `pip uninstall {package}`"
            )
    return None


def _remedy(needed: str | None) -> str:
    package = f"'{PACKAGE}[cu13]{'' if needed is None else '==' + needed}'"
    return f"run `pip install {package}`, or start with --attention-backend triton"


def _needed() -> str | None:
    """Returns the version that the installed SGLang requires; None where it names none."""
    for line in importlib.metadata.requires("sglang") or ():
        if found := re.match(r"flashinfer[-_]python\b[^;]*==\s*([\w.]+)", line):
            return found[1]
    return None


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _is_older(found: str, needed: str) -> bool:
    from packaging.version import Version

    return Version(found) < Version(needed)
