"""A server whose ranks write down what they run, for `test_tensor_parallel`. Takes the flags of `sgl_prefill.launch_server`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

FOLDER = "RANKS_CHILD_FOLDER"  # a variable: where they write


def run_scheduler_process(*arguments: Any, **options: Any) -> None:
    """Runs one rank. Its file gets the ids of the requests in the order in which they run."""
    from sglang.srt.layers import vocab_parallel_embedding as embedding

    from sgl_prefill.core.job import Job
    from sgl_prefill.entry import processes
    from sgl_prefill.port.steps.jobs import SchedulerPort

    _, environment, _, _, _, rank, *_ = arguments  # (config, environment, server_args, port_args, gpu_id, tp_rank, ...)
    file = Path(environment._variables[FOLDER], f"rank-{rank}").open("w", buffering=1)  # noqa: SIM115
    started = SchedulerPort.started
    # SGLang compiles this function of two lines, which takes a C++ compiler half a minute.
    embedding.get_masked_input_and_mask = embedding.get_masked_input_and_mask._torchdynamo_orig_callable

    def write_down(port: SchedulerPort, job: Job) -> None:
        file.write(f"{port.reqs_of([job])[0].rid}\n")
        started(port, job)

    SchedulerPort.started = write_down  # type: ignore[method-assign, assignment]
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
    from tests.integration import ranks_child  # so that its functions have names that other processes find

    os.environ.setdefault(FOLDER, ".")
    sys.exit(ranks_child.main())
