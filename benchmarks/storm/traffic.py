"""An endless mixture of requests of every kind, the same in every run: users come and go, labels are new, some are nonsense."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import orjson

N_USERS, REQUESTS_A_USER = 500, 20  # users at a time; requests after which a user is replaced
SHARED_WORDS, OWN_WORDS = (15, 120), (5, 60)
IDS = range(1000, 40_000)
OK, BAD, LATE = (200,), (400,), (200, 429, 504)


class Request(NamedTuple):
    """A request, and with which statuses it may be answered."""

    kind: str
    path: str
    body: dict[str, Any]
    user: str
    statuses: tuple[int, ...] = OK
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


class Traffic:
    """Makes the requests, from one seed.

    Args:
        model: folder whose tokenizer says which words are one token.
        leaves_s: seconds after which a client that leaves does so, at most.
    """

    def __init__(self, model: Path, leaves_s: float) -> None:
        self._rng, self._n_made, self._leaves_s = random.Random(0), 0, leaves_s
        self._words = words_of(model)
        self._prefix = functools.lru_cache(2 * N_USERS)(functools.partial(_prefix, self._words))
        kinds: dict[Callable[[str], Request], int] = {
            self._completion_by_text: 24,
            self._completion_by_ids: 15,
            self._generate_by_text: 10,
            self._generate_ids: 10,
            self._chat: 12,
            self._score: 10,
            self._rerank: 5,
            self._one_token: 4,
            self._with_deadline: 4,
            self._leaves: 4,
            self._unknown_label: 2,
            self._bad: 4,
        }
        self._kinds, self._weights = list(kinds), list(kinds.values())

    def next(self) -> Request:
        newest = N_USERS + self._n_made // REQUESTS_A_USER
        self._n_made += 1
        user = f"user {self._rng.randrange(newest - N_USERS, newest)}"
        request = self._rng.choices(self._kinds, self._weights)[0](user)
        return request._replace(user="") if self._rng.random() < 0.05 else request

    def _completion_by_text(self, user: str) -> Request:
        body = {"prompt": self._text(user), "allowed_tokens": self._labels(), **self._rid()}
        return Request("completion, labels as text", "/v1/completions", body, user)

    def _completion_by_ids(self, user: str) -> Request:
        body = {"prompt": self._text(user), **self._label_ids(), "user": user, **self._rid()}
        return Request("completion, labels as ids", "/v1/completions", body, user)

    def _generate_by_text(self, user: str) -> Request:
        body = {"text": [self._text(user), self._text(user)], "allowed_tokens": self._labels()}
        return Request("generate, two prompts", "/generate", body, user)

    def _generate_ids(self, user: str) -> Request:
        prompt = random.Random(user).choices(IDS, k=50) + self._rng.choices(IDS, k=20)
        options = {"sampling_params": {"max_new_tokens": 0, "temperature": 0}, "return_logprob": True}
        body = {"input_ids": prompt, **options, "token_ids_logprob": self._ids(), **self._rid()}
        return Request("generate, ids", "/generate", body, user)

    def _chat(self, user: str) -> Request:
        messages = [{"role": "system", "content": self._prefix(user)}, {"role": "user", "content": self._own_text()}]
        as_text = {"allowed_tokens": [label.strip() for label in self._labels()]}
        labels = self._label_ids() if self._rng.random() < 0.5 else as_text
        return Request("chat", "/v1/chat/completions", {"messages": messages, **labels}, user)

    def _score(self, user: str) -> Request:
        items = [" " + self._own_text() for _ in range(2)]
        body = {"query": self._prefix(user), "items": items, "label_token_ids": self._ids(), "apply_softmax": True}
        return Request("score", "/v1/score", body, user)

    def _rerank(self, user: str) -> Request:
        body = {"query": self._own_text(), "documents": [self._own_text() for _ in range(3)]}
        return Request("rerank", "/v1/rerank", body, user)

    def _one_token(self, user: str) -> Request:
        body = {"prompt": self._text(user), "max_tokens": 1, "temperature": 0, "logprobs": 2}
        return Request("one token", "/v1/completions", body, user)

    def _with_deadline(self, user: str) -> Request:
        deadline_ms = self._rng.choice((1, 20, 100, 10_000))
        request = self._completion_by_ids(user)
        body = {**request.body, "deadline_ms": deadline_ms}
        return request._replace(kind="deadline", body=body, statuses=LATE)

    def _leaves(self, user: str) -> Request:
        kind = self._rng.choice((self._completion_by_ids, self._generate_by_text, self._chat, self._score))
        leaves_after_s = self._rng.uniform(0, self._leaves_s)
        return kind(user)._replace(kind="leaves", leaves_after_s=leaves_after_s)

    def _unknown_label(self, user: str) -> Request:
        labels = [*self._labels(), f" no such token {self._rng.random()}"]
        return Request(
            "unknown label", "/v1/completions", {"prompt": self._text(user), "allowed_tokens": labels}, user, BAD
        )

    def _bad(self, user: str) -> Request:
        labels, text = {"allowed_token_ids": [5, 6]}, self._text(user)
        bodies: tuple[dict[str, Any], ...] = (
            {"prompt": "", **labels},
            {"prompt": [10**11], **labels},
            {"prompt": text, "allowed_token_ids": [5, 10**7]},
            {"prompt": text, "max_tokens": 500},
            {"prompt": text, **labels, "deadline_ms": -1},
            {"prompt": self._rng.choices(IDS, k=9000), **labels},
        )
        body, is_cut = self._rng.choice(bodies), self._rng.random() < 0.3
        return Request("bad", "/v1/completions", body, user, BAD, is_cut=is_cut)

    def _rid(self) -> dict[str, str]:
        return {"rid": f"rid {self._n_made}"} if self._rng.random() < 0.3 else {}

    def _text(self, user: str) -> str:
        return f"{self._prefix(user)} {self._own_text()}"

    def _own_text(self) -> str:
        return " ".join(self._rng.choices(self._words, k=self._rng.randint(*OWN_WORDS)))

    def _labels(self) -> list[str]:
        return [f" {word}" for word in self._rng.sample(self._words, self._rng.randint(2, 6))]

    def _label_ids(self) -> dict[str, list[int]]:
        return {"allowed_token_ids": self._ids()}

    def _ids(self) -> list[int]:
        return self._rng.sample(IDS, self._rng.randint(2, 6))


def words_of(model: Path) -> list[str]:
    """Returns words that are one token after a space and at the start of a text."""
    vocabulary: dict[str, int] = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"]
    words = [word for word in vocabulary if len(word) > 2 and word.isascii() and word.isalpha()]
    return sorted(word for word in words if f"Ġ{word}" in vocabulary)


def _prefix(words: list[str], user: str) -> str:
    rng = random.Random(user)
    return " ".join(rng.choices(words, k=rng.randint(*SHARED_WORDS)))
