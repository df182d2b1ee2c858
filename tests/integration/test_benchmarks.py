"""The comparison harness against real servers, short."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import report
from benchmarks.harness import client, engines, turns
from benchmarks.harness.compare import SATURATION, Comparison
from tests.integration.conftest import Server
from tests.integration.prompts import CANDIDATES, PROMPTS

STOCK = engines.stock("fcfs")


def test_ours_and_stock_are_compared_and_agree(
    server: Server, stock_server: Server, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """32 requests to each of two servers that run already: a run refuses log-probabilities that differ, and it refuses a
    stock server that is ours."""
    by_name = {engines.OURS.name: server, STOCK.name: stock_server}

    def look_at(_: turns.Servers, engine: engines.Engine) -> engines.Running:
        one = by_name[engine.name]
        return engines.look_at(engine, one.url, one.process.pid, ["python", "-m", engine.module])

    monkeypatch.setattr(turns.Servers, "of", look_at)
    # Ours without the kernel is refused, unless that was asked for; these also run where nothing can build it.
    monkeypatch.setattr(engines, "check_kernel", lambda *_: None)
    monkeypatch.setattr(sys, "argv", [str(report.REPOSITORY / "benchmarks" / "guard" / "run.py")])
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    labels = [tokenizer.encode(label)[0] for label in CANDIDATES]
    dues = [client.Due(0.0, tokenizer.encode(prompt), labels) for prompt in PROMPTS]
    arguments = argparse.Namespace(json=tmp_path / "result.json")
    with Comparison(arguments, lambda _: dues, turns.Served(None, [], []), n_servers=turns.MANY) as comparison:
        for engine in (engines.OURS, STOCK):
            comparison.measure(engine, [SATURATION])
        with pytest.raises(report.InvalidRunError, match="the activation record is"):
            engines.look_at(STOCK, server.url, server.process.pid, [])
    comparison.finish([])
    result = json.loads((tmp_path / "result.json").read_text())
    assert {row["engine"]: row["requests"] for row in result["rows"]} == dict.fromkeys(by_name, len(PROMPTS))
    assert min(row["told_apart"] for row in result["rows"]) > 0.5
    assert result["activation_records"][engines.OURS.name]["hooks"]
    assert result["activation_records"][STOCK.name] is None


def test_a_small_storm_changes_nothing(tmp_path: Path) -> None:
    """Nonsense on all routes, and a mix of good, bad, late and cancelled requests on a small KV cache: no 5xx, no hang, no death,
    no answer lost or changed, no KV slot lost."""
    command = [sys.executable, "benchmarks/storm/run.py", "--quick", "--json", str(tmp_path / "result.json")]
    environment = {**os.environ, "BENCH_PARTS": "fuzz soak"}
    done = subprocess.run(command, cwd=report.REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    targets = json.loads((tmp_path / "result.json").read_text())["targets"]
    found = {target["name"]: target["value"] for target in targets if "growth" not in target["name"]}
    assert len(found) == 7
    assert not any(found.values()), found
