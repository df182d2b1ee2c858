"""A start on a GPU with FlashInfer that is not there, or is another one: stand-ins for what pip has installed."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from sgl_prefill import flashinfer_version, preflight
from sgl_prefill.config import PrefillConfig
from sgl_prefill.errors import ConfigurationError

NEEDED = "0.6.15.post1"
Install = Callable[..., None]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Names the versions that pip has installed, by packages; SGLang wants what it does."""
    for variable in (flashinfer_version.UNCHECKED, flashinfer_version.UNCHECKED_BESIDE):
        monkeypatch.delenv(variable, raising=False)

    def install(**packages: str) -> None:
        def version(name: str) -> str:
            try:
                return packages[name.replace("-", "_")]
            except KeyError:
                raise importlib.metadata.PackageNotFoundError(name) from None

        requires = ["torch==2.11.0", f"flashinfer_python[cu13]=={NEEDED}", "numpy"]
        monkeypatch.setattr(importlib.metadata, "version", version)
        monkeypatch.setattr(importlib.metadata, "requires", lambda _: requires)

    return install


def test_it_is_the_version_that_this_sglang_requires() -> None:
    """Read from its own metadata, so that another release of SGLang needs no change here."""
    assert flashinfer_version._needed() == NEEDED


def test_a_missing_package_is_named_with_both_remedies(installed: Install) -> None:
    """And asked for only where attention runs in it."""
    installed()
    problem = flashinfer_version.problem(["flashinfer", None])
    assert problem is not None
    assert "flashinfer-python is not installed" in problem
    assert f"pip install 'flashinfer-python[cu13]=={NEEDED}'" in problem
    assert "--attention-backend triton" in problem
    assert flashinfer_version.problem(["fa3", "triton", None]) is None


@pytest.mark.parametrize(("found", "is_fine"), [("0.6.14", False), ("0.6.15", False), (NEEDED, True), ("0.7.0", True)])
def test_an_older_package_is_named_with_what_is_there_and_what_is_needed(
    installed: Install, found: str, is_fine: bool
) -> None:
    """A post-release counts; a newer one is SGLang's to refuse."""
    installed(flashinfer_python=found)
    problem = flashinfer_version.problem(["flashinfer"])
    assert (problem is None) is is_fine
    if problem is not None:
        assert problem.startswith(
            f"flashinfer-python {found} is installed, and SGLang needs {NEEDED}: run `pip install"
        )


@pytest.mark.parametrize("package", flashinfer_version.BESIDE)
def test_kernels_of_another_version_beside_it_are_named(installed: Install, package: str) -> None:
    """FlashInfer ends with a traceback where they are imported, which is in the scheduler."""
    installed(flashinfer_python=NEEDED, **{package.replace("-", "_"): "0.6.3+cu130"})
    problem = flashinfer_version.problem(["flashinfer"])
    assert problem is not None
    assert problem.startswith(f"{package} 0.6.3+cu130 is installed beside flashinfer-python {NEEDED}")
    installed(flashinfer_python=NEEDED, **{package.replace("-", "_"): f"{NEEDED}+cu130"})
    assert flashinfer_version.problem(["flashinfer"]) is None


def test_who_has_built_packages_of_their_own_can_say_so(installed: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the variables that SGLang and FlashInfer have for it."""
    installed(flashinfer_python=NEEDED, flashinfer_cubin="0.1")
    monkeypatch.setenv(flashinfer_version.UNCHECKED_BESIDE, "1")
    assert flashinfer_version.problem(["flashinfer"]) is None
    installed()
    monkeypatch.setenv(flashinfer_version.UNCHECKED, "true")
    assert flashinfer_version.problem(["flashinfer"]) is None


@pytest.mark.parametrize("kind", ["attention_backend", "prefill_attention_backend"])
def test_a_start_on_a_gpu_ends_with_that_message(
    installed: Install, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Before any process is started, with all other complaints; SGLang looks only at --attention-backend, and ends with a
    traceback. On a host nobody asks."""
    installed(flashinfer_python="0.6.3")
    config = PrefillConfig()
    fields: dict[str, Any] = {need.field: need.value for need in preflight.required_for(config)}
    backends = {"attention_backend": "fa3", "prefill_attention_backend": None, "decode_attention_backend": None}
    others = {"page_size": 1, "is_embedding": False, "tp_size": 1, "model_path": "m", "enable_trace": False}
    arguments = SimpleNamespace(**{**fields, **backends, **others, kind: "flashinfer"})
    monkeypatch.setattr("sgl_prefill.device.has_accelerator", lambda: True)
    with pytest.raises(
        ConfigurationError, match=re.escape(f"flashinfer-python 0.6.3 is installed, and SGLang needs {NEEDED}")
    ):
        preflight.check_server_args(config, arguments, listens=False)
    monkeypatch.setattr("sgl_prefill.device.has_accelerator", lambda: False)
    preflight.check_server_args(config, arguments, listens=False)
