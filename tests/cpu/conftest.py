"""What several tests of the native kernels share."""

from __future__ import annotations

import pytest

from sgl_prefill.cpu.native import library
from sgl_prefill.cpu.native.calls import Kernels
from tests.support import quiet_imports  # noqa: F401  (before all else that imports SGLang)


@pytest.fixture
def kernels() -> Kernels:
    """The best build; skips where there is no library."""
    found = library.find("auto")
    if found.kernels is None:
        pytest.skip(str(found.reason))
    return found.kernels
