"""A fork server that imports SGLang while the launcher does, and from which scheduler and detokenizer are forked.

SGLang spawns these processes after its own import, and each imports SGLang again: half of a start on two cores. Only on machines
without an accelerator: a CUDA driver that an import has initialized does not survive a fork.
"""

from __future__ import annotations

import ctypes
import functools
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from sgl_prefill.entry import quiet_start

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

PRELOADED = "sgl_prefill.entry.preloaded"
PR_SET_PDEATHSIG = 1
_begun_in: int | None = None  # the process that has started the fork server; one that was forked from it has none


def begin() -> None:
    """Starts the fork server. Call it before SGLang is imported, and after setting the environment of these imports."""
    global _begun_in
    from sgl_prefill.startup.device import (
        this_device,  # imports torch: the fork server's process imports this module first
    )

    if not this_device().is_host or _begun_in is not None:
        return
    multiprocessing.set_forkserver_preload([PRELOADED])
    multiprocessing.forkserver.ensure_running()
    _begun_in = os.getpid()


def fork_from_here(server_args: ServerArgs) -> None:
    """Makes SGLang fork its processes from the fork server, if there is one, instead of spawning them. With data parallelism or
    several detokenizers SGLang starts further processes, which would not adopt the launcher's environment: they are spawned.
    """
    if _begun_in == os.getpid() and server_args.dp_size == 1 and server_args.detokenizer_worker_num == 1:
        multiprocessing.set_start_method("forkserver", force=True)


class Launcher(NamedTuple):
    pid: int
    failure_signal: int  # a process that cannot start sends it after printing the reason

    def report_failure(self) -> None:
        os.kill(self.pid, self.failure_signal)


class ParentEnvironment:
    """Carries the launcher's os.environ to a started process when it is pickled: the fork server's own is older."""

    def __init__(
        self,
        failure_signal: int,
        variables: dict[str, str] | None = None,
        launcher_pid: int | None = None,
        *,
        is_quiet: bool = False,
    ) -> None:
        self._failure_signal, self._is_quiet = failure_signal, is_quiet
        self._variables, self._launcher_pid = variables, launcher_pid

    def __reduce__(self) -> tuple[Any, ...]:
        make = functools.partial(ParentEnvironment, is_quiet=quiet_start.is_on())
        return make, (self._failure_signal, dict(os.environ), os.getpid())

    def adopt(self) -> Launcher:
        """Sets the environment in the started process, which ends if its launcher has ended."""
        assert self._variables is not None
        assert self._launcher_pid is not None
        end_with_parent()
        try:
            os.kill(self._launcher_pid, 0)
        except ProcessLookupError:
            os._exit(1)
        threads = self._variables.get("OMP_NUM_THREADS", "")
        if threads.isdigit() and "torch" in sys.modules:
            # PyTorch has read the variable in the fork server, before the program set it.
            sys.modules["torch"].set_num_threads(int(threads))
        for name in os.environ.keys() - self._variables.keys():
            del os.environ[name]
        os.environ.update(self._variables)
        signal.signal(signal.SIGQUIT, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher gets Ctrl-C too, and ends this process
        if self._is_quiet:
            quiet_start.be_quiet()
        return Launcher(self._launcher_pid, self._failure_signal)


def end_with_parent() -> None:
    """Makes the kernel kill this process when its parent ends, as SGLang does for its processes."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def prepare_forking() -> None:
    """Prepares the fork server after its imports. A child that fails sends SIGQUIT to its parent, which passes it on to the
    launcher. The title is set before children change the environment, whose memory it is written to.
    """
    import setproctitle

    setproctitle.setproctitle("sgl_prefill::prefork")
    signal.signal(signal.SIGQUIT, lambda *_: os.kill(os.getppid(), signal.SIGQUIT))
