"""`python -m sgl_prefill.launch_server`: SGLang's HTTP server as a prefill-only engine.

Takes every flag of `sglang.launch_server` and those of `sgl_prefill.config`. Without `--model-path` it serves the demo model. A
refused start ends with status 2 and one message on stderr; a process that fails later ends all of them.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from sgl_prefill.config import PrefillConfig

# Modules that import torch or SGLang are imported where they are used: --help and refusals are fast.
from sgl_prefill.entry import quiet_start
from sgl_prefill.errors import ConfigurationError, SeamError, SglPrefillError
from sgl_prefill.startup.quiet import usage_as_error

SPIN_COUNT = "50000"  # iterations of GNU OpenMP, about 0.1 ms


def main(argv: list[str] | None = None, *, is_program: bool = False) -> int:
    """Runs the server until it is stopped, and returns the exit status. is_program: this process does nothing else."""
    argv = sys.argv[1:] if argv is None else argv
    if {"-h", "--help", "--help-all"} & set(argv):
        return _print_help(with_sglangs="--help-all" in argv)
    if is_program:
        quiet_start.end_at_interrupt()
    try:
        if stocks_flags := _flags_of_stock(argv):
            from sgl_prefill.entry import launch

            return launch.serve_stock(stocks_flags)
        config, server_args = parse(argv, is_quiet=is_program)
        from sgl_prefill.entry import launch

        return launch.serve(config, server_args)
    except SglPrefillError as error:
        print(f"sgl_prefill: cannot start\n{error}", file=sys.stderr)
        return 2


def _divided(argv: list[str]) -> tuple[PrefillConfig, list[str]]:
    """Returns this package's options and SGLang's flags. Raises ConfigurationError."""
    with usage_as_error():
        namespace, for_sglang = _our_parser().parse_known_args(argv)
    return PrefillConfig.from_namespace(namespace), for_sglang


def _flags_of_stock(argv: list[str]) -> list[str]:
    """Returns SGLang's command line where one of its flags leaves everything to SGLang's own server; else none."""
    config, for_sglang = _divided(argv)
    from sgl_prefill.startup import arguments, techniques

    reasons = techniques.stock_only(config, arguments.given_in(for_sglang))
    for reason in reasons:
        print(f"sgl_prefill: SGLang's own server serves, without this package: {reason}", file=sys.stderr)
    return [*_model_flags(for_sglang), *for_sglang] if reasons else []


def parse(
    argv: list[str], *, listens: bool = True, is_quiet: bool = False, defaults: dict[str, Any] | None = None
) -> tuple[PrefillConfig, Any]:
    """Returns this package's options, less the techniques that model and flags do not allow, and SGLang's resolved arguments.
    Raises SglPrefillError.

    Checks that need no SGLang come first: its import takes 20 seconds on two cores.

    Args:
        listens: the server's port must be free.
        is_quiet: log as `quiet_start` does.
        defaults: of options that are not given.
    """
    config, for_sglang = _divided(argv)
    config = config.with_default(defaults or {})
    if is_quiet:
        quiet_start.begin(for_sglang)
    from sgl_prefill.entry import fingerprints, prefork
    from sgl_prefill.startup import arguments, examine, techniques
    from sgl_prefill.startup.device import this_device

    if problem := fingerprints.version_problem():
        raise SeamError(problem)
    if problems := arguments.check_argv(config, for_sglang, listens=listens):
        raise ConfigurationError("\n".join(problems))
    if not this_device().is_host:
        examine.prepare_cuda()
    if listens:
        if this_device().is_host:
            # Kernel threads spin for about as long as Python takes between two kernels. Longer, they would take the cores from
            # this process and the detokenizer after a step; shorter, waking them would halve the speed of a step.
            os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
        prefork.begin()
    from sgl_prefill.entry import launch

    for_sglang = launch.with_config_file([*_model_flags(for_sglang), *for_sglang])
    config = techniques.step_back(config, techniques.of_flags(arguments.given_in(for_sglang)))

    def build(config: PrefillConfig) -> Any:
        defaults = arguments.default_flags(config, for_sglang)
        return launch.server_args_of([*arguments.required_flags(config), *defaults, *for_sglang])

    config, server_args = launch.settle(config, build)
    arguments.check_server_args(config, launch.resolved(server_args), listens=listens)
    return config, server_args


def _our_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m sgl_prefill.launch_server", add_help=False, allow_abbrev=False)
    PrefillConfig.add_cli_arguments(parser)
    return parser


def _model_flags(argv: list[str]) -> list[str]:
    """Returns flags for the demo model where the user names no model."""
    from sgl_prefill.startup import arguments

    if arguments.value_of(argv, "--model-path", "--model", "--config") is not None:
        return []
    from sgl_prefill.examples import demo_model

    print("sgl_prefill: no --model-path given, serving the demo model SmolLM2-135M-Instruct", file=sys.stderr)
    return ["--model-path", str(demo_model.ensure()), "--served-model-name", demo_model.SERVED_NAME]


def _print_help(*, with_sglangs: bool) -> int:
    _our_parser().print_help()
    if not with_sglangs:
        print("\nand every flag of sglang.launch_server: --help-all shows them too")
        return 0
    from sgl_prefill.entry import launch

    print()
    launch.print_sglangs_help()
    return 0


if __name__ == "__main__":
    sys.exit(main(is_program=True))
