"""What keeps SGLang from starting a model is one sentence; an error of this package's code stays what it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from sgl_prefill.errors import ConfigurationError, UnsupportedModelError
from sgl_prefill.startup import foreign_errors
from sgl_prefill.startup.foreign_errors import as_refusals


def test_an_error_of_another_package_names_the_model_the_place_and_the_error() -> None:
    with pytest.raises(UnsupportedModelError) as found, as_refusals("a/model"):
        raise AttributeError("no attribute\n  'mlp_layer_types'" + "x" * 1000)
    text = str(found.value)
    assert "a/model" in text
    assert "test_foreign_errors.py, line" in text
    assert "AttributeError: no attribute 'mlp_layer_types'x" in text
    assert len(text) < 700


def test_an_error_without_words_is_named_by_its_kind() -> None:
    with pytest.raises(UnsupportedModelError, match="says: AssertionError\n"), as_refusals("a/model"):
        raise AssertionError


def test_refusals_and_faults_of_this_package_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError), as_refusals("a/model"):
        raise ConfigurationError
    monkeypatch.setattr(foreign_errors, "PACKAGE", Path(__file__).parent)
    with pytest.raises(AssertionError), as_refusals("a/model"):
        raise AssertionError
