"""One client that does its worst, as a process of its own: python benchmarks/storm/attack.py URL KIND SECONDS

KIND is one of FLOODS or BODIES, which the README describes, or `connections`, which opens 10,000 at once and leaves.
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
import resource
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
N_PARTS, N_CONNECTIONS = 8_000, 10_000
PAUSE_S = 0.1  # between two bodies: a stream of refusals is no body
TEXT_BYTES, FITTING_CHARACTERS = 30_000_000, 60_000
DEADLINE_MS, N_STATE_WORDS = 2_000, 300
USER = "attacker"
LEAST_PRIORITY = 19  # its own work is no attack: it would be done on another machine
Requests = list[tuple[str, dict[str, Any] | bytes]]
Bodies = Callable[[int], Requests]
COMPLETIONS, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/generate"
LABELS: dict[str, Any] = {"allowed_token_ids": [5, 6]}


@functools.cache
def vocabulary() -> dict[str, int]:
    return Tokenizer.from_file(str(demo_model.ensure() / "tokenizer.json")).get_vocab()


@functools.cache
def words() -> list[str]:
    """Returns labels of one token each."""
    found = sorted(word[1:] for word in vocabulary() if re.fullmatch("Ġ[a-z]{3,}", word))
    return [f" {word}" for word in found[:N_LABELS]]


def ids(rng: random.Random, n: int) -> list[int]:
    return [rng.randrange(1000, 40_000) for _ in range(n)]


def labels(number: int) -> Requests:
    """One request with N_ENDS new prompts and many labels."""
    ends = [f"Attack {number}, question {end}? Answer:" for end in range(N_ENDS)]
    return [(COMPLETIONS, {"prompt": ends, "allowed_tokens": words()})]


def texts(number: int) -> Requests:
    fits = f"{number} x y" * (FITTING_CHARACTERS // 5)
    return [(COMPLETIONS, {"prompt": text, **LABELS}) for text in ("x y " * (TEXT_BYTES // 4), fits)]


def prompts(number: int) -> Requests:
    rng = random.Random(number)
    return [(COMPLETIONS, {"prompt": [ids(rng, 12) for _ in range(N_PROMPTS)], **LABELS})]


def deadlines(number: int) -> Requests:
    rng = random.Random(number)
    return [(COMPLETIONS, {"prompt": ids(rng, 40), **LABELS, "deadline_ms": DEADLINE_MS}) for _ in range(N_DEADLINES)]


def decisions(number: int) -> Requests:
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
    return [("/v1/systemone", {"state": state, "questions": {str(n): question(n) for n in range(N_QUESTIONS)}})]


def template(number: int) -> Requests:
    values = {"a": [f"{number} " + "x" * 400] * N_PARTS}
    return [(CHAT, {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": values})]


def tools(number: int) -> Requests:
    function = {"name": "a", "arguments": f'{{"{number}":[{"[]," * 1_300_000}0]}}'}
    calls = [{"id": "1", "type": "function", "function": function}]
    messages = [{"role": "assistant", "content": None, "tool_calls": calls}, {"role": "user", "content": "a"}]
    return [(CHAT, {"messages": messages})]


def stops(number: int) -> Requests:
    """More than the server takes, and the most that it takes."""
    found: Requests = []
    for n_stops, n_characters in ((32, 500), (16, 31)):
        stop = [f"{number} {n} {'x y ' * 125}"[:n_characters] for n in range(n_stops)]
        some = [[1000 + number % 1000, 1000 + n] for n in range(600)]
        found.append((GENERATE, {"input_ids": some, "sampling_params": {"max_new_tokens": 1, "stop": stop}}))
    return found


def regex(number: int) -> Requests:
    dashes = max((word for word in vocabulary() if set(word) == {"-"}), key=len)
    options = {"stop_regex": "(-+)+x", "logit_bias": {str(vocabulary()[dashes]): 1e30}}
    return [(GENERATE, {"text": f"{number}", "sampling_params": {"max_new_tokens": 1, **options}})]


def samples(number: int) -> Requests:
    some = [f"{number} {n}" for n in range(9)]
    return [(GENERATE, {"text": some, "sampling_params": {"max_new_tokens": 1, "n": 1024}})]


def keys(number: int) -> Requests:
    parts = ",".join([r'{"\u0074\u0079\u0070\u0065":"text","\u0074\u0065\u0078\u0074":""}'] * N_PARTS)
    body = f'{{"model":"m","user":"{number}","messages":[{{"role":"user","content":[{parts}]}}]}}'
    return [(CHAT, body.encode())]


def answers(number: int) -> Requests:
    some = [f"{one}{other}" for one in words()[:173] for other in words()[:173]]
    return [(COMPLETIONS, {"prompt": f"{number}? Answer:", "allowed_answers": some})]


def logprobs(number: int) -> Requests:
    """More than the server takes, and the most that it takes."""
    rng = random.Random(number)
    options: dict[str, Any] = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 500}
    options["sampling_params"] = {"max_new_tokens": 1}
    return [(GENERATE, {"input_ids": ids(rng, n_tokens), **options}) for n_tokens in (8_000, 100)]


def user(number: int) -> Requests:
    return [(COMPLETIONS, {"prompt": [5, 6], **LABELS, "user": f"{number} " + "x" * 4_000_000})]


FLOODS: dict[str, Bodies] = {one.__name__: one for one in (labels, texts, prompts, deadlines, decisions)}
CONNECTIONS = "connections"
BODIES: dict[str, Bodies] = {
    one.__name__: one for one in (template, tools, stops, regex, samples, keys, answers, logprobs, user)
}


async def connect(url: str, seconds: float) -> dict[str, int]:
    """Opens connections all at once, again and again. Returns how many were made, and how many were not."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    host, port = url.removeprefix("http://").split(":")
    made: Counter[str] = Counter()
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        opened = await asyncio.gather(
            *(asyncio.open_connection(host, int(port)) for _ in range(N_CONNECTIONS)), return_exceptions=True
        )
        for one in opened:
            made["refused" if isinstance(one, BaseException) else "connected"] += 1
            if not isinstance(one, BaseException):
                one[1].close()
    return dict(made)


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
            round_of_it = [
                (route, body if isinstance(body, bytes) else orjson.dumps({"model": "x", **body}))
                for route, body in (FLOODS | BODIES)[kind](number)
            ]
            try:
                await asyncio.wait_for(asyncio.gather(*(ask(*one) for one in round_of_it)), left_s)
            except TimeoutError:  # it leaves, and so do its requests
                statuses["left"] += 1
            if kind in BODIES:
                await asyncio.sleep(PAUSE_S)
    return dict(statuses)


def main() -> int:
    url, kind, seconds = sys.argv[1:]
    os.nice(LEAST_PRIORITY)
    found = connect(url, float(seconds)) if kind == CONNECTIONS else attack(url, kind, float(seconds))
    print(json.dumps(asyncio.run(found)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
