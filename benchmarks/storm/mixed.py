"""A storm of requests of every kind on a cache that holds none of the long ones: is each answered as on a quiet server?

The same prompts are asked one by one first. A client that leaves is not answered; a request that asks for a deadline
may be refused for it. Afterwards nothing may be left behind, no request and no token of the cache, and a long prompt
is answered as before.
"""

from __future__ import annotations

import asyncio
import math
import random
import resource
import time
from collections import Counter
from collections.abc import Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import orjson
import requests

from benchmarks import report, shapes
from benchmarks.storm import part
from benchmarks.storm.part import Part

N_REQUESTS, N_REQUESTS_QUICK = 2_000, 100
N_CONNECTIONS = 200
KV_TOKENS = 2_000
LONGEST_TOKENS = 6_000
TIMEOUT_S = 600
IDLE_S = 60  # after the storm
FLAGS = ("--isolate-by", "user", "--enable-priority-scheduling", "--max-input-length", "8000")
LABEL_IDS = [9805, 787, 5000]
TEXT_LABELS = [" yes", " no"]
TENANTS = ("ann", "bob", "cy", None)
PRIORITY_SHARE, BACKGROUND_SHARE = 0.2, 0.1
MOST_EXAMPLES = 20
WORDS = (
    "the",
    "sky",
    "over",
    "harbour",
    "was",
    "blue",
    "late",
    "package",
    "soft",
    "green",
    "seven",
    "lamps",
    "rain",
    "nobody",
)

# Each kind, and how many of a hundred requests are of it.
KINDS = {
    "long": 6,
    "shared prefix": 24,
    "text labels": 12,
    "chat": 10,
    "batch": 8,
    "native": 12,  # /generate with token_ids_logprob
    "one token": 6,  # as stock answers it: /v1/completions with logprobs
    "cancelled": 10,
    "impossible deadline": 3,
    "short deadline": 5,
    "bad body": 4,
}


class Asked(NamedTuple):
    """One request of the storm."""

    kind: str
    path: str
    body: dict[str, Any]
    headers: dict[str, str]
    leaves_after_s: float | None = None  # the client closes then, answered or not


class Answer(NamedTuple):
    """What came; `status` is None where nothing did, `logprobs` is empty for what is no answer."""

    status: int | None
    logprobs: list[float]
    text: str = ""
    left: bool = False


class Left(NamedTuple):
    """What a server holds after the storm."""

    n_tokens: int  # of the cache that are neither free nor evictable
    last_differs: bool  # the answer to a last long prompt is not the one before
    told: dict[str, Any]


class Maker:
    """Makes the requests, from one seed. Prompts come from a small stock, so that prefixes are shared."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._prefixes = [shapes.token_ids(self._rng, length) for length in (40, 150, 400, 900, 1500, 2500)]
        self._prompts = [
            [*prefix, *shapes.token_ids(self._rng, self._rng.randint(1, 60))]
            for prefix in self._prefixes
            for _ in range(8)
        ]
        longest = [1_900, 2_100, 3_000, 4_500, LONGEST_TOKENS]
        self._long = [shapes.token_ids(self._rng, n_tokens) for n_tokens in longest]
        self._texts = [self._text(self._rng.randint(5, 120)) for _ in range(30)]
        self._batches = [
            [prefix[:30] + shapes.token_ids(self._rng, 8) for _ in range(self._rng.randint(2, 12))]
            for prefix in self._prefixes
        ]

    @property
    def longest(self) -> list[int]:
        return self._long[-1]

    def make(self) -> Asked:
        (kind,) = self._rng.choices(list(KINDS), list(KINDS.values()))
        headers = {}
        if (tenant := self._rng.choice(TENANTS)) is not None:
            headers["x-user-id"] = tenant
        if self._rng.random() < BACKGROUND_SHARE:
            headers["x-prefill-background"] = "1"
        path, body = self._of(kind)
        if self._rng.random() < PRIORITY_SHARE and kind != "bad body":
            body["priority"] = self._rng.randint(-3, 3)
        leaves_after_s = self._rng.uniform(0, 0.3) if kind == "cancelled" else None
        return Asked(kind, path, body, headers, leaves_after_s)

    def _of(self, kind: str) -> tuple[str, dict[str, Any]]:
        rng = self._rng
        if kind == "cancelled":
            return self._of(rng.choice(("long", "shared prefix", "batch", "native", "chat", "one token")))
        if kind == "long":
            return "/v1/completions", {"prompt": rng.choice(self._long), "allowed_token_ids": LABEL_IDS}
        if kind == "text labels":
            return "/v1/completions", {"prompt": rng.choice(self._texts), "allowed_tokens": TEXT_LABELS}
        if kind == "chat":
            messages = [{"role": "user", "content": rng.choice(self._texts)}]
            return "/v1/chat/completions", {"messages": messages, "allowed_token_ids": LABEL_IDS}
        if kind == "batch":
            return "/v1/completions", {"prompt": rng.choice(self._batches), "allowed_token_ids": LABEL_IDS}
        if kind == "native":
            return "/generate", {
                "input_ids": rng.choice(self._prompts),
                "sampling_params": {"max_new_tokens": 0},
                "return_logprob": True,
                "token_ids_logprob": LABEL_IDS,
            }
        if kind == "one token":
            options = {"max_tokens": 1, "temperature": 0, "logprobs": 2}
            return "/v1/completions", {"prompt": rng.choice(self._prompts), **options}
        if kind == "bad body":
            return "/v1/completions", rng.choice(
                (
                    {"prompt": [5] * 9_000, "allowed_token_ids": LABEL_IDS},
                    {"prompt": "", "allowed_tokens": TEXT_LABELS},
                    {"prompt": [10**11], "allowed_token_ids": LABEL_IDS},
                    {"prompt": "a", "allowed_tokens": [" absolutely not"]},
                    {"prompt": "a", "max_tokens": 50},
                )
            )
        body: dict[str, Any] = {"prompt": rng.choice(self._prompts), "allowed_token_ids": LABEL_IDS}
        if kind == "impossible deadline":
            body["deadline_ms"] = 1
        elif kind == "short deadline":
            body["deadline_ms"] = rng.choice((50, 200, 1000, 4000))
        return "/v1/completions", body

    def _text(self, n_words: int) -> str:
        return " ".join(self._rng.choices(WORDS, k=n_words)) + ". Is it so? Answer:"


def reference_key(asked: Asked) -> bytes:
    """The parts of a request on which its answer may depend: not its user, nor its priority."""
    body = {key: value for key, value in asked.body.items() if key not in ("priority", "deadline_ms")}
    return orjson.dumps([asked.path, body])


def logprobs_of(path: str, body: dict[str, Any], answer: Any) -> list[float]:
    """Reads the log-probabilities of all prompts of an answer, one after the other."""
    if path == "/generate":
        return [entry[0] for entry in answer["meta_info"]["output_token_ids_logprobs"][0]]
    choices = sorted(answer["choices"], key=lambda choice: int(choice["index"]))
    if "logprobs" in body:
        return [logprob for choice in choices for logprob in choice["logprobs"]["token_logprobs"]]
    return [label["logprob"] for choice in choices for label in choice["label_scores"]["labels"]]


def references(url: str, all_asked: Sequence[Asked]) -> dict[bytes, list[float]]:
    """Asks each distinct prompt alone, without tenant, priority or deadline. Raises InvalidRunError where one fails."""
    found: dict[bytes, list[float]] = {}
    for asked in all_asked:
        key = reference_key(asked)
        if asked.kind in ("bad body", "cancelled") or key in found:
            continue
        path, body = orjson.loads(key)
        reply = requests.post(url + path, json=body, timeout=TIMEOUT_S)
        if reply.status_code != HTTPStatus.OK:
            raise report.InvalidRunError(f"{path} on a quiet server: {reply.status_code} {reply.text[:300]}")
        found[key] = logprobs_of(path, body, reply.json())
    return found


async def storm(url: str, all_asked: Sequence[Asked]) -> list[Answer]:
    """Sends all, over as many connections at once as there are."""
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    slots = asyncio.Semaphore(N_CONNECTIONS)  # not the connector's limit: a client that leaves must have been connected
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:

        async def post(asked: Asked) -> Answer:
            data, headers = orjson.dumps(asked.body), {"content-type": "application/json", **asked.headers}
            async with session.post(url + asked.path, data=data, headers=headers) as reply:
                raw = await reply.read()
            if reply.status != HTTPStatus.OK:
                return Answer(reply.status, [], raw.decode(errors="replace"))
            return Answer(reply.status, logprobs_of(asked.path, asked.body, orjson.loads(raw)))

        async def one(asked: Asked) -> Answer:
            async with slots:
                try:
                    return await asyncio.wait_for(post(asked), asked.leaves_after_s)
                except (TimeoutError, aiohttp.ClientError) as error:
                    return Answer(None, [], repr(error), left=asked.leaves_after_s is not None)

        return list(await asyncio.gather(*map(one, all_asked)))


def verdict(asked: Asked, answer: Answer, expected: list[float] | None) -> str:
    """Says in a word what came of a request: `unanswered` and `unequal` must not be."""
    if answer.left:
        return "cancelled"
    if answer.status is None:
        return "unanswered"
    if asked.kind == "bad body":
        return "refused" if answer.status == HTTPStatus.BAD_REQUEST else "unanswered"
    late = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.GATEWAY_TIMEOUT)
    if "deadline_ms" in asked.body and answer.status in late:
        return "refused for its deadline"
    if answer.status != HTTPStatus.OK:
        return "unanswered"
    if expected is None:
        return "answered before it was cancelled"
    same = len(answer.logprobs) == len(expected) and not part.differs(answer.logprobs, expected)
    return "as on a quiet server" if same else "unequal"


def load(url: str) -> dict[str, Any]:
    """Returns what SGLang's scheduler says that it holds at this moment."""
    loads: list[dict[str, Any]] = requests.get(f"{url}/v1/loads", timeout=TIMEOUT_S).json()["loads"]
    return loads[0]


def wait_until_idle(url: str) -> float:
    """Returns the seconds until nothing runs and nothing waits, at most IDLE_S."""
    began_s = time.monotonic()
    while (waited_s := time.monotonic() - began_s) < IDLE_S:
        now = load(url)
        if now["num_running_reqs"] == 0 and now["num_waiting_reqs"] == 0:
            break
        time.sleep(0.1)
    return waited_s


def slots_not_returned(url: str) -> tuple[int, dict[str, Any]]:
    """Flushes the cache, and returns how many tokens of it are then still in use, and what the server said."""
    reply = requests.post(f"{url}/flush_cache", params={"timeout": IDLE_S}, timeout=2 * IDLE_S)
    now = load(url)
    # Gauges are written after a step, so one prompt runs after the flush. Only the cache holds its tokens then.
    requests.post(f"{url}/generate", json={"input_ids": [5, 6, 7], "allowed_token_ids": LABEL_IDS}, timeout=TIMEOUT_S)
    free = gauge(url, "sglang:kv_available_tokens") + gauge(url, "sglang:kv_evictable_tokens")
    told = {
        "flush_cache": reply.status_code,
        "num_used_tokens": now["num_used_tokens"],
        "num_running_reqs": now["num_running_reqs"],
        "free_or_evictable_tokens": free,
        "all_tokens": now["max_total_num_tokens"],
    }
    lost = max(int(now["num_used_tokens"]), int(now["max_total_num_tokens"] - free))
    return (lost if reply.status_code == HTTPStatus.OK else max(lost, 1)), told


def gauge(url: str, name: str) -> float:
    metrics = requests.get(f"{url}/metrics", timeout=TIMEOUT_S).text
    return sum(float(line.rsplit(" ", 1)[1]) for line in metrics.splitlines() if line.startswith(f"{name}{{"))


def last_answer(url: str, prompt: list[int]) -> list[float]:
    body = {"prompt": prompt, "allowed_token_ids": LABEL_IDS}
    reply = requests.post(f"{url}/v1/completions", json=body, timeout=TIMEOUT_S)
    return logprobs_of("/v1/completions", body, reply.json()) if reply.status_code == HTTPStatus.OK else [math.nan]


def left_behind(url: str, longest: list[int], expected: list[float]) -> Left:
    """Waits until the server is idle, and looks at what it still holds; a server that has died has returned nothing."""
    try:
        idle_s = wait_until_idle(url)
        n_tokens, told = slots_not_returned(url)
        last = last_answer(url, longest)
    except requests.ConnectionError as error:
        return Left(KV_TOKENS, True, {"died": repr(error)[:300]})
    differs = len(last) != len(expected) or part.differs(last, expected)
    return Left(n_tokens, differs, {"idle_after_s": round(idle_s, 1), **told})


def measure(quick: bool, model: Path, folder: Path) -> Part:
    """Asks the prompts one by one, then all kinds at once, and looks at what is left."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    maker = Maker(seed=0)
    all_asked = [maker.make() for _ in range(N_REQUESTS_QUICK if quick else N_REQUESTS)]
    with part.serving(model, folder / "mixed.log", *FLAGS, kv_tokens=KV_TOKENS) as server:
        expected = references(server.url, all_asked)
        last_expected = last_answer(server.url, maker.longest)
        server.flush_cache()
        began_s = time.monotonic()
        answers = asyncio.run(storm(server.url, all_asked))
        storm_s = time.monotonic() - began_s
        left = left_behind(server.url, maker.longest, last_expected)
    verdicts = [
        verdict(asked, answer, None if asked.kind == "cancelled" else expected.get(reference_key(asked)))
        for asked, answer in zip(all_asked, answers, strict=True)
    ]
    counts = Counter(verdicts)
    targets = [
        report.Target.at_most("mixed storm: requests unanswered", counts["unanswered"], 0),
        report.Target.at_most(
            "mixed storm: answers unequal to a quiet server's", counts["unequal"] + left.last_differs, 0
        ),
        report.Target.at_most("mixed storm: tokens of the cache not returned", left.n_tokens, 0),
    ]
    after = {"storm_s": round(storm_s, 1), **left._asdict()}
    rows = [*_rows(all_asked, verdicts), {"after the storm": after}, *_examples(all_asked, answers, verdicts, expected)]
    return Part(rows, targets, {"ours, mixed": server.command})


def _rows(all_asked: Sequence[Asked], verdicts: Sequence[str]) -> list[dict[str, Any]]:
    rows = []
    for kind in KINDS:
        of_kind = Counter(word for asked, word in zip(all_asked, verdicts, strict=True) if asked.kind == kind)
        rows.append({"kind": kind, "requests": of_kind.total(), **of_kind})
    return rows


def _examples(
    all_asked: Sequence[Asked],
    answers: Sequence[Answer],
    verdicts: Sequence[str],
    expected: dict[bytes, list[float]],
) -> list[dict[str, Any]]:
    """Shows what failed."""
    failed = [
        {
            "example": word,
            "kind": asked.kind,
            "sent": f"{asked.path} {asked.headers} {orjson.dumps(asked.body).decode()[:200]}",
            "status": answer.status,
            "reply": answer.text[:300],
            "logprobs": answer.logprobs[:6],
            "expected": expected.get(reference_key(asked), [])[:6],
        }
        for asked, answer, word in zip(all_asked, answers, verdicts, strict=True)
        if word in ("unanswered", "unequal")
    ]
    return failed[:MOST_EXAMPLES]
