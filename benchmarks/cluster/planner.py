"""Which router before several engines, on a simulated clock? Routings compared, 1 to 1,000 engines by user, and a heavy user.

    python benchmarks/cluster/planner.py [--quick] [--json PATH]

Part of ./run.py, and runs alone: 5 to 8 minutes on 2 cores. Every engine is the one of ../planner: the default settings, its
example machine, and a cache for the profiles of two users. x is what one engine serves of WL1 with all submitted at once; a
load is given in x an engine.

* `routings`: WL1 of 20 users an engine, with their posts in bursts, singly, and in five bursts of ten ("returning"). Two and four
  engines; at 0.9x for latency, at 2x for throughput. `of_ceiling`: tokens found cached, of what an unlimited cache common to
  all engines would find. `per_engine`: requests/s an engine, of what one engine alone serves at the same load.
* `scale`: 1,000 users an engine, by user, all submitted at once. Users do not move, so that engines do not concern each other
  once users are placed: the router itself places all of them (a million), and each engine's 50,000 requests are replayed apart;
  beyond four engines only of the two engines with the most work and of one other. `even`: users come while all before them
  wait, and are counted. `chance`: each comes while nobody waits, and chance places it, the worst that the gateway does.
  Throughput is all requests / the time of the last answer.
* `offered`: 10 users an engine in bursts at 0.9x, all engines and the router on one clock.
* `heavy`: four engines in bursts at 0.9x; half of all requests are one user's, of as many profiles as all others have, or of
  one. By user it has one name or several (a profile stays with a name); names get fair shares, as in an engine by default.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import multiprocessing
import random
import statistics
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import report
from sgl_prefill import plan
from sgl_prefill.config import PrefillConfig
from sgl_prefill.planner import workloads
from sgl_prefill.planner.routing import ROUTERS, ByUser, EngineLoad
from sgl_prefill.planner.simulate import Served, SimulatedEngine, replay, replay_cluster
from sgl_prefill.planner.workloads import Arrival

DURABLE_TOKENS = 2 * (17_000 + 150)
PROFILE = plan.EXAMPLE_PROFILE
N_USERS, N_POSTS, N_VISITS = 20, 50, 5
WORKLOADS = ("bursts", "singly", "returning")
LOADS = (0.9, 2.0)
HEAVY_ENGINES, OFFERED_USERS = 4, 10
PLACEMENTS, KINDS = ("even", "chance"), ("many profiles", "one profile")
PROCESSES = 2

Row = dict[str, Any]


class Size(NamedTuple):
    """How much is replayed."""

    seeds: int
    users_an_engine: int  # of `scale`
    whole: tuple[int, ...]  # `scale` of so many engines, each of them replayed
    sampled: tuple[int, ...]  # and of so many, some of them replayed
    n_heaviest: int
    n_random: int
    offered: tuple[int, ...]


FULL = Size(2, 1000, (1, 2, 4), (10, 100, 1000), 2, 1, (1, 10, 100, 1000))
QUICK = Size(1, 50, (1, 2), (10,), 2, 1, (1, 4))


def measure(quick: bool) -> dict[str, Any]:
    """Returns rows that JSON can hold, by the names of the page above."""
    size = QUICK if quick else FULL
    x = saturation_of()
    clusters = [(n, "even") for n in size.whole] + [(n, way) for n in size.sampled for way in PLACEMENTS]
    with ProcessPoolExecutor(PROCESSES, mp_context=multiprocessing.get_context("spawn")) as pool:  # the longest first
        placements = [pool.submit(placed, n, size.users_an_engine, way) for n, way in reversed(clusters)]
        found = {
            "offered": [pool.submit(offered, n, x, 40 if n == 1 else 1) for n in reversed(size.offered)],
            "routings": [
                pool.submit(compare, workload, load, n, name, x, seed)
                for workload in WORKLOADS
                for load in LOADS
                for n, name in [(1, "user"), *itertools.product((2, 4), ROUTERS)]
                for seed in range(size.seeds)
            ],
            "heavy": [
                pool.submit(heavy, kind, case, x, seed)
                for kind in KINDS
                for case in HEAVY_CASES
                for seed in range(size.seeds)
            ],
        }
        found["scale"] = [
            pool.submit(one_engine, *engine)
            for (_, way), placement in zip(reversed(clusters), placements, strict=True)
            for engine in engines_to_replay(placement.result(), way, size)
        ]
        rows = {name: [future.result() for future in futures] for name, futures in found.items()}
    return {
        "x_requests_per_s": x,
        "durable_tokens": DURABLE_TOKENS,
        "profile": PROFILE._asdict(),
        "routings": routing_rows(rows["routings"]),
        "scale": scale_rows(rows["scale"]),
        "offered": sorted(rows["offered"], key=lambda row: row["engines"]),
        "heavy": means_of(rows["heavy"], ("kind", "case")),
    }


def targets_of(found: dict[str, Any]) -> list[report.Target]:
    """The issue's target, of what `measure` returns: the worst size, for each placement of the users."""
    return [
        report.Target.at_least(
            f"simulated, WL1 by user to {max(row['engines'] for row in rows):,} engines, users placed {shown}:"
            " requests/s an engine / one engine's",
            min(row["per_engine"] for row in rows),
            0.9,
        )
        for shown, placement in (("evenly", "even"), ("by chance", "chance"))
        if (rows := [row for row in found["scale"] if row["placement"] == placement])
    ]


def saturation_of() -> float:
    trace = workloads.post_recommendation(random.Random(0), 1.0, arrivals="at-once")
    return len(trace) / max(one.finish_s for one in replay(trace, PrefillConfig(), PROFILE, DURABLE_TOKENS))


def engines_of(n: int, *, is_fair: bool = False) -> list[SimulatedEngine]:
    return [SimulatedEngine(PrefillConfig(), PROFILE, DURABLE_TOKENS, is_fair=is_fair) for _ in range(n)]


# -- routings


def trace_of(workload: str, requests_per_s: float, n_users: int, seed: int) -> list[Arrival]:
    """Returns WL1 of so many users; "returning": a user's posts come in bursts with others' between them."""
    rng = random.Random(seed)
    if workload == "singly":
        return workloads.post_recommendation(rng, requests_per_s, n_users=n_users, n_posts=N_POSTS, arrivals="single")
    if workload == "bursts":
        return workloads.post_recommendation(rng, requests_per_s, n_users=n_users, n_posts=N_POSTS)
    one_visit = N_POSTS // N_VISITS
    profiles = workloads.post_recommendation(rng, 1.0, n_users=n_users, n_posts=1)
    visits = rng.sample(profiles * N_VISITS, len(profiles) * N_VISITS)
    now_s, trace = 0.0, []
    for visit in visits:
        now_s += rng.expovariate(requests_per_s / one_visit)
        trace += [visit._replace(arrival_s=now_s)] * one_visit
    return trace


def compare(workload: str, load: float, n_engines: int, routing: str, x: float, seed: int) -> Row:
    trace = trace_of(workload, load * x * n_engines, N_USERS * n_engines, seed)
    served = [one for _, one in replay_cluster(trace, engines_of(n_engines), ROUTERS[routing](random.Random(seed)))]
    saved = sum(one.n_cached_tokens for one in served) / sum(one.n_tokens for one in served)
    return {
        "workload": workload,
        "load": load,
        "engines": n_engines,
        "routing": routing,
        "of_ceiling": saved / workloads.ceiling_of_saving(trace),
        **speed_of(served, trace),
    }


def speed_of(served: Sequence[Served], trace: Sequence[Arrival]) -> Row:
    return {
        "requests_per_s": len(served) / (max(one.finish_s for one in served) - trace[0].arrival_s),
        **latency_of(served),
    }


def latency_of(served: Sequence[Served]) -> Row:
    latencies_s = sorted(one.latency_s for one in served)
    return {"mean_s": statistics.fmean(latencies_s), "p99_s": plan.percentile(latencies_s, 99)}


def routing_rows(rows: list[Row]) -> list[Row]:
    """Means over the seeds, each beside what one engine serves."""
    means = means_of(rows, ("workload", "load", "engines", "routing"))
    alone = {(row["workload"], row["load"]): row["requests_per_s"] for row in means if row["engines"] == 1}
    for row in means:
        row["per_engine"] = row["requests_per_s"] / row["engines"] / alone[row["workload"], row["load"]]
    return means


def means_of(rows: list[Row], keys: tuple[str, ...]) -> list[Row]:
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    return [
        {
            name: value if name in keys else statistics.fmean(one[name] for one in group)
            for name, value in group[0].items()
        }
        for group in groups.values()
    ]


# -- scale


@dataclasses.dataclass(slots=True)
class Placed:
    """What the router knows of an engine that computes nothing yet."""

    n_users: int = 0
    n_unanswered: int = 0


def profiles_of(n_engines: int, users_an_engine: int) -> list[int]:
    rng = random.Random(n_engines)
    users = workloads.post_recommendation(rng, 1.0, n_users=n_engines * users_an_engine, n_posts=1, arrivals="at-once")
    return [user.prefix_tokens for user in users]


def placed(n_engines: int, users_an_engine: int, placement: str) -> list[list[int]]:
    """Returns the profile lengths of each engine's users, as the router places them."""
    router, loads = ByUser(random.Random(1)), [Placed() for _ in range(n_engines)]
    of_engine: list[list[int]] = [[] for _ in loads]
    known: Sequence[EngineLoad] = loads
    for number, profile_tokens in enumerate(profiles_of(n_engines, users_an_engine)):
        index = router.engine_of(Arrival(0.0, f"user-{number}", profile_tokens, 150), known)
        of_engine[index].append(profile_tokens)
        loads[index].n_users += placement == "even"
    return of_engine


def work_s(profiles: Sequence[int]) -> float:
    """Returns what an engine's users cost where each profile is computed once, and its other posts fill a step."""
    return sum(map(_user_work_s, profiles))


@functools.cache
def _user_work_s(profile_tokens: int) -> float:
    first, hit = (profile_tokens + 150, 0), (profile_tokens + 150, profile_tokens)
    return (sum(PROFILE.of_step([first])) + sum(PROFILE.of_step([hit] * (N_POSTS - 1)))) / 1000


def engines_to_replay(
    of_engine: Sequence[Sequence[int]], placement: str, size: Size
) -> Iterator[tuple[Sequence[int], int, Row]]:
    """Yields the arguments of `one_engine`: every engine, or those with the most work and a few of the others."""
    n_engines = len(of_engine)
    by_work = sorted(of_engine, key=lambda profiles: -work_s(profiles))
    chosen = by_work
    if n_engines in size.sampled:
        chosen = by_work[: size.n_heaviest] + random.Random(2).sample(by_work[size.n_heaviest :], size.n_random)
    n_requests = n_engines * size.users_an_engine * N_POSTS
    told = {"engines": n_engines, "placement": placement, "replayed": len(chosen), "requests": n_requests}
    for rank, profiles in enumerate(chosen):
        yield profiles, rank, told


def one_engine(profiles: Sequence[int], rank: int, told: Row) -> Row:
    """One engine of many: all that its users ask, at once."""
    trace = [Arrival(0.0, f"user-{user}", n, 150) for user, n in enumerate(profiles) for _ in range(N_POSTS)]
    random.Random(rank).shuffle(trace)
    last_s = max(one.finish_s for one in replay(trace, PrefillConfig(), PROFILE, DURABLE_TOKENS))
    return {**told, "users": len(profiles), "last_s": last_s, "of_work": last_s / work_s(profiles)}


def scale_rows(rows: list[Row]) -> list[Row]:
    """A row for each cluster: what it serves until its last answer, an engine, as a share of one engine's."""
    clusters: dict[tuple[int, str], list[Row]] = {}
    for row in sorted(rows, key=lambda row: row["engines"]):
        clusters.setdefault((row["engines"], row["placement"]), []).append(row)
    found: list[Row] = []
    for (n_engines, placement), group in clusters.items():
        per_s = group[0]["requests"] / n_engines / max(row["last_s"] for row in group)
        found.append(
            {
                "engines": n_engines,
                "placement": placement,
                "requests": group[0]["requests"],
                "engines_replayed": group[0]["replayed"],
                "most_users": max(row["users"] for row in group),
                "requests_per_s_an_engine": per_s,
                "per_engine": per_s / (found[0]["requests_per_s_an_engine"] if found else per_s),
                "first_done_s": min(row["last_s"] for row in group),
                "last_done_s": max(row["last_s"] for row in group),
                # How well the work tells the time: what the choice of the engines with the most work rests on.
                "time_of_work": [min(row["of_work"] for row in group), max(row["of_work"] for row in group)],
            }
        )
    return found


def offered(n_engines: int, x: float, n_seeds: int) -> Row:
    """Users in bursts at 0.9x, by user; one engine over several seeds, since its users are few."""
    rows = []
    for seed in range(n_seeds):
        trace = trace_of("bursts", 0.9 * x * n_engines, OFFERED_USERS * n_engines, seed)
        served = [one for _, one in replay_cluster(trace, engines_of(n_engines), ByUser(random.Random(seed)))]
        rows.append({"engines": n_engines, "requests": len(served), **speed_of(served, trace)})
    row = means_of(rows, ("engines",))[0]
    return {**row, "requests_per_s_an_engine": row["requests_per_s"] / n_engines}


# -- one user with half of all traffic


class HeavyCase(NamedTuple):
    """How the requests of the heavy user are named and routed."""

    routing: str
    n_names: int
    is_fair: bool


HEAVY_CASES: dict[str, HeavyCase] = {
    "user, one name": HeavyCase("user", 1, True),
    "user, one name, no fair shares": HeavyCase("user", 1, False),
    "user, 2 names": HeavyCase("user", 2, True),
    "user, 4 names": HeavyCase("user", 4, True),
    "user, 16 names": HeavyCase("user", 16, True),
    "cache_aware": HeavyCase("cache_aware", 1, True),
    "prefix_hash": HeavyCase("prefix_hash", 1, True),
    "power_of_two": HeavyCase("power_of_two", 1, True),
}
HEAVY = "heavy"


def heavy_trace(kind: str, n_names: int, x: float, seed: int) -> list[Arrival]:
    """Returns bursts, half of them the heavy user's: of profiles that stay with one of its names, or all of one profile."""
    n_users = 2 * N_USERS * HEAVY_ENGINES
    trace = trace_of("bursts", 0.9 * x * HEAVY_ENGINES, n_users, seed)
    bursts = [trace[at : at + N_POSTS] for at in range(0, len(trace), N_POSTS)]
    is_heavy = [number % 2 == 0 for number in range(n_users)]
    random.Random(seed).shuffle(is_heavy)
    name = itertools.count()
    for number, burst in enumerate(bursts):
        if is_heavy[number] and kind == "many profiles":
            bursts[number] = [one._replace(user=f"{HEAVY}-{number % n_names}") for one in burst]
        elif is_heavy[number]:
            bursts[number] = [
                one._replace(prefix_id=HEAVY, prefix_tokens=14_000, user=f"{HEAVY}-{next(name) % n_names}")
                for one in burst
            ]
    return list(itertools.chain.from_iterable(bursts))


def heavy(kind: str, case: str, x: float, seed: int) -> Row:
    routing, n_names, is_fair = HEAVY_CASES[case]
    trace = heavy_trace(kind, n_names, x, seed)
    heavy_s = {one.arrival_s for one in trace if one.user}
    engines = engines_of(HEAVY_ENGINES, is_fair=is_fair)
    found = list(replay_cluster(trace, engines, ROUTERS[routing](random.Random(seed))))
    served = [one for _, one in found]
    groups = {
        HEAVY: [one for one in served if one.arrival_s in heavy_s],
        "others": [one for one in served if one.arrival_s not in heavy_s],
    }
    per_engine = [sum(index == engine for index, _ in found) for engine in range(HEAVY_ENGINES)]
    latencies = {
        f"{name}_{figure}": value for name, group in groups.items() for figure, value in latency_of(group).items()
    }
    speed = speed_of(served, trace)["requests_per_s"]
    return {
        "kind": kind,
        "case": case,
        "requests_per_s": speed,
        "of_x": speed / x / HEAVY_ENGINES,
        **latencies,
        "share_of_the_busiest": max(per_engine) / len(found),
    }


def main() -> int:
    arguments = report.arguments(__doc__, Path(__file__).with_name("result.planner.json"))
    found = {"conditions": report.conditions(), **measure(arguments.quick)}
    for name in ("routings", "scale", "offered", "heavy"):
        print(name)
        for row in found[name]:
            print("  ", "  ".join(f"{key} {_shown(value)}" for key, value in row.items()))
    report.finish(found, targets_of(found), arguments.json)
    return 0


def _shown(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main())
