"""A server whose hybrid body is wrong, for `test_servers`. Takes the flags of `sgl_prefill.launch_server`."""

from __future__ import annotations

import sys
from typing import Any


def run_scheduler_process(*arguments: Any, **options: Any) -> None:
    """Runs SGLang's scheduler process with a body that hands on the rows of its tokens in the wrong order."""
    from sgl_prefill.entry import processes
    from sgl_prefill.hybrid.body import HybridBody

    right = HybridBody.run

    def wrong(body: HybridBody, *inputs: Any, **more: Any) -> Any:
        return right(body, *inputs, **more).roll(1, dims=0)

    HybridBody.run = wrong  # type: ignore[method-assign, assignment]
    processes.run_scheduler_process(*arguments, **options)


def main() -> int:
    from sgl_prefill import launch_server
    from sgl_prefill.entry import launch

    vars(launch)["processes"] = _Processes()
    return launch_server.main()


class _Processes:
    """`entry.processes` with another scheduler process."""

    run_scheduler_process = staticmethod(run_scheduler_process)

    def __getattr__(self, name: str) -> Any:
        from sgl_prefill.entry import processes

        return getattr(processes, name)


if __name__ == "__main__":
    from tests.gpu import wrong_hybrid_child  # so that its functions have names that other processes find

    sys.exit(wrong_hybrid_child.main())
