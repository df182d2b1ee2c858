"""Steady traffic of every kind over a cache that holds none of the long prompts: does a process grow after the first tenth of it,
does a request fail, is an answer another than on a quiet server, and is anything left behind?

Users come and go, labels are new all the time, clients leave, and some send nonsense: what a server remembers of each must be
forgotten again. The first requests are asked alone before, and a long prompt before and after. Memory is anonymous memory: a page
that a forked process shares with the one it was forked from counts in both, so that writing to it changes nothing.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import statistics
import sys
import time
from collections import Counter, defaultdict
from typing import Any, NamedTuple

import orjson
import psutil
import requests

from benchmarks import process_memory, report, shapes
from benchmarks.storm import part
from benchmarks.storm.traffic import OK, Answer, Request, Traffic, send_all

BLOCKS, QUICK_BLOCKS = (1_000, 100), (100, 3)  # requests of a block, after which memory is read; blocks
N_COMPARED = 5_000  # at most: the first of them
EARLY_SHARE = 0.1  # of the blocks, until growth counts
AROUND = 2  # memory is the median of this many samples on either side
N_CONNECTIONS = 200
KV_TOKENS = 2_000
LONG_TOKENS = (1_900, 2_100, 3_000, 4_500, 6_000)
LONG_SHARE, PRIORITY_SHARE, BACKGROUND_SHARE = 0.02, 0.2, 0.1
LEAVES_S = 0.3  # at most
IDLE_S = 60  # after the storm
TIMEOUT_S = 600
FLAGS = ("--isolate-by", "user", "--enable-priority-scheduling", "--max-input-length", "8000")
MIB = 1 << 20


class Sample(NamedTuple):
    """What one process holds."""

    bytes: int
    fds: int
    threads: int


def requests_of(n: int) -> list[Request]:
    rng, traffic = random.Random(0), Traffic(LEAVES_S)
    all_long = [shapes.token_ids(rng, n_tokens) for n_tokens in LONG_TOKENS]
    made = []
    for _ in range(n):
        request = traffic.next()
        if rng.random() < LONG_SHARE:
            request = _long(rng.choice(all_long))._replace(user=request.user)
        if rng.random() < PRIORITY_SHARE:
            request = request._replace(body={**request.body, "priority": rng.randint(-3, 3)})
        made.append(request._replace(background=rng.random() < BACKGROUND_SHARE))
    return made


def measure(quick: bool) -> dict[str, Any]:
    n_block, n_blocks = QUICK_BLOCKS if quick else BLOCKS
    asked = requests_of(n_block * n_blocks)
    longest = _long(shapes.token_ids(random.Random(1), LONG_TOKENS[-1]))
    statuses: defaultdict[str, Counter[str]] = defaultdict(Counter)
    failed: list[dict[str, str]] = []
    n_unequal = 0
    with part.serving(*FLAGS, kv_tokens=KV_TOKENS) as server:
        *quiet, longest_before = asyncio.run(
            send_all(server.url, [*map(_alone, asked[:N_COMPARED]), longest], 1, TIMEOUT_S)
        )
        server.flush_cache()
        processes = {_name_of(process): process for process in part.processes(server.pid)}
        samples: dict[str, list[Sample]] = {name: [] for name in processes}
        began_s = time.monotonic()
        for start in range(0, len(asked), n_block):
            of_block = slice(start, start + n_block)
            answers = asyncio.run(send_all(server.url, asked[of_block], N_CONNECTIONS, TIMEOUT_S))
            for answer, expected in itertools.zip_longest(answers, quiet[of_block]):
                statuses[answer.request.kind][answer.status] += 1
                if not answer.is_allowed:
                    failed.append(answer.failure)
                elif expected is not None and _is_unequal(answer, expected):
                    n_unequal += 1
                    failed.append({**answer.failure, "alone": f"{expected.raw[:300]!r}"})
            for name, process in processes.items():
                samples[name].append(_sample(process))
            held = {name: f"{of_process[-1].bytes / MIB:.0f}" for name, of_process in samples.items()}
            print(f"\rsoak: {start + n_block:,} requests, MiB {held}    ", end="", file=sys.stderr)
        elapsed_s = time.monotonic() - began_s
        n_left, left = _left_behind(server.url)
        (longest_after,) = asyncio.run(send_all(server.url, [longest], 1, TIMEOUT_S))
    if not longest_after.is_allowed or _is_unequal(longest_after, longest_before):
        n_unequal += 1
        failed.append({**longest_after.failure, "alone": f"{longest_before.raw[:300]!r}"})
    rows = [_row_of(name, of_process) for name, of_process in samples.items()]
    growth, at_most = max(row["growth"] for row in rows), report.Target.at_most
    targets = [
        at_most("steady traffic: largest growth of a process after the first tenth", growth, 0.02),
        at_most("steady traffic: requests that failed", len(failed) - n_unequal, 0),
        at_most(f"steady traffic: of the first {len(quiet):,}, answers unequal to a quiet server's", n_unequal, 0),
        at_most("steady traffic: tokens of the cache not returned", n_left, 0),
    ]
    rows.append({"requests": len(asked), "requests_per_s": round(len(asked) / elapsed_s), "statuses": statuses})
    return report.part([*rows, left, *failed[:20]], targets, commands={"soak": server.command})


def _long(prompt: list[int]) -> Request:
    return Request("long", "/v1/completions", {"prompt": prompt, "allowed_token_ids": [9805, 787, 5000]})


def _alone(request: Request) -> Request:
    """The parts of a request on which its answer may depend: not its user, its priority or its deadline."""
    body = {name: value for name, value in request.body.items() if name not in ("priority", "deadline_ms", "rid")}
    return request._replace(body=body, user="", background=False, leaves_after_s=None)


def _is_unequal(answer: Answer, expected: Answer) -> bool:
    if answer.status not in OK:
        return False
    return expected.status not in OK or part.differ(*(part.scores(orjson.loads(one.raw)) for one in (answer, expected)))


def _left_behind(url: str) -> tuple[int, dict[str, Any]]:
    """Flushes the cache, and returns how many of its tokens are then still in use, and what the server said."""
    flushed = requests.post(f"{url}/flush_cache", params={"timeout": IDLE_S}, timeout=2 * IDLE_S).status_code
    now: dict[str, int] = requests.get(f"{url}/v1/loads", timeout=TIMEOUT_S).json()["loads"][0]
    # Gauges are written after a step, so one prompt runs after the flush. Only the cache holds its tokens then.
    requests.post(f"{url}/v1/completions", json=_long([5, 6, 7]).body, timeout=TIMEOUT_S)
    lines = requests.get(f"{url}/metrics", timeout=TIMEOUT_S).text.splitlines()
    gauges = ("sglang:kv_available_tokens{", "sglang:kv_evictable_tokens{")
    free = sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(gauges))
    told = {name: now[name] for name in ("num_used_tokens", "num_running_reqs", "num_waiting_reqs")}
    n_left = max(now["num_used_tokens"], int(now["max_total_num_tokens"] - free))
    return max(n_left, int(flushed != 200)), {"flush_cache": flushed, "free_or_evictable_tokens": free, **told}


def _row_of(name: str, samples: list[Sample]) -> dict[str, Any]:
    """Says how much a process has grown, in the second half too (a leak goes on, a fragmented heap does not), and all samples."""
    early, middle, last = math.ceil(EARLY_SHARE * len(samples)), len(samples) // 2, len(samples) - AROUND
    moments = [samples[max(at - 1 - AROUND, 0) : at + AROUND] for at in (early, middle, last)]
    early_bytes, middle_bytes, late_bytes = (statistics.median(one.bytes for one in some) for some in moments)
    return {
        "process": name,
        "mib": [round(early_bytes / MIB, 1), round(late_bytes / MIB, 1)],
        "growth": round(late_bytes / early_bytes - 1, 4),
        "growth_in_second_half": round(late_bytes / middle_bytes - 1, 4),
        "fds": [max(one.fds for one in some) for some in (moments[0], moments[-1])],
        "threads": [max(one.threads for one in some) for some in (moments[0], moments[-1])],
        "mib_of_all_samples": [round(one.bytes / MIB, 1) for one in samples],
    }


def _name_of(process: psutil.Process) -> str:
    """Names a process by the title it has set; the launcher by its module."""
    words: list[str] = [word for word in process.cmdline() if word]
    if len(words) == 1:
        return words[0].rpartition("::")[2]
    return "launcher" if "sgl_prefill.launch_server" in words else "resource tracker"


def _sample(process: psutil.Process) -> Sample:
    """Raises InvalidRunError where the process has ended."""
    try:
        return Sample(process_memory.resident_bytes(process.pid), process.num_fds(), process.num_threads())
    except (FileNotFoundError, psutil.NoSuchProcess) as error:
        raise report.InvalidRunError(f"a process of the server has ended: {error}") from error
