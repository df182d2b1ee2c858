"""Requests that are wrong in many ways, over all routes: is each answered, and are good ones answered as before?

Each request is the bytes that go over a socket of its own, made from one seed: what failed can be sent again.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import json
import math
import operator
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import requests

from benchmarks import report
from benchmarks.harness import engines
from benchmarks.storm import part
from benchmarks.storm.part import Part

N_REQUESTS, N_REQUESTS_QUICK = 20_000, 300
WAVE_REQUESTS = 500  # good requests are sent after each wave
N_AT_ONCE = 16
TIMEOUT_S = 60
MOST_DEATHS = 8
MOST_EXAMPLES = 20
SHORT_CHARACTERS = 400
ENDING = "a process of this server has ended"  # what a server says while it goes down
MOST_KEPT_BYTES = 1 << 20  # of a reply; the rest is counted
INCOMPLETE_S = 4  # after which a request that is never complete is given up, so that the waves do not wait for it

# Beginnings of paths that are not asked, each with its reason.
LEFT_OUT: tuple[tuple[str, str], ...] = (
    ("/start_profile", "writes files until it is stopped"),
    ("/stop_profile", "belongs to /start_profile"),
)

MODEL = "default"
LABELS = {"allowed_tokens": [" yes", " no"]}
LABEL_IDS = {"allowed_token_ids": [9805, 787]}
TEXT = "The sky over the harbour was blue. Is it so? Answer:"
TEXTS = [TEXT, "One two three four. Answer:", "Was the package late? Answer:"]
IDS = [504, 4832, 690, 260, 12345, 30]
CHAT = [{"role": "system", "content": "Answer in one word."}, {"role": "user", "content": TEXT}]
PARTS = [{"role": "user", "content": [{"type": "text", "text": TEXT}, {"type": "text", "text": "Is it?"}]}]
PREFILL = {"sampling_params": {"max_new_tokens": 0}}
ONE_TOKEN = {"sampling_params": {"max_new_tokens": 1, "temperature": 0}}
LOGPROBS = {"return_logprob": True, "token_ids_logprob": [9805, 787]}

_CHATS: tuple[dict[str, Any], ...] = (
    {"model": MODEL, "messages": CHAT, "allowed_tokens": ["yes", "no"], "user": "ann"},
    {"model": MODEL, "messages": PARTS, **LABEL_IDS, "logprobs": True, "stream": True, "deadline_ms": 60_000},
    {"model": MODEL, "messages": CHAT, "max_completion_tokens": 1, "logprobs": True, "top_logprobs": 3, "stream": True},
)
_EMBEDDINGS: tuple[dict[str, Any], ...] = (
    {"model": MODEL, "input": TEXT},
    {"model": MODEL, "input": TEXTS, "rid": "e"},
)
_ENCODED: tuple[dict[str, Any], ...] = ({"text": TEXT}, {"input_ids": [IDS, IDS[:3]], "rid": ["a", "b"]})
_TO_TOKENS: tuple[dict[str, Any], ...] = (
    {"model": MODEL, "prompt": TEXT},
    {"model": MODEL, "prompt": TEXTS},
    {"model": MODEL, "messages": CHAT, "add_special_tokens": False},
)
_TO_TEXT: tuple[dict[str, Any], ...] = (
    {"model": MODEL, "tokens": IDS},
    {"model": MODEL, "tokens": [IDS, IDS[:2]], "skip_special_tokens": True},
)

# Bodies that are right, of each route that takes one.
VALID: dict[str, tuple[dict[str, Any], ...]] = {
    "/v1/completions": (
        {"model": MODEL, "prompt": TEXT, **LABELS, "user": "ann", "rid": "one", "cache_salt": "salt"},
        {"model": MODEL, "prompt": TEXTS, **LABEL_IDS, "logprobs": 2, "deadline_ms": 60_000, "priority": 1},
        {"model": MODEL, "prompt": [IDS, IDS[:4]], **LABELS, "stream": True, "stream_options": {"include_usage": True}},
        {"model": MODEL, "prompt": TEXT, **LABELS, "deadline_ms": 1},
        {"model": MODEL, "prompt": TEXTS, "max_tokens": 1, "logprobs": 3, "echo": True, "temperature": 0},
        {"model": MODEL, "prompt": IDS, "max_tokens": 1, "stream": True, "logit_bias": {"5": 1.5}, "stop": ["a"]},
    ),
    "/v1/chat/completions": _CHATS,
    "/generate": (
        {"text": TEXT, **LABELS, **PREFILL, "rid": "one", "cache_salt": "salt", "deadline_ms": 60_000},
        {"text": TEXTS, **LABEL_IDS, "rid": ["one", "two", "three"], "stream": True},
        {"input_ids": [IDS, IDS[:4]], **PREFILL, **LOGPROBS, "priority": 2, "extra_key": "salt"},
        {"input_ids": IDS, **ONE_TOKEN, **LOGPROBS, "logprob_start_len": 2, "top_logprobs_num": 2, "stream": True},
        {"text": TEXT, **PREFILL, "return_logprob": True, "return_text_in_logprobs": True, "logprob_start_len": 0},
    ),
    "/v1/score": (
        {"model": MODEL, "query": TEXT, "items": [" yes", " no"], "label_token_ids": [9805, 787]},
        {"model": MODEL, "query": IDS, "items": [IDS[:2], IDS[:3]], "label_token_ids": [5, 6], "apply_softmax": True},
        {"model": MODEL, "query": TEXT, "items": TEXTS, "label_token_ids": [5], "item_first": True},
    ),
    "/v1/rerank": (
        {"query": TEXT, "documents": TEXTS},
        {"query": TEXT, "documents": TEXTS, "top_n": 1, "return_documents": False, "instruct": "Find it."},
    ),
    "/v1/embeddings": _EMBEDDINGS,
    "/v1/classify": _EMBEDDINGS,
    "/encode": _ENCODED,
    "/classify": _ENCODED,
    "/tokenize": _TO_TOKENS,
    "/v1/tokenize": _TO_TOKENS,
    "/detokenize": _TO_TEXT,
    "/v1/detokenize": _TO_TEXT,
    "/abort_request": ({"rid": "one"}, {"rid": "", "abort_all": True}),
}


def _deep(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


NASTY: tuple[Any, ...] = (
    *(None, True, False, "", " ", "a", "0", "yes", "null", [], {}, [[]], [{}], [None], [True], [""], {"": None}),
    *(0, 1, -1, 2, 1.5, -0.0, 1e-320, 1e308, float("nan"), float("inf"), 2**31, 2**32 + 1, -(2**31) - 1),
    *(2**63, -(2**63) - 1, 10**30, 49_151, 49_152, [49_152], [-1], [0] * 9000, [[1], 2], [1, "a"], [1.5]),
    *("\x00", "\u00e4\u00f6 \u732b \U0001f408", "\ud800", "a\udfff", ["\ud800"], "\u202e\ufeff", "x y " * 25_000),
    *("x" * 70_000, "<|im_end|>", "{{ 7 * 7 }}", "../../etc/passwd", "%s%n", _deep(3), _deep(200)),
    *({"a": {"b": {"c": []}}}, {"type": "json_object"}, ["a"] * 300, [[5]] * 300, {"__class__": "x"}),
    *(
        1e39,
        -1e39,
        10**400,
        {"5": 1e39},
        {"5": 10**400},
        {"\u00b2": 1},
        {"a": "b"},
        {"chat_template": "{{ 1 }}"},
        ["a", "b", "c"],
    ),
)
# Of SGLang's `sampling_params`, which no schema names.
SAMPLING_OPTIONS = (
    *("max_new_tokens", "stop", "stop_token_ids", "stop_regex", "temperature", "top_p", "top_k", "min_p", "n", "regex"),
    *(
        "frequency_penalty",
        "presence_penalty",
        "repetition_penalty",
        "min_new_tokens",
        "json_schema",
        "ebnf",
        "logit_bias",
    ),
    *("structural_tag", "ignore_eos", "skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim"),
    *("custom_params", "stream_interval", "sampling_seed"),
)
UNKNOWN = (
    "no_such_field",
    "",
    "__proto__",
    "\u00e4",
    "self",
    "x" * 1000,
    "http_worker_ipc",
    "image_data",
    "received_time",
)
HEADER_VALUES = (
    b"ann",
    b"",
    b" ",
    b"1",
    b"0",
    b"-1",
    b"true",
    b"\xff\xfe",
    b"\xc3\xa4",
    b"a,b;c=d",
    b"x" * 4000,
    b"Bearer x",
)
HEADER_NAMES = (
    *("x-user-id", "x-prefill-background", "authorization", "x-request-id", "x-custom-labels", "x-smg-routing-key"),
    *(
        "accept",
        "accept-encoding",
        "content-encoding",
        "expect",
        "traceparent",
        "cookie",
        "origin",
        "x-api-key",
        "range",
    ),
    *("x-data-parallel-rank", "x-forwarded-for", "upgrade", "transfer-encoding"),
)
CONTENT_TYPES = (
    b"text/plain",
    b"",
    b"application/x-www-form-urlencoded",
    b"multipart/form-data",
    b"application/json;charset=x",
)
QUERIES = ("", "-1", "0", "1", "nan", "99999999999999999999", "x", "\u00e4", "%00", "true", "x" * 3000)
JSON_TEXTS = (
    *(b"", b"{", b"[1, 2]", b'"text"', b"null", b"\xff\xfe{}", b"{}", b"{}{}", b"\xef\xbb\xbf{}", b"[" * 100_000),
    *(
        b'{"a":' * 5000 + b"1",
        b'{"prompt": "\xff"}',
        b'{"text": "\\ud800"}',
        b'{"rid": 1, "rid": 2}',
        b"1" * 5000,
        b"\x00" * 99,
    ),
)


class Fuzzed(NamedTuple):
    """One request as it goes over the wire, and what may be expected of it."""

    kind: str
    path: str
    raw: bytes
    n_answers: int = 1  # least number of status lines that must come; 0: it may be closed without one
    leaves: bool = False  # the client closes without reading


class Met(NamedTuple):
    """What came of one request; `status` is None where no answer came."""

    request: Fuzzed
    status: int | None = None
    reply: str = ""
    failure: str | None = None  # "5xx", "hang" or "no answer"
    is_shapeless: bool = False
    n_reply_bytes: int = 0


class Fuzzer:
    """Makes requests, each from what the seed gives it, by mutating bodies that are right."""

    def __init__(self, routes: Sequence[tuple[str, str]], fields: dict[str, list[str]], seed: int) -> None:
        """`routes`: (method, path) as the server lists them; `fields`: what its schema names for a path's body."""
        self._routes = list(routes)
        self._fields = fields
        self._rng = random.Random(seed)
        self._kinds: dict[str, Callable[[], Fuzzed]] = {
            "valid": self._valid,
            "field dropped": lambda: self._mutated("field dropped", self._drop),
            "value replaced": lambda: self._mutated("value replaced", self._replace),
            "value doubled": lambda: self._mutated("value doubled", self._double),
            "unknown field": lambda: self._mutated("unknown field", self._add_unknown),
            "known field": self._known_field,
            "several": lambda: self._mutated("several", self._several),
            "another route's body": self._swapped,
            "headers": self._headers,
            "no JSON": self._no_json,
            "query or method": self._query_or_method,
            "framing": self._framing,
        }
        self._weights = (8, 6, 24, 4, 5, 20, 10, 4, 6, 3, 6, 4)

    def make(self) -> Fuzzed:
        (kind,) = self._rng.choices(list(self._kinds), self._weights)
        return self._kinds[kind]()

    def plain(self) -> Iterator[Fuzzed]:
        """Yields every route with each right body, or with none, to be asked alone: so it is known what kills."""
        for method, path in self._routes:
            for body in VALID.get(path, ({},)):
                yield Fuzzed(
                    "alone", path, http(method, self._filled(path), json.dumps(body).encode()), _expected(method)
                )

    def each_value(self) -> Iterator[Fuzzed]:
        """Yields a body per route, field and value of NASTY, which replaces the field's value.

        Fields are those of the first valid body for one prompt and for several, of the schema, and the sampling options.
        """
        for method, path in self._routes:
            if method != "POST":
                continue
            for body in _one_and_several(VALID.get(path, ())):
                for keys in self._fields_of(path, body):
                    for value in NASTY:
                        changed = json.dumps(_with(body, keys, value)).encode()
                        yield Fuzzed("each value", path, http(method, path, changed))

    def _fields_of(self, path: str, body: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
        yield from paths(body)
        yield from ((name,) for name in self._fields.get(path, ()) if name not in body)
        if path == "/generate":
            yield from (("sampling_params", name) for name in SAMPLING_OPTIONS)

    def _valid(self) -> Fuzzed:
        return self._mutated("valid", lambda path, body: None)

    def _mutated(self, kind: str, change: Callable[[str, dict[str, Any]], None]) -> Fuzzed:
        method, path = self._route_with_body()
        body = copy.deepcopy(self._rng.choice(VALID[path]))
        change(path, body)
        return Fuzzed(kind, path, http(method, path, json.dumps(body).encode()))

    def _route_with_body(self) -> tuple[str, str]:
        """Draws a route of VALID; routes that compute labels come more often."""
        method, path = self._rng.choice([one for one in self._routes if one[0] in ("POST", "PUT") and one[1] in VALID])
        if self._rng.random() < 0.4:
            path = self._rng.choice(("/v1/completions", "/v1/chat/completions", "/generate", "/v1/score", "/v1/rerank"))
            method = "POST"
        return method, path

    def _drop(self, path: str, body: dict[str, Any]) -> None:
        parent, key = self._rng.choice(list(places(body)))
        del parent[key]

    def _replace(self, path: str, body: dict[str, Any]) -> None:
        parent, key = self._rng.choice(list(places(body)))
        parent[key] = copy.deepcopy(self._rng.choice(NASTY))

    def _double(self, path: str, body: dict[str, Any]) -> None:
        parent, key = self._rng.choice(list(places(body)))
        value = copy.deepcopy(parent[key])
        parent[key] = (
            value * 2 if isinstance(value, list) and self._rng.random() < 0.5 else [value, copy.deepcopy(value)]
        )

    def _add_unknown(self, path: str, body: dict[str, Any]) -> None:
        parents = [body, *(parent[key] for parent, key in places(body) if isinstance(parent[key], dict))]
        self._rng.choice(parents)[self._rng.choice(UNKNOWN)] = copy.deepcopy(self._rng.choice(NASTY))

    def _several(self, path: str, body: dict[str, Any]) -> None:
        for _ in range(self._rng.randint(2, 4)):
            if body:
                self._rng.choice((self._drop, self._replace, self._double, self._add_unknown))(path, body)

    def _known_field(self) -> Fuzzed:
        def change(path: str, body: dict[str, Any]) -> None:
            names = self._fields.get(path) or list(UNKNOWN)
            body[self._rng.choice(names)] = copy.deepcopy(self._rng.choice(NASTY))

        return self._mutated("known field", change)

    def _swapped(self) -> Fuzzed:
        method, path = self._rng.choice(self._routes)
        one, other = (self._rng.choice(VALID[self._rng.choice(list(VALID))]) for _ in range(2))
        body = one if self._rng.random() < 0.5 else {**one, **other}
        return Fuzzed(
            "another route's body", path, http(method, self._filled(path), json.dumps(body).encode()), _expected(method)
        )

    def _headers(self) -> Fuzzed:
        method, path = self._route_with_body()
        body = json.dumps(self._rng.choice(VALID[path])).encode()
        names = self._rng.sample(HEADER_NAMES, self._rng.randint(1, 3))
        headers = [(name.encode(), self._rng.choice(HEADER_VALUES)) for name in names]
        kind = self._rng.choice(CONTENT_TYPES) if self._rng.random() < 0.3 else b"application/json"
        # A body that says that it comes in chunks and does not is one that never comes whole.
        n_answers = 0 if {"transfer-encoding", "expect", "upgrade"} & set(names) else 1
        return Fuzzed("headers", path, http(method, path, body, headers, kind), n_answers)

    def _no_json(self) -> Fuzzed:
        method, path = self._route_with_body()
        body = self._rng.choice(JSON_TEXTS)
        if self._rng.random() < 0.5:
            right = json.dumps(self._rng.choice(VALID[path])).encode()
            at = self._rng.randrange(len(right))
            body = right[:at] if self._rng.random() < 0.5 else right[:at] + self._rng.randbytes(3) + right[at + 1 :]
        return Fuzzed("no JSON", path, http(method, path, body))

    def _query_or_method(self) -> Fuzzed:
        method, path = self._rng.choice(self._routes)
        if self._rng.random() < 0.3:
            method = self._rng.choice(("GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE", "BREW"))
        # /flush_cache gets none: it would wait for as long as a random `timeout` says.
        names = [name for name in ("dp_rank", "include", "format", "level", "rank", "x") if path != "/flush_cache"]
        pairs = [f"{name}={quote(self._rng.choice(QUERIES))}" for name in names if self._rng.random() < 0.4]
        target = self._filled(path) + ("?" + "&".join(pairs) if pairs else "")
        body = json.dumps(self._rng.choice(VALID.get(path, ({},)))).encode() if method in ("POST", "PUT") else b""
        return Fuzzed("query or method", path, http(method, target, body), 0 if method == "BREW" else _expected(method))

    def _filled(self, path: str) -> str:
        return re.sub(r"\{\w+\}", lambda _: quote(self._rng.choice(("x", "default", "\u00e4", "..", "a b"))), path)

    def _framing(self) -> Fuzzed:
        """Makes bytes that are no HTTP request, not a whole one, or several."""
        method, path = self._route_with_body()
        right = http(method, path, json.dumps(self._rng.choice(VALID[path])).encode())
        head, _, body = right.partition(b"\r\n\r\n")
        chunked = re.sub(rb"content-length: \d+", b"transfer-encoding: chunked", head) + b"\r\n\r\n"
        kept = right.replace(b"connection: close\r\n", b"")
        unfinished = [
            re.sub(rb"content-length: \d+", b"content-length: %d" % (len(body) + 50), head) + b"\r\n\r\n" + body,
            right[: self._rng.randrange(1, len(right))],
            chunked + b"%x\r\n" % len(body) + body,
            head[: self._rng.randrange(1, len(head))],
        ]
        broken = [
            re.sub(rb"content-length: \d+", b"content-length: %d" % (len(body) // 2), head) + b"\r\n\r\n" + body,
            re.sub(rb"content-length: \d+", b"content-length: -5", head) + b"\r\n\r\n" + body,
            re.sub(rb"content-length: \d+", b"content-length: 99999999999999999999999", head) + b"\r\n\r\n" + body,
            chunked + b"zz\r\n" + body + b"\r\n0\r\n\r\n",
            self._rng.randbytes(300) + b"\r\n\r\n",
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + self._rng.randbytes(100),
            b"GET " + b"/" + b"a" * 100_000 + b" HTTP/1.1\r\nconnection: close\r\n\r\n",
            right.replace(b"\r\n", b"\r\nx-long: " + b"y" * 200_000 + b"\r\n", 1),
            right.replace(b"\r\n", b"\r\n" + b"".join(b"x-%d: y\r\n" % n for n in range(3000)), 1),
            right.replace(b"HTTP/1.1", self._rng.choice((b"HTTP/9.9", b"HTTP/1.0", b"HTCPCP/1.0", b"")), 1),
            right.replace(b"host: ", b"content-length: 3\r\nhost: ", 1),
            chunked + b"%x\r\n" % len(body) + body + b"\r\n0\r\n\r\n",
        ]
        draw = self._rng.random()
        if draw < 0.3:
            # A few wait until the server has had enough of it, most go away.
            return Fuzzed("framing", path, self._rng.choice(unfinished), 0, leaves=self._rng.random() < 0.9)
        if draw < 0.85:
            return Fuzzed("framing", path, self._rng.choice(broken), 0)
        if draw < 0.93:
            return Fuzzed("framing", path, right, 0, leaves=True)
        n_before = self._rng.randint(1, 5)
        return Fuzzed("framing", path, kept * n_before + right, n_before + 1)


def _one_and_several(bodies: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the first body, and the first of another shape with several prompts."""
    several = [
        body for body in bodies[1:] if isinstance(body.get("prompt", body.get("text", body.get("input_ids"))), list)
    ]
    return [*bodies[:1], *several[:1]]


def _with(body: dict[str, Any], keys: tuple[Any, ...], value: Any) -> dict[str, Any]:
    changed = copy.deepcopy(body)
    parent: Any = changed
    for key in keys[:-1]:
        parent = parent.setdefault(key, {}) if isinstance(parent, dict) else parent[key]
    parent[keys[-1]] = value
    return changed


def paths(value: Any) -> Iterator[tuple[Any, ...]]:
    """Yields how each value below a JSON value is reached, by keys and indices."""
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield (key,)
        yield from ((key, *below) for below in paths(value[key]))


def _expected(method: str) -> int:
    return 1 if method in ("GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE") else 0


def http(
    method: str,
    target: str,
    body: bytes,
    headers: Sequence[tuple[bytes, bytes]] = (),
    content_type: bytes = b"application/json",
) -> bytes:
    """Returns the bytes of one request after which the connection is closed."""
    lines = [
        f"{method} {target} HTTP/1.1".encode(),
        b"host: localhost",
        b"connection: close",
        b"content-type: " + content_type,
        b"content-length: %d" % len(body),
        *(name + b": " + value for name, value in headers),
    ]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yields each container below a JSON value with each of its keys or indices."""
    for *above, key in paths(value):
        yield functools.reduce(operator.getitem, above, value), key


def routes_of(url: str) -> tuple[list[tuple[str, str]], dict[str, list[str]]]:
    """Returns the routes to fuzz, as (method, path), and the names of body fields in each path's schema."""
    listed = requests.get(f"{url}/openapi.json", timeout=TIMEOUT_S).json()
    schemas = listed["components"]["schemas"]
    routes, fields = [], {}
    for path, operations in listed["paths"].items():
        if path.startswith(tuple(beginning for beginning, _ in LEFT_OUT)):
            continue
        for method, operation in operations.items():
            routes.append((method.upper(), path))
            for content in operation.get("requestBody", {}).get("content", {}).values():
                name = content["schema"].get("$ref", "").rpartition("/")[2]
                fields[path] = list(schemas.get(name, {}).get("properties", {}))
    return routes, fields


def good_answers(url: str) -> list[list[float]]:
    """Asks what must always be answered alike, one by one; log-probabilities are NaN where one is not answered."""
    return [_good_answer(url, path, body) for path, body in _good_requests()]


def _good_requests() -> Iterator[tuple[str, dict[str, Any]]]:
    for text in (*TEXTS, TEXT * 20):
        yield "/v1/completions", {"model": MODEL, "prompt": text, **LABELS}
        yield "/v1/chat/completions", {"model": MODEL, "messages": [{"role": "user", "content": text}], **LABEL_IDS}
        yield "/generate", {"text": text, **LABEL_IDS}
        yield "/v1/score", {"model": MODEL, "query": text, "items": [" yes", " no"], "label_token_ids": [9805, 787]}
        yield "/v1/rerank", {"query": text, "documents": TEXTS}


def _good_answer(url: str, path: str, body: dict[str, Any]) -> list[float]:
    try:
        reply = requests.post(url + path, json=body, timeout=TIMEOUT_S)
    except requests.RequestException:
        return [math.nan]
    if reply.status_code != 200:
        return [math.nan]
    answer = reply.json()
    if path == "/v1/score":
        return [math.log(score) for row in answer["scores"] for score in row]
    if path == "/v1/rerank":
        return [math.log(one["score"]) for one in sorted(answer, key=lambda one: int(one["index"]))]
    scores = answer["meta_info"] if path == "/generate" else answer["choices"][0]
    return [label["logprob"] for label in scores["label_scores"]["labels"]]


def n_changed(before: list[list[float]], now: list[list[float]]) -> int:
    return sum(len(a) != len(b) or part.differs(a, b) for a, b in zip(before, now, strict=True))


async def send_all(url: str, fuzzed: Sequence[Fuzzed]) -> list[Met]:
    """Sends all requests, each over a connection of its own, with a limit on how many are open at once."""
    host, _, port = url.removeprefix("http://").partition(":")
    slots = asyncio.Semaphore(N_AT_ONCE)

    async def one(request: Fuzzed) -> Met:
        async with slots:
            try:
                raw, n_bytes = await asyncio.wait_for(
                    _exchange(host, int(port), request), TIMEOUT_S if request.n_answers else INCOMPLETE_S
                )
            except TimeoutError:
                return Met(request, failure="hang" if request.n_answers else None)
            except OSError as error:
                return Met(request, reply=repr(error), failure="no answer" if request.n_answers else None)
            return met(request, raw, n_bytes)

    return list(await asyncio.gather(*map(one, fuzzed)))


async def _exchange(host: str, port: int, request: Fuzzed) -> tuple[bytes, int]:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(request.raw)
        if request.leaves:
            return b"", 0
        sending = asyncio.create_task(writer.drain())  # the server may answer, and close, before it has read all
        try:
            return await _read_all(reader)
        finally:
            sending.cancel()
    finally:
        writer.transport.abort()


async def _read_all(reader: asyncio.StreamReader) -> tuple[bytes, int]:
    """Reads to the end, or until the connection is reset, and returns the beginning and the number of all bytes."""
    kept, n_bytes = bytearray(), 0
    try:
        while piece := await reader.read(1 << 16):
            kept += piece[: MOST_KEPT_BYTES - len(kept)]
            n_bytes += len(piece)
    except ConnectionResetError:
        if not kept:
            raise
    return bytes(kept), n_bytes


def met(request: Fuzzed, raw: bytes, n_bytes: int) -> Met:
    """Says what an answer means."""
    statuses = [int(number) for number in re.findall(rb"HTTP/1\.[01] (\d{3}) ", raw)]
    _, _, body = raw.partition(b"\r\n\r\n")
    text = body.decode(errors="replace")
    status = max(statuses, default=None)
    failure = None
    if any(not _is_by_design(one, raw) for one in statuses) or re.search(r'^data:.*"code": ?5(00|01|02)', text, re.M):
        failure = "5xx"
    elif len(statuses) < request.n_answers:
        failure = "no answer"
    is_refused = status is not None and 400 <= status < 500 and request.kind != "framing"
    is_whole = n_bytes <= MOST_KEPT_BYTES and not request.raw.startswith(b"HEAD")
    return Met(request, status, text, failure, is_refused and is_whole and not _has_message(body), n_bytes)


def _is_by_design(status: int, raw: bytes) -> bool:
    """A deadline's 504 and an abort's 503 are no failures; every other 5xx is."""
    told = raw.lower()
    return status < 500 or (status == 504 and b"deadline" in told) or (status == 503 and b"abort" in told)


def _has_message(body: bytes) -> bool:
    try:
        answer = json.loads(body)
    except ValueError:
        return False
    error = answer.get("error") if isinstance(answer, dict) else None
    return isinstance(error, dict) and isinstance(error.get("message"), str) and bool(error["message"])


class Run:
    """What has been sent and met, over as many servers as it took."""

    def __init__(self) -> None:
        self.all_met: list[Met] = []
        self.deaths: list[list[Fuzzed]] = []  # what was in flight, or had just been
        self.n_changed = 0
        self.deadly_paths: set[str] = set()  # that killed when asked alone, and are not asked again
        self.command = ""
        self._plain: list[Fuzzed] | None = None  # still to be asked alone
        self._waves: list[list[Fuzzed]] = []

    def on_one_server(self, model: Path, log: Path, n_requests: int) -> bool:
        """Goes on where the server before it died, and says whether all has been asked."""
        with part.serving(model, log) as server:
            self.command = server.command
            if self._plain is None:
                fuzzer = Fuzzer(*routes_of(server.url), seed=0)
                self._plain = list(fuzzer.plain())
                each = list(fuzzer.each_value())
                fuzzed = [
                    *(fuzzer.make() for _ in range(n_requests)),
                    *(each if n_requests == N_REQUESTS else each[::500]),
                ]
                self._waves = [fuzzed[at : at + WAVE_REQUESTS] for at in range(0, len(fuzzed), WAVE_REQUESTS)]
            before = good_answers(server.url)
            if any(math.isnan(value) for answer in before for value in answer):
                raise report.InvalidRunError(
                    "the good requests are not answered by a server that was asked nothing else"
                )
            while self._plain:
                request = self._plain.pop(0)
                if request.path not in self.deadly_paths and self._kills(server, [request]):
                    self.deadly_paths.add(request.path)
                    return False
            if self._changes(server, [], before):
                return False
            while self._waves:
                wave = [request for request in self._waves.pop(0) if request.path not in self.deadly_paths]
                if self._kills(server, wave) or self._changes(server, wave, before):
                    return False
        return True

    def _kills(self, server: engines.Running, wave: list[Fuzzed]) -> bool:
        """Sends these, and says whether the server died; what it then no longer answered is no failure of its own."""
        found = asyncio.run(send_all(server.url, wave))
        suspects = [one.failure in ("hang", "no answer") or ENDING in one.reply for one in found]
        died = any(suspects) and server.has_ended()
        if died:
            self.deaths.append([one.request for one in found if one.failure is not None][: 2 * N_AT_ONCE])
            found = [one for one in found if one.failure is None]
        self.all_met += found
        return died

    def _changes(self, server: engines.Running, wave: list[Fuzzed], before: list[list[float]]) -> bool:
        """Counts good requests that are answered otherwise than before; says whether that is since the server died."""
        n = n_changed(before, good_answers(server.url))
        if n > 0 and server.has_ended():
            self.deaths.append(wave[: 2 * N_AT_ONCE])
            return True
        self.n_changed += n
        return False


def measure(quick: bool, model: Path, folder: Path) -> Part:
    """Sends the requests, and on the way asks good ones; a server that dies is started again."""
    n_requests = N_REQUESTS_QUICK if quick else N_REQUESTS
    run = Run()
    while not run.on_one_server(model, folder / f"fuzz_{len(run.deaths)}.log", n_requests):
        if len(run.deaths) >= MOST_DEATHS:
            break
    failures = Counter(one.failure for one in run.all_met)
    targets = [
        report.Target.at_most("fuzzed requests: 5xx", failures["5xx"], 0),
        report.Target.at_most("fuzzed requests: hangs", failures["hang"] + failures["no answer"], 0),
        report.Target.at_most("fuzzed requests: deaths of the server", len(run.deaths), 0),
        report.Target.at_most("fuzzed requests: changed answers to good ones", run.n_changed, 0),
    ]
    rows = [*_rows(run.all_met), *_death_rows(run), *_examples(run.all_met)]
    return Part(rows, targets, {"ours, fuzzed": run.command})


def _rows(all_met: Sequence[Met]) -> list[dict[str, Any]]:
    rows = []
    for kind in dict.fromkeys(one.request.kind for one in all_met):
        of_kind = [one for one in all_met if one.request.kind == kind]
        statuses = Counter("none" if one.status is None else f"{one.status // 100}xx" for one in of_kind)
        failures = Counter(one.failure for one in of_kind if one.failure is not None)
        rows.append(
            {
                "kind": kind,
                "requests": len(of_kind),
                **dict(sorted(statuses.items())),
                "failures": dict(failures),
                "shapeless": sum(one.is_shapeless for one in of_kind),
                "longest_reply_bytes": max(one.n_reply_bytes for one in of_kind),
            }
        )
    return rows


def _death_rows(run: Run) -> list[dict[str, Any]]:
    return [{"death": [_short(request.raw) for request in killers]} for killers in run.deaths]


def _examples(all_met: Sequence[Met]) -> list[dict[str, Any]]:
    """Shows failures that differ in route, status or reply, and what had no message where there is room."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for one in sorted(all_met, key=lambda one: (one.failure is None, len(one.request.raw))):
        what = one.failure or ("shapeless" if one.is_shapeless else None)
        if what is not None:
            example: dict[str, Any] = {
                "example": what,
                "status": one.status,
                "sent": _short(one.request.raw),
                "reply": one.reply[:SHORT_CHARACTERS],
            }
            found.setdefault((what, one.request.path, one.status, one.reply[:60]), example)
    return list(found.values())[:MOST_EXAMPLES]


def _short(raw: bytes) -> str:
    line, _, rest = raw.partition(b"\r\n")
    headers, _, body = rest.partition(b"\r\n\r\n")
    own = [
        header
        for header in headers.split(b"\r\n")
        if not header.startswith((b"host", b"connection", b"content-length"))
    ]
    shown = b" | ".join((line[:100], *own, body)).decode(errors="backslashreplace")
    return shown if len(shown) <= SHORT_CHARACTERS else f"{shown[:SHORT_CHARACTERS]}... ({len(raw)} bytes)"
