"""A process that imports SGLang while the launcher does, and from which scheduler and detokenizer are then forked.

SGLang spawns them when its own import is over, and each imports all of it again: half of a start on two cores. Only on
machines without an accelerator: a driver that some import has touched does not survive a fork.
"""

from __future__ import annotations

import ctypes
import functools
import multiprocessing
import multiprocessing.forkserver
import os
import signal
from typing import TYPE_CHECKING, Any, NamedTuple

from sgl_prefill.entry import quiet_start

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

PRELOADED = "sgl_prefill.entry.preloaded"
PR_SET_PDEATHSIG = 1
_begun = False


def begin() -> None:
    """Start the process. Call it before SGLang is imported, and after what its imports shall find in os.environ is set."""
    global _begun
    from sgl_prefill.startup.device import (
        this_device,  # imports torch, which the process that starts here must not wait for
    )

    if not this_device().is_host or _begun:
        return
    multiprocessing.set_forkserver_preload([PRELOADED])
    multiprocessing.forkserver.ensure_running()
    _begun = True


def fork_from_here(server_args: ServerArgs) -> None:
    """Replaces what SGLang has chosen: to spawn its processes; where ours is there, they are forked from it.

    Not where SGLang starts processes of its own functions (data parallelism, several detokenizers): only ours adopt the
    environment.
    """
    if _begun and server_args.dp_size == 1 and server_args.detokenizer_worker_num == 1:
        multiprocessing.set_start_method("forkserver", force=True)


class Launcher(NamedTuple):
    """Who started a process, and which signal tells it that the process cannot start and has said why."""

    pid: int
    failure_signal: int

    def report_failure(self) -> None:
        os.kill(self.pid, self.failure_signal)


class ParentEnvironment:
    """os.environ of the process that starts another, as it is then: a forked process has that of long before."""

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
        """Takes it over in the started process, which ends where nobody waits for it any more."""
        assert self._variables is not None
        assert self._launcher_pid is not None
        end_with_parent()
        try:
            os.kill(self._launcher_pid, 0)
        except ProcessLookupError:
            os._exit(1)
        for name in os.environ.keys() - self._variables.keys():
            del os.environ[name]
        os.environ.update(self._variables)
        signal.signal(signal.SIGQUIT, signal.SIG_DFL)
        signal.signal(
            signal.SIGINT, signal.SIG_IGN
        )  # Ctrl-C reaches a terminal's whole group; the launcher ends the rest
        if self._is_quiet:
            quiet_start.be_quiet()
        return Launcher(self._launcher_pid, self._failure_signal)


def end_with_parent() -> None:
    """Ask the kernel to end this process with its parent, however that ends; SGLang asks the same for its own processes."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def prepare_forking() -> None:
    """Makes the forking process ready, once all is imported.

    A child that fails sends SIGQUIT to its parent, which SGLang takes to be the launcher: pass it on. The title is set
    before a child changes its environment, where the room for it is found only once.
    """
    import setproctitle

    setproctitle.setproctitle("sgl_prefill::prefork")
    signal.signal(signal.SIGQUIT, lambda *_: os.kill(os.getppid(), signal.SIGQUIT))
