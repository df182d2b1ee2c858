"""One client that does its worst, as a process of its own: python benchmarks/storm/attack.py URL KIND SECONDS

    labels     1,873 labels after 16 different ends of prompts: a second of looking up
    texts      30 MB of text, and the longest text that may fit, which is tokenised to find out that it does not
    prompts    10,000 prompts in one request
    deadlines  3,000 requests with a deadline, all at once
    decisions  400 questions about one new state, in one request

It asks again and again under one user's name, and prints what it was answered.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import os
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import aiohttp
import orjson
from tokenizers import Tokenizer

from sgl_prefill.examples import demo_model

N_LABELS, N_ENDS, N_PROMPTS, N_DEADLINES, N_QUESTIONS = 1873, 16, 10_000, 3_000, 400
TEXT_BYTES, FITTING_CHARACTERS = 30_000_000, 60_000
DEADLINE_MS, N_STATE_WORDS = 2_000, 300
USER = "attacker"
LEAST_PRIORITY = 19  # its own work is no attack: it would be done on another machine
Bodies = Callable[[int], list[tuple[str, dict[str, Any]]]]


@functools.cache
def words() -> list[str]:
    """Returns labels of one token each."""
    vocabulary = Tokenizer.from_file(str(demo_model.ensure() / "tokenizer.json")).get_vocab()
    found = sorted(word[1:] for word in vocabulary if re.fullmatch("Ġ[a-z]{3,}", word))
    return [f" {word}" for word in found[:N_LABELS]]


def labels(number: int) -> list[tuple[str, dict[str, Any]]]:
    """One request with N_ENDS new prompts and many labels."""
    ends = [f"Attack {number}, question {end}? Answer:" for end in range(N_ENDS)]
    return [("/v1/completions", {"prompt": ends, "allowed_tokens": words()})]


def texts(number: int) -> list[tuple[str, dict[str, Any]]]:
    big = {"prompt": "x y " * (TEXT_BYTES // 4), "allowed_token_ids": [5, 6]}
    fits = {"prompt": f"{number} x y" * (FITTING_CHARACTERS // 5), "allowed_token_ids": [5, 6]}
    return [("/v1/completions", big), ("/v1/completions", fits)]


def prompts(number: int) -> list[tuple[str, dict[str, Any]]]:
    rng = random.Random(number)
    ids = [[rng.randrange(1000, 40_000) for _ in range(12)] for _ in range(N_PROMPTS)]
    return [("/v1/completions", {"prompt": ids, "allowed_token_ids": [5, 6]})]


def deadlines(number: int) -> list[tuple[str, dict[str, Any]]]:
    rng = random.Random(number)
    return [
        (
            "/v1/completions",
            {
                "prompt": [rng.randrange(1000, 40_000) for _ in range(40)],
                "allowed_token_ids": [5, 6],
                "deadline_ms": DEADLINE_MS,
            },
        )
        for _ in range(N_DEADLINES)
    ]


def decisions(number: int) -> list[tuple[str, dict[str, Any]]]:
    """Half of the questions are yes/no, a quarter choices of 4, a quarter levels of 5."""
    rng = random.Random(number)

    def question(index: int) -> dict[str, Any]:
        asked = {"instructions": f"Question {index} of {rng.choice(words())}?"}
        if index % 4 == 2:
            return {**asked, "type": "choice", "criteria": dict.fromkeys(rng.sample(words(), 4), "some text")}
        if index % 4 == 3:
            return {**asked, "type": "score", "criteria": ["none", "little", "some", "much", "most"]}
        return {**asked, "type": "noul"}

    state = "".join(rng.choices(words(), k=N_STATE_WORDS))
    return [
        (
            "/v1/systemone",
            {"model": "m", "state": state, "questions": {str(n): question(n) for n in range(N_QUESTIONS)}},
        )
    ]


KINDS: dict[str, Bodies] = {
    "labels": labels,
    "texts": texts,
    "prompts": prompts,
    "deadlines": deadlines,
    "decisions": decisions,
}


async def attack(url: str, kind: str, seconds: float) -> dict[str, int]:
    """Sends all requests of a round at once, and the next round once they are answered. Returns how many got which status."""
    statuses: Counter[str] = Counter()
    until_s = time.monotonic() + seconds
    headers = {"content-type": "application/json", "x-user-id": USER}
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, headers=headers) as session:

        async def ask(route: str, body: bytes) -> None:
            try:
                async with session.post(url + route, data=body) as reply:
                    await reply.read()
                    statuses[str(reply.status)] += 1
            except aiohttp.ClientConnectionError:  # a connection that was kept is closed just as it is used again
                statuses["closed"] += 1

        for number in itertools.count():
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                break
            round_of_it = [(route, orjson.dumps({"model": "x", **body})) for route, body in KINDS[kind](number)]
            try:
                await asyncio.wait_for(asyncio.gather(*(ask(*one) for one in round_of_it)), left_s)
            except TimeoutError:  # it leaves, and so do its requests
                statuses["left"] += 1
    return dict(statuses)


def main() -> int:
    url, kind, seconds = sys.argv[1:]
    os.nice(LEAST_PRIORITY)
    print(json.dumps(asyncio.run(attack(url, kind, float(seconds)))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
