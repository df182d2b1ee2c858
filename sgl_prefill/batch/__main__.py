"""`python -m sgl_prefill.batch`: answers a file of requests.

Exit status: 0 if every row was answered, 2 if some were not or nothing could begin.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sgl_prefill.batch.backends import OwnEngine, RunningServers
from sgl_prefill.batch.options import SCHEDULING, JobOptions, options_of, parser
from sgl_prefill.batch.rows import RequestFile
from sgl_prefill.batch.tables import rows_of
from sgl_prefill.errors import BadRequestError, BatchJobError, SglPrefillError
from sgl_prefill.startup.quiet import quiet, usage_as_error

if TYPE_CHECKING:
    from sgl_prefill.config import PrefillConfig

QUIET = ("--log-level", "error")
INTERRUPTED = 130


def main(argv: list[str] | None = None) -> int:
    """Runs a job, and returns the exit status."""
    quiet()
    try:
        with usage_as_error():
            namespace, engine_flags = parser().parse_known_args(sys.argv[1:] if argv is None else argv)
        return answer(options_of(namespace), engine_flags)
    except SglPrefillError as error:
        say(str(error))
        return 2
    except KeyboardInterrupt:
        say("interrupted; the same command goes on where this one was")
        return INTERRUPTED


def answer(options: JobOptions, engine_flags: list[str]) -> int:
    """Answers a job. Raises SglPrefillError where it cannot begin or go on."""
    from sgl_prefill.batch.batch_job import Job
    from sgl_prefill.batch.planned import report_plan

    opened = open_input(options)
    backend: RunningServers | OwnEngine
    if not options.base_urls:
        say("imports SGLang, whose tokenizer and checks all rows pass before a model is loaded")
    backend, identity = running_servers(options, engine_flags) if options.base_urls else own_engine(engine_flags)
    if options.dry_run:
        return only_plan(options, backend, opened)
    job = Job(options, identity, opened)
    try:
        if job.is_finished:
            say("all rows were answered by an earlier run (--overwrite answers them again)")
            return 0
        planned = job.plan(backend)
        report_plan(planned, backend.unit)
        if len(planned.order):
            start(backend)
        return job.answer(backend, planned)
    finally:
        job.close()


def start(backend: RunningServers | OwnEngine) -> None:
    if isinstance(backend, OwnEngine):
        say("loads the model")
    backend.start()


def say(text: str) -> None:
    print(f"sgl_prefill.batch: {text}", file=sys.stderr, flush=True)


def open_input(options: JobOptions) -> RequestFile:
    """Opens the input before SGLang is imported, which takes most of a minute. Raises BatchJobError if it cannot be read, or if
    its first row is not what the options say."""
    opened = RequestFile(options.input)
    if options.is_table:
        next(iter(rows_of(options)), None)
    elif len(opened) and not options.skip_bad_rows:
        try:
            opened.request(0)
        except BadRequestError as error:
            raise BatchJobError(f"{options.input}, line {opened.line_number(0)}: {error}") from error
    return opened


def only_plan(options: JobOptions, backend: RunningServers | OwnEngine, opened: RequestFile) -> int:
    """Prints the plan of the whole job. The only file it writes lists the rows that cannot be answered."""
    from sgl_prefill.batch import planned as plans
    from sgl_prefill.batch.batch_job import Job

    with tempfile.TemporaryDirectory() as folder:
        elsewhere = dataclasses.replace(options, output=Path(folder) / options.output.name)
        job = Job(elsewhere, {}, opened)
        try:
            planned = job.plan(backend)
        finally:
            job.close()
        lines = plans.describe(planned, backend.unit)
        if options.price_per_hour is not None and isinstance(backend, OwnEngine) and len(planned.order):
            start(backend)
            assert backend.state is not None
            jct_ms, step = backend.state.jct_ms, backend.state.step_size
            if jct_ms is not None and step is not None:
                ms = plans.predicted_ms(planned.order, planned.prompts.tokens.lengths, jct_ms, step)
                lines += plans.time_and_price(ms, options.price_per_hour)
    print("\n".join(lines))
    return 2 if job.bad else 0


def running_servers(options: JobOptions, engine_flags: list[str]) -> tuple[RunningServers, dict[str, Any]]:
    """Returns the servers and an empty identity: what they serve is unknown."""
    if engine_flags:
        raise BatchJobError(f"{' '.join(engine_flags)}: with --base-url the engine's flags are the servers' own")
    headers: dict[str, str] = {}
    if key := os.environ.get("OPENAI_API_KEY"):
        headers["Authorization"] = f"Bearer {key}"
    return RunningServers(options.base_urls, headers, is_background=options.background), {}


def own_engine(engine_flags: list[str]) -> tuple[OwnEngine, dict[str, Any]]:
    """Returns an engine in this process, not started yet, and its identity."""
    from sgl_prefill import launch_server

    flags = [*QUIET, *engine_flags]
    config, server_args = launch_server.parse(flags, listens=False, defaults={"scheduling": SCHEDULING})
    from sgl_prefill.entry.in_process import InProcessEngine

    return OwnEngine(InProcessEngine(config, server_args)), identity_of(config, server_args)


def identity_of(config: PrefillConfig, server_args: Any) -> dict[str, Any]:
    """The model and the options that answers depend on."""
    folder = Path(server_args.model_path)
    files = sorted(path for path in folder.glob("*") if path.suffix in (".safetensors", ".bin", ".json", ".gguf"))
    digest = hashlib.sha256()
    for path in files:
        content = path.read_bytes() if path.suffix == ".json" else str(path.stat().st_size).encode()
        digest.update(path.name.encode() + b"\0" + content + b"\0")
    return {
        "model_path": str(server_args.model_path),
        "model_files": digest.hexdigest(),
        "dtype": server_args.dtype,
        "quantization": server_args.quantization,
        "logits_dtype": config.logits_dtype,
        "max_input_length": config.max_input_length,
    }


if __name__ == "__main__":
    sys.exit(main())
