"""A process that imports SGLang while the launcher does, and from which scheduler and detokenizer are then forked.

SGLang spawns them when its own import is over, and each imports all of it again: half of a start on two cores. Only on
machines without an accelerator: a driver that some import has touched does not survive a fork.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.forkserver
import os
import signal
from typing import TYPE_CHECKING

from sgl_prefill.cpu.detect import has_accelerator

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

PRELOADED = "sgl_prefill.preloaded"
_begun = False


def begin() -> None:
    """Start the process. Call it before SGLang is imported, and after what its imports shall find in os.environ is set."""
    global _begun
    if has_accelerator() or _begun:
        return
    multiprocessing.set_forkserver_preload([PRELOADED])
    multiprocessing.forkserver.ensure_running()
    _begun = True


def end() -> None:
    """Where nothing is served after all, the launcher ends before those imports do."""
    global _begun
    if not _begun:
        return
    _begun = False
    # Without its parent's open end it ends by itself, but only after its imports.
    pid = multiprocessing.forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def after_set_envs_and_config(result: None, server_args: ServerArgs) -> None:
    """Hook: SGLang has chosen to spawn its processes; where ours is there, they are forked from it.

    Not where SGLang starts processes of its own functions (data parallelism, several detokenizers): only ours adopt the
    environment.
    """
    if _begun and server_args.dp_size == 1 and server_args.detokenizer_worker_num == 1:
        multiprocessing.set_start_method("forkserver", force=True)


class ParentEnvironment:
    """os.environ of the process that starts another, as it is then: a forked process has that of long before."""

    def __init__(self, variables: dict[str, str] | None = None) -> None:
        self._variables = variables

    def __reduce__(self) -> tuple[type[ParentEnvironment], tuple[dict[str, str]]]:
        return ParentEnvironment, (dict(os.environ),)

    def adopt(self) -> None:
        """In the started process."""
        assert self._variables is not None
        for name in os.environ.keys() - self._variables.keys():
            del os.environ[name]
        os.environ.update(self._variables)
        signal.signal(signal.SIGQUIT, signal.SIG_DFL)


def prepare_forking() -> None:
    """In the forking process, once all is imported.

    A child that fails sends SIGQUIT to its parent, which SGLang takes to be the launcher: pass it on. The title is set
    before a child changes its environment, where the room for it is found only once.
    """
    import setproctitle

    setproctitle.setproctitle("sgl_prefill::prefork")
    signal.signal(signal.SIGQUIT, lambda *_: os.kill(os.getppid(), signal.SIGQUIT))
