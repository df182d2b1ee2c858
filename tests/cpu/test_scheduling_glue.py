"""The glue between the core policy and SGLang's objects, with SGLang's real radix tree and no model."""

from __future__ import annotations

import random
from array import array
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey, TreeNode
from sglang.srt.sampling.sampling_params import SamplingParams

from sgl_prefill.config import PrefillConfig
from sgl_prefill.core.calibration import Calibration
from sgl_prefill.core.jct import FittedJct
from sgl_prefill.core.job import Job
from sgl_prefill.core.policies.fifo import Fifo
from sgl_prefill.core.policy import Policy, PolicySettings
from sgl_prefill.errors import SeamError
from sgl_prefill.port import loop
from sgl_prefill.port.kv.radix_cache import RadixTree, WatchedRadixCache
from sgl_prefill.port.steps import jobs, request_state
from sgl_prefill.port.steps.step_state import StepState
from sgl_prefill.port.steps.waiting_list import WaitingList
from sgl_prefill.startup.record import StartRecord


def key(tokens: list[int], extra_key: str | None = None) -> RadixKey:
    return RadixKey(token_ids=array("q", tokens), extra_key=extra_key)


def insert(tree: RadixCache, tokens: list[int], extra_key: str | None = None) -> None:
    tree.insert(InsertParams(key=key(tokens, extra_key), value=torch.tensor(tokens)))


def watched_tree(page_size: int = 1) -> WatchedRadixCache:
    allocator = SimpleNamespace(device="cpu", free_segment=lambda *_, **__: None)
    parameters = CacheInitParams(
        disable=False, req_to_token_pool=None, token_to_kv_pool_allocator=allocator, page_size=page_size
    )
    return WatchedRadixCache(parameters)


def calibrated(tree: WatchedRadixCache, policy: Policy, kv_tokens: int = 0) -> Calibration:
    """A policy that follows a tree."""
    calibration = Calibration(RadixTree(tree), policy)
    tree.connect(calibration, calibration.advisor, kv_tokens)
    return calibration


def waiting_job(tokens: list[int], arrival_s: float = 1.0, namespace: str | None = None) -> Job:
    return Job(array("q", tokens), arrival_s, len(tokens) - 1, namespace)


def count_cached_tokens(tree: WatchedRadixCache, tokens: list[int], namespace: str | None = None) -> int:
    """By the probe that changes nothing."""
    return RadixTree(tree).match(Job(array("q", tokens), 0.0, len(tokens), namespace)).n_tokens


def nodes(tree: RadixCache) -> list[tuple[Any, ...]]:
    """Everything of the tree that a lookup could change."""
    found, stack = [], [tree.root_node]
    while stack:
        node = stack.pop()
        found.append((id(node), list(node.key.token_ids), node.last_access_time, node.hit_count, list(node.children)))
        stack.extend(node.children.values())
    return sorted(found, key=lambda entry: entry[0])


@pytest.mark.parametrize("page_size", [1, 4])
def test_the_probe_counts_what_match_prefix_finds_and_changes_nothing(page_size: int) -> None:
    """On random trees over a 3-letter alphabet, where prefixes overlap often, and under two namespaces."""
    rng = random.Random(page_size)
    tree = watched_tree(page_size)
    for _ in range(60):
        insert(tree, rng.choices(range(3), k=rng.randrange(1, 40)), rng.choice([None, "salt"]))
    for _ in range(200):
        tokens, extra_key = rng.choices(range(3), k=rng.randrange(0, 50)), rng.choice([None, "salt", "other"])
        before, n_nodes = nodes(tree), TreeNode.counter
        counted = count_cached_tokens(tree, tokens, extra_key)
        assert nodes(tree) == before
        assert TreeNode.counter == n_nodes, "a lookup created a node"
        assert counted == tree.match_prefix(MatchPrefixParams(key=key(tokens, extra_key))).device_prefix_len


def test_waiting_requests_do_not_change_what_is_evicted_first() -> None:
    """With match_prefix the queue would refresh the old prefix; with the probe the least recently used one goes."""
    tree = watched_tree()
    old, new = [1] * 50, [2] * 50
    insert(tree, old)
    insert(tree, new)
    for _ in range(1000):
        assert count_cached_tokens(tree, [*old, 3]) == 50
    tree.evict(EvictParams(num_tokens=50))
    assert count_cached_tokens(tree, old) == 0
    assert count_cached_tokens(tree, new) == 50


class Request(SimpleNamespace):
    """Hashed by identity, as SGLang's are."""

    __hash__ = object.__hash__  # type: ignore[assignment]
    __eq__ = object.__eq__


def request(name: str, tokens: list[int], arrival_s: float = 1.0, priority: int | None = None) -> Any:
    return Request(
        name=name,
        origin_input_ids=array("q", tokens),
        output_ids=array("q"),
        extra_key=None,
        seqlen=len(tokens),
        priority=priority,
        sampling_params=SamplingParams(max_new_tokens=1),
        return_logprob=False,
        time_stats=SimpleNamespace(
            api_server_dispatch_time=arrival_s,
            wait_queue_entry_time=99.0,
            trace_ctx=SimpleNamespace(tracing_enable=False),
        ),
        rid=name,
        _compute_max_prefix_len=lambda n: n - 1,
    )


class Engine(NamedTuple):
    """SGLang's scheduler as far as our hooks look at it, and what they know."""

    scheduler: Any
    state: StepState

    def step(self, admit: Any) -> Any:
        """One prefill admission; `admit` stands in for SGLang's."""
        return loop.around_get_new_batch_prefill(self.state, admit, self.scheduler, SimpleNamespace(reqs=[]))


def engine_with(
    tree: Any, waiting: list[Any], fairness_lambda: float = 0.0, jct_ms: FittedJct | None = None, **options: Any
) -> Engine:
    defaults = {"enable_priority_scheduling": False, "schedule_low_priority_values_first": False}
    stand_in = SimpleNamespace(
        tree_cache=tree, waiting_queue=waiting, max_total_num_tokens=1000, forward_ct=0, **{**defaults, **options}
    )
    config = PrefillConfig(fairness_lambda=fairness_lambda, jct_model="cache-miss", pack_step_tokens=0)
    state = StepState(StartRecord(config, jct_ms=jct_ms))
    jobs.after_init_schedule_policy(state, None, stand_in)
    return Engine(stand_in, state)


def admit_first(scheduler: Any, running_batch: Any) -> Any:
    """Stands in for SGLang's admission: takes the first of the queue that it sees."""
    admitted = scheduler.waiting_queue.pop(0)
    stats = SimpleNamespace(num_pending_tokens=0)
    return SimpleNamespace(
        batch_to_run=SimpleNamespace(reqs=[admitted], prefill_stats=stats), running_batch=running_batch
    )


def admit_nothing(scheduler: Any, running_batch: Any) -> Any:
    return SimpleNamespace(batch_to_run=None, running_batch=running_batch)


def names(requests: list[Any]) -> str:
    return "".join(r.name for r in requests)


def test_a_step_admits_the_shortest_calibrated_request_and_keeps_the_others_in_order() -> None:
    """C is longest but cached; then A before B by length."""
    tree = watched_tree()
    insert(tree, [7] * 90)
    waiting = [request("B", [5] * 40), request("A", [6] * 30), request("C", [7] * 100)]
    engine = engine_with(tree, waiting)
    ran, pending = "", []
    while engine.scheduler.waiting_queue:
        plan = engine.step(admit_first)
        ran += names(plan.batch_to_run.reqs)
        pending.append(plan.batch_to_run.prefill_stats.num_pending_tokens)
    assert ran == "CAB"
    assert pending == [70, 40, 0], "requests that SGLang did not see are counted as pending"


def test_a_request_that_is_not_admitted_keeps_its_place_and_new_ones_queue_behind() -> None:
    """SGLang may refuse the picked one for lack of memory, and may itself queue a preempted one."""
    engine = engine_with(watched_tree(), [request("B", [5] * 40), request("A", [6] * 30)])

    def refuse_and_preempt(scheduler: Any, running_batch: Any) -> Any:
        scheduler.waiting_queue.append(request("P", [8] * 10))
        return admit_nothing(scheduler, running_batch)

    engine.step(refuse_and_preempt)
    assert names(engine.scheduler.waiting_queue) == "BAP"


def test_the_queue_is_restored_when_sglang_raises() -> None:
    """An error inside SGLang's admission loses no request."""
    engine = engine_with(watched_tree(), [request("B", [5] * 40), request("A", [6] * 30)])

    def fail(scheduler: Any, running_batch: Any) -> Any:
        raise RuntimeError("inside SGLang")

    with pytest.raises(RuntimeError, match="inside SGLang"):
        engine.step(fail)
    assert names(engine.scheduler.waiting_queue) == "BA"


def test_arrival_is_counted_from_the_http_process_and_priorities_come_first() -> None:
    """The scheduler's own stamp (99 s here) would make every request that arrived in a long step look new."""
    new, old = request("new", [5] * 40, arrival_s=2.0, priority=1), request("old", [6] * 50, arrival_s=1.0, priority=1)
    urgent = request("urgent", [9] * 500, priority=2)

    def order(waiting: list[Any], fairness_lambda: float) -> list[str]:
        engine = engine_with(watched_tree(), waiting, fairness_lambda, enable_priority_scheduling=True)
        picked = []
        while engine.scheduler.waiting_queue:
            plan = engine.step(admit_first)
            picked.append(plan.batch_to_run.reqs[0].name)
        return picked

    assert order([new, old], 500.0) == ["old", "new"]
    assert order([new, old], 0.0) == ["new", "old"]
    assert order([new, old, urgent], 500.0)[0] == "urgent", (
        "larger values are more urgent unless SGLang is told otherwise"
    )


@pytest.mark.parametrize("how", ["remove", "new list", "pop and insert"])
def test_a_request_that_sglang_takes_from_its_list_leaves_the_policy(how: str) -> None:
    """A client that leaves: SGLang pops it, or assigns a list without it."""
    waiting = [request("A", [5] * 30), request("B", [6] * 20), request("C", [7] * 10)]
    engine = engine_with(watched_tree(), waiting)
    engine.step(admit_nothing)
    queue, gone = engine.scheduler.waiting_queue, waiting[2]
    if how == "remove":
        queue.remove(gone)
    elif how == "new list":
        engine.scheduler.waiting_queue = [req for req in queue if req is not gone]
    else:
        queue.pop(2)
        queue.insert(0, request("D", [8] * 5))
    plan = engine.step(admit_first)
    assert plan.batch_to_run.reqs[0].name == ("D" if how == "pop and insert" else "B")
    assert plan.batch_to_run.prefill_stats.num_pending_tokens == (50 if how == "pop and insert" else 30)


def test_the_list_takes_requests_out_by_identity_and_knows_what_else_happened_to_it() -> None:
    """Against a plain list, with every kind of change; what is taken out is no change to report."""
    rng = random.Random(4)
    followed, expected = WaitingList[Any](), list[Any]()
    for number in range(2000):
        kind = rng.random()
        if kind < 0.5:
            req = request(str(number), [1])
            followed.append(req)
            expected.append(req)
        elif kind < 0.6 and expected:
            index = rng.randrange(len(expected))
            assert followed.pop(index) is expected.pop(index)
            assert followed.take_changes() is None
        elif kind < 0.65:
            req = request(str(number), [1])
            followed.insert(0, req)
            expected.insert(0, req)
        else:
            followed.take_changes()
            gone = rng.sample(expected, min(rng.randrange(4), len(expected)))
            followed.take_out(gone)
            expected = [req for req in expected if req not in gone]
            assert followed.take_changes() == []
        assert followed == expected


def test_what_hangs_on_a_request_is_gone_once_it_waits_no_longer() -> None:
    """The job is there while it waits, for the KV side; afterwards the policy knows nothing of it."""
    waiting = [request("A", [5] * 30)]
    engine = engine_with(watched_tree(), waiting)
    seen: list[Any] = []

    def admit(stand_in: Any, running_batch: Any) -> Any:
        seen.append(request_state.of(waiting[0]).job)
        return admit_first(stand_in, running_batch)

    engine.step(admit)
    assert seen[0].n_input_tokens == 30
    assert request_state.of(waiting[0]).job is None
    assert engine.state.scheduling is not None
    assert engine.state.scheduling.live.policy.waiting == {}


def test_a_prefix_cache_that_the_probe_cannot_read_is_refused_by_name() -> None:
    """A hybrid or sliding-window tree would be misread silently."""

    class SWARadixCache:
        pass

    with pytest.raises(SeamError, match=r"SWARadixCache.*--scheduling stock"):
        engine_with(SWARadixCache(), [])


def test_background_jobs_take_a_share_of_the_cache_and_then_evict_themselves() -> None:
    tree = watched_tree()
    calibration = calibrated(tree, Fifo(PolicySettings()), kv_tokens=40)
    for first in (100, 200, 300):
        insert(tree, list(range(first, first + 10)))
    tree._inserts_for_background = True
    insert(tree, list(range(100, 115)))  # 5 tokens behind what a live request has computed
    insert(tree, list(range(400, 405)))
    tree._inserts_for_background = False
    assert tree.of_background is not None
    assert tree.of_background.n_tokens == 10
    calibration.add(waiting_job([*range(400, 405), 1]))  # whoever waits for them, they are a background job's

    tree.evict_tokens(10, for_background=True)
    assert tree.of_background.n_tokens == 0
    assert tree.total_size() == 30  # live requests' prefixes are whole

    tree.evict_tokens(10, for_background=True)
    assert tree.total_size() == 20  # up to its share a job may take what is oldest


def test_what_a_live_request_has_used_is_no_background_jobs_any_more() -> None:
    tree = watched_tree()
    calibrated(tree, Fifo(PolicySettings()), kv_tokens=40)
    insert(tree, [7, 8, 9])
    tree._inserts_for_background = True
    insert(tree, [1, 2, 3, 4, 5, 6])
    tree._inserts_for_background = False
    insert(tree, [1, 2, 3])
    assert tree.of_background is not None
    assert tree.of_background.n_tokens == 3
    tree.evict_tokens(3)
    assert [count_cached_tokens(tree, tokens) for tokens in ([1, 2, 3, 4, 5, 6], [7, 8, 9])] == [3, 3]


@pytest.mark.parametrize(
    ("is_idle", "n_steps"), [(True, loop.RELEASE_EVERY_STEPS), (False, loop.RELEASE_AT_LATEST_STEPS)]
)
def test_a_host_gives_memory_back_after_many_steps(
    monkeypatch: pytest.MonkeyPatch, is_idle: bool, n_steps: int
) -> None:
    released: list[int] = []
    host = SimpleNamespace(is_host=True, release_unused=lambda: released.append(1))
    monkeypatch.setattr(loop, "this_device", lambda: host)
    engine = engine_with(watched_tree(), [], is_fully_idle=lambda: is_idle)
    for engine.scheduler.forward_ct in (n_steps - 1, n_steps, n_steps + 1):
        engine.step(admit_nothing)
    assert len(released) == 1


@pytest.mark.parametrize(
    ("options", "price"),
    [
        ({"max_new_tokens": 0}, 0),
        ({"max_new_tokens": 1, "temperature": 0}, 0),
        ({"max_new_tokens": 1}, 4),
        ({"max_new_tokens": 1, "top_p": 0.9}, 11),
        ({"max_new_tokens": 1, "top_k": 50}, 11),
    ],
)
def test_choosing_a_token_at_random_has_a_price_in_tokens(options: dict[str, Any], price: int) -> None:
    """It takes 3.5 times as long as a token, or 10.5 times where the probabilities are sorted."""
    req = request("asks", [1] * 50)
    req.sampling_params = SamplingParams(**options)
    req.sampling_params.normalize(None)
    jct_ms = FittedJct(step_ms=20.0, miss_token_ms=0.5, pair_ms=0.0, cached_token_ms=0.0)
    size = round(3.5 * jct_ms.miss_token_ms / jobs.SAMPLING_MS_PER_LOGIT)
    engine = engine_with(watched_tree(), [req], jct_ms=jct_ms, model_config=SimpleNamespace(vocab_size=size))
    jobs.follow(engine.state, engine.scheduler)
    job = request_state.of(req).job
    assert job is not None
    assert job.n_priced_tokens == 50 + price


def test_a_prompt_that_asks_for_much_of_each_token_shares_no_step() -> None:
    """The HTTP process writes the log-probabilities of a step before it reads other answers."""
    for n_labels, runs_alone in ((10, False), (jobs.MANY_LOGPROBS, True)):
        req = request("asks", [1] * 50)
        req.return_logprob, req.logprob_start_len = True, 48
        req.logprob = SimpleNamespace(top_logprobs_num=n_labels, token_ids_logprob=None)
        engine = engine_with(watched_tree(), [req])
        jobs.follow(engine.state, engine.scheduler)
        job = request_state.of(req).job
        assert job is not None
        assert job.runs_alone is runs_alone
