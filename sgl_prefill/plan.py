"""`python -m sgl_prefill.plan`: which fairness lambda suits my traffic? A trace replayed through the engine's own policy.

    python -m sgl_prefill.plan --workload post-recommendation --arrivals single --users 12 --rate 10 --durable-tokens 43000
    python -m sgl_prefill.plan --trace T.jsonl --profile P.json --durable-tokens 200000 --plot latency.png
    python -m sgl_prefill.plan --trace requests.jsonl --durable-tokens 28300 --fairness-lambda 500,2000

`--profile` is a JSON object with the coefficients of a fitted JCT model, as /server_info shows it under
`sgl_prefill.jct_model`. A trace is the file that a server wrote with `--request-log`, or has one JSON object a line:
arrival_s, prefix_id, prefix_tokens, tail_tokens. Of a request log the first row is how the server served it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import math
import random
import sys
import warnings
from pathlib import Path
from typing import Any

from sgl_prefill.config import PrefillConfig
from sgl_prefill.core.jct import FittedJct
from sgl_prefill.errors import ConfigurationError
from sgl_prefill.planner.summary import Served, plot, show, summary_of
from sgl_prefill.planner.summary import Summary as Summary
from sgl_prefill.planner.summary import percentile as percentile
from sgl_prefill.port.steps.request_log import PAGE_TOKENS
from sgl_prefill.startup.progress_bar import ProgressBar

# A machine that computes 20,000 tokens a second, where no server has fitted a model yet.
EXAMPLE_PROFILE = FittedJct(step_ms=5.0, miss_token_ms=0.05, pair_ms=5e-7, cached_token_ms=1e-4)
USUAL_LAMBDAS = "0,100,500,2000"
USUAL_PAGE_TOKENS = 50


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status: 0, or 2 with one message on stderr."""
    arguments = _parser().parse_args(argv)
    try:
        profile = profile_of(arguments.profile)
        lambdas = lambdas_of(arguments.lambdas or USUAL_LAMBDAS)
        from sgl_prefill.planner import workloads

        arrivals, as_it_ran = _arrivals(arguments)
        config = PrefillConfig.from_namespace(arguments)
    except (ValueError, OSError, ConfigurationError) as error:
        print(f"sgl_prefill: {error}", file=sys.stderr)
        return 2
    import_quietly()
    config = dataclasses.replace(config, fair_by="none")  # a trace names no clients
    configs = [dataclasses.replace(config, scheduling=name) for name in ("fifo", "srjf")]
    configs += [dataclasses.replace(config, fairness_lambda=value) for value in lambdas]
    configs.append(PrefillConfig(paper=True))
    print(
        f"{len(arrivals)} requests; an unlimited cache would save {100 * workloads.ceiling_of_saving(arrivals):.2f} %"
    )
    summaries = [summary_of("as it ran", as_it_ran)] if as_it_ran else []
    with ProgressBar(len(configs) * len(arrivals)) as bar:
        summaries += [
            summarize(arrivals, one, profile, arguments, bar, index * len(arrivals))
            for index, one in enumerate(configs)
        ]
    show(summaries)
    if arguments.json is not None:
        found = [summary._replace(latencies_s=[])._asdict() for summary in summaries]
        arguments.json.write_text(json.dumps({"profile": profile._asdict(), "settings": found}, indent=1) + "\n")
    if arguments.plot is not None:
        plot(summaries, arguments.plot)
    return 0


def import_quietly() -> None:
    """Imports the simulation, without the warnings of SGLang and PyTorch about this machine."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
        from sgl_prefill.planner import simulate  # noqa: F401


def summarize(
    arrivals: list[Any],
    config: PrefillConfig,
    profile: FittedJct,
    arguments: argparse.Namespace,
    bar: ProgressBar | None = None,
    n_before: int = 0,
) -> Summary:
    """Replays under these options. arguments: `durable_tokens` and `page_tokens`; n_before: requests counted by `bar` already."""
    from sgl_prefill.planner.simulate import name_of, replay

    name = name_of(config)

    def on_progress(n_served: int) -> None:
        if bar is not None:
            bar.show(n_before + n_served, f"{n_served:,} of {len(arrivals):,} requests", name)

    tokens, page_tokens = arguments.durable_tokens, arguments.page_tokens
    return summary_of(
        name, list(replay(arrivals, config, profile, tokens, page_tokens=page_tokens, on_progress=on_progress))
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        prog="python -m sgl_prefill.plan",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--trace", type=Path, help="a trace file, or a server's request log")
    source.add_argument("--workload", choices=("post-recommendation", "credit-verification"), help="one of the paper's")
    parser.add_argument("--profile", type=Path, help="coefficients of the JCT model (default: an example machine)")
    parser.add_argument("--durable-tokens", type=int, help="KV slots of the prefix cache")
    parser.add_argument(
        "--lambda",
        "--fairness-lambda",
        dest="lambdas",
        help=f"values to compare, tokens per second (default: {USUAL_LAMBDAS})",
    )
    PrefillConfig.add_set_argument(parser)
    parser.add_argument("--page-tokens", type=int, help="page size of the replay (default: 50; of a request log: 64)")
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


def profile_of(path: Path | None) -> FittedJct:
    """Reads the coefficients of a JCT model. Raises ValueError and OSError."""
    if path is None:
        return EXAMPLE_PROFILE
    try:
        profile = FittedJct(**json.loads(path.read_text()))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a JCT profile ({error}): it needs {', '.join(FittedJct._fields)}") from error
    if not all(isinstance(value, int | float) and 0 <= value < math.inf for value in profile) or sum(profile) == 0:
        raise ValueError(f"{path}: coefficients must be numbers >= 0, and not all 0: {profile}")
    return profile


def lambdas_of(text: str) -> list[float]:
    """Reads numbers with commas between them. Raises ValueError."""
    values = [float(part) for part in text.split(",")]
    if not all(0 <= value < math.inf for value in values):
        raise ValueError(f"--lambda is {text}: it must be numbers >= 0 with commas between them")
    return values


def _arrivals(arguments: argparse.Namespace) -> tuple[list[Any], list[Served]]:
    """Returns the trace, and of a request log how its requests were served. Sets `page_tokens`."""
    from sgl_prefill.planner import workloads

    logged = None if arguments.trace is None else workloads.read_log(arguments.trace)
    if logged is not None and arguments.page_tokens not in (None, PAGE_TOKENS):
        raise ValueError(
            f"--page-tokens is {arguments.page_tokens}, and a request log has pages of {PAGE_TOKENS}: leave it out"
        )
    if arguments.page_tokens is None:
        arguments.page_tokens = USUAL_PAGE_TOKENS if logged is None else PAGE_TOKENS
    if arguments.durable_tokens is None:
        raise ValueError("--durable-tokens is missing: give the KV slots of the prefix cache")
    for name in ("durable_tokens", "page_tokens", "rate"):
        if not 0 < getattr(arguments, name) < math.inf:
            raise ValueError(f"--{name.replace('_', '-')} is {getattr(arguments, name)}: it must be positive")
    if logged is not None:
        return logged
    if arguments.trace is not None:
        arrivals = workloads.read(arguments.trace)
        if not arrivals:
            raise ValueError(f"{arguments.trace} holds no request")
        return arrivals, []
    rng = random.Random(arguments.seed)
    users: dict[str, Any] = {} if arguments.users is None else {"n_users": arguments.users}
    if arguments.workload == "credit-verification":
        return workloads.credit_verification(rng, arguments.rate, **users), []
    limits: dict[str, Any] = {"profile_range_tokens": None} if arguments.plain_normal else {}
    return workloads.post_recommendation(rng, arguments.rate, arrivals=arguments.arrivals, **users, **limits), []


if __name__ == "__main__":
    sys.exit(main())
