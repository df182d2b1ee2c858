"""What a snapshot for the dashboard holds, and that nothing is asked while nobody looks."""

from __future__ import annotations

import asyncio
import re
import time
from array import array
from collections import Counter
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
from sglang.srt.managers.io_struct import GetInternalStateReq
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from sgl_prefill.config import PrefillConfig
from sgl_prefill.core.job import Job
from sgl_prefill.http import dashboard_routes as routes
from sgl_prefill.http.dashboard_routes import Feed, page
from sgl_prefill.http.shutdown import Ending
from sgl_prefill.port.dashboard import watch
from tests.support.dashboard_server import Manager
from tests.support.filled_engine import filled_engine

MOST_BYTES = 100_000
pytestmark = pytest.mark.usefixtures("published")


def snapshot(engine: Any) -> dict[str, Any]:
    """A snapshot; of a tree that is walked a part at a time, the first one after a whole walk."""
    while True:
        found: dict[str, Any] = orjson.loads(watch.taken(engine.state, engine.scheduler))
        if engine.state.watch.survey is None or engine.state.watch.survey.view is not None:
            return found


@pytest.mark.parametrize("scheduling", ["calibrated-srjf", "srjf", "fifo"])
def test_the_next_step_is_what_the_policy_would_choose_and_looking_changes_nothing(scheduling: str) -> None:
    """Under each policy: the same jobs in the same order, before and after it was looked at."""
    now_s = time.perf_counter()
    engine = filled_engine(300, 100, now_s=now_s, config=PrefillConfig(scheduling=scheduling))
    assert engine.state.scheduling is not None
    policy = engine.state.scheduling.live.policy
    before = policy.choose(now_s)
    shown = snapshot(engine)["now"]["next"]
    assert [one["input_tokens"] for one in shown] == [job.n_input_tokens for job in before[:12]]
    assert [one["rides"] for one in shown] == [place > 0 for place in range(len(shown))]
    assert policy.choose(now_s) == before
    if scheduling != "fifo":
        assert shown[0]["score"] == pytest.approx(shown[0]["cost"] - shown[0]["credit"], rel=0.01)


def test_a_snapshot_of_ten_thousand_requests_and_fifty_thousand_prefixes_is_small() -> None:
    """All are counted, and none is listed but the first few."""
    engine = filled_engine(10_000, 50_000, now_s=time.perf_counter(), n_clients=3_000)
    while snapshot(engine)["cache"]["prefixes"] is None:  # the cache is walked in parts
        pass
    text = watch.taken(engine.state, engine.scheduler)
    assert len(text) < MOST_BYTES
    found = orjson.loads(text)
    assert found["now"]["waiting"] == 10_000
    assert sum(found["now"]["by_age"]["counts"]) == sum(found["now"]["by_predicted"]["counts"]) == 10_000
    assert found["cache"]["prefixes"]["tokens"] == engine.scheduler.tree_cache.evictable_size()


def test_parents_hold_what_goes_on_from_them_and_hits_are_of_later_requests() -> None:
    """A prefix that nine requests brought was found by eight; each shown one comes after its parent."""
    engine = filled_engine(0, 200, now_s=time.perf_counter(), first_prefix=[7] * 50)
    prefixes = snapshot(engine)["cache"]["prefixes"]
    own = next(one for one in prefixes["largest"] if one["tokens"] == 50)
    assert own["hits"] == 8
    for place, one in enumerate(prefixes["largest"]):
        if one["parent"] is not None:
            parent = prefixes["largest"][one["parent"]]
            assert one["parent"] < place
            assert parent["below"] >= one["tokens"] + one["below"]


def test_prefixes_are_named_by_hashes_under_a_key_of_the_process() -> None:
    """No token of a prefix leaves the scheduler; a second process gives the same prefix another name."""
    one, other = (
        snapshot(filled_engine(0, 50, now_s=time.perf_counter()))["cache"]["prefixes"]["largest"] for _ in range(2)
    )
    assert set(one[0]) == {"parent", "tokens", "below", "hits", "name"}
    assert [prefix["tokens"] for prefix in one] == [prefix["tokens"] for prefix in other]
    assert one[0]["name"] != other[0]["name"]


def test_an_evicted_prefix_counts_as_wanted_where_somebody_waits_for_it() -> None:
    """One job waits behind 40 cached tokens, which are evicted; another prefix nobody wants."""
    engine = filled_engine(0, 30, now_s=1.0, first_prefix=[7] * 40)
    assert engine.state.scheduling is not None
    live = engine.state.scheduling.live
    live.arrive(Job(array("q", [7] * 40 + [8]), 0.0, 40))
    cache = engine.scheduler.tree_cache
    cache.evict(EvictParams(num_tokens=int(cache.evictable_size())))
    found = snapshot(engine)["cache"]
    assert (found["wanted_removals"], found["wanted_removed_tokens"]) == (1, 40)
    assert found["removed_tokens"] > 40


def test_other_questions_for_the_internal_state_reach_sglang() -> None:
    """/server_info asks the same message without our name."""
    engine = filled_engine(0, 20, now_s=1.0)
    stock: Any = SimpleNamespace(internal_state={"a": 1})
    engine.scheduler.tp_worker = SimpleNamespace(model_runner=SimpleNamespace(attn_backend=None))
    answer = watch.around_get_internal_state(engine.state, lambda *_: stock, engine.scheduler, GetInternalStateReq())
    assert answer is stock
    assert stock.internal_state == {"a": 1}
    ours = watch.around_get_internal_state(
        engine.state, lambda *_: "stock", engine.scheduler, GetInternalStateReq(rid=watch.NAME)
    )
    assert orjson.loads(ours.internal_state[watch.NAME])["scheduling"] == engine.state.record.config.scheduling


def test_under_sglangs_own_scheduler_memory_is_shown_and_no_policy() -> None:
    """There is none to show."""
    engine = filled_engine(0, 20, now_s=1.0)
    engine.state.scheduling = None
    found = snapshot(engine)
    assert found["memory"]["rows"]
    assert "now" not in found


def test_two_who_look_share_one_question_and_after_them_none_is_asked() -> None:
    """The stream of each ends with the server."""

    async def run() -> None:
        engine = filled_engine(5, 30, now_s=time.perf_counter())
        manager: Any = Manager(engine)
        feed = Feed(lambda: manager, engine.state.record.config, Ending(0), Counter(invalid=2))
        assert manager.n_asked == 0
        one, other = feed.events(1), feed.events(5)
        events = await asyncio.gather(anext(one), anext(other))
        assert events[0] == events[1]
        assert manager.n_asked == 1
        found = orjson.loads(events[0].removeprefix(b"data: "))
        assert found["http"]["refused"] == {"invalid": 2}
        assert found["engines"][0]["cache"]["prefixes"]["largest"]
        await one.aclose()
        await other.aclose()
        assert feed._polling is not None
        await feed._polling
        assert manager.n_asked == 1

    asyncio.run(run())


def test_the_stream_says_whether_a_step_or_the_next_question_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever comes between two questions is shown the last answer."""
    monkeypatch.setattr(routes, "LOOK_S", 0.01)
    monkeypatch.setattr("sgl_prefill.port.dashboard.snapshot.age_of", lambda _: 1e6)

    async def run() -> None:
        engine = filled_engine(5, 30, now_s=time.perf_counter())
        manager: Any = Manager(engine)
        feed = Feed(lambda: manager, engine.state.record.config, Ending(0), Counter())
        answers, may_answer = manager.get_internal_state_communicator, asyncio.Event()

        async def late(question: Any) -> Any:
            await may_answer.wait()
            return await answers(question)

        manager.get_internal_state_communicator = late
        one = feed.events(5)
        assert await anext(one) == b": a step computes\n\n"
        may_answer.set()
        shown = await anext(one)
        while shown == b": a step computes\n\n":
            shown = await anext(one)
        assert shown.startswith(b"data: ")
        assert await anext(one) == b": the next snapshot is not due\n\n"
        other = feed.events(5)
        assert await anext(other) == shown
        assert manager.n_asked == 1
        await one.aclose()
        await other.aclose()
        assert feed._polling is not None
        feed._polling.cancel()

    asyncio.run(run())


def test_the_page_asks_for_nothing_and_runs_its_own_script_alone() -> None:
    """No address of another host in what it loads; its policy names the hash of its one script."""
    html = page().html.decode()
    assert "src=" not in html.split("<script>")[0]
    assert html.count("<script>") == 1
    assert "'unsafe-inline'" not in page().policy
    assert "innerHTML" not in html.rpartition("d3-hierarchy")[2]


def test_every_number_and_column_has_a_tooltip() -> None:
    terms = re.findall(r"<(?:dt|th)( title=\"[^\"]+\.\")?>", page().html.decode())
    assert len(terms) > 40
    assert all(terms)


def test_an_engine_without_our_prefix_cache_has_none_to_show() -> None:
    """--scheduling stock with --suffix-kv keep runs SGLang's own."""
    engine = filled_engine(0, 20, now_s=1.0)
    engine.state.scheduling = None
    scheduler = SimpleNamespace(**{**vars(engine.scheduler), "tree_cache": object()})
    assert orjson.loads(watch.taken(engine.state, scheduler))["cache"] is None
