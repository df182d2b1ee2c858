"""An open-loop client: requests are sent when they are due, whether or not earlier ones have been answered.

A closed loop (workers that each wait for an answer) slows down with the engine and hides what a queue does.
"""

from __future__ import annotations

import asyncio
import itertools
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import aiohttp
import orjson

from benchmarks import report
from sgl_prefill.plan import percentile

LABEL_IDS = (100, 200, 300)
TIMEOUT_S = 3600


class Due(NamedTuple):
    """A prompt, when it arrives, in seconds from the start of the run, and the request for it."""

    at_s: float
    input_ids: list[int]
    label_ids: Sequence[int] = LABEL_IDS
    n_new_tokens: int = 0  # 0: prefill only
    user: str = ""  # "": the request names no user
    text: str | None = None  # None: the request has the token ids, else this text


class Outcome(NamedTuple):
    """How one request was answered; times in seconds from the start of the run."""

    at_s: float
    sent_s: float
    first_byte_s: float
    finish_s: float
    prompt_tokens: int
    cached_tokens: int
    logprobs: list[float]
    queue_s: float | None = None  # from the HTTP process to its forward, by the server's clock; needs --enable-metrics

    @property
    def latency_s(self) -> float:
        """Counts from when it was due: what the client itself lost counts too."""
        return self.finish_s - self.at_s


class Figures(NamedTuple):
    """What one run comes to."""

    requests: int
    mean_s: float
    p50_s: float
    p99_s: float
    longest_s: float
    requests_per_s: float
    cached_share: float  # of all prompt tokens


class Answer(NamedTuple):
    """What a reply says."""

    prompt_tokens: int
    cached_tokens: int
    logprobs: list[float]  # of the labels, as the first new token
    queue_s: float | None = None


class Dialect(NamedTuple):
    """How a kind of server is asked for the log-probabilities of the labels."""

    path: str
    body_of: Callable[[Due], dict[str, Any]]
    answer_of: Callable[[dict[str, Any], Due], Answer]
    flush_path: str  # empties the prefix cache


def run(url: str, dues: Sequence[Due], name: str, dialect: Dialect | None = None) -> list[Outcome]:
    """Send all and wait for all. Raises InvalidRunError where a request fails: none may be lost. dialect: None: SGLANG."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a connection each
    return asyncio.run(_run(url, dues, name, dialect or SGLANG))


def figures(outcomes: Sequence[Outcome]) -> Figures:
    """Percentiles are nearest-rank."""
    latencies = sorted(one.latency_s for one in outcomes)
    first, last = min(one.at_s for one in outcomes), max(one.finish_s for one in outcomes)
    return Figures(
        requests=len(outcomes),
        mean_s=sum(latencies) / len(latencies),
        p50_s=percentile(latencies, 50),
        p99_s=percentile(latencies, 99),
        longest_s=latencies[-1],
        requests_per_s=len(outcomes) / (last - first),
        cached_share=sum(one.cached_tokens for one in outcomes) / sum(one.prompt_tokens for one in outcomes),
    )


def check_agreement(
    answers: Sequence[list[float]], others: Sequence[list[float]], max_difference: float, name: str
) -> None:
    """Compares two engines' log-probabilities for the same prompts, one by one and, with a quarter of that limit, on average.

    Raises InvalidRunError naming the engine of `answers`.
    """
    apart: list[float] = []
    for ours, theirs in zip(answers, others, strict=True):
        of_prompt = [abs(a - b) for a, b in zip(ours, theirs, strict=True)]
        if not all(one <= max_difference for one in of_prompt):  # NaN is no agreement either
            raise report.InvalidRunError(f"{name} disagrees with another engine: {ours} and {theirs}")
        apart += of_prompt
    if apart and (mean := statistics.mean(apart)) > max_difference / 4:
        raise report.InvalidRunError(f"{name} disagrees with another engine by {mean:.3f} on average")


def told_apart(answers: Sequence[list[float]], max_difference: float) -> float:
    """The share of answers that `check_agreement` would reject if they were swapped for the preceding request's answer."""
    differ = [
        any(abs(a - b) > max_difference for a, b in zip(one, before, strict=True))
        for before, one in itertools.pairwise(answers)
    ]
    return sum(differ) / max(len(differ), 1)


def body_of(due: Due) -> dict[str, Any]:
    """The body of a request to `/generate`, the same for every engine."""
    ends = {"ignore_eos": True} if due.n_new_tokens else {}  # all engines generate equally many
    return {
        **({"input_ids": due.input_ids} if due.text is None else {"text": due.text}),
        "sampling_params": {"max_new_tokens": due.n_new_tokens, "temperature": 0, **ends},
        "return_logprob": True,
        "token_ids_logprob": due.label_ids,
    }


def label_logprobs(meta: dict[str, Any]) -> list[float]:
    """Of the first new token, from an answer's `meta_info`."""
    return [entry[0] for entry in meta["output_token_ids_logprobs"][0]]


def _answer(reply: dict[str, Any], _: Due) -> Answer:
    meta = reply["meta_info"]
    return Answer(meta["prompt_tokens"], meta["cached_tokens"], label_logprobs(meta), _queue_s(meta))


def _completion_body(due: Due) -> dict[str, Any]:
    return {
        "prompt": due.input_ids if due.text is None else due.text,
        "max_tokens": max(due.n_new_tokens, 1),
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 1,
        "logprob_token_ids": list(due.label_ids),
        "return_tokens_as_token_ids": True,
    }


def _completion_answer(reply: dict[str, Any], due: Due) -> Answer:
    usage = reply["usage"]
    first = reply["choices"][0]["logprobs"]["top_logprobs"][0]
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return Answer(usage["prompt_tokens"], cached, [first[f"token_id:{label}"] for label in due.label_ids])


SGLANG = Dialect("/generate", body_of, _answer, "/flush_cache")
VLLM = Dialect("/v1/completions", _completion_body, _completion_answer, "/reset_prefix_cache")


async def _run(url: str, dues: Sequence[Due], name: str, dialect: Dialect) -> list[Outcome]:
    bodies = [orjson.dumps(dialect.body_of(due)) for due in dues]
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    n_done = 0
    # A connection that idles for longer than servers keep theirs (5 s) may end just as a request is sent on it.
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        started = time.perf_counter()

        async def one(due: Due, body: bytes) -> Outcome:
            nonlocal n_done
            while (sent_s := time.perf_counter() - started) < due.at_s:  # a timer may fire a clock tick early
                await asyncio.sleep(due.at_s - sent_s)
            headers = {"content-type": "application/json"} | ({"x-user-id": due.user} if due.user else {})
            try:
                async with session.post(f"{url}{dialect.path}", data=body, headers=headers) as reply:
                    first_byte_s = time.perf_counter() - started
                    raw = await reply.read()
            except (TimeoutError, aiohttp.ClientError) as error:
                raise report.InvalidRunError(f"{name}: no answer to a request ({error!r})") from error
            finish_s = time.perf_counter() - started
            if reply.status != 200:
                raise report.InvalidRunError(f"{name}: a request failed with {reply.status}: {raw[:300]!r}")
            answer = dialect.answer_of(orjson.loads(raw), due)
            n_done += 1
            return Outcome(due.at_s, sent_s, first_byte_s, finish_s, *answer)

        async def show_progress() -> None:
            while True:
                await asyncio.sleep(2)
                left_s = (time.perf_counter() - started) / max(n_done, 1) * (len(dues) - n_done)
                print(f"\r{name}: {n_done} of {len(dues)}, {left_s:.0f} s left    ", end="", file=sys.stderr)

        progress = asyncio.create_task(show_progress())
        try:
            return list(await asyncio.gather(*map(one, dues, bodies)))
        finally:
            progress.cancel()
            print(file=sys.stderr)


def _queue_s(meta: dict[str, Any]) -> float | None:
    if "forward_entry_time" not in meta or "api_server_dispatch_finish_ts" not in meta:
        return None
    return float(meta["forward_entry_time"] - meta["api_server_dispatch_finish_ts"])
