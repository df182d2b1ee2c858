"""What each actor gets of its node, and of Ray's account of the cluster."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from sgl_prefill.errors import ConfigurationError
from sgl_prefill.launch_server import SPIN_COUNT

# For Ray's own tasks beside the actors: without them nothing is read or written, and the job waits for ever.
CPUS_OF_TASKS = 2


class Share(NamedTuple):
    """Of a node's cores and memory."""

    n_on_node: int  # actors
    threads: int | None  # None: an equal share of the cores

    def apply(self, engine: Mapping[str, Any]) -> dict[str, Any]:
        """Gives this process its threads, and returns an engine's arguments with its memory. Comes before torch is imported."""
        os.environ["OMP_NUM_THREADS"] = str(self.threads or max(1, len(os.sched_getaffinity(0)) // self.n_on_node))
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
        from sgl_prefill.device import this_device
        from sgl_prefill.startup import examine

        if not this_device().is_host or "memory_budget_gb" in engine:
            return dict(engine)
        for_us_gb, _ = examine.free_memory_gb()
        return {**engine, "memory_budget_gb": round(for_us_gb / 2 / self.n_on_node, 3)}


def share(n_actors: int, threads: int | None) -> Share:
    """Divides the nodes among actors, which Ray spreads over them."""
    import ray

    n_nodes = sum(bool(node["Alive"] and node["Resources"].get("CPU")) for node in ray.nodes())
    return Share(math.ceil(n_actors / max(n_nodes, 1)), threads)


def remote_args(n_actors: int, asks_servers: bool) -> dict[str, Any]:
    """Returns what an actor asks Ray for where the user says nothing. Raises ConfigurationError where there are too few GPUs."""
    import ray

    cluster = ray.cluster_resources()
    if asks_servers:
        return {"num_cpus": 0}
    n_gpus = int(cluster.get("GPU", 0))
    if 0 < n_gpus < n_actors:
        raise ConfigurationError(
            f"concurrency is {n_actors}, and the cluster has {n_gpus} GPUs, one for each engine: ask for at most {n_gpus} actors"
        )
    n_cpus = max(0, int(cluster.get("CPU", 0)) - CPUS_OF_TASKS) // n_actors
    return {"num_cpus": n_cpus, **({"num_gpus": 1} if n_gpus else {})}
