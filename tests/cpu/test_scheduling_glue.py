"""The glue between the core policy and SGLang's objects, with SGLang's real radix tree and no model."""

from __future__ import annotations

import random
from array import array
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey, TreeNode

from sgl_prefill.errors import SeamError
from sgl_prefill.scheduling import step
from sgl_prefill.scheduling.radix_probe import count_cached_tokens


def key(tokens: list[int], extra_key: str | None = None) -> RadixKey:
    return RadixKey(token_ids=array("q", tokens), extra_key=extra_key)


def insert(tree: RadixCache, tokens: list[int], extra_key: str | None = None) -> None:
    tree.insert(InsertParams(key=key(tokens, extra_key), value=torch.tensor(tokens)))


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
    tree = RadixCache.create_simulated(page_size=page_size)
    for _ in range(60):
        insert(tree, rng.choices(range(3), k=rng.randrange(1, 40)), rng.choice([None, "salt"]))
    for _ in range(200):
        tokens, extra_key = rng.choices(range(3), k=rng.randrange(0, 50)), rng.choice([None, "salt", "other"])
        before, n_nodes = nodes(tree), TreeNode.counter
        counted = count_cached_tokens(tree, array("q", tokens), extra_key)
        assert nodes(tree) == before
        assert TreeNode.counter == n_nodes, "a lookup created a node"
        assert counted == len(tree.match_prefix(MatchPrefixParams(key=key(tokens, extra_key))).device_indices)


def test_waiting_requests_do_not_change_what_is_evicted_first() -> None:
    """With match_prefix the queue would refresh the old prefix; with the probe the least recently used one goes."""
    tree = RadixCache.create_simulated(mock_allocator=SimpleNamespace(device="cpu", free_segment=lambda *_, **__: None))
    old, new = [1] * 50, [2] * 50
    insert(tree, old)
    insert(tree, new)
    for _ in range(1000):
        assert count_cached_tokens(tree, array("q", [*old, 3]), None) == 50
    tree.evict(EvictParams(num_tokens=50))
    assert count_cached_tokens(tree, array("q", old), None) == 0
    assert count_cached_tokens(tree, array("q", new), None) == 50


def request(name: str, tokens: list[int], arrival_s: float = 1.0, priority: int | None = None) -> Any:
    return SimpleNamespace(
        name=name,
        origin_input_ids=array("q", tokens),
        output_ids=array("q"),
        extra_key=None,
        seqlen=len(tokens),
        priority=priority,
        time_stats=SimpleNamespace(api_server_dispatch_time=arrival_s, wait_queue_entry_time=99.0),
        _compute_max_prefix_len=lambda n: n - 1,
    )


def scheduler_with(tree: Any, waiting: list[Any], **options: Any) -> Any:
    defaults = {"enable_priority_scheduling": False, "schedule_low_priority_values_first": False}
    return SimpleNamespace(tree_cache=tree, waiting_queue=waiting, **{**defaults, **options})


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
    tree = RadixCache.create_simulated()
    insert(tree, [7] * 90)
    waiting = [request("B", [5] * 40), request("A", [6] * 30), request("C", [7] * 100)]
    scheduler = scheduler_with(tree, waiting)
    scheduler.sgl_prefill_policy = step.CalibratedSrjf(scheduler, fairness_lambda=0.0)
    ran, pending = "", []
    while scheduler.waiting_queue:
        plan = step.around_get_new_batch_prefill(admit_first, scheduler, None)
        ran += names(plan.batch_to_run.reqs)
        pending.append(plan.batch_to_run.prefill_stats.num_pending_tokens)
    assert ran == "CAB"
    assert pending == [70, 40, 0], "requests that SGLang did not see are counted as pending"


def test_a_request_that_is_not_admitted_keeps_its_place_and_new_ones_queue_behind() -> None:
    """SGLang may refuse the picked one for lack of memory, and may itself queue a preempted one."""
    scheduler = scheduler_with(RadixCache.create_simulated(), [request("B", [5] * 40), request("A", [6] * 30)])
    scheduler.sgl_prefill_policy = step.CalibratedSrjf(scheduler, fairness_lambda=0.0)

    def refuse_and_preempt(scheduler: Any, running_batch: Any) -> Any:
        scheduler.waiting_queue.append(request("P", [8] * 10))
        return admit_nothing(scheduler, running_batch)

    step.around_get_new_batch_prefill(refuse_and_preempt, scheduler, None)
    assert names(scheduler.waiting_queue) == "BAP"


def test_the_queue_is_restored_when_sglang_raises() -> None:
    """An error inside SGLang's admission loses no request."""
    scheduler = scheduler_with(RadixCache.create_simulated(), [request("B", [5] * 40), request("A", [6] * 30)])
    scheduler.sgl_prefill_policy = step.CalibratedSrjf(scheduler, fairness_lambda=0.0)

    def fail(scheduler: Any, running_batch: Any) -> Any:
        raise RuntimeError("inside SGLang")

    with pytest.raises(RuntimeError, match="inside SGLang"):
        step.around_get_new_batch_prefill(fail, scheduler, None)
    assert names(scheduler.waiting_queue) == "BA"


def test_arrival_is_counted_from_the_http_process_and_priorities_come_first() -> None:
    """The scheduler's own stamp (99 s here) would make every request that arrived in a long step look new."""
    waiting = [request("new", [5] * 40, arrival_s=2.0, priority=1), request("old", [6] * 50, arrival_s=1.0, priority=1)]
    scheduler = scheduler_with(RadixCache.create_simulated(), waiting, enable_priority_scheduling=True)

    def picked(requests: list[Any], fairness_lambda: float) -> Any:
        chosen: Any = step.CalibratedSrjf(scheduler, fairness_lambda).pick(requests)
        return chosen.name

    assert picked(waiting, 500.0) == "old"
    assert picked(waiting, 0.0) == "new"
    urgent = request("urgent", [9] * 500, priority=2)
    assert picked([*waiting, urgent], 500.0) == "urgent", (
        "larger values are more urgent unless SGLang is told otherwise"
    )


def test_a_prefix_cache_that_the_probe_cannot_read_is_refused_by_name() -> None:
    """A hybrid or sliding-window tree would be misread silently."""

    class SWARadixCache:
        pass

    with pytest.raises(SeamError, match=r"SWARadixCache.*--scheduling stock"):
        step.after_init_schedule_policy(None, scheduler_with(SWARadixCache(), []))
