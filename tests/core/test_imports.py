"""The core runs where neither torch nor SGLang is installed, and so do its tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def test_core_its_tests_and_the_options_import_neither_torch_nor_sglang() -> None:
    """Both are blocked here, and every module is imported."""
    package = HERE.parents[1] / "sgl_prefill"
    core = [
        ".".join(path.relative_to(package.parent).with_suffix("").parts)
        for path in (package / "core").glob("**/[a-z]*.py")
    ]
    tests = [f"tests.core.{path.stem}" for path in HERE.glob("[a-z]*.py")]
    assert len(core) > 10
    code = "import sys; sys.modules['torch'] = sys.modules['sglang'] = None\n" + "".join(
        f"import {name}\n" for name in ("sgl_prefill", "sgl_prefill.config", "sgl_prefill.errors", *core, *tests)
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=HERE.parents[1]
    )
    assert done.returncode == 0, done.stderr
