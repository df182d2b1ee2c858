"""Processes of their own for engines and schedulers, which leave sockets, handlers and globals behind."""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import util
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import setproctitle

from sgl_prefill.entry.local_server import LocalServer, free_port

# SGLang takes 20 seconds to import: children are forked from one process that has done so.
_FORKED = multiprocessing.get_context("forkserver")
_FORKED.set_forkserver_preload(["tests.support.quiet_imports", "sglang.srt.models.registry", "torch._dynamo"])
os.environ.setdefault("OMP_NUM_THREADS", "2")  # read when torch is imported there


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
    _redirect(log)
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
    _redirect(log)
    sys.exit(importlib.import_module(module).main(argv))


class Forked:
    """A process of the fork server, with the interface of `subprocess.Popen` that the tests and `local_server` use."""

    def __init__(self, target: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        self._process = _FORKED.Process(target=target, args=arguments)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(self._process.name, timeout)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def begin_server(
    module: str, flags: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
) -> LocalServer:
    """Does `local_server.begin` in a process that need not import SGLang. The caller waits for its health."""
    port = free_port()
    argv = [module, "--host", "127.0.0.1", "--port", str(port), *flags]
    variables = {**os.environ, "OMP_NUM_THREADS": "2", **(environment or {})}
    process: Any = Forked(_run_program, (argv, log, variables))
    return LocalServer(f"http://127.0.0.1:{port}", argv, process, log)


def _run_program(argv: list[str], log: Path, variables: dict[str, str]) -> None:
    """Becomes `python -m MODULE FLAGS`."""
    os.setsid()
    _redirect(log)
    setproctitle.setproctitle(
        f"python -m {' '.join(argv)}"
    )  # before the environment changes: its room is found only once
    os.environ.clear()
    os.environ.update(variables)
    sys.argv = argv
    runpy.run_module(argv[0], run_name="__main__", alter_sys=True)


def _fork_the_fork_server(spawn: Callable[..., int], path: bytes, args: list[str], passed: list[int]) -> int:
    """In the place of a new interpreter, which would import SGLang again."""
    if "multiprocessing.forkserver" not in args[-1]:
        return spawn(path, args, passed)
    if pid := os.fork():
        return pid
    try:
        for fd in map(int, os.listdir("/proc/self/fd")):
            if fd > 2 and fd not in passed:
                with contextlib.suppress(OSError):
                    os.close(fd)
        exec(args[-1], {})
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _redirect(log: Path) -> None:
    """Prints to the log. Processes that SGLang forks from a fork server are forked from one that is forked from this process."""
    vars(util)["spawnv_passfds"] = functools.partial(_fork_the_fork_server, util.spawnv_passfds)
    with log.open("w") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
