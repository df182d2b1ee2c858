"""The functions that SGLang calls in each process of a server. The configuration is an argument, never in the environment.

HTTP and tokenizer process        init_tokenizer_manager, execute_warmup     (and http.routes)
scheduler process, one per rank   run_scheduler_process
detokenizer process               run_detokenizer_process
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import psutil
import requests

from sgl_prefill.config import PrefillConfig
from sgl_prefill.entry import prefork, quiet_start
from sgl_prefill.entry.prefork import Launcher, ParentEnvironment
from sgl_prefill.errors import ConfigurationError, MemoryPlanError, SglPrefillError
from sgl_prefill.startup import examine
from sgl_prefill.startup.device import device_of, is_out_of_memory, this_device
from sgl_prefill.startup.foreign_errors import as_refusals

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.server_args import PortArgs, ServerArgs

    from sgl_prefill.entry.activation import Parts
    from sgl_prefill.http.shutdown import Ending
    from sgl_prefill.http.tokenizer_manager import PrefillTokenizerManager

logger = logging.getLogger(__name__)

WARM_UP_TIMEOUT_S = 600
BIND_TIMEOUT_S = 10.0  # uvicorn binds as soon as the warm-up's thread is started
END_TIMEOUT_S = 10
OTHER_RANKS_WAIT_S = 2  # rank 0 usually has the same error, and ends all ranks
# Sent to `launch_server` by a process that has printed why it cannot start. A user's program gets SGLang's signal, SIGQUIT.
REPORTED_FAILURE = signal.SIGUSR2
# On a host a process of this niceness gets a tenth of a core beside a step. All threads of a step wait for the slowest one, some
# 300 times: beside a busy HTTP process of the same priority, a step of 40 ms took up to 1.1 s.
NICENESS = 10


@dataclasses.dataclass
class ProcessState:
    launcher: Launcher | None = None  # None in the process of a user's program
    is_of_server: bool = (
        False  # this is the HTTP process of `launch_server`, which errors may end; not a user's program
    )


def give_way() -> None:
    """On a host, lowers the priority of this process. Called by its main thread before it starts others."""
    if this_device().is_host:
        os.nice(NICENESS)


def run_scheduler_process(
    config: PrefillConfig,
    environment: ParentEnvironment,
    server_args: ServerArgs,
    port_args: PortArgs,
    gpu_id: int,
    tp_rank: int,
    pp_rank: int,
    dp_rank: int | None,
    pipe_writer: Connection,
    *display_ranks: int | None,
) -> None:
    launcher = environment.adopt()
    from sglang.srt.managers import scheduler

    from sgl_prefill.port.runner import at_start

    class ToLauncher:
        def send(self, info: dict[str, Any]) -> None:
            pipe_writer.send(at_start.with_record(parts.runner, info))

    parts = _activate_or_end(config, "scheduler", launcher)
    ranks = (gpu_id, tp_rank, pp_rank, dp_rank)
    scheduler.run_scheduler_process(server_args, port_args, *ranks, ToLauncher(), *display_ranks)


def run_detokenizer_process(config: PrefillConfig, environment: ParentEnvironment, *args: Any, **kwargs: Any) -> None:
    launcher = environment.adopt()
    from sglang.srt.managers import detokenizer_manager

    _activate_or_end(config, "detokenizer", launcher)
    give_way()
    detokenizer_manager.run_detokenizer_process(*args, **kwargs)


def _activate_or_end(config: PrefillConfig, process: str, launcher: Launcher) -> Parts:
    from sgl_prefill.entry import activation

    try:
        parts = activation.activate(config, process)
    except SglPrefillError as error:
        end_with_launcher(error, launcher)
    parts.processes.launcher = launcher
    return parts


def around_scheduler_init(
    state: ProcessState, original: Callable[..., None], scheduler: Scheduler, *arguments: Any, **options: Any
) -> None:
    """Hook: prints what keeps a model from starting without a traceback, and ends the start. On a device it checks before loading
    whether the weights fit, and names running out of memory.
    """
    from sglang.srt.runtime_context import get_device, get_parallel

    server_args = arguments[0] if arguments else options["server_args"]
    tp_rank = get_parallel().tp_rank
    logger.info("reads the weights of %s", server_args.model_path)
    try:
        named = nullcontext() if state.launcher is None else as_refusals(server_args.model_path)
        with named, _named_out_of_memory(server_args, get_device().gpu_id or 0):
            original(scheduler, *arguments, **options)
        quiet_start.end()
    except SglPrefillError as error:
        if state.launcher is None:
            raise
        if tp_rank > 0:
            time.sleep(OTHER_RANKS_WAIT_S)
        end_with_launcher(error, state.launcher)


@contextmanager
def _named_out_of_memory(server_args: ServerArgs, gpu_id: int) -> Iterator[None]:
    """On a device: raises MemoryPlanError where the weights do not fit, or where loading them runs out of memory."""
    from sglang.srt.arg_groups.overrides import resolving_view

    view = resolving_view(server_args)
    device = device_of(view.device if view.device == "cpu" else f"{view.device}:{gpu_id}")
    if device.is_host:
        yield
        return
    is_changed = view.quantization is not None or view.cpu_offload_gb > 0
    free_bytes = device.free_bytes()
    examine.check_card(device, view.model_path, view.tp_size, loads_all_as_it_is=not is_changed)
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise MemoryPlanError(examine.out_of_memory(device, server_args.model_path, free_bytes, error)) from error


def end_with_launcher(error: SglPrefillError, launcher: Launcher) -> NoReturn:
    """Prints the error, and makes the launcher end all processes."""
    print(f"sgl_prefill: cannot start\n{error}", file=sys.stderr, flush=True)
    launcher.report_failure()
    # If this process ended before the signal arrives, SGLang would report the closed pipe as the reason.
    time.sleep(END_TIMEOUT_S)
    os._exit(1)


def after_set_envs_and_config(state: ProcessState, result: None, server_args: ServerArgs) -> None:
    """Hook: makes SGLang fork its processes, and handles their failures until SGLang installs its own handler of SIGQUIT."""
    prefork.fork_from_here(server_args)
    if state.is_of_server:
        signal.signal(
            signal.SIGQUIT, lambda *_: _end_all("sgl_prefill: a process has failed, for the reason above\n", 1)
        )
        signal.signal(REPORTED_FAILURE, lambda *_: _end_all("", 2))


def _end_all(message: str, status: int) -> NoReturn:
    from sglang.srt.utils import kill_process_tree

    logging.disable()  # else SGLang would log lines after the reason
    kill_process_tree(os.getpid(), include_parent=False)
    print(message, end="", file=sys.stderr, flush=True)
    os._exit(status)


def init_tokenizer_manager(
    config: PrefillConfig, server_args: ServerArgs, port_args: PortArgs, *, ending: Ending | None = None
) -> Any:
    """Returns (tokenizer manager, SGLang's template manager). ending: the graceful shutdown of `launch_server`."""
    from sglang.srt.entrypoints.engine import init_tokenizer_manager as stock

    from sgl_prefill.http.tokenizer_manager import PrefillTokenizerManager

    with as_refusals(server_args.model_path):
        return stock(server_args, port_args, functools.partial(PrefillTokenizerManager, config=config, ending=ending))


def execute_warmup(config: PrefillConfig, server_args: ServerArgs) -> bool:
    """Sends two prefill-only requests through HTTP, computes `--shared-prefix`, and sets the server to healthy.

    SGLang calls it in a thread of the HTTP process. On failure it ends the server.
    """
    from sglang.srt.entrypoints import http_server
    from sglang.srt.managers.tokenizer_manager import ServerStatus

    from sgl_prefill.http import conversations

    manager = http_server._global_state.tokenizer_manager
    route, body = warm_up_request(manager)
    try:
        session = _session(server_args)
        _wait_until_listening(session, server_args)
        session.post(server_args.url() + route, json=body, timeout=WARM_UP_TIMEOUT_S).raise_for_status()
        # Full garbage collections, which stop all requests, skip all objects of the start from now on.
        asyncio.run_coroutine_threadsafe(manager.freeze_gc(), manager.event_loop).result(WARM_UP_TIMEOUT_S)
        # The scheduler freezes too: this request waits for it, so that no client's request does.
        session.post(server_args.url() + route, json=body, timeout=WARM_UP_TIMEOUT_S).raise_for_status()
        if config.shared_prefix is not None:
            text = Path(config.shared_prefix).read_text(encoding="utf-8")
            shared = conversations.share_system_prompt(manager, http_server.app.state.openai_serving_chat, text)
            asyncio.run_coroutine_threadsafe(shared, manager.event_loop).result(WARM_UP_TIMEOUT_S)
    except requests.RequestException as error:
        _end_all(f"sgl_prefill: cannot start\nthe warm-up request failed: {error}\n", 1)
    except SglPrefillError as error:
        _end_all(f"sgl_prefill: cannot start\n{error}\n", 2)
    quiet_start.end_launchers(_what_is_served(server_args))
    manager.server_status = ServerStatus.Up
    return True


def warm_up_request(manager: PrefillTokenizerManager) -> tuple[str, dict[str, Any]]:
    """Returns the path and the body of a small request that this model answers."""
    from sgl_prefill.http import decision_checkpoints

    if decision_checkpoints.is_one(manager.model_config):
        return decision_checkpoints.WARM_UP
    prompt: dict[str, Any] = {"input_ids": [10, 11, 12]} if manager.tokenizer is None else {"text": "warm-up"}
    if not manager.is_generation:
        return "/encode", prompt
    # With labels, to load their tables before the first request.
    options = {"allowed_token_ids": [10, 11], "sampling_params": {"max_new_tokens": 0, "temperature": 0}}
    return "/generate", {**prompt, **options}


def _what_is_served(server_args: ServerArgs) -> str:
    from sglang.srt.runtime_context import get_serving

    metrics = f", metrics at {server_args.url()}/metrics" if server_args.enable_metrics else ""
    return f"serves {get_serving().served_model_name} at {server_args.url()}{metrics}"


def _session(server_args: ServerArgs) -> requests.Session:
    from sglang.srt.arg_groups.serving_hook import ssl_verify_of

    session = requests.Session()
    session.trust_env = False  # the server is on this machine: no proxy
    session.verify = ssl_verify_of(server_args)
    if server_args.api_key:
        session.headers["Authorization"] = f"Bearer {server_args.api_key}"
    return session


def _listens(port: int) -> bool:
    """Whether this process listens on the port."""
    sockets = psutil.Process().net_connections("inet")
    return any(one.status == psutil.CONN_LISTEN and one.laddr.port == port for one in sockets)


def _wait_until_listening(session: requests.Session, server_args: ServerArgs) -> None:
    """Raises ConfigurationError where the HTTP server does not listen, e.g. since another process has taken the port."""
    url = server_args.url()
    began = time.monotonic()
    deadline = began + WARM_UP_TIMEOUT_S
    while True:
        try:
            session.get(url + "/model_info", timeout=5).raise_for_status()
            return
        except requests.RequestException:
            # Uvicorn does not end where it cannot bind: SGLang's shutdown waits for this thread.
            is_late = time.monotonic() > began + BIND_TIMEOUT_S and not _listens(server_args.port)
            if is_late or not threading.main_thread().is_alive():
                listening = [("--port", server_args.host, server_args.port)]
                reason = (
                    "\n".join(examine.port_problems(listening)) or "the HTTP server has ended, as its log above says"
                )
                raise ConfigurationError(reason) from None
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
