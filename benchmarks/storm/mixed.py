"""A storm of requests of every kind on a cache that holds none of the long ones: is each answered as on a quiet server?

Each is asked alone first. Afterwards nothing may be left behind, no request and no token of the cache, and a long prompt is
answered as before.
"""

from __future__ import annotations

import asyncio
import random
import resource
import time
from collections import Counter
from typing import Any

import orjson
import requests

from benchmarks import report, shapes
from benchmarks.storm import part
from benchmarks.storm.traffic import OK, Answer, Request, Traffic, send_all

N_REQUESTS, N_REQUESTS_QUICK = 2_000, 100
N_CONNECTIONS = 200
KV_TOKENS = 2_000
LONG_TOKENS = (1_900, 2_100, 3_000, 4_500, 6_000)
LONG_SHARE, PRIORITY_SHARE, BACKGROUND_SHARE = 0.06, 0.2, 0.1
LEAVES_S = 0.3
IDLE_S = 60  # after the storm
TIMEOUT_S = 600
FLAGS = ("--isolate-by", "user", "--enable-priority-scheduling", "--max-input-length", "8000")
UNANSWERED, UNEQUAL = "unanswered", "unequal"


def requests_of(n: int) -> list[Request]:
    rng, traffic = random.Random(0), Traffic(LEAVES_S)
    all_long = [shapes.token_ids(rng, n_tokens) for n_tokens in LONG_TOKENS]
    made = []
    for _ in range(n):
        request = traffic.next()
        if rng.random() < LONG_SHARE:
            request = long(rng.choice(all_long))._replace(user=request.user)
        if rng.random() < PRIORITY_SHARE:
            request = request._replace(body={**request.body, "priority": rng.randint(-3, 3)})
        made.append(request._replace(background=rng.random() < BACKGROUND_SHARE))
    return made


def long(prompt: list[int]) -> Request:
    return Request("long", "/v1/completions", {"prompt": prompt, "allowed_token_ids": [9805, 787, 5000]})


def alone(request: Request) -> Request:
    """The parts of a request on which its answer may depend: not its user, its priority or its deadline."""
    body = {name: value for name, value in request.body.items() if name not in ("priority", "deadline_ms", "rid")}
    return request._replace(body=body, user="", background=False, leaves_after_s=None)


def verdict(answer: Answer, expected: Answer) -> str:
    """Says in a word what came of a request: UNANSWERED and UNEQUAL must not be."""
    if not answer.is_allowed:
        return UNANSWERED
    if answer.status not in OK:
        return answer.status
    if expected.status not in OK:
        return UNEQUAL
    now, before = (part.scores(orjson.loads(one.raw)) for one in (answer, expected))
    return UNEQUAL if part.differ(now, before) else "as on a quiet server"


def left_behind(url: str) -> tuple[int, dict[str, Any]]:
    """Flushes the cache, and returns how many of its tokens are then still in use, and what the server said."""
    flushed = requests.post(f"{url}/flush_cache", params={"timeout": IDLE_S}, timeout=2 * IDLE_S).status_code
    now: dict[str, int] = requests.get(f"{url}/v1/loads", timeout=TIMEOUT_S).json()["loads"][0]
    # Gauges are written after a step, so one prompt runs after the flush. Only the cache holds its tokens then.
    requests.post(f"{url}/v1/completions", json=long([5, 6, 7]).body, timeout=TIMEOUT_S)
    lines = requests.get(f"{url}/metrics", timeout=TIMEOUT_S).text.splitlines()
    gauges = ("sglang:kv_available_tokens{", "sglang:kv_evictable_tokens{")
    free = sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(gauges))
    told = {name: now[name] for name in ("num_used_tokens", "num_running_reqs", "num_waiting_reqs")}
    n_left = max(now["num_used_tokens"], int(now["max_total_num_tokens"] - free))
    return max(n_left, int(flushed != 200)), {"flush_cache": flushed, "free_or_evictable_tokens": free, **told}


def measure(quick: bool) -> dict[str, Any]:
    """Asks each alone, then all at once, and looks at what is left."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    asked = requests_of(N_REQUESTS_QUICK if quick else N_REQUESTS)
    longest = long(shapes.token_ids(random.Random(1), 6_000))
    with part.serving(*FLAGS, kv_tokens=KV_TOKENS) as server:
        expected = asyncio.run(send_all(server.url, [*map(alone, asked), longest], 1, TIMEOUT_S))
        server.flush_cache()
        began_s = time.monotonic()
        answers = asyncio.run(send_all(server.url, asked, N_CONNECTIONS, TIMEOUT_S))
        storm_s = round(time.monotonic() - began_s, 1)
        try:
            n_left, told = left_behind(server.url)
        except requests.ConnectionError as error:  # a server that has died has returned nothing
            n_left, told = KV_TOKENS, {"died": repr(error)[:300]}
        answers += asyncio.run(send_all(server.url, [longest], 1, TIMEOUT_S))
    verdicts = [verdict(*one) for one in zip(answers, expected, strict=True)]
    counts = Counter(verdicts)
    rows: list[dict[str, Any]] = []
    for kind in dict.fromkeys(one.request.kind for one in answers):
        of_kind = Counter(word for one, word in zip(answers, verdicts, strict=True) if one.request.kind == kind)
        rows.append({"kind": kind, "requests": of_kind.total(), **of_kind})
    rows.append({"after the storm": {"storm_s": storm_s, **told}})
    for answer, was, word in zip(answers, expected, verdicts, strict=True):
        if word in (UNANSWERED, UNEQUAL) and len(rows) < 40:
            rows.append({**answer.failure, "alone": f"{was.raw[:300]!r}"})
    at_most = report.Target.at_most
    targets = [
        at_most("mixed storm: requests unanswered", counts[UNANSWERED], 0),
        at_most("mixed storm: answers unequal to a quiet server's", counts[UNEQUAL], 0),
        at_most("mixed storm: tokens of the cache not returned", n_left, 0),
    ]
    return report.part(rows, targets, commands={"ours, mixed": server.command})
