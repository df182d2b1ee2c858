"""Child processes for engines, schedulers and servers, which leave sockets, handlers and globals behind.

SGLang takes 20 seconds to import. This process imports it once; a fork server is forked from it, and all children from that.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import logging
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import traceback
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from multiprocessing import forkserver, util
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import setproctitle

from sgl_prefill.entry import prefork
from sgl_prefill.entry.local_server import LocalServer, free_port

_FORKED = multiprocessing.get_context("forkserver")
_FORKED.set_forkserver_preload(["tests.support.quiet_imports", "sglang.srt.models.registry", "torch._dynamo"])
# By module and process the names of scenarios, which are also names of the fixtures that return their results.
SCENARIOS: defaultdict[tuple[str, str], list[str]] = defaultdict(list)


def start_fork_server() -> None:
    """Forks it from this process, which has imported SGLang."""
    with _forks_instead_of_imports():
        forkserver.ensure_running()


def result_of(module: str, scenario: str, *, process: str = "") -> Any:
    """A fixture: what `SCENARIOS[scenario]` of `tests.integration.MODULE` returns. See `conftest.scenarios`.

    process: where it is given, the scenarios of a module that have the same run in one process, apart from others.
    """
    SCENARIOS[module, process].append(scenario)

    @pytest.fixture(scope="session", name=scenario)
    def result(scenarios: Mapping[str, Any]) -> Any:
        return scenarios[scenario].result()

    return result


def run_scenarios(module: str, results: Mapping[str, Future[Any]], folder: Path) -> None:
    """Runs `SCENARIOS[name](folder)` of `tests.integration.MODULE` for each name in `results`, all in one process."""
    receiver, sender = _FORKED.Pipe(duplex=False)
    log = folder / "log"
    child = _FORKED.Process(target=_run, args=(module, list(results), folder, log, sender))
    child.start()
    sender.close()
    for result in results.values():
        try:
            result.set_result(json.loads(receiver.recv()))
        except EOFError:
            result.set_exception(AssertionError(f"{module}: {log.read_text()[-4000:]}"))
    child.join()


def _run(module: str, names: list[str], folder: Path, log: Path, sender: Connection) -> None:
    import torch

    redirect(log)
    torch.set_num_threads(1)  # two such processes run at a time
    try:
        for name in names:
            sender.send(json.dumps(importlib.import_module(f"tests.integration.{module}").SCENARIOS[name](folder)))
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        sender.close()


def forked_main(module: str, argv: list[str], log: Path) -> Any:
    """A process that runs `MODULE.main(argv)` and ends with its status; what it prints is in the log."""
    return forked(_run_main, (module, argv, log))


def _run_main(module: str, argv: list[str], log: Path) -> None:
    redirect(log)
    prefork.begin()
    sys.exit(importlib.import_module(module).main(argv))


def forked(target: Callable[..., None], arguments: tuple[Any, ...]) -> Any:
    """A process of the fork server, started: `multiprocessing.Process`."""
    process = _FORKED.Process(target=target, args=arguments)
    process.start()
    return process


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
    redirect(log)
    setproctitle.setproctitle(
        f"python -m {' '.join(argv)}"
    )  # before the environment changes: its room is found only once
    os.environ.clear()
    os.environ.update(variables)
    sys.path[:0] = [path for path in variables.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.argv = argv
    runpy.run_module(argv[0], run_name="__main__", alter_sys=True)


@contextlib.contextmanager
def _forks_instead_of_imports() -> Iterator[None]:
    """Within it, processes that multiprocessing would start with a new interpreter are forked from this one."""
    with mock.patch.object(util, "spawnv_passfds", functools.partial(_fork_or_spawn, util.spawnv_passfds)):
        yield


def _fork_or_spawn(spawn: Callable[..., int], path: bytes, args: list[str], passed: list[int]) -> int:
    program, *arguments = args[args.index("-c") + 1 :]
    if "multiprocessing.forkserver" not in program and "multiprocessing.spawn" not in program:
        return spawn(path, args, passed)
    if pid := os.fork():
        return pid
    status: Any = 1
    try:
        for fd in map(int, os.listdir("/proc/self/fd")):
            if fd > 2 and fd not in passed:
                with contextlib.suppress(OSError):
                    os.close(fd)
        fork_server: Any = vars(forkserver)["_forkserver"]
        fork_server.__init__()  # this process holds its lock
        sys.argv, sys.stdout, sys.stderr = ["-c", *arguments], sys.__stdout__, sys.__stderr__
        _log_to_stderr()
        warnings.simplefilter("ignore")  # pytest makes errors of them
        exec(program, {})
        status = 0
    except SystemExit as end:
        status = end.code
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status or 0)


def _log_to_stderr() -> None:
    """SGLang's imports have made handlers that write to a file of pytest. It is closed here, and another file gets its number."""
    for logger in (logging.root, *logging.root.manager.loggerDict.values()):
        for handler in getattr(logger, "handlers", ()):
            if type(handler) is logging.StreamHandler:
                handler.setStream(sys.stderr)


def redirect(log: Path) -> None:
    """Prints to the log. What SGLang would start with a new interpreter is forked from this process."""
    vars(util)["spawnv_passfds"] = functools.partial(_fork_or_spawn, util.spawnv_passfds)
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
