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
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import orjson
import requests

from benchmarks import report, shapes
from benchmarks.storm import part
from benchmarks.storm.part import Part
from benchmarks.storm.traffic import BAD, OK, Request, Traffic

N_REQUESTS, N_REQUESTS_QUICK = 2_000, 100
N_CONNECTIONS = 200
KV_TOKENS = 2_000
LONG_TOKENS = (1_900, 2_100, 3_000, 4_500, 6_000)
LONG_SHARE, PRIORITY_SHARE, BACKGROUND_SHARE = 0.06, 0.2, 0.1
LEAVES_S = 0.3
TIMEOUT_S = 600
IDLE_S = 60  # after the storm
FLAGS = ("--isolate-by", "user", "--enable-priority-scheduling", "--max-input-length", "8000")
MOST_EXAMPLES = 20
CANCELLED, UNANSWERED, UNEQUAL = "cancelled", "unanswered", "unequal"


class Answer(NamedTuple):
    """What came; `status` is None where nothing did, `logprobs` is empty for what is no answer."""

    status: int | None
    logprobs: list[float]
    text: str = ""


def requests_of(model: Path, n: int) -> list[Request]:
    rng, traffic = random.Random(0), Traffic(model, LEAVES_S)
    all_long = [shapes.token_ids(rng, n_tokens) for n_tokens in LONG_TOKENS]
    made = []
    for _ in range(n):
        request = traffic.next()
        if rng.random() < LONG_SHARE:
            body = {"prompt": rng.choice(all_long), "allowed_token_ids": [9805, 787, 5000]}
            request = Request("long", "/v1/completions", body, request.user)
        if rng.random() < PRIORITY_SHARE:
            request = request._replace(body={**request.body, "priority": rng.randint(-3, 3)})
        made.append(request._replace(background=rng.random() < BACKGROUND_SHARE))
    return made


def alone(request: Request) -> Request:
    """The parts of a request on which its answer may depend: not its user, its priority or its deadline."""
    body = {name: value for name, value in request.body.items() if name not in ("priority", "deadline_ms", "rid")}
    return request._replace(body=body, user="", background=False, leaves_after_s=None)


async def send_all(url: str, all_asked: Sequence[Request], n_at_once: int) -> list[Answer]:
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    slots = asyncio.Semaphore(n_at_once)  # not the connector's limit: a client that leaves must have been connected
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:

        async def post(asked: Request) -> Answer:
            async with session.post(url + asked.path, data=asked.sent, headers=asked.headers) as reply:
                raw = await reply.read()
            found = logprobs_of(asked, orjson.loads(raw)) if reply.status in OK else []
            return Answer(reply.status, found, raw.decode(errors="replace"))

        async def one(asked: Request) -> Answer:
            async with slots:
                try:
                    return await asyncio.wait_for(post(asked), asked.leaves_after_s)
                except (TimeoutError, aiohttp.ClientError) as error:
                    return Answer(None, [], repr(error))

        return list(await asyncio.gather(*map(one, all_asked)))


def logprobs_of(asked: Request, answer: Any) -> list[float]:
    """Reads the numbers of all prompts of an answer, one after the other."""
    if asked.path == "/v1/score":
        return [score for row in answer["scores"] for score in row]
    if asked.path == "/v1/rerank":
        return [one["score"] for one in sorted(answer, key=lambda one: int(one["index"]))]
    if asked.path == "/generate":
        several = answer if isinstance(answer, list) else [answer]
        if "allowed_tokens" in asked.body:
            return [label["logprob"] for one in several for label in one["meta_info"]["label_scores"]["labels"]]
        return [entry[0] for one in several for entry in one["meta_info"]["output_token_ids_logprobs"][0]]
    choices = answer["choices"]
    if "max_tokens" in asked.body:
        return [logprob for choice in choices for logprob in choice["logprobs"]["token_logprobs"]]
    return [label["logprob"] for choice in choices for label in choice["label_scores"]["labels"]]


def verdict(asked: Request, answer: Answer, expected: Answer) -> str:
    """Says in a word what came of a request: UNANSWERED and UNEQUAL must not be."""
    if answer.status is None:
        return UNANSWERED if asked.leaves_after_s is None else CANCELLED
    if answer.status not in asked.statuses:
        return UNANSWERED
    if answer.status not in OK:
        return "refused" if asked.statuses == BAD else "refused for its deadline"
    same = len(answer.logprobs) == len(expected.logprobs) and not part.differs(answer.logprobs, expected.logprobs)
    return "as on a quiet server" if same else UNEQUAL


def wait_until_idle(url: str) -> float:
    """Returns the seconds until nothing runs and nothing waits, at most IDLE_S."""
    began_s = time.monotonic()
    while (waited_s := time.monotonic() - began_s) < IDLE_S:
        now = load(url)
        if now["num_running_reqs"] == 0 and now["num_waiting_reqs"] == 0:
            break
        time.sleep(0.1)
    return waited_s


def load(url: str) -> dict[str, Any]:
    """Returns what SGLang's scheduler says that it holds at this moment."""
    loads: list[dict[str, Any]] = requests.get(f"{url}/v1/loads", timeout=TIMEOUT_S).json()["loads"]
    return loads[0]


def gauge(url: str, name: str) -> float:
    metrics = requests.get(f"{url}/metrics", timeout=TIMEOUT_S).text
    return sum(float(line.rsplit(" ", 1)[1]) for line in metrics.splitlines() if line.startswith(f"{name}{{"))


def tokens_left(url: str, prompt: Request) -> tuple[int, dict[str, Any]]:
    """Flushes the cache, and returns how many tokens of it are then still in use, and what the server said."""
    told: dict[str, Any] = {"idle_after_s": round(wait_until_idle(url), 1)}
    told["flush_cache"] = requests.post(
        f"{url}/flush_cache", params={"timeout": IDLE_S}, timeout=2 * IDLE_S
    ).status_code
    now = load(url)
    # Gauges are written after a step, so one prompt runs after the flush. Only the cache holds its tokens then.
    requests.post(f"{url}{prompt.path}", json=prompt.body | {"prompt": [5, 6, 7]}, timeout=TIMEOUT_S)
    free = gauge(url, "sglang:kv_available_tokens") + gauge(url, "sglang:kv_evictable_tokens")
    told |= {name: now[name] for name in ("num_used_tokens", "num_running_reqs", "max_total_num_tokens")}
    told["free_or_evictable_tokens"] = free
    lost = max(int(now["num_used_tokens"]), int(now["max_total_num_tokens"] - free))
    return (lost if told["flush_cache"] in OK else max(lost, 1)), told


def measure(quick: bool, model: Path, folder: Path) -> Part:
    """Asks each alone, then all at once, and looks at what is left."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    all_asked = requests_of(model, N_REQUESTS_QUICK if quick else N_REQUESTS)
    longest = Request(
        "long",
        "/v1/completions",
        {"prompt": shapes.token_ids(random.Random(1), 6_000), "allowed_token_ids": [5, 6]},
        "",
    )
    with part.serving(model, folder / "mixed.log", *FLAGS, kv_tokens=KV_TOKENS) as server:
        *expected, before = asyncio.run(send_all(server.url, [*map(alone, all_asked), longest], 1))
        requests.post(f"{server.url}/flush_cache", timeout=TIMEOUT_S)
        began_s = time.monotonic()
        answers = asyncio.run(send_all(server.url, all_asked, N_CONNECTIONS))
        told: dict[str, Any] = {"storm_s": round(time.monotonic() - began_s, 1)}
        try:
            n_left, found = tokens_left(server.url, longest)
            (after,) = asyncio.run(send_all(server.url, [longest], 1))
        except requests.ConnectionError as error:  # a server that has died has returned nothing
            n_left, found, after = KV_TOKENS, {"died": repr(error)[:300]}, Answer(None, [])
    triples = list(zip(all_asked, answers, expected, strict=True))
    verdicts = [verdict(*one) for one in (*triples, (longest, after, before))]
    counts = Counter(verdicts)
    targets = [
        report.Target.at_most("mixed storm: requests unanswered", counts[UNANSWERED], 0),
        report.Target.at_most("mixed storm: answers unequal to a quiet server's", counts[UNEQUAL], 0),
        report.Target.at_most("mixed storm: tokens of the cache not returned", n_left, 0),
    ]
    rows: list[dict[str, Any]] = []
    for kind in dict.fromkeys(one.kind for one in all_asked):
        of_kind = Counter(word for one, word in zip(all_asked, verdicts, strict=False) if one.kind == kind)
        rows.append({"kind": kind, "requests": of_kind.total(), **of_kind})
    rows.append({"after the storm": told | found})
    failed = [one for one, word in zip(triples, verdicts, strict=False) if word in (UNANSWERED, UNEQUAL)]
    for asked, answer, was in failed[:MOST_EXAMPLES]:
        sent = f"{asked.path} {asked.headers} {asked.sent[:200]!r}"
        replies = {"reply": answer.text[:300], "expected": was.text[:300]}
        rows.append({"example": asked.kind, "sent": sent, "status": answer.status, **replies})
    return Part(rows, targets, {"ours, mixed": server.command})
