"""An endless mixture of requests of every kind, the same in every run: users come and go, labels are new, some are nonsense."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import aiohttp
import orjson

from sgl_prefill.examples import demo_model

N_USERS, REQUESTS_A_USER = 500, 20  # users at a time; requests after which a user is replaced
SHARED_WORDS, OWN_WORDS = (15, 120), (5, 60)
IDS = range(1000, 40_000)
OK, BAD, LATE = ("200",), ("400",), ("200", "429", "504")
# How often each kind comes; the kinds of the last lines are made of the others.
SHARES = {
    "completion, labels as text": 24,
    "completion, labels as ids": 15,
    "generate, two prompts": 10,
    "generate, ids": 10,
}
SHARES |= {"chat": 12, "score": 10, "rerank": 5, "one token": 4, "unknown label": 2, "bad": 4}
SHARES |= {"deadline": 4, "leaves": 4}
LEAVING = ("completion, labels as ids", "generate, two prompts", "chat", "score")


class Request(NamedTuple):
    """A request, and how it may be answered."""

    kind: str
    path: str
    body: dict[str, Any]
    user: str = ""
    statuses: tuple[str, ...] = OK
    leaves_after_s: float | None = None  # its client goes away then, answered or not
    is_cut: bool = False  # the body ends before it is complete
    background: bool = False

    @property
    def sent(self) -> bytes:
        return orjson.dumps(self.body)[: -5 if self.is_cut else None]

    @property
    def headers(self) -> dict[str, str]:
        own = {"x-user-id": self.user} if self.user else {}
        own |= {"x-prefill-background": "1"} if self.background else {}
        return {"content-type": "application/json", **own}


class Answer(NamedTuple):
    """What came of a request; status: of HTTP, "left" where its client has, or "none"."""

    request: Request
    status: str
    raw: bytes

    @property
    def is_allowed(self) -> bool:
        return self.status in (*self.request.statuses, "left")

    @property
    def failure(self) -> dict[str, str]:
        """What a reader needs to see why it is not allowed."""
        sent = f"{self.request.path} {self.request.headers} {self.request.sent[:300]!r}"
        return {"failed": self.request.kind, "status": self.status, "sent": sent, "reply": f"{self.raw[:300]!r}"}


async def send_all(url: str, requests: Sequence[Request], n_at_once: int, timeout_s: float) -> list[Answer]:
    """Sends each as soon as a place is free."""
    places = asyncio.Semaphore(n_at_once)  # not the connector's limit: a client that leaves must have been connected
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2)  # see benchmarks.harness.client
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:

        async def send(one: Request) -> Answer:
            async with places:
                try:
                    async with (
                        asyncio.timeout(one.leaves_after_s),
                        session.post(url + one.path, data=one.sent, headers=one.headers) as reply,
                    ):
                        return Answer(one, str(reply.status), await reply.read())
                except TimeoutError as error:
                    return Answer(one, "none" if one.leaves_after_s is None else "left", repr(error).encode())
                except aiohttp.ClientError as error:
                    return Answer(one, "none", repr(error).encode())

        return list(await asyncio.gather(*map(send, requests)))


class Traffic:
    """Makes the requests, from one seed; a client that leaves does so within `leaves_s`."""

    def __init__(self, leaves_s: float) -> None:
        self._rng, self._n_made, self._leaves_s = random.Random(0), 0, leaves_s
        vocabulary = json.loads((demo_model.ensure() / "tokenizer.json").read_text())["model"]["vocab"]
        words = [word for word in vocabulary if len(word) > 2 and word.isascii() and word.isalpha()]
        self._words = sorted(word for word in words if f"Ġ{word}" in vocabulary)  # one token each, also after a space

    def next(self) -> Request:
        newest = N_USERS + self._n_made // REQUESTS_A_USER
        self._n_made += 1
        user = f"user {self._rng.randrange(newest - N_USERS, newest)}"
        (kind,) = self._rng.choices(list(SHARES), list(SHARES.values()))
        request = self._of_kind(kind, user)
        return request._replace(user="" if self._rng.random() < 0.05 else user)

    def _of_kind(self, kind: str, user: str) -> Request:
        if kind == "deadline":
            path, body = self._right("completion, labels as ids", user)
            return Request(kind, path, {**body, "deadline_ms": self._rng.choice((1, 20, 100, 10_000))}, statuses=LATE)
        if kind == "leaves":
            right = self._right(self._rng.choice(LEAVING), user)
            return Request(kind, *right, leaves_after_s=self._rng.uniform(0, self._leaves_s))
        if kind == "unknown label":
            labels = [*self._labels(), f" no such token {self._rng.random()}"]
            body = {"prompt": self._text(user), "allowed_tokens": labels}
            return Request(kind, "/v1/completions", body, statuses=BAD)
        if kind == "bad":
            body, is_cut = self._rng.choice(self._wrong(user)), self._rng.random() < 0.3
            return Request(kind, "/v1/completions", body, statuses=BAD, is_cut=is_cut)
        return Request(kind, *self._right(kind, user))

    def _right(self, kind: str, user: str) -> tuple[str, dict[str, Any]]:
        rng, text = self._rng, self._text(user)
        labels = {"allowed_tokens": self._labels()}
        ids = {"allowed_token_ids": self._ids()}
        rid = {"rid": f"rid {self._n_made}"} if rng.random() < 0.3 else {}
        match kind:
            case "completion, labels as text":
                return "/v1/completions", {"prompt": text, **labels, **rid}
            case "completion, labels as ids":
                return "/v1/completions", {"prompt": text, **ids, "user": user, **rid}
            case "generate, two prompts":
                return "/generate", {"text": [text, self._text(user)], **labels}
            case "generate, ids":
                prompt = random.Random(user).choices(IDS, k=50) + rng.choices(IDS, k=20)
                options = {"sampling_params": {"max_new_tokens": 0, "temperature": 0}, "return_logprob": True}
                return "/generate", {"input_ids": prompt, **options, "token_ids_logprob": self._ids(), **rid}
            case "chat":
                system = {"role": "system", "content": self._shared(user)}
                as_text = {"allowed_tokens": [label.strip() for label in labels["allowed_tokens"]]}
                messages = [system, {"role": "user", "content": self._own()}]
                return "/v1/chat/completions", {"messages": messages, **(ids if rng.random() < 0.5 else as_text)}
            case "score":
                items = {"items": [" " + self._own() for _ in range(2)], "label_token_ids": self._ids()}
                return "/v1/score", {"query": self._shared(user), **items, "apply_softmax": True}
            case "rerank":
                return "/v1/rerank", {"query": self._own(), "documents": [self._own() for _ in range(3)]}
        return "/v1/completions", {"prompt": text, "max_tokens": 1, "temperature": 0, "logprobs": 2}

    def _wrong(self, user: str) -> list[dict[str, Any]]:
        labels, text = {"allowed_token_ids": [5, 6]}, self._text(user)
        return [
            {"prompt": "", **labels},
            {"prompt": [10**11], **labels},
            {"prompt": text, "allowed_token_ids": [5, 10**7]},
            {"prompt": text, "max_tokens": 500},
            {"prompt": text, **labels, "deadline_ms": -1},
            {"prompt": self._rng.choices(IDS, k=9000), **labels},
        ]

    def _text(self, user: str) -> str:
        return f"{self._shared(user)} {self._own()}"

    def _shared(self, user: str) -> str:
        rng = random.Random(user)
        return " ".join(rng.choices(self._words, k=rng.randint(*SHARED_WORDS)))

    def _own(self) -> str:
        return " ".join(self._rng.choices(self._words, k=self._rng.randint(*OWN_WORDS)))

    def _labels(self) -> list[str]:
        return [f" {word}" for word in self._rng.sample(self._words, self._rng.randint(2, 6))]

    def _ids(self) -> list[int]:
        return self._rng.sample(IDS, self._rng.randint(2, 6))
