"""Where the time of a server goes: operators of its scheduler by the engine's own profiler, and CPU time by process."""

from __future__ import annotations

import gzip
import json
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import psutil
import requests

from benchmarks import report
from benchmarks.harness.engines import Running

# Parts of operators' names; what contains none of them is an "other operator".
GROUPS = {
    "matrix products": (
        "aten::mm",
        "aten::addmm",
        "aten::bmm",
        "mkldnn::_linear",
        "sgl_prefill::product",
        "sgl_prefill::logits",
        "_C::onednn_mm",
    ),
    "attention": ("scaled_dot_product", "sgl_prefill::attention", "_C::cpu_att"),
}
# Parts of processes' titles: of SGLang, and of vLLM, whose model has a process of its own.
ROLES = {"scheduler": "scheduler", "detokenizer": "detokenizer", "EngineCore": "scheduler", "VLLM::Worker": "scheduler"}
OTHER, BETWEEN = "other operators", "between operators"


def operator_seconds(server: Running, folder: Path, work: Callable[[], Any]) -> dict[str, float]:
    """Run `work` under the profiler: seconds by group of operators, each operator without the operators that it calls.

    What is left of the time of `work` is BETWEEN: Python, and waiting for requests.
    """
    request = {"output_dir": str(folder), "activities": ["CPU"], "with_stack": False, "record_shapes": False}
    _post(f"{server.url}/start_profile", request)
    started = time.perf_counter()
    work()
    seconds = time.perf_counter() - started
    _post(f"{server.url}/stop_profile", {})
    (written,) = folder.glob("*.json.gz")
    with gzip.open(written) as file:
        events = json.load(file)["traceEvents"]
    written.unlink()
    groups = by_group(events)
    return {**groups, BETWEEN: seconds - sum(groups.values())}


def by_group(events: Iterable[dict[str, Any]]) -> dict[str, float]:
    """Sums the events of a Chrome trace, whose times are in microseconds. Events of a thread lie inside each other or apart."""
    threads: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        is_kernel = event.get("cat") == "user_annotation" and event["name"].startswith("sgl_prefill::")
        if event.get("cat") == "cpu_op" or is_kernel:
            threads[event["pid"], event["tid"]].append(event)
    seconds = dict.fromkeys([*GROUPS, OTHER], 0.0)
    for ops in threads.values():
        open_ops: list[dict[str, Any]] = []
        for event in sorted(ops, key=lambda one: (one["ts"], -one["dur"])):
            while open_ops and event["ts"] >= open_ops[-1]["ts"] + open_ops[-1]["dur"]:
                open_ops.pop()
            if open_ops:
                seconds[_group(open_ops[-1]["name"])] -= event["dur"] / 1e6
            seconds[_group(event["name"])] += event["dur"] / 1e6
            open_ops.append(event)
    return seconds


def cpu_seconds(server: Running) -> dict[str, float]:
    """So far, by process of the server, and of this one (the client)."""
    found = {"client": sum(os.times()[:2])}
    root = psutil.Process(server.pid)
    for process in (root, *root.children(recursive=True)):
        times = process.cpu_times()
        found[_role(process)] = found.get(_role(process), 0.0) + times.user + times.system
    return found


def _role(process: psutil.Process) -> str:
    title = " ".join([process.name(), *process.cmdline()])
    return next((role for part, role in ROLES.items() if part in title), "HTTP and tokenizer")


def _group(name: str) -> str:
    return next((group for group, parts in GROUPS.items() if any(part in name for part in parts)), OTHER)


def _post(url: str, body: dict[str, Any]) -> None:
    reply = requests.post(url, json=body, timeout=600)
    if reply.status_code != 200:
        raise report.InvalidRunError(f"{url} answered {reply.status_code}: {reply.text[:300]}")
