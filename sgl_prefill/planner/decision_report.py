"""What `python -m sgl_prefill.plan --decisions LOG` prints: whether the log replays, and what other options would have done.

Two answers for other options. The first asks their policy at each decision of the log, with everything before it as it was. The
second lets them decide for themselves, on a simulated clock and prefix cache; there the server's own options stand beside them,
since a simulation is compared with a simulation.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from sgl_prefill.config import PrefillConfig
from sgl_prefill.core.jct import FittedJct
from sgl_prefill.errors import ConfigurationError
from sgl_prefill.planner import decisions, logged_traffic
from sgl_prefill.planner.decisions import Agreement
from sgl_prefill.planner.logged_traffic import Traffic
from sgl_prefill.planner.summary import Summary, plot, show, summary_of

# Of a trace or a workload alone.
NOT_FOR_LOGS = {"engines": 1, "routing": "user", "rate": 1.0, "arrivals": "burst", "users": None, "plain_normal": False}


class Change(NamedTuple):
    """Options in the place of a server's."""

    options: dict[str, Any]

    @property
    def name(self) -> str:
        return ", ".join(f"{_spoken(name)} {_shown(value)}" for name, value in self.options.items())

    def apply(self, config: PrefillConfig) -> PrefillConfig:
        return dataclasses.replace(config, **self.options)


def main(arguments: argparse.Namespace) -> int:
    """Returns the exit status: 0; 1 where the log does not replay to the same order; 2 with one message on stderr."""
    try:
        changes = _changes(arguments)
        same = decisions.replay(decisions.read(arguments.decisions))
        traffic = logged_traffic.last_start(decisions.read(arguments.decisions))
        if traffic is None:
            raise ValueError(f"{arguments.decisions} holds no decision: nobody has asked that server anything")
        others = [decisions.replay(decisions.read(arguments.decisions), change.apply) for change in changes]
        summaries = _as_it_ran(traffic) + (_simulated(arguments, traffic, changes) if changes else [])
    except (ValueError, OSError, ConfigurationError) as error:
        print(f"sgl_prefill: {error}", file=sys.stderr)
        return 2
    except KeyError as error:
        print(
            f"sgl_prefill: {arguments.decisions}: a decision has no {error}: it was not written by a server",
            file=sys.stderr,
        )
        return 2
    _tell(arguments, same, changes, others)
    show(summaries)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(_numbers(same, changes, others, summaries), indent=1) + "\n")
    if arguments.plot is not None:
        plot(summaries, arguments.plot)
    return 0 if same.is_whole else 1


def _changes(arguments: argparse.Namespace) -> list[Change]:
    """Lists what is to be compared with the log."""
    from sgl_prefill.plan import ENGINE_OPTIONS, lambdas_of

    given = vars(arguments)
    if strange := [name for name, usual in NOT_FOR_LOGS.items() if given[name] != usual]:
        flags = ", ".join("--" + name.replace("_", "-") for name in strange)
        raise ValueError(f"{flags}: with --decisions the log says who came, and one engine served them: leave this out")
    fixed = {name: given[name] for name in ENGINE_OPTIONS if name in given}
    if arguments.fairness_lambda is None:
        return [Change(fixed)] if fixed else []
    return [Change({"fairness_lambda": value, **fixed}) for value in lambdas_of(arguments.fairness_lambda)]


def _as_it_ran(traffic: Traffic) -> list[Summary]:
    return [summary_of("as it ran", traffic.served)] if traffic.served else []


def _simulated(arguments: argparse.Namespace, traffic: Traffic, changes: Sequence[Change]) -> list[Summary]:
    """Lets the server's options and others decide for themselves. Raises ValueError where nobody knows how long a step takes."""
    from sgl_prefill.plan import import_quietly, profile_of

    jct_ms = traffic.start.jct_ms if arguments.profile is None else profile_of(arguments.profile)
    if jct_ms is None:
        raise ValueError("the server of this log has measured no times (--jct-model cache-miss): give --profile")
    import_quietly()
    for name in ("durable_tokens", "page_tokens"):
        if (given := getattr(arguments, name)) is not None and given < 1:
            raise ValueError(f"--{name.replace('_', '-')} is {given}: it must be positive")
    simulate = functools.partial(_simulate, arguments, traffic, jct_ms)
    return [simulate("simulated as it was", Change({}))] + [
        simulate(f"simulated, {change.name}", change) for change in changes
    ]


def _simulate(arguments: argparse.Namespace, traffic: Traffic, jct_ms: FittedJct, name: str, change: Change) -> Summary:
    from sgl_prefill.planner.routing import RoundRobin
    from sgl_prefill.planner.simulate import SimulatedEngine, replay_cluster

    config = change.apply(traffic.start.config)
    page_tokens = arguments.page_tokens or logged_traffic.page_tokens_of(traffic)
    engine = SimulatedEngine(
        config,
        jct_ms,
        arguments.durable_tokens or traffic.start.kv_tokens,
        page_tokens=page_tokens,
        is_fair=config.is_fair,
        settings=logged_traffic.simulated_settings(
            traffic.start, config, jct_ms, page_tokens, change.options.get("pack_step_tokens")
        ),
        job_of=logged_traffic.LoggedJobs(traffic, page_tokens).job_of,
    )
    served = [one for _, one in replay_cluster(logged_traffic.arrivals_of(traffic), [engine], RoundRobin())]
    if not served:
        raise ValueError(f"{name}: every request of the log would be refused")
    return summary_of(name, served)


def _tell(
    arguments: argparse.Namespace, same: Agreement, changes: Sequence[Change], others: Sequence[Agreement]
) -> None:
    for reason in same.left_out:
        print(f"{arguments.decisions}: {reason}")
    print(f"made again with the server's options: {same.n_same} of {same.n_decisions} decisions in the same order")
    if (first := same.first_difference) is not None:
        print(
            f"  the first that differs is {first.name}: it {first.in_words}. The log is of another release, or of a"
            " policy that looks at what no log tells: what follows is worth nothing"
        )
    for change, other in zip(changes, others, strict=True):
        n_others = other.n_decisions - other.n_same
        print(
            f"with {change.name}, asked at the same moments, each with all before it as it was: {other.n_same} decisions the"
            f" same, {n_others} others ({100 * n_others / other.n_decisions:.1f} %)"
        )
        if other.first_difference is not None:
            print(f"  the first is {other.first_difference.name}: it {other.first_difference.in_words}")
    if changes:
        print(
            "\nhad these options decided all since the last start (times are predicted: compare simulated rows with each other):"
        )
    else:
        print("what other options would have done: add --fairness-lambda 500,2000, say, and --plot FILE\n")


def _numbers(
    same: Agreement, changes: Sequence[Change], others: Sequence[Agreement], summaries: Sequence[Summary]
) -> dict[str, Any]:
    return {
        "decisions": same.n_decisions,
        "same_order": same.n_same,
        "left_out": same.left_out,
        "other_options": [
            {
                "options": change.options,
                "same_order": other.n_same,
                "first_difference": other.first_difference and other.first_difference._asdict(),
            }
            for change, other in zip(changes, others, strict=True)
        ],
        "settings": [summary._replace(latencies_s=[])._asdict() for summary in summaries],
    }


def _spoken(name: str) -> str:
    return {"fairness_lambda": "lambda"}.get(name, "--" + name.replace("_", "-"))


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
