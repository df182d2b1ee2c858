"""`python -m sgl_prefill.plan`: which fairness lambda suits my traffic? A trace replayed through the engine's own policy.

    python -m sgl_prefill.plan --workload post-recommendation --rate 20 --durable-tokens 28300 --lambda 0,100,500,2000
    python -m sgl_prefill.plan --trace T.jsonl --profile P.json --durable-tokens 200000 --plot latency.png
    python -m sgl_prefill.plan --trace T.jsonl --durable-tokens 28300 --engines 4 --routing user,cache_aware

`--profile` is a JSON object with the coefficients of a fitted JCT model, as /server_info shows it under
`sgl_prefill.jct_model`. A trace has one JSON object a line: arrival_s, prefix_id, prefix_tokens, tail_tokens, and `user`
where a prefix is not a user's. `--engines` puts a router before so many engines, with `--durable-tokens` each.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import math
import random
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sgl_prefill.config import PrefillConfig
from sgl_prefill.core.jct import FittedJct
from sgl_prefill.errors import ConfigurationError

# A machine that computes 20,000 tokens a second, for those who have not started a server yet.
EXAMPLE_PROFILE = FittedJct(step_ms=5.0, miss_token_ms=0.05, pair_ms=5e-7, cached_token_ms=1e-4)
# Of the engine's own options these can be given here too, with the same defaults.
ENGINE_OPTIONS = ("sharers", "max_queue_s", "pack_step_tokens")


class Cluster(NamedTuple):
    """How many engines, and what stands before them."""

    n_engines: int = 1
    routing: str = "user"
    seed: int = 0  # of a router that leaves something to chance


ALONE = Cluster()


class Summary(NamedTuple):
    """One setting of a replay."""

    name: str
    n_requests: int
    token_saving: float  # share of all input tokens that the cache held
    hit_rate: float  # share of requests that found half of their tokens or more
    requests_per_s: float
    mean_s: float
    p50_s: float
    p99_s: float
    longest_wait_s: float
    latencies_s: list[float]  # sorted

    def row(self) -> list[str]:
        percents = [f"{100 * value:.2f}" for value in (self.token_saving, self.hit_rate)]
        numbers = [self.requests_per_s, self.mean_s, self.p50_s, self.p99_s, self.longest_wait_s]
        return [self.name, *percents, *(f"{number:.3f}" for number in numbers)]


HEADER = ["setting", "tokens saved %", "hits %", "requests/s", "mean s", "P50 s", "P99 s", "longest wait s"]


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status: 0, or 2 with one message on stderr."""
    arguments = _parser().parse_args(argv)
    try:
        profile = _profile(arguments.profile)
        lambdas = _lambdas(arguments.fairness_lambda)
        routings = _routings(arguments.engines, arguments.routing)
        from sgl_prefill.planner import workloads

        arrivals = _arrivals(arguments)
        config = PrefillConfig.from_namespace(arguments, ENGINE_OPTIONS)
    except (ValueError, OSError, ConfigurationError) as error:
        print(f"sgl_prefill: {error}", file=sys.stderr)
        return 2
    with warnings.catch_warnings():  # SGLang's and PyTorch's, about this machine
        warnings.simplefilter("ignore")
        logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
        from sgl_prefill.planner import simulate  # noqa: F401
    config = dataclasses.replace(config, fair_by="none")  # a trace names no clients
    configs = [dataclasses.replace(config, scheduling=name) for name in ("fifo", "srjf")]
    configs += [dataclasses.replace(config, fairness_lambda=value) for value in lambdas]
    configs.append(PrefillConfig(paper=True))
    print(
        f"{len(arrivals)} requests; an unlimited cache would save {100 * workloads.ceiling_of_saving(arrivals):.2f} %"
    )
    clusters = [Cluster(arguments.engines, routing, arguments.seed) for routing in routings]
    summaries = [summarize(arrivals, one, profile, arguments, cluster) for cluster in clusters for one in configs]
    rows = [HEADER, *(summary.row() for summary in summaries)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER))]
    for row in rows:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
    if arguments.json is not None:
        found = [summary._replace(latencies_s=[])._asdict() for summary in summaries]
        arguments.json.write_text(json.dumps({"profile": profile._asdict(), "settings": found}, indent=1) + "\n")
    if arguments.plot is not None:
        plot(summaries, arguments.plot)
    return 0


def summarize(
    arrivals: list[Any],
    config: PrefillConfig,
    profile: FittedJct,
    arguments: argparse.Namespace,
    cluster: Cluster = ALONE,
    *,
    is_fair: bool = False,
) -> Summary:
    """Replay under these options, with progress on stderr.

    Args:
        arguments: `durable_tokens` of each engine, and `page_tokens`.
        is_fair: users get fair shares of an engine.
    """
    from sgl_prefill.planner.routing import ROUTERS
    from sgl_prefill.planner.simulate import SimulatedEngine, name_of, replay_cluster

    name = name_of(config) if cluster.n_engines == 1 else f"{cluster.routing}: {name_of(config)}"
    started = time.monotonic()

    def show(n_served: int) -> None:
        left_s = (time.monotonic() - started) / n_served * (len(arrivals) - n_served)
        print(f"\r{name}: {n_served} of {len(arrivals)}, {left_s:.0f} s left   ", end="", file=sys.stderr)

    engines = [
        SimulatedEngine(config, profile, arguments.durable_tokens, page_tokens=arguments.page_tokens, is_fair=is_fair)
        for _ in range(cluster.n_engines)
    ]
    router = ROUTERS[cluster.routing](random.Random(cluster.seed))
    served = [one for _, one in replay_cluster(arrivals, engines, router, on_progress=show)]
    print("\r" + 79 * " " + "\r", end="", file=sys.stderr)
    latencies_s = sorted(one.latency_s for one in served)
    return Summary(
        name=name,
        n_requests=len(served),
        token_saving=sum(one.n_cached_tokens for one in served) / sum(one.n_tokens for one in served),
        hit_rate=sum(2 * one.n_cached_tokens >= one.n_tokens for one in served) / len(served),
        requests_per_s=len(served) / max(max(one.finish_s for one in served) - served[0].arrival_s, 1e-9),
        mean_s=sum(latencies_s) / len(latencies_s),
        p50_s=percentile(latencies_s, 50),
        p99_s=percentile(latencies_s, 99),
        longest_wait_s=max(one.start_s - one.arrival_s for one in served),
        latencies_s=latencies_s,
    )


def percentile(sorted_values: Sequence[float], percent: float) -> float:
    """Returns the smallest value that `percent` of all values do not exceed."""
    return sorted_values[max(math.ceil(len(sorted_values) * percent / 100) - 1, 0)]


def plot(summaries: list[Summary], path: Path) -> None:
    """Draws the latency CDF of each setting (the paper's Fig. 11)."""
    try:
        import matplotlib
    except ImportError as error:
        raise SystemExit("sgl_prefill: --plot needs matplotlib: pip install matplotlib") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for summary in summaries:
        share = [(index + 1) / len(summary.latencies_s) for index in range(len(summary.latencies_s))]
        axes.plot(summary.latencies_s, share, label=summary.name)
    axes.set(
        xlabel="latency in seconds", ylabel="share of requests", xscale="log", title="Simulated latency per setting"
    )
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sgl_prefill.plan", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--trace", type=Path, help="a trace file")
    source.add_argument("--workload", choices=("post-recommendation", "credit-verification"), help="one of the paper's")
    parser.add_argument("--profile", type=Path, help="coefficients of the JCT model (default: an example machine)")
    parser.add_argument("--durable-tokens", type=int, required=True, help="KV slots of the prefix cache")
    parser.add_argument(
        "--lambda", dest="fairness_lambda", default="0,100,500,2000", help="values to compare, tokens per second"
    )
    for name in ENGINE_OPTIONS:
        PrefillConfig.add_cli_argument(parser, name)
    parser.add_argument("--engines", type=int, default=1, help="engines behind a router (default: 1)")
    parser.add_argument(
        "--routing",
        default="user",
        help="values of `python -m sgl_prefill.cluster --routing` to compare (default: user)",
    )
    parser.add_argument(
        "--page-tokens", type=int, default=50, help="tokens that the replay counts as one (default: 50)"
    )
    parser.add_argument("--rate", type=float, default=1.0, help="of a workload: requests per second")
    parser.add_argument("--arrivals", choices=("burst", "single", "at-once"), default="burst", help="of WL1")
    parser.add_argument("--users", type=int, help="of a workload (default: the paper's 20 or 60)")
    parser.add_argument(
        "--plain-normal", action="store_true", help="of WL1: profile lengths outside 11,000 to 17,000 too"
    )
    parser.add_argument("--seed", type=int, default=0, help="of a workload")
    parser.add_argument("--plot", type=Path, help="write the latency CDF as PNG")
    parser.add_argument("--json", type=Path, help="write the numbers")
    return parser


def _profile(path: Path | None) -> FittedJct:
    if path is None:
        return EXAMPLE_PROFILE
    try:
        profile = FittedJct(**json.loads(path.read_text()))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a JCT profile ({error}): it needs {', '.join(FittedJct._fields)}") from error
    if not all(isinstance(value, int | float) and 0 <= value < math.inf for value in profile) or sum(profile) == 0:
        raise ValueError(f"{path}: coefficients must be numbers >= 0, and not all 0: {profile}")
    return profile


def _lambdas(text: str) -> list[float]:
    values = [float(part) for part in text.split(",")]
    if not all(0 <= value < math.inf for value in values):
        raise ValueError(f"--lambda is {text}: it must be numbers >= 0 with commas between them")
    return values


def _routings(n_engines: int, text: str) -> list[str]:
    from sgl_prefill.planner.routing import ROUTERS

    if n_engines < 1:
        raise ValueError(f"--engines is {n_engines}: it must be at least 1")
    names = text.split(",")
    if unknown := [name for name in names if name not in ROUTERS]:
        raise ValueError(
            f"--routing is {text}: {unknown[0]!r} is none of {', '.join(ROUTERS)} (with commas between them)"
        )
    return names if n_engines > 1 else names[:1]


def _arrivals(arguments: argparse.Namespace) -> list[Any]:
    from sgl_prefill.planner import workloads

    for name in ("durable_tokens", "page_tokens", "rate"):
        if not 0 < getattr(arguments, name) < math.inf:
            raise ValueError(f"--{name.replace('_', '-')} is {getattr(arguments, name)}: it must be positive")
    if arguments.trace is not None:
        arrivals = workloads.read(arguments.trace)
        if not arrivals:
            raise ValueError(f"{arguments.trace} holds no request")
        return arrivals
    rng = random.Random(arguments.seed)
    users: dict[str, Any] = {} if arguments.users is None else {"n_users": arguments.users}
    if arguments.workload == "credit-verification":
        return workloads.credit_verification(rng, arguments.rate, **users)
    limits: dict[str, Any] = {"profile_range_tokens": None} if arguments.plain_normal else {}
    return workloads.post_recommendation(rng, arguments.rate, arrivals=arguments.arrivals, **users, **limits)


if __name__ == "__main__":
    sys.exit(main())
