"""`python -m sgl_prefill.mil`: the longest input that this model and this memory can serve, without serving.

Takes the flags of `sgl_prefill.launch_server`. Loads the model, measures what an input takes, prints where the memory would
go, the limits of memory and of the model's context length, and as the last line the smaller of the two.
"""

from __future__ import annotations

import argparse
import logging
import sys
from typing import Any

from sgl_prefill import launch_server
from sgl_prefill.config import PrefillConfig
from sgl_prefill.errors import SglPrefillError
from sgl_prefill.startup.quiet import quiet


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status: 0, or 2 with one message on stderr."""
    argv = sys.argv[1:] if argv is None else argv
    if "-h" in argv or "--help" in argv:
        return print_help()
    quiet()
    try:
        memory = measure(argv)
    except SglPrefillError as error:
        print(f"sgl_prefill: {error}", file=sys.stderr)
        return 2
    from sgl_prefill.startup.prepare import input_limit

    for row in memory["rows"]:
        per_token = "" if row["bytes_per_token"] is None else f"{row['bytes_per_token']:12.0f} bytes a token"
        print(f"{row['what']:<42} {row['mib']:10.1f} MiB {per_token}")
    by_memory, context = memory["largest_input_tokens"], memory["context_tokens"]
    print(f"longest input by memory: {by_memory} tokens; by the context length of {context}: {input_limit(context)}")
    print(f"longest input in tokens: {min(by_memory, input_limit(context))}")
    return 0


def measure(argv: list[str]) -> dict[str, Any]:
    """Returns the memory plan as /server_info shows it, and `context_tokens`. Raises SglPrefillError."""
    config, server_args = launch_server.parse([*argv, "--log-level", "warning"], listens=False)
    logging.basicConfig(level=logging.WARNING)
    from sgl_prefill.core import memory_plan
    from sgl_prefill.entry import in_process

    parts, scheduler = in_process.build_scheduler(config, server_args)
    assert parts.record.memory_plan is not None
    return {**memory_plan.shown(parts.record.memory_plan), "context_tokens": scheduler.model_config.context_len}


def print_help() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m sgl_prefill.mil", description=__doc__, add_help=False, allow_abbrev=False
    )
    PrefillConfig.add_cli_arguments(parser)
    parser.print_help()
    return 0


if __name__ == "__main__":
    sys.exit(main())
