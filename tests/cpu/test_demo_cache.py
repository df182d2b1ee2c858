"""The folder of the demo model: whole, or made again; with a fetch and a conversion that write small files."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from sgl_prefill.errors import DemoModelError
from sgl_prefill.examples import demo_model


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    def convert(gguf_file: Path, folder: Path, dtype: str) -> None:
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(b"weights")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(demo_model, "fetch", lambda target: target / "model.gguf")
    monkeypatch.setattr(demo_model, "convert", convert)
    return demo_model.default_folder("float32")


def test_a_folder_that_is_not_whole_is_made_again(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert demo_model.ensure("float32") == cache
    assert "fetching" in capsys.readouterr().err
    demo_model.ensure("float32")
    assert capsys.readouterr().err == ""
    (cache / "model.safetensors").write_bytes(b"wei")
    demo_model.ensure("float32")
    assert "not complete" in capsys.readouterr().err
    assert (cache / "model.safetensors").read_bytes() == b"weights"
    (cache / "config.json").unlink()
    demo_model.ensure("float32")
    assert demo_model.is_complete(cache)


def test_a_full_disk_is_named_with_what_is_needed(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage: Any = type("Usage", (), {"free": 100 << 20})
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(DemoModelError, match=r"takes 736 MB at .* and 100 MB are free"):
        demo_model.ensure("float32")


def test_a_disk_that_cannot_be_written_is_named(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(demo_model, "convert", no_space)
    with pytest.raises(DemoModelError, match=r"cannot write .*: No space left on device\. It takes 736 MB") as found:
        demo_model.ensure("float32")
    assert str(cache) in str(found.value)
