"""What SGLang runs for us in each of its processes. The configuration travels as an argument, never by environment.

HTTP and tokenizer process      init_tokenizer_manager, execute_warmup     (and api.routes)
scheduler process, one a rank   run_scheduler_process
detokenizer process             run_detokenizer_process
"""

from __future__ import annotations

import functools
import logging
import os
import signal
import sys
import time
from typing import TYPE_CHECKING, Any

import psutil
import requests

from sgl_prefill.config import PrefillConfig
from sgl_prefill.errors import SglPrefillError
from sgl_prefill.prefork import ParentEnvironment

if TYPE_CHECKING:
    from sglang.srt.server_args import PortArgs, ServerArgs

logger = logging.getLogger(__name__)

WARM_UP_TIMEOUT_S = 600


def run_scheduler_process(
    config: PrefillConfig, environment: ParentEnvironment, server_args: ServerArgs, *args: Any, **kwargs: Any
) -> None:
    """SGLang's scheduler process with our hooks in place.

    Used as `functools.partial(run_scheduler_process, config, ParentEnvironment())`.
    """
    environment.adopt()
    from sglang.srt.managers import scheduler

    _activate_or_end(config, "scheduler")
    scheduler.run_scheduler_process(server_args, *args, **kwargs)


def run_detokenizer_process(config: PrefillConfig, environment: ParentEnvironment, *args: Any, **kwargs: Any) -> None:
    """The same for SGLang's detokenizer process, in which SGLang itself loads no plugins."""
    environment.adopt()
    from sglang.srt.managers import detokenizer_manager

    _activate_or_end(config, "detokenizer")
    detokenizer_manager.run_detokenizer_process(*args, **kwargs)


def _activate_or_end(config: PrefillConfig, process: str) -> None:
    """Where activation fails, nothing is served: the message goes to stderr, the parent gets the signal by which SGLang
    ends all processes of a failed start, and this process exits with 1.
    """
    from sgl_prefill.seam import activation

    try:
        activation.activate(config, process)
    except SglPrefillError as error:
        print(f"sgl_prefill: {error}", file=sys.stderr, flush=True)
        parent = psutil.Process().parent()
        if parent is not None:
            parent.send_signal(signal.SIGQUIT)
        os._exit(1)


def init_tokenizer_manager(config: PrefillConfig, server_args: ServerArgs, port_args: PortArgs) -> Any:
    """(tokenizer manager, template manager), ours and SGLang's."""
    from sglang.srt.entrypoints.engine import init_tokenizer_manager as stock

    from sgl_prefill.api.tokenizer_manager import PrefillTokenizerManager

    return stock(server_args, port_args, functools.partial(PrefillTokenizerManager, config=config))


def execute_warmup(server_args: ServerArgs) -> bool:
    """One prefill-only request through HTTP, where SGLang would generate 8 tokens; then the server reports healthy.

    Runs in a thread of the HTTP process once uvicorn is about to start. On failure ends the server, as SGLang does.
    """
    from sglang.srt.entrypoints import http_server
    from sglang.srt.managers.tokenizer_manager import ServerStatus
    from sglang.srt.utils import kill_process_tree

    manager = http_server._global_state.tokenizer_manager
    route = "/generate" if manager.is_generation else "/encode"
    prompt: dict[str, Any] = {"input_ids": [10, 11, 12]} if manager.tokenizer is None else {"text": "warm-up"}
    try:
        session = _session(server_args)
        _wait_until_listening(session, server_args.url())
        body = {**prompt, "sampling_params": {"max_new_tokens": 0, "temperature": 0}}
        reply = session.post(server_args.url() + route, json=body, timeout=WARM_UP_TIMEOUT_S)
        reply.raise_for_status()
        # From now on full garbage collections pass over what has been loaded; each would stop all requests for that long.
        session.post(server_args.url() + "/freeze_gc", timeout=WARM_UP_TIMEOUT_S).raise_for_status()
    except requests.RequestException as error:
        logger.error("the warm-up request failed: %s", error)
        kill_process_tree(os.getpid())
        return False
    manager.server_status = ServerStatus.Up
    return True


def _session(server_args: ServerArgs) -> requests.Session:
    session = requests.Session()
    session.trust_env = False  # the server is on this machine: no proxy
    session.verify = server_args.ssl_verify()
    if server_args.api_key:
        session.headers["Authorization"] = f"Bearer {server_args.api_key}"
    return session


def _wait_until_listening(session: requests.Session, url: str) -> None:
    deadline = time.monotonic() + WARM_UP_TIMEOUT_S
    while True:
        try:
            session.get(url + "/model_info", timeout=5).raise_for_status()
            return
        except requests.RequestException:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
