"""Processes of their own for engines and schedulers, which leave sockets, handlers and globals behind."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import subprocess
import sys
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

# SGLang takes 20 seconds to import: children are forked from one process that has done so.
_FORKED = multiprocessing.get_context("forkserver")
_FORKED.set_forkserver_preload(["tests.support.quiet_imports"])
os.environ.setdefault("OMP_NUM_THREADS", "2")  # read when torch is imported there


def run_child(module: str, *arguments: str) -> dict[str, Any]:
    """What `python -m tests.integration.MODULE ARGUMENTS` prints as its last line."""
    done = subprocess.run(
        [sys.executable, "-m", f"tests.integration.{module}", *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def run_scenario(module: str, scenario: str, folder: Path) -> dict[str, Any]:
    """What `SCENARIOS[scenario](folder)` of `tests.integration.MODULE` returns, in a process of its own."""
    receiver, sender = _FORKED.Pipe(duplex=False)
    log = folder / f"{scenario}.log"
    child = _FORKED.Process(target=_run, args=(module, scenario, folder, log, sender))
    child.start()
    sender.close()
    try:
        result: dict[str, Any] = json.loads(receiver.recv())
    except EOFError:
        raise AssertionError(f"{module}, {scenario}: {log.read_text()[-4000:]}") from None
    finally:
        child.join()
    return result


def _run(module: str, scenario: str, folder: Path, log: Path, sender: Connection) -> None:
    with log.open("w") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    try:
        sender.send(json.dumps(importlib.import_module(f"tests.integration.{module}").SCENARIOS[scenario](folder)))
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        sender.close()


def forked_main(module: str, argv: list[str], log: Path) -> Any:
    """A process that runs `MODULE.main(argv)` and ends with its status; what it prints is in the log."""
    child = _FORKED.Process(target=_run_main, args=(module, argv, log))
    child.start()
    return child


def _run_main(module: str, argv: list[str], log: Path) -> None:
    with log.open("w") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    sys.exit(importlib.import_module(module).main(argv))
