"""Measurements kept between starts."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sgl_prefill.core.jct import FittedJct
from sgl_prefill.core.ranks import OneRank
from sgl_prefill.port.runner.sglang_model import SglangModel
from sgl_prefill.startup import disk_cache, jct_profile
from sgl_prefill.startup.device import Host

FIELDS = {"chunk_tokens": int}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_a_measurement_is_found_again_under_the_same_circumstances_only() -> None:
    """A changed thread count is another machine."""
    disk_cache.store("chunk size", {"threads": 2}, {"chunk_tokens": 512})
    assert disk_cache.load("chunk size", {"threads": 2}, FIELDS) == {"chunk_tokens": 512}
    assert disk_cache.load("chunk size", {"threads": 4}, FIELDS) is None
    assert disk_cache.load("memory profile", {"threads": 2}, FIELDS) is None


def test_what_was_measured_on_another_processor_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A home folder may be shared by several machines."""
    hf_config = SimpleNamespace(to_dict=dict)
    config = SimpleNamespace(context_len=100, vocab_size=10, hf_config=hf_config, model_path="model")
    parts = {"device": "cpu", "dtype": torch.float32, "page_size": 1, "is_generation": True, "model_config": config}
    state: Any = SimpleNamespace(hybrid=None)
    runner: Any = SimpleNamespace(**parts, token_to_kv_pool_allocator=None, prefill_attention_backend_str="x")
    model = SglangModel(state, runner)
    monkeypatch.setattr(Host, "model", lambda _: "one processor")
    disk_cache.store("chunk size", model.circumstances, {"chunk_tokens": 512})
    assert disk_cache.load("chunk size", model.circumstances, FIELDS) == {"chunk_tokens": 512}
    monkeypatch.setattr(Host, "model", lambda _: "another")
    assert disk_cache.load("chunk size", model.circumstances, FIELDS) is None


def test_a_broken_file_and_a_folder_that_cannot_be_written_cost_a_measurement_and_no_start(
    cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With a line in the log."""
    disk_cache.store("chunk size", {}, {"chunk_tokens": 512})
    (file,) = (cache / "sgl_prefill" / "profiles").iterdir()
    file.write_text("{")
    assert disk_cache.load("chunk size", {}, FIELDS) is None
    assert "measuring again" in caplog.text
    (cache / "sgl_prefill" / "profiles").rename(cache / "elsewhere")
    (cache / "sgl_prefill" / "profiles").write_text("a file in the way")
    disk_cache.store("chunk size", {}, {"chunk_tokens": 512})
    assert "cannot be kept" in caplog.text


@pytest.mark.parametrize(
    "text",
    ["[]", "null", "3", "{}", '{"chunk_tokens": "512"}', '{"chunk_tokens": -1}', '{"chunk_tokens": 1, "other": 2}'],
)
def test_valid_json_of_the_wrong_shape_is_measured_again(
    cache: Path, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    """It had ended the start with a TypeError; now one line names the file and what is wrong with it."""
    disk_cache.store("chunk size", {}, {"chunk_tokens": 512})
    (file,) = (cache / "sgl_prefill" / "profiles").iterdir()
    file.write_text(text)
    assert disk_cache.load("chunk size", {}, FIELDS) is None
    assert str(file) in caplog.text
    assert "is not as it should be" in caplog.text


def test_a_half_written_file_is_never_seen(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a start wrote before it was killed has another name."""
    disk_cache.store("chunk size", {}, {"chunk_tokens": 512})

    def killed(*_: object) -> None:
        raise OSError("killed")

    monkeypatch.setattr("os.replace", killed)
    disk_cache.store("chunk size", {}, {"chunk_tokens": 1024})
    assert disk_cache.load("chunk size", {}, FIELDS) == {"chunk_tokens": 512}


def test_a_jct_profile_in_which_tokens_cost_nothing_is_neither_kept_nor_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A busy machine's: one was used for months, and predicted 474 ms for each step of 35 ms."""
    model: Any = SimpleNamespace(circumstances={}, hybrid=None, is_evicting=False, graphed_tokens=[], ranks=OneRank())
    busy, quiet = FittedJct(441.0, 0.0, 0.0, 0.0), FittedJct(30.4, 0.225, 0.0, 0.0)
    measured = [busy, quiet]
    monkeypatch.setattr(jct_profile, "measure", lambda *_: [])
    monkeypatch.setattr(jct_profile, "fit", lambda _: measured.pop(0))
    assert jct_profile.fitted_model(model, 100) == busy
    assert "not kept for the next" in caplog.text
    assert [jct_profile.fitted_model(model, 100) for _ in range(2)] == [quiet, quiet]
    (file,) = (disk_cache.cache_root() / "profiles").iterdir()
    file.write_text(json.dumps(busy._asdict()))
    measured.append(quiet)
    assert jct_profile.fitted_model(model, 100) == quiet
