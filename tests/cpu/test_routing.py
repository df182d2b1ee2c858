"""Routers of the planner, and the replay over several engines."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Sequence

import pytest

from sgl_prefill.cluster import gateway
from sgl_prefill.config import PrefillConfig
from sgl_prefill.core.jct import FittedJct
from sgl_prefill.planner import workloads
from sgl_prefill.planner.routing import ROUTERS, ByUser, CacheAware, PowerOfTwo, PrefixHash, RoundRobin, Router
from sgl_prefill.planner.simulate import Served, SimulatedEngine, replay, replay_cluster
from sgl_prefill.planner.workloads import Arrival

TOKEN_A_MS = FittedJct(step_ms=0.0, miss_token_ms=1.0, pair_ms=0.0, cached_token_ms=0.0)
PAGE = 10


@dataclasses.dataclass
class Load:
    n_unanswered: int = 0
    n_users: int = 0


def asked(prefix_id: str, user: str = "", *, prefix_tokens: int = 1000, tail_tokens: int = 100) -> Arrival:
    return Arrival(0.0, prefix_id, prefix_tokens, tail_tokens, user)


def engines(n: int, *, is_fair: bool = False) -> list[SimulatedEngine]:
    config = PrefillConfig()
    return [SimulatedEngine(config, TOKEN_A_MS, 2000, page_tokens=PAGE, is_fair=is_fair) for _ in range(n)]


def served_by(n: int, router: Router, arrivals: Sequence[Arrival]) -> list[tuple[int, Served]]:
    return list(replay_cluster(arrivals, engines(n), router))


def test_the_planner_knows_every_routing_of_the_cluster() -> None:
    assert list(ROUTERS) == list(gateway.ROUTINGS)


@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize("arrivals", ["burst", "single", "at-once"])
def test_one_engine_behind_a_router_is_one_engine(name: str, arrivals: str) -> None:
    """The same requests in the same order at the same times, whatever the router."""
    trace = workloads.post_recommendation(random.Random(0), 1.0, n_users=8, n_posts=10, arrivals=arrivals)  # type: ignore[arg-type]
    alone = list(replay(trace, PrefillConfig(), TOKEN_A_MS, 2000, page_tokens=PAGE))
    assert served_by(1, ROUTERS[name](random.Random(0)), trace) == [(0, one) for one in alone]


def test_engines_run_at_the_same_time_on_one_clock() -> None:
    """1 ms a token: three prompts of 100, one after the other on the first of two engines, the second beside it."""
    found = served_by(2, RoundRobin(), [Arrival(1.0, name, 0, 100) for name in "abc"])
    found_s = sorted((index, one.start_s, one.finish_s) for index, one in found)
    assert found_s == [pytest.approx(times) for times in [(0, 1.0, 1.1), (0, 1.1, 1.2), (1, 1.0, 1.1)]]


def test_a_router_sees_what_is_unanswered_when_a_request_comes() -> None:
    """Also of the step that runs, until its very end; a step that ends at that moment is answered."""
    seen: list[list[tuple[int, int]]] = []

    class Watching(RoundRobin):
        def engine_of(self, arrival: Arrival, engines: Sequence[object]) -> int:
            seen.append([(one.n_unanswered, one.n_users) for one in engines])  # type: ignore[attr-defined]
            return 0

    at_s = (0.0, 0.0, 0.04, 0.05, 0.5)
    served_by(2, Watching(), [Arrival(time_s, name, 0, 50) for time_s, name in zip(at_s, "aabcd", strict=True)])
    assert [first for first, _ in seen] == [(0, 0), (1, 1), (2, 1), (2, 2), (0, 0)]
    assert {second for _, second in seen} == {(0, 0)}


def test_a_user_stays_at_an_engine_and_a_new_one_goes_where_the_fewest_wait() -> None:
    router, loads = ByUser(random.Random(0)), [Load(n_users=1, n_unanswered=50), Load(n_users=2)]
    assert router.engine_of(asked("a"), loads) == 0
    loads[0].n_users = 9
    assert [router.engine_of(asked(name), loads) for name in "aba"] == [0, 1, 0]


def test_users_who_come_while_nobody_waits_are_spread_by_chance() -> None:
    """What the gateway's `min_group` was seen to do: 112 of 200 users at one of two idle engines."""
    router, loads = ByUser(random.Random(0)), [Load(), Load()]
    counts = Counter(router.engine_of(asked(f"user-{number}"), loads) for number in range(200))
    assert sum(counts.values()) == 200
    assert 0 < abs(counts[0] - counts[1]) < 60


def test_users_of_a_burst_are_spread_evenly() -> None:
    """All of them wait: 12 users make four at each of three engines."""
    arrivals = [asked(f"user-{number}") for number in range(12) for _ in range(3)]
    found = served_by(3, ByUser(random.Random(0)), arrivals)
    assert Counter(index for index, _ in found) == {0: 12, 1: 12, 2: 12}


def test_several_names_of_one_user_are_several_users_with_one_prefix() -> None:
    arrivals = [asked("shop", f"shop-{number % 2}") for number in range(20)]
    found = served_by(2, ByUser(random.Random(0)), arrivals)
    assert Counter(index for index, _ in found) == {0: 10, 1: 10}
    n_cached = [sum(one.n_cached_tokens for index, one in found if index == engine) for engine in (0, 1)]
    assert n_cached == [9 * 1000] * 2
    assert len({index for index, _ in served_by(2, ByUser(random.Random(0)), [asked("shop")] * 20)}) == 1


def test_cache_aware_follows_the_longest_match_and_leaves_an_overloaded_engine() -> None:
    """Margin: two standard deviations of a count with the mean load, here of 50: 14."""
    router, loads = CacheAware(), [Load(3), Load(2)]
    assert router.engine_of(asked("p"), loads) == 1
    loads[1].n_unanswered = 9
    assert router.engine_of(asked("p"), loads) == 1  # 9 are not above the mean of 6 by more than 4.9
    loads[:] = [Load(36), Load(64)]
    assert router.engine_of(asked("p"), loads) == 1  # 64 are not above the mean by half
    loads[:] = [Load(20), Load(80)]
    assert router.engine_of(asked("p"), loads) == 0
    loads[:] = [Load(5), Load(6)]
    assert router.engine_of(asked("p"), loads) == 0  # both hold it now: the less loaded


def test_cache_aware_needs_a_share_of_the_prompt() -> None:
    router, loads = CacheAware(), [Load(0), Load(1)]
    router.engine_of(asked("p", prefix_tokens=300), loads)
    loads[0].n_unanswered = 3
    assert router.engine_of(asked("p", prefix_tokens=300, tail_tokens=700), loads) == 1
    assert router.engine_of(asked("q", prefix_tokens=900), loads) == 1


def test_prefix_hash_keeps_a_prefix_at_its_place_until_that_is_overloaded() -> None:
    router, loads = PrefixHash(), [Load() for _ in range(4)]
    places = Counter(router.engine_of(asked(f"p{number}"), loads) for number in range(400))
    assert all(60 < places[index] < 140 for index in range(4))
    home = router.engine_of(asked("p"), loads)
    loads[home].n_unanswered = 13
    assert router.engine_of(asked("p"), loads) == home  # of 14 with this one a quarter, and 10: 13.5
    loads[home].n_unanswered = 14
    assert router.engine_of(asked("p"), loads) != home
    short = {router.engine_of(asked("p", prefix_tokens=255), [Load()] * 4) for _ in range(40)}
    assert short == {0, 1, 2, 3}


def test_power_of_two_never_takes_the_most_loaded() -> None:
    router, loads = PowerOfTwo(random.Random(0)), [Load(5), Load(9), Load(1)]
    assert Counter(router.engine_of(asked("p"), loads) for _ in range(300)).keys() == {0, 2}
    assert router.engine_of(asked("p"), loads[:1]) == 0


def test_fair_shares_let_another_user_in_before_a_flood() -> None:
    """A user's 40 hits against one new profile that came last: with fair shares it does not wait for them all."""
    arrivals = [asked("flood")] * 40 + [asked("other")]

    def start_s(is_fair: bool) -> float:
        config = PrefillConfig(pack_step_tokens=0)
        engine = SimulatedEngine(config, TOKEN_A_MS, 1_500, page_tokens=PAGE, is_fair=is_fair)
        found = replay_cluster(arrivals, [engine], RoundRobin())
        return max(one.start_s for _, one in found if one.n_cached_tokens == 0)

    assert start_s(is_fair=True) < start_s(is_fair=False)
