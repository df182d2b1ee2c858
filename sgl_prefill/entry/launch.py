"""Starts SGLang's HTTP server with this package's hooks, routes and process functions."""

from __future__ import annotations

import argparse
import functools
import gc
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sgl_prefill.config import PrefillConfig
from sgl_prefill.cpu import rank_threads
from sgl_prefill.entry import activation, prefork, processes
from sgl_prefill.errors import ProcessError
from sgl_prefill.port.kv import admission
from sgl_prefill.startup import arguments, techniques
from sgl_prefill.startup.device import this_device
from sgl_prefill.startup.foreign_errors import as_refusals
from sgl_prefill.startup.quiet import usage_as_error
from sgl_prefill.startup.secret import FIELDS, Secret

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs


# New objects in the HTTP process between garbage collections. One request makes Python's default of 700: collections of the
# objects of thousands of waiting requests took a fifth of the event loop's time.
GC_THRESHOLD = 50_000
# SGLang's messages for a scheduler that ends before it is ready.
ENDED_AT_START = ("died during initialization", "Initialization failed")


def server_args_of(flags: list[str]) -> ServerArgs:
    """Parses and resolves a command line as SGLang does, and marks its keys as secrets."""
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    load_plugins()  # `entry.plugin` adds the CPU attention backend to the choices
    model = arguments.value_of(flags, "--model-path", "--model") or "the model"
    with as_refusals(model), usage_as_error():
        found = prepare_server_args(flags)
        for name in FIELDS:
            if value := getattr(found, name):
                setattr(found, name, Secret(value))  # the arguments are sealed once they are resolved
        found.resolve_once()
    return found


def resolved(server_args: ServerArgs) -> Any:
    """Returns a view of what SGLang has made of its arguments, whose own attributes are what was given."""
    from sglang.srt.arg_groups.overrides import resolving_view

    return resolving_view(server_args)


def with_config_file(flags: list[str]) -> list[str]:
    """Returns a command line with the contents of SGLang's `--config FILE` in its place."""
    if "--config" not in flags:
        return flags
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.server_args_config_parser import ConfigArgumentMerger

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    merged: list[str] = ConfigArgumentMerger(parser).merge_config_with_args(flags)
    return merged


def settle(config: PrefillConfig, build: Callable[[PrefillConfig], ServerArgs]) -> tuple[PrefillConfig, ServerArgs]:
    """Returns the configuration that the model and SGLang's resolved arguments allow, and these arguments.

    build: makes the arguments of a configuration, the user's flags among them. Raises ConfigurationError.
    """
    while True:
        server_args = build(config)
        view = resolved(server_args)
        values = {need.field: getattr(view, need.field) for need in arguments.required_for(config)}
        found = [*techniques.of_flags(values), *techniques.of_kv_dtype(view.kv_cache_dtype)]
        allowed = techniques.step_back(config, [*found, *admission.unsupported_with(server_args)])
        if allowed is config:
            techniques.log_what_is_off(config)
            return config, server_args
        config = allowed


def serve_stock(flags: list[str]) -> int:
    """Runs SGLang's own server until it ends."""
    from sglang.launch_server import run_server

    run_server(server_args_of(flags))
    return 0


def serve(config: PrefillConfig, server_args: ServerArgs) -> int:
    """Runs the server until it ends, ends all of its processes, and returns its exit status."""
    from sglang.srt.entrypoints import http_server
    from sglang.srt.utils import kill_process_tree

    from sgl_prefill.http import routes
    from sgl_prefill.http.shutdown import Ending

    ending = Ending()
    activation.activate(config, "http").processes.is_of_server = True
    routes.install(http_server.app, config, ending)
    view = resolved(server_args)
    if view.gc_threshold is None:
        gc.set_threshold(GC_THRESHOLD)
    processes.give_way()
    if this_device().is_host:
        rank_threads.share_cores(view.tp_size)
    environment = prefork.ParentEnvironment(processes.REPORTED_FAILURE)
    try:
        http_server.launch_server(
            server_args,
            init_tokenizer_manager_func=functools.partial(processes.init_tokenizer_manager, config, ending=ending),
            run_scheduler_process_func=functools.partial(processes.run_scheduler_process, config, environment),
            run_detokenizer_process_func=functools.partial(processes.run_detokenizer_process, config, environment),
            execute_warmup_func=functools.partial(processes.execute_warmup, config),
        )
    except (EOFError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not any(words in str(error) for words in ENDED_AT_START):
            raise
        why = f": {error}" if str(error) else ", for the reason above"
        raise ProcessError(f"a process of the server ended while it started{why}") from error
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
    return ending.status


def print_sglangs_help() -> None:
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    load_plugins()
    parser = argparse.ArgumentParser(prog="and every flag of sglang.launch_server", add_help=False)
    ServerArgs.add_cli_args(parser)
    parser.print_help()
