"""SGLang is imported in silence."""

from __future__ import annotations

from tests.support import quiet_imports  # noqa: F401  (before all else that imports SGLang)
