"""SGLang's scheduler with its model, pools and our hooks in this process, without the processes around it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from sgl_prefill.config import PrefillConfig
from sgl_prefill.entry import activation
from sgl_prefill.entry.activation import Parts
from sgl_prefill.errors import ConfigurationError

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs


def build(config: PrefillConfig, server_args: ServerArgs) -> tuple[Parts, Any]:
    """Returns (what the hooks share, SGLang's scheduler): loads the model and runs everything of the start.

    Raises what the start of a server raises, and ConfigurationError where other ranks are asked for.
    """
    if server_args.tp_size > 1:
        raise ConfigurationError(
            f"--tp-size is {server_args.tp_size}, and here one process computes: leave it out, or start a server with it"
            " (sgl_prefill.batch asks servers with --base-url)"
        )
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.runtime_context import publish
    from sglang.srt.server_args import PortArgs

    parts = activation.activate(config, "scheduler")
    publish(server_args, role="scheduler")
    ranks = dict.fromkeys(("tp_rank", "moe_ep_rank", "pp_rank", "attn_cp_rank", "moe_dp_rank"), 0)
    return parts, Scheduler(server_args, PortArgs.init_new(server_args), gpu_id=0, **ranks, dp_rank=None)


@torch.inference_mode()
def step(scheduler: Any) -> bool:
    """Runs one turn of SGLang's event loop over the requests that the scheduler has taken in. Returns whether a batch ran."""
    plan = scheduler.get_next_batch_to_run(running_batch=scheduler.running_batch, last_batch=scheduler.last_batch)
    scheduler.running_batch = plan.running_batch
    batch = plan.batch_to_run
    if batch:
        scheduler.process_batch_result(batch, scheduler.run_batch(batch))
    scheduler.last_batch = batch
    return bool(batch)
