"""Requests that are wrong in many ways, over all routes: is each answered, and are good ones answered as before?

Each request is the bytes that go over a socket of its own, made from one seed: what failed can be sent again.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import json
import operator
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from urllib.parse import quote

import requests

from benchmarks import report
from benchmarks.storm import part

N_REQUESTS, N_REQUESTS_QUICK = 20_000, 300
WAVE_REQUESTS = 500  # good requests are sent after each wave
N_AT_ONCE = 16
TIMEOUT_S = 60
INCOMPLETE_S = 4  # after which a request that is never complete is given up, so that the waves do not wait for it
MOST_EXAMPLES, SHORT_CHARACTERS = 20, 400
MOST_KEPT_BYTES = 1 << 20  # of a reply; the rest is counted
LEFT_OUT = ("/start_profile", "/stop_profile")  # writes files until it is stopped
METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE")

LABELS, LABEL_IDS = {"allowed_tokens": [" yes", " no"]}, {"allowed_token_ids": [9805, 787]}
TEXT = "The sky over the harbour was blue. Is it so? Answer:"
TEXTS = [TEXT, "One two three four. Answer:", "Was the package late? Answer:"]
IDS = [504, 4832, 690, 260, 12345, 30]
CHAT = [{"role": "system", "content": "Answer in one word."}, {"role": "user", "content": TEXT}]
PARTS = [{"role": "user", "content": [{"type": "text", "text": TEXT}, {"type": "text", "text": "Is it?"}]}]
PREFILL, ONE_TOKEN = {"sampling_params": {"max_new_tokens": 0}}, {"sampling_params": {"max_new_tokens": 1}}
LOGPROBS = {"return_logprob": True, "token_ids_logprob": [9805, 787]}
ITEMS = {"items": [" yes", " no"], "label_token_ids": [9805, 787]}
CHOICE = {"type": "choice", "instructions": "Who?", "criteria": {"ann": "repairs", "bob": None}}
LEVELS = {"type": "score", "instructions": "How?", "criteria": ["calm", "cross"]}
PICK = {"type": "choice", "instructions": "Which?", "choices": [{"value": "a"}, {"value": "b"}]}
ORDERS = {"orders": 1, "baseline": True, "abstain_below": 0.5}

_EMBEDDINGS: tuple[dict[str, Any], ...] = ({"input": TEXT}, {"input": TEXTS, "rid": "e"})
_ENCODED: tuple[dict[str, Any], ...] = ({"text": TEXT}, {"input_ids": [IDS, IDS[:3]], "rid": ["a", "b"]})
_TO_TOKENS: tuple[dict[str, Any], ...] = ({"prompt": TEXT}, {"prompt": TEXTS}, {"messages": CHAT})
_TO_TEXT: tuple[dict[str, Any], ...] = ({"tokens": IDS}, {"tokens": [IDS, IDS[:2]], "skip_special_tokens": True})
# Bodies that are right, of each route that takes one.
VALID: dict[str, tuple[dict[str, Any], ...]] = {
    "/v1/completions": (
        {"prompt": TEXT, **LABELS, "user": "ann", "rid": "one", "cache_salt": "salt"},
        {"prompt": TEXTS, **LABEL_IDS, "logprobs": 2, "deadline_ms": 60_000, "priority": 1},
        {"prompt": [IDS, IDS[:4]], **LABELS, "stream": True, "stream_options": {"include_usage": True}},
        {"prompt": TEXT, **LABELS, "deadline_ms": 1},
        {"prompt": TEXTS, "max_tokens": 1, "logprobs": 3, "echo": True, "temperature": 0},
        {"prompt": IDS, "max_tokens": 1, "stream": True, "logit_bias": {"5": 1.5}, "stop": ["a"]},
    ),
    "/v1/chat/completions": (
        {"messages": CHAT, "allowed_tokens": ["yes", "no"], "user": "ann"},
        {"messages": PARTS, **LABEL_IDS, "logprobs": True, "stream": True, "deadline_ms": 60_000},
        {"messages": CHAT, "max_completion_tokens": 1, "logprobs": True, "top_logprobs": 3, "stream": True},
    ),
    "/v1/systemone": (
        {"model": "m", "state": TEXT, "questions": {"a": {"type": "noul", "instructions": "Is it?"}}},
        {"model": "m", "state": {"a": [1, TEXT]}, "questions": {"b": CHOICE, "c": LEVELS}, "x_options": {"b": ORDERS}},
    ),
    "/v1/decisions": (
        {"model": "m", "input": TEXT, "questions": [{"type": "predicate", "instructions": "Is it?"}]},
        {"model": "m", "input": TEXT, "questions": [PICK], "x_options": {"0": ORDERS}},
    ),
    "/generate": (
        {"text": TEXT, **LABELS, **PREFILL, "rid": "one", "cache_salt": "salt", "deadline_ms": 60_000},
        {"text": TEXTS, **LABEL_IDS, "rid": ["one", "two", "three"], "stream": True},
        {"input_ids": [IDS, IDS[:4]], **PREFILL, **LOGPROBS, "priority": 2, "extra_key": "salt"},
        {"input_ids": IDS, **ONE_TOKEN, **LOGPROBS, "logprob_start_len": 2, "top_logprobs_num": 2, "stream": True},
        {"text": TEXT, **PREFILL, "return_logprob": True, "return_text_in_logprobs": True, "logprob_start_len": 0},
    ),
    "/v1/score": (
        {"query": TEXT, **ITEMS},
        {"query": IDS, "items": [IDS[:2], IDS[:3]], "label_token_ids": [5, 6], "apply_softmax": True},
        {"query": TEXT, "items": TEXTS, "label_token_ids": [5], "item_first": True},
    ),
    "/v1/rerank": (
        {"query": TEXT, "documents": TEXTS},
        {"query": TEXT, "documents": TEXTS, "top_n": 1, "return_documents": False, "instruct": "Find it."},
    ),
    **dict.fromkeys(("/v1/embeddings", "/v1/classify"), _EMBEDDINGS),
    **dict.fromkeys(("/encode", "/classify"), _ENCODED),
    **dict.fromkeys(("/tokenize", "/v1/tokenize"), _TO_TOKENS),
    **dict.fromkeys(("/detokenize", "/v1/detokenize"), _TO_TEXT),
    "/abort_request": ({"rid": "one"}, {"rid": "", "abort_all": True}),
}
OFTEN = ("/v1/completions", "/v1/chat/completions", "/generate", "/v1/score", "/v1/rerank", "/v1/systemone")

_DEEP = json.loads("[" * 200 + "1" + "]" * 200)
NASTY: tuple[Any, ...] = (
    *(None, True, False, "", " ", "a", "0", "yes", "null", [], {}, [[]], [{}], [None], [True], [""], {"": None}),
    *(0, 1, -1, 2, 1.5, -0.0, 1e-320, 1e308, float("nan"), float("inf"), 2**31, 2**32 + 1, -(2**31) - 1, 10**400),
    *(2**63, -(2**63) - 1, 10**30, 49_151, 49_152, [49_152], [-1], [0] * 9000, [[1], 2], [1, "a"], [1.5], [[[1]]]),
    *("\x00", "\u00e4\u00f6 \u732b \U0001f408", "\ud800", "a\udfff", ["\ud800"], "\u202e\ufeff", "x y " * 25_000),
    *("x" * 70_000, "<|im_end|>", "{{ 7 * 7 }}", "../../etc/passwd", "%s%n", _DEEP, {"a": {"b": {"c": []}}}, 1e39),
    *({"type": "json_object"}, ["a"] * 300, [[5]] * 300, {"__class__": "x"}, {"5": 1e39}, {"5": 10**400}, -1e39),
    *({"\u00b2": 1}, {"a": "b"}, {"chat_template": "{{ 1 }}"}, ["a", "b", "c"]),
)
# Of SGLang's `sampling_params`, which no schema names.
SAMPLING_OPTIONS = re.findall(
    r"\S+",
    "max_new_tokens stop stop_token_ids stop_regex temperature top_p top_k min_p n regex frequency_penalty ignore_eos "
    "presence_penalty repetition_penalty min_new_tokens json_schema ebnf logit_bias structural_tag skip_special_tokens "
    "spaces_between_special_tokens no_stop_trim custom_params stream_interval sampling_seed",
)
UNKNOWN = ("no_such_field", "", "__proto__", "\u00e4", "self", "x" * 1000, "http_worker_ipc", "image_data")
HEADER_NAMES = re.findall(
    r"\S+",
    "x-user-id x-prefill-background authorization x-request-id x-custom-labels x-smg-routing-key accept accept-encoding "
    "content-encoding expect traceparent cookie origin x-api-key range x-data-parallel-rank x-forwarded-for upgrade "
    "transfer-encoding content-type",
)
HEADER_VALUES = (
    *(b"ann", b"", b" ", b"1", b"0", b"-1", b"true", b"\xff\xfe", b"\xc3\xa4", b"a,b;c=d", b"x" * 4000, b"Bearer x"),
    *(b"text/plain", b"application/x-www-form-urlencoded", b"multipart/form-data", b"application/json;charset=x"),
)
QUERIES = ("", "-1", "0", "1", "nan", "99999999999999999999", "x", "\u00e4", "%00", "true", "x" * 3000)
JSON_TEXTS = (
    *(b"", b"{", b"[1, 2]", b'"text"', b"null", b"\xff\xfe{}", b"{}", b"{}{}", b"\xef\xbb\xbf{}", b"[" * 100_000),
    *(b'{"a":' * 5000 + b"1", b'{"prompt": "\xff"}', b'{"text": "\\ud800"}', b'{"rid": 1, "rid": 2}', b"1" * 5000),
)
# Weight of each kind of request.
KINDS = {"right": 8, "one change": 55, "several changes": 10, "another route's body": 4, "headers": 6, "no JSON": 3}
KINDS |= {"query or method": 6, "framing": 4}


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
    failure: str | None = None  # "5xx", "hang", "no answer", or "no message" of a refusal
    n_reply_bytes: int = 0

    @property
    def shown(self) -> dict[str, Any]:
        sent = self.request.raw.decode(errors="backslashreplace")
        cut = f"{sent[:SHORT_CHARACTERS]}... ({len(self.request.raw)} bytes)" if len(sent) > SHORT_CHARACTERS else sent
        return {"example": self.failure, "status": self.status, "sent": cut, "reply": self.reply[:SHORT_CHARACTERS]}


class Fuzzer:
    """Makes requests, each from what the seed gives it, by changing bodies that are right."""

    def __init__(self, routes: Sequence[tuple[str, str]], fields: dict[str, list[str]], seed: int) -> None:
        """`routes`: (method, path) as the server lists them; `fields`: what its schema names for a path's body."""
        self._routes, self._fields, self._rng = list(routes), fields, random.Random(seed)
        self._with_body = [one for one in self._routes if one[0] in ("POST", "PUT") and one[1] in VALID]
        self._made_by: dict[str, Callable[[str], Fuzzed]] = {
            "another route's body": self._swapped,
            "headers": self._headers,
            "no JSON": self._no_json,
            "query or method": self._query,
            "framing": self._framing,
        }

    def make(self) -> Fuzzed:
        (kind,) = self._rng.choices(list(KINDS), list(KINDS.values()))
        return self._made_by.get(kind, self._changed)(kind)

    def plain(self) -> Iterator[Fuzzed]:
        """Yields every route with each right body, or with none."""
        for method, path in self._routes:
            for body in VALID.get(path, ({},)):
                yield Fuzzed("alone", path, http(method, self._filled(path), body))

    def each_value(self) -> Iterator[Fuzzed]:
        """Yields a body per route, field and value of NASTY, which replaces the field's value.

        Fields are those of the first right body and of the first with several prompts, of the schema, and sampling options.
        """
        for path in (path for method, path in self._routes if method == "POST"):
            bodies = VALID.get(path, ())
            several = (
                one for one in bodies[1:] if any(isinstance(one.get(k), list) for k in ("prompt", "text", "input"))
            )
            for body in (*bodies[:1], *[*several][:1]):
                keys = [*paths(body), *((name,) for name in self._fields.get(path, ()) if name not in body)]
                keys += [("sampling_params", name) for name in SAMPLING_OPTIONS] if path == "/generate" else []
                for *above, key in keys:
                    for value in NASTY:
                        changed = copy.deepcopy(body)
                        parent: Any = changed
                        for one in above:
                            parent = parent.setdefault(one, {}) if isinstance(parent, dict) else parent[one]
                        parent[key] = value
                        yield Fuzzed("each value", path, http("POST", path, changed))

    def _route_with_body(self) -> tuple[str, str]:
        """Draws a route of VALID; routes that compute labels come more often."""
        return ("POST", self._rng.choice(OFTEN)) if self._rng.random() < 0.4 else self._rng.choice(self._with_body)

    def _body(self, path: str) -> dict[str, Any]:
        return copy.deepcopy(self._rng.choice(VALID.get(path, ({},))))

    def _changed(self, kind: str) -> Fuzzed:
        method, path = self._route_with_body()
        body = self._body(path)
        for _ in range({"right": 0, "one change": 1}.get(kind, self._rng.randint(2, 4))):
            self._change(path, body)
        return Fuzzed(kind, path, http(method, path, body))

    def _change(self, path: str, body: dict[str, Any]) -> None:
        """Drops, doubles or replaces a value anywhere, or adds a field that the schema, or that no schema, names."""
        nasty = copy.deepcopy(self._rng.choice(NASTY))
        if self._rng.random() < 0.4 or not body:
            body[self._rng.choice([*self._fields.get(path, ()), *UNKNOWN])] = nasty
            return
        *above, key = self._rng.choice(list(paths(body)))
        parent = functools.reduce(operator.getitem, above, body)
        match self._rng.choices(("drop", "double", "replace"), (6, 4, 24)):
            case ["drop"]:
                del parent[key]
            case ["double"]:
                parent[key] = [parent[key], copy.deepcopy(parent[key])]
            case _:
                parent[key] = nasty

    def _swapped(self, kind: str) -> Fuzzed:
        method, path = self._rng.choice(self._routes)
        one, other = (self._body(self._rng.choice(list(VALID))) for _ in range(2))
        return Fuzzed(kind, path, http(method, self._filled(path), {**one, **other}))

    def _headers(self, kind: str) -> Fuzzed:
        method, path = self._route_with_body()
        names = self._rng.sample(HEADER_NAMES, self._rng.randint(1, 3))
        headers = [(name.encode(), self._rng.choice(HEADER_VALUES)) for name in names]
        # A body that says that it comes in chunks and does not is one that never comes whole.
        n_answers = 0 if {"transfer-encoding", "expect", "upgrade"} & set(names) else 1
        return Fuzzed(kind, path, http(method, path, self._body(path), headers), n_answers)

    def _no_json(self, kind: str) -> Fuzzed:
        method, path = self._route_with_body()
        right = json.dumps(self._body(path)).encode()
        at = self._rng.randrange(len(right))
        cut, torn = right[:at], right[:at] + self._rng.randbytes(3) + right[at + 1 :]
        return Fuzzed(kind, path, http(method, path, self._rng.choice((*JSON_TEXTS, *(cut, torn) * 8))))

    def _query(self, kind: str) -> Fuzzed:
        method, path = self._rng.choice(self._routes)
        method = self._rng.choice((*METHODS, "BREW")) if self._rng.random() < 0.3 else method
        # /flush_cache gets none: it would wait for as long as a random `timeout` says.
        names = [name for name in ("dp_rank", "include", "format", "level", "rank", "x") if path != "/flush_cache"]
        pairs = [f"{name}={quote(self._rng.choice(QUERIES))}" for name in names if self._rng.random() < 0.4]
        body = self._body(path) if method in ("POST", "PUT") else b""
        return Fuzzed(kind, path, http(method, f"{self._filled(path)}?{'&'.join(pairs)}", body), int(method in METHODS))

    def _filled(self, path: str) -> str:
        return re.sub(r"\{\w+\}", lambda _: quote(self._rng.choice(("x", "default", "\u00e4", "..", "a b"))), path)

    def _framing(self, kind: str) -> Fuzzed:
        """Makes bytes that are no HTTP request, not a whole one, or several."""
        method, path = self._route_with_body()
        right = http(method, path, self._body(path))
        head, _, body = right.partition(b"\r\n\r\n")

        def says(length: bytes) -> bytes:
            return re.sub(rb"content-length: \d+", length, head) + b"\r\n\r\n"

        chunked, n_bytes = says(b"transfer-encoding: chunked"), len(body)
        unfinished = [
            says(b"content-length: %d" % (n_bytes + 50)) + body,
            right[: self._rng.randrange(1, len(right))],
            chunked + b"%x\r\n" % n_bytes + body,
            head[: self._rng.randrange(1, len(head))],
        ]
        broken = [
            says(b"content-length: %d" % (n_bytes // 2)) + body,
            says(b"content-length: -5") + body,
            says(b"content-length: 99999999999999999999999") + body,
            chunked + b"zz\r\n" + body + b"\r\n0\r\n\r\n",
            chunked + b"%x\r\n" % n_bytes + body + b"\r\n0\r\n\r\n",
            self._rng.randbytes(300) + b"\r\n\r\n",
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + self._rng.randbytes(100),
            b"GET " + b"/" + b"a" * 100_000 + b" HTTP/1.1\r\nconnection: close\r\n\r\n",
            right.replace(b"\r\n", b"\r\nx-long: " + b"y" * 200_000 + b"\r\n", 1),
            right.replace(b"\r\n", b"\r\n" + b"".join(b"x-%d: y\r\n" % n for n in range(3000)), 1),
            right.replace(b"HTTP/1.1", self._rng.choice((b"HTTP/9.9", b"HTTP/1.0", b"HTCPCP/1.0", b"")), 1),
            right.replace(b"host: ", b"content-length: 3\r\nhost: ", 1),
        ]
        draw = self._rng.random()
        if draw < 0.3:
            # A few wait until the server has had enough of it, most go away.
            return Fuzzed(kind, path, self._rng.choice(unfinished), 0, leaves=self._rng.random() < 0.9)
        if draw < 0.85:
            return Fuzzed(kind, path, self._rng.choice(broken), 0)
        if draw < 0.93:
            return Fuzzed(kind, path, right, 0, leaves=True)
        n_before = self._rng.randint(1, 5)
        return Fuzzed(kind, path, right.replace(b"connection: close\r\n", b"") * n_before + right, n_before + 1)


def paths(value: Any) -> Iterator[tuple[Any, ...]]:
    """Yields how each value below a JSON value is reached, by keys and indices."""
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield (key,)
        yield from ((key, *below) for below in paths(value[key]))


def http(method: str, target: str, body: bytes | dict[str, Any], headers: Sequence[tuple[bytes, bytes]] = ()) -> bytes:
    """Returns the bytes of one request after which the connection is closed."""
    content = json.dumps(body).encode() if isinstance(body, dict) else body
    own = {b"host": b"localhost", b"connection": b"close", b"content-type": b"application/json"}
    own |= {b"content-length": b"%d" % len(content), **dict(headers)}
    lines = [f"{method} {target} HTTP/1.1".encode(), *(b": ".join(one) for one in own.items())]
    return b"\r\n".join(lines) + b"\r\n\r\n" + content


def routes_of(url: str) -> tuple[list[tuple[str, str]], dict[str, list[str]]]:
    """Returns the routes to fuzz, as (method, path), and the names of body fields in each path's schema."""
    listed = requests.get(f"{url}/openapi.json", timeout=TIMEOUT_S).json()
    routes, fields = [], {}
    for path, operations in listed["paths"].items():
        for method, operation in operations.items() if not path.startswith(LEFT_OUT) else ():
            routes.append((method.upper(), path))
            for content in operation.get("requestBody", {}).get("content", {}).values():
                name = content["schema"].get("$ref", "").rpartition("/")[2]
                fields[path] = list(listed["components"]["schemas"].get(name, {}).get("properties", {}))
    return routes, fields


def good_answers(url: str) -> list[list[float]]:
    """Asks what must always be answered alike, one by one."""
    found = []
    for text in (*TEXTS, TEXT * 20):
        for path, body in (
            ("/v1/completions", {"prompt": text, **LABELS}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}], **LABEL_IDS}),
            ("/generate", {"text": text, **LABEL_IDS}),
            ("/v1/score", {"query": text, **ITEMS, "apply_softmax": True}),
            ("/v1/rerank", {"query": text, "documents": TEXTS}),
        ):
            try:
                reply = requests.post(url + path, json=body, timeout=TIMEOUT_S)
                found.append(part.scores(reply.json()) if reply.ok else [])
            except requests.RequestException:
                found.append([])
    return found


async def send_all(url: str, fuzzed: Sequence[Fuzzed]) -> list[Met]:
    """Sends all requests, each over a connection of its own, with a limit on how many are open at once."""
    host, _, port = url.removeprefix("http://").partition(":")
    places = asyncio.Semaphore(N_AT_ONCE)

    async def one(request: Fuzzed) -> Met:
        limit_s = TIMEOUT_S if request.n_answers else INCOMPLETE_S
        async with places:
            try:
                return met(request, *await asyncio.wait_for(_exchange(host, int(port), request), limit_s))
            except TimeoutError:
                return Met(request, failure="hang" if request.n_answers else None)
            except OSError as error:
                return Met(request, reply=repr(error), failure="no answer" if request.n_answers else None)

    return list(await asyncio.gather(*map(one, fuzzed)))


async def _exchange(host: str, port: int, request: Fuzzed) -> tuple[bytes, int]:
    """Returns the beginning of what comes until the end or a reset, and the number of all its bytes."""
    reader, writer = await asyncio.open_connection(host, port)
    kept, n_bytes = bytearray(), 0
    try:
        writer.write(request.raw)
        if request.leaves:
            return b"", 0
        sending = asyncio.create_task(writer.drain())  # the server may answer, and close, before it has read all
        try:
            while piece := await reader.read(1 << 16):
                kept += piece[: MOST_KEPT_BYTES - len(kept)]
                n_bytes += len(piece)
        except ConnectionResetError:
            if not kept:
                raise
        finally:
            sending.cancel()
        return bytes(kept), n_bytes
    finally:
        writer.transport.abort()


def met(request: Fuzzed, raw: bytes, n_bytes: int) -> Met:
    """Says what an answer means."""
    statuses = [int(number) for number in re.findall(rb"HTTP/1\.[01] (\d{3}) ", raw)]
    _, _, body = raw.partition(b"\r\n\r\n")
    text = body.decode(errors="replace")
    status = max(statuses, default=None)
    is_whole = n_bytes <= MOST_KEPT_BYTES and not request.raw.startswith(b"HEAD") and request.kind != "framing"
    failure = None
    if any(not _is_by_design(one, raw) for one in statuses) or re.search(r'^data:.*"code": ?5(00|01|02)', text, re.M):
        failure = "5xx"
    elif len(statuses) < request.n_answers:
        failure = "no answer"
    elif status is not None and 400 <= status < 500 and is_whole and not _has_message(body):
        failure = "no message"
    return Met(request, status, text, failure, n_bytes)


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


def measure(quick: bool) -> dict[str, Any]:
    """Sends the requests in waves, and good ones after each; ends where the server does."""
    with part.serving() as server:
        fuzzer = Fuzzer(*routes_of(server.url), seed=0)
        each = list(fuzzer.each_value())
        fuzzed = [*fuzzer.plain(), *(fuzzer.make() for _ in range(N_REQUESTS_QUICK if quick else N_REQUESTS))]
        fuzzed += each[::500] if quick else each
        before = good_answers(server.url)
        if not all(before):
            raise report.InvalidRunError("good requests are not answered by a server that was asked nothing else")
        all_met: list[Met] = []
        n_changed, has_died = 0, False
        while fuzzed and not has_died:
            wave, fuzzed = fuzzed[:WAVE_REQUESTS], fuzzed[WAVE_REQUESTS:]
            all_met += asyncio.run(send_all(server.url, wave))
            now = good_answers(server.url)
            n_changed += sum(map(part.differ, before, now))
            has_died = not all(now) and server.has_ended()
    failures = Counter(one.failure for one in all_met)
    found = {
        "5xx": failures["5xx"],
        "hangs": failures["hang"] + failures["no answer"],
        "deaths of the server": int(has_died),
        "changed answers to good ones": n_changed,
    }
    targets = [report.Target.at_most(f"fuzzed requests: {what}", n, 0) for what, n in found.items()]
    rows: list[dict[str, Any]] = []
    if has_died:
        in_flight = [one.shown for one in all_met[-len(wave) :] if one.failure is not None]
        rows.append(
            {"died": len(all_met), "requests that were not sent": len(fuzzed), "unanswered": in_flight[:N_AT_ONCE]}
        )
    rows += [
        _row(kind, [one for one in all_met if one.request.kind == kind]) for kind in ("alone", *KINDS, "each value")
    ]
    # Failures that differ in route, status or reply; refusals without a message come last.
    failed = sorted(
        (one for one in all_met if one.failure), key=lambda one: (one.failure == "no message", len(one.request.raw))
    )
    examples = {(one.failure, one.request.path, one.status, one.reply[:60]): one.shown for one in reversed(failed)}
    rows += list(reversed(examples.values()))[:MOST_EXAMPLES]
    return report.part(rows, targets, commands={"ours, fuzzed": server.command})


def _row(kind: str, found: Sequence[Met]) -> dict[str, Any]:
    statuses = Counter("none" if one.status is None else f"{one.status // 100}xx" for one in found)
    failures = Counter(one.failure for one in found if one.failure is not None)
    longest = max((one.n_reply_bytes for one in found), default=0)
    return {"kind": kind, "requests": len(found), **statuses, "failures": failures, "longest_reply_bytes": longest}
