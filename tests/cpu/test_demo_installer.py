"""Fetching the demo model on a machine that has nothing yet."""

from __future__ import annotations

import sys
import types

import pytest

from sgl_prefill.examples import demo_model


def test_looking_for_an_installer_warns_of_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """After an import of distutils setuptools' hook warns of whoever looks for the module pip; here warnings are errors."""
    monkeypatch.setitem(sys.modules, "distutils", types.ModuleType("distutils"))
    assert demo_model._installer()[1:3] in (["-m", "pip"], ["pip", "install"])
