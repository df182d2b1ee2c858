"""`python -m sgl_prefill.launch_server`: SGLang's HTTP server as a prefill-only engine.

Takes every flag of `sglang.launch_server` and those of `sgl_prefill.config`. Without `--model-path` it serves the demo
model. Start refused: exit status 2 and one message on stderr; a failure of a process later ends all of them.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
from typing import TYPE_CHECKING

from sgl_prefill import preflight, prefork
from sgl_prefill.config import PrefillConfig
from sgl_prefill.cpu.detect import has_accelerator
from sgl_prefill.errors import ConfigurationError, SeamError, SglPrefillError
from sgl_prefill.seam import fingerprints

SPIN_COUNT = "50000"  # of GNU OpenMP, some 0.1 ms

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs


def main(argv: list[str] | None = None) -> int:
    """Run the server until it is stopped; the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    if "-h" in argv or "--help" in argv:
        return _print_help()
    try:
        config, server_args = parse(argv)
        serve(config, server_args)
    except SglPrefillError as error:
        print(f"sgl_prefill: cannot start\n{error}", file=sys.stderr)
        return 2
    finally:
        prefork.end()
    return 0


def parse(argv: list[str], *, listens: bool = True) -> tuple[PrefillConfig, ServerArgs]:
    """Our options and SGLang's resolved arguments. Raises SglPrefillError for everything that cannot be started.

    What can be seen without SGLang is checked first, since its import takes 20 seconds on two cores. `listens`: a port
    will be opened, and must be free.
    """
    activation_error = fingerprints.version_problem()
    if activation_error:
        raise SeamError(activation_error)
    namespace, for_sglang = _our_parser().parse_known_args(argv)
    config = PrefillConfig.from_namespace(namespace)
    defaults = preflight.default_flags(config)
    if problems := preflight.check_argv(config, for_sglang, listens=listens):
        raise ConfigurationError("\n".join(problems))
    if listens:
        if not has_accelerator():
            # Threads that spin on after a step take the cores from this process and the detokenizer; threads that sleep between
            # two kernels of a step cost half of its speed. So they spin about as long as Python takes between two kernels.
            os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
        prefork.begin()
    server_args = _prepare([*preflight.required_flags(config), *defaults, *_model_flags(for_sglang), *for_sglang])
    preflight.check_server_args(config, server_args, listens=listens)
    return config, server_args


def serve(config: PrefillConfig, server_args: ServerArgs) -> None:
    """Blocks until the server ends. No process that was started for it is left."""
    from sglang.srt.entrypoints import http_server
    from sglang.srt.utils import kill_process_tree

    from sgl_prefill import processes
    from sgl_prefill.api import routes
    from sgl_prefill.seam import activation

    activation.activate(config, "http")
    routes.install(http_server.app, config)
    environment = prefork.ParentEnvironment()
    try:
        http_server.launch_server(
            server_args,
            init_tokenizer_manager_func=functools.partial(processes.init_tokenizer_manager, config),
            run_scheduler_process_func=functools.partial(processes.run_scheduler_process, config, environment),
            run_detokenizer_process_func=functools.partial(processes.run_detokenizer_process, config, environment),
            execute_warmup_func=processes.execute_warmup,
        )
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


def _our_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m sgl_prefill.launch_server", add_help=False, allow_abbrev=False)
    PrefillConfig.add_cli_arguments(parser)
    return parser


def _prepare(argv: list[str]) -> ServerArgs:
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    load_plugins()  # our entry point adds the CPU attention backend to the choices
    return prepare_server_args(argv)


def _model_flags(argv: list[str]) -> list[str]:
    """The demo model where the user names none."""
    if preflight.value_of(argv, "--model-path", "--model", "--config") is not None:
        return []
    from sgl_prefill import demo_model

    print("sgl_prefill: no --model-path given, serving the demo model SmolLM2-135M-Instruct", file=sys.stderr)
    return ["--model-path", str(demo_model.ensure()), "--served-model-name", demo_model.SERVED_NAME]


def _print_help() -> int:
    _our_parser().print_help()
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    load_plugins()
    parser = argparse.ArgumentParser(prog="and every flag of sglang.launch_server", add_help=False)
    ServerArgs.add_cli_args(parser)
    print()
    parser.print_help()
    return 0


if __name__ == "__main__":
    sys.exit(main())
