"""Measurements kept between starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from sgl_prefill import disk_cache


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_a_measurement_is_found_again_under_the_same_circumstances_only() -> None:
    """A changed thread count is another machine."""
    disk_cache.store("chunk size", {"threads": 2}, {"chunk_tokens": 512})
    assert disk_cache.load("chunk size", {"threads": 2}) == {"chunk_tokens": 512}
    assert disk_cache.load("chunk size", {"threads": 4}) is None
    assert disk_cache.load("memory profile", {"threads": 2}) is None


def test_a_broken_file_and_a_folder_that_cannot_be_written_cost_a_measurement_and_no_start(
    cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With a line in the log."""
    disk_cache.store("chunk size", {}, {"chunk_tokens": 512})
    (file,) = (cache / "sgl_prefill" / "profiles").iterdir()
    file.write_text("{")
    assert disk_cache.load("chunk size", {}) is None
    assert "measuring again" in caplog.text
    (cache / "sgl_prefill" / "profiles").rename(cache / "elsewhere")
    (cache / "sgl_prefill" / "profiles").write_text("a file in the way")
    disk_cache.store("chunk size", {}, {"chunk_tokens": 512})
    assert "cannot be kept" in caplog.text
