"""What one of SGLang's own policies takes to order the same queue, once a step: python rival.py POLICY WAITING TOKENS

Run by `policy.py` with the Python of an environment that holds the SGLang version in question; imports nothing from this package.
Prints one JSON line: the times of some steps in milliseconds, "as shipped" and with the limit lifted beyond which the policy
stops looking at the cache.
"""

from __future__ import annotations

import importlib.metadata
import json
import random
import sys
import time
from array import array
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.schedule_policy import SchedulePolicy
from sglang.srt.mem_cache.base_prefix_cache import InsertParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey
from sglang.srt.runtime_context import publish
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs

TAIL_TOKENS, PER_PREFIX, CACHED_USERS, VOCABULARY = 150, 50, 4, 512
STEPS = 3


def main(policy_name: str, n_waiting: int, n_tokens: int) -> None:
    publish(ServerArgs(model_path="dummy", device="cpu"), role="scheduler")
    rng = random.Random(n_waiting)
    prefixes = [ids(rng, n_tokens - TAIL_TOKENS) for _ in range(max(n_waiting // PER_PREFIX, 1))]
    tree = RadixCache.create_simulated()
    for prefix in prefixes[:CACHED_USERS]:
        tree.insert(InsertParams(key=RadixKey(prefix), value=torch.arange(len(prefix))))
    waiting = [request(index, prefixes[index % len(prefixes)] + ids(rng, TAIL_TOKENS)) for index in range(n_waiting)]
    policy: Any = SchedulePolicy(
        policy=policy_name,
        tree_cache=tree,
        enable_hierarchical_cache=False,
        enable_priority_scheduling=False,
        schedule_low_priority_values_first=False,
    )
    as_shipped = [step_ms(policy, waiting) for _ in range(STEPS)]
    policy._determine_active_policy = lambda queue: policy.policy
    unlimited = [step_ms(policy, waiting) for _ in range(STEPS)]
    version = importlib.metadata.version("sglang")
    print(json.dumps({"sglang": version, "as_shipped_ms": as_shipped, "unlimited_ms": unlimited}))


def ids(rng: random.Random, n_tokens: int) -> array[int]:
    return array("q", (rng.randrange(3, VOCABULARY) for _ in range(n_tokens)))


def request(index: int, token_ids: array[int]) -> Req:
    req = Req(
        rid=str(index),
        origin_input_text="",
        origin_input_ids=token_ids,
        sampling_params=SamplingParams(max_new_tokens=0, temperature=0),
    )
    req.full_untruncated_fill_ids = req.origin_input_ids
    return req


def step_ms(policy: Any, waiting: list[Req]) -> float:
    queue = list(waiting)
    started = time.perf_counter()
    policy.calc_priority(queue, None)
    return 1000 * (time.perf_counter() - started)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
