"""Steady traffic of every kind over a full cache: does a process grow after the first tenth of it, and does a request fail?

Users come and go, labels are new all the time, clients leave, and some send nonsense: what a server remembers of each must be
forgotten again. Memory is anonymous memory: a page that a forked process shares with the one it was forked from counts in both,
so that writing to it changes nothing.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import orjson
import psutil

from benchmarks import process_memory, report
from benchmarks.harness import engines
from benchmarks.storm import part

N_REQUESTS, N_QUICK = 100_000, 300
N_SAMPLES = 100  # of memory, one after each hundredth of the requests
FIRST = 10  # samples until growth counts
AROUND = 2  # memory is the median of this many samples on either side
CONCURRENCY = 32
KV_TOKENS = 8_000  # some 70 prompts
N_USERS, REQUESTS_A_USER = 500, 20  # users at a time; requests after which a user is replaced
CANCEL_AFTER_S = 0.004
SHARED_WORDS, OWN_WORDS = (15, 120), (5, 60)
TIMEOUT_S = 120
MIB = 1 << 20


class Request(NamedTuple):
    """A request, and with which statuses it may be answered."""

    kind: str
    path: str
    body: bytes
    user: str
    statuses: tuple[int, ...] = (200,)
    is_cancelled: bool = False  # its client leaves before it can be answered


class Sample(NamedTuple):
    """What one process holds."""

    bytes: int
    fds: int
    threads: int


def measure(quick: bool, model: Path, folder: Path) -> part.Part:
    """Sends all requests to one server. folder: for its log."""
    return run(N_QUICK if quick else N_REQUESTS, N_SAMPLES, FIRST, model, folder / "soak.txt")


def run(n_requests: int, n_samples: int, first: int, model: Path, log: Path) -> part.Part:
    """Sends the requests in one block for each sample, and compares the last samples with those around `first`."""
    traffic = Traffic(model)
    with part.serving(model, log, "--isolate-by", "user", kv_tokens=KV_TOKENS) as server:
        began_s = time.monotonic()
        samples, statuses, failed = asyncio.run(send_all(server, traffic, n_requests // n_samples, n_samples))
        elapsed_s = time.monotonic() - began_s
    rows = [row_of(name, of_process, first) for name, of_process in samples.items()]
    rows.append({"requests": n_requests, "requests_per_s": round(n_requests / elapsed_s), "statuses": statuses})
    growth = max(row["growth"] for row in rows if "growth" in row)
    n_first = first * n_requests // n_samples
    targets = [
        report.Target.at_most(
            f"steady traffic: largest growth of a process after the first {n_first:,} requests", growth, 0.02
        ),
        report.Target.at_most("steady traffic: requests that failed", len(failed), 0),
    ]
    rows += [{"failed": one} for one in failed[:20]]
    return part.Part(rows, targets, {"soak": server.command})


def row_of(name: str, samples: list[Sample], first: int) -> dict[str, Any]:
    """Says how much a process has grown, in the second half too (a leak goes on, a fragmented heap does not), and all samples."""
    middle, last = len(samples) // 2, len(samples) - AROUND
    moments = [samples[max(at - 1 - AROUND, 0) : at + AROUND] for at in (first, middle, last)]
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


async def send_all(
    server: engines.Running, traffic: Traffic, n_block: int, n_blocks: int
) -> tuple[dict[str, list[Sample]], dict[str, dict[str, int]], list[str]]:
    """Returns samples of each process, how often each kind of request got which status, and what failed."""
    processes = {name_of(process): process for process in part.processes(server.pid)}
    samples: dict[str, list[Sample]] = {name: [] for name in processes}
    statuses: dict[str, Counter[str]] = {}
    failed: list[str] = []
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2)  # see benchmarks.harness.client
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        for number in range(n_blocks):
            requests = iter([traffic.next() for _ in range(n_block)])
            workers = (work(session, server.url, requests, statuses, failed) for _ in range(CONCURRENCY))
            await asyncio.gather(*workers)
            for name, process in processes.items():
                samples[name].append(sample(process))
            left = {name: f"{of_process[-1].bytes / MIB:.0f}" for name, of_process in samples.items()}
            print(f"\rsoak: block {number + 1} of {n_blocks}, MiB {left}    ", end="", file=sys.stderr)
    print(file=sys.stderr)
    return samples, {kind: dict(of_kind) for kind, of_kind in sorted(statuses.items())}, failed


async def work(
    session: aiohttp.ClientSession,
    url: str,
    requests: Iterator[Request],
    statuses: dict[str, Counter[str]],
    failed: list[str],
) -> None:
    """Sends one request after another, until there is none."""
    for request in requests:
        headers = {"content-type": "application/json", **({"x-user-id": request.user} if request.user else {})}
        limit = aiohttp.ClientTimeout(total=CANCEL_AFTER_S) if request.is_cancelled else session.timeout
        try:
            async with session.post(url + request.path, data=request.body, headers=headers, timeout=limit) as reply:
                raw, got = await reply.read(), str(reply.status)
        except TimeoutError:
            raw, got = b"", "cancelled" if request.is_cancelled else "nothing"
        except aiohttp.ClientError as error:
            raw, got = repr(error).encode(), "closed"
        statuses.setdefault(request.kind, Counter())[got] += 1
        if got not in map(str, request.statuses) and got != "cancelled":
            failed.append(f"{request.kind}: {got} {raw[:300]!r} to {request.body[:300]!r}")


def name_of(process: psutil.Process) -> str:
    """Names a process by the title it has set; the launcher by its module."""
    words: list[str] = [word for word in process.cmdline() if word]
    if len(words) == 1:
        return words[0].rpartition("::")[2]
    return "launcher" if "sgl_prefill.launch_server" in words else "resource tracker"


def sample(process: psutil.Process) -> Sample:
    """Raises InvalidRunError where the process has ended: the server's log says why."""
    try:
        return Sample(process_memory.resident_bytes(process.pid), process.num_fds(), process.num_threads())
    except (FileNotFoundError, psutil.NoSuchProcess) as error:
        raise report.InvalidRunError(f"a process of the server has ended: {error}") from error


class Traffic:
    """An endless mixture of requests, the same in every run."""

    def __init__(self, model: Path) -> None:
        self._rng = random.Random(0)
        self._words = words_of(model)
        self._n_made = 0
        prefix = functools.partial(_prefix, self._words)
        self._prefix = functools.lru_cache(2 * N_USERS)(prefix)
        kinds: tuple[tuple[int, Callable[[str], Request]], ...] = (
            (24, self._completion_by_text),
            (15, self._completion_by_ids),
            (10, self._generate_by_text),
            (10, self._generate_ids),
            (12, self._chat),
            (10, self._score),
            (5, self._rerank),
            (4, self._with_deadline),
            (4, self._cancelled),
            (2, self._unknown_label),
            (4, self._bad),
        )
        self._kinds = [kind for _, kind in kinds]
        self._weights = list(itertools.accumulate(weight for weight, _ in kinds))

    def next(self) -> Request:
        rng = self._rng
        newest = N_USERS + self._n_made // REQUESTS_A_USER
        self._n_made += 1
        user = f"user {rng.randrange(newest - N_USERS, newest)}"
        request = rng.choices(self._kinds, cum_weights=self._weights)[0](user)
        return request._replace(user="") if rng.random() < 0.05 else request

    def _completion_by_text(self, user: str) -> Request:
        body = {"prompt": self._text(user), "allowed_tokens": self._labels(), **self._rid()}
        return self._request("completion, labels as text", "/v1/completions", body, user)

    def _completion_by_ids(self, user: str) -> Request:
        body = {"prompt": self._text(user), "allowed_token_ids": self._ids(), "user": user, **self._rid()}
        return self._request("completion, labels as ids", "/v1/completions", body, user)

    def _generate_by_text(self, user: str) -> Request:
        body = {"text": [self._text(user), self._text(user)], "allowed_tokens": self._labels()}
        return self._request("generate, two prompts", "/generate", body, user)

    def _generate_ids(self, user: str) -> Request:
        prompt = random.Random(user).choices(range(1000, 40_000), k=50) + self._rng.choices(range(1000, 40_000), k=20)
        sampling = {"max_new_tokens": 0, "temperature": 0}
        body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True, **self._rid()}
        return self._request("generate, ids", "/generate", {**body, "token_ids_logprob": self._ids()}, user)

    def _chat(self, user: str) -> Request:
        messages = [{"role": "system", "content": self._prefix(user)}, {"role": "user", "content": self._own_text()}]
        labels: dict[str, Any] = {"allowed_tokens": [label.strip() for label in self._labels()]}
        if self._rng.random() < 0.5:
            labels = {"allowed_token_ids": self._ids()}
        return self._request("chat", "/v1/chat/completions", {"messages": messages, **labels}, user)

    def _score(self, user: str) -> Request:
        items = [" " + self._own_text() for _ in range(2)]
        body = {"query": self._prefix(user), "items": items, "label_token_ids": self._ids(), "apply_softmax": True}
        return self._request("score", "/v1/score", body, user)

    def _rerank(self, user: str) -> Request:
        body = {"query": self._own_text(), "documents": [self._own_text() for _ in range(3)]}
        return self._request("rerank", "/v1/rerank", body, user)

    def _with_deadline(self, user: str) -> Request:
        deadline_ms = self._rng.choice((1, 20, 100, 10_000))
        body = {"prompt": self._text(user), "allowed_token_ids": self._ids(), "deadline_ms": deadline_ms}
        return self._request("deadline", "/v1/completions", body, user, (200, 429, 504))

    def _cancelled(self, user: str) -> Request:
        body = {"prompt": self._text(user), "allowed_token_ids": self._ids(), **self._rid()}
        return self._request("cancelled", "/v1/completions", body, user)._replace(is_cancelled=True)

    def _unknown_label(self, user: str) -> Request:
        labels = [*self._labels(), f" no such token {self._rng.random()}"]
        body = {"prompt": self._text(user), "allowed_tokens": labels}
        return self._request("unknown label", "/v1/completions", body, user, (400,))

    def _bad(self, user: str) -> Request:
        body: dict[str, Any] = self._rng.choice(
            (
                {"prompt": "", "allowed_token_ids": [5, 6]},
                {"prompt": self._text(user), "allowed_token_ids": [5, 10**7]},
                {"prompt": self._text(user), "max_tokens": 500},
                {"prompt": self._text(user), "allowed_token_ids": [5, 6], "deadline_ms": -1},
                {"prompt": self._rng.choices(range(1000, 40_000), k=9000), "allowed_token_ids": [5, 6]},
            )
        )
        request = self._request("bad", "/v1/completions", body, user, (400,))
        return request._replace(body=request.body[:-5]) if self._rng.random() < 0.3 else request  # no JSON

    def _request(
        self, kind: str, path: str, body: dict[str, Any], user: str, statuses: tuple[int, ...] = (200,)
    ) -> Request:
        return Request(kind, path, orjson.dumps({"model": "default", **body}), user, statuses)

    def _rid(self) -> dict[str, str]:
        return {"rid": f"rid {self._n_made}"} if self._rng.random() < 0.3 else {}

    def _text(self, user: str) -> str:
        return f"{self._prefix(user)} {self._own_text()}"

    def _own_text(self) -> str:
        return " ".join(self._rng.choices(self._words, k=self._rng.randint(*OWN_WORDS)))

    def _labels(self) -> list[str]:
        return [f" {word}" for word in self._rng.sample(self._words, self._rng.randint(2, 6))]

    def _ids(self) -> list[int]:
        return self._rng.sample(range(1000, 40_000), self._rng.randint(2, 6))


def words_of(model: Path) -> list[str]:
    """Returns words that are one token after a space and at the start of a text."""
    vocabulary: dict[str, int] = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"]
    words = [word for word in vocabulary if len(word) > 2 and word.isascii() and word.isalpha()]
    return sorted(word for word in words if f"Ġ{word}" in vocabulary)


def _prefix(words: list[str], user: str) -> str:
    rng = random.Random(user)
    return " ".join(rng.choices(words, k=rng.randint(*SHARED_WORDS)))
