"""Label scoring (PrefillOnly, section 2.3): the probabilities of a few allowed answers in one prefill.

A scoring request runs with `max_new_tokens=0` and `token_ids_logprob`, SGLang's prefill-only path: no sampling, one
log-softmax row. SGLang's own routes render the prompts.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import fastapi
import numpy as np
from sglang.srt.managers.io_struct import GenerateReqInput
from transformers.convert_slow_tokenizer import bytes_to_unicode

from sgl_prefill.core import long_labels
from sgl_prefill.core.branches import Asked, Tokens, asked_of_label
from sgl_prefill.core.labels import (
    CONTEXT_CHARACTERS,
    CONTEXT_TOKENS,
    Label,
    LabelDistribution,
    check_distinct,
    other_forms,
    resolve_in_context,
    restrict,
    text_of_bytes,
    tokens_in_context,
)
from sgl_prefill.errors import BadRequestError, PromptTooLongError
from sgl_prefill.http.branch_requests import BranchRequests
from sgl_prefill.http.request_checks import (
    MOST_LABELS,
    PER_PROMPT_FIELDS,
    check_ids_in_vocabulary,
    count_prompts,
    media_of,
)
from sgl_prefill.http.scored_prompt import (
    PLAIN,
    ReplyOptions,
    ScoredPrompt,
    UnscoredPrompt,
    distribution_of,
    scored_of,
    with_reply,
)
from sgl_prefill.http.token_ids import TokenIds
from sgl_prefill.port.steps import custom_params

if TYPE_CHECKING:
    from sgl_prefill.http.tokenizer_manager import PrefillTokenizerManager

# Looking up a label after one end of a prompt takes some 30 microseconds: at most one second of one core.
MOST_RESOLUTIONS = 30_000
SLICE = 500  # labels per task of the look-up thread, so that requests take turns
CHARACTERS_PER_LABEL = 8  # of a text that takes the thread for long texts as long as one label
MOST_LABEL_CHARACTERS = 1_000
MOST_HINTED = 20  # labels whose other forms are looked up too
LEAST_LEFT_MS = 1e-3  # deadline of a request that is already late: the scheduler refuses it
NO_TEXT = "\ufffd"  # the tokenizer writes it for bytes that are not UTF-8
ANYWHERE = ""  # key of labels given as token ids, the same after every prompt

T = TypeVar("T")
_End = str | tuple[int, ...]  # of a prompt
_LookUp = tuple[str, tuple[str, ...] | tuple[int, ...], bool]  # tenant, labels, whether they may have several tokens


class AllowedAnswers(NamedTuple):
    """The labels of a request. `token_ids` or `tokens` is set; or `long`, whose look-up sets `tokens` too."""

    tokens: list[str] | None  # as text, resolved after each prompt
    token_ids: list[int] | None  # as ids, the same after every prompt
    long: long_labels.AnswerOptions | None = None  # as texts of any length, resolved after each prompt

    @property
    def field(self) -> str:
        return "allowed_tokens" if self.long is None else "allowed_answers"

    @property
    def way(self) -> dict[str, Any]:
        """How labels of any length get their probabilities; empty for the default. A calibration holds for one way only."""
        if self.long is None:
            return {}
        forms = {label.name: sorted(label.forms) for label in self.long.labels if label.forms != (label.name,)}
        found = {
            "normalise": self.long.normalise if self.long.normalise != "sum" else None,
            "answer_end": long_labels.END_TOKEN if self.long.ends_with_token else self.long.end_text,
            "forms": forms,
        }
        return {name: value for name, value in found.items() if value}


class _AskedLabels(NamedTuple):
    """Labels of any length, per prompt."""

    forms: list[list[Tokens]]
    ways: list[list[Tokens]]  # in which the forms may be written out, all different
    requests: BranchRequests

    def logprobs(self, outputs: Sequence[Sequence[dict[str, Any]]]) -> list[dict[Tokens, float]]:
        """Returns the log-probability of each way, per prompt. outputs: per request, per prompt."""
        return [
            {way: sum(values) for way, values in zip(ways, found, strict=True)}
            for ways, found in zip(self.ways, self.requests.logprobs(outputs), strict=True)
        ]


class AskedPrompts(NamedTuple):
    """What was found behind prompts that share their beginning."""

    distributions: list[LabelDistribution]  # one for each prompt, over its own tokens
    meta_info: list[dict[str, Any]]  # SGLang's, of each request
    shared_tokens: int  # of all prompts
    own_tokens: int  # beyond them


class LabelScorer:
    """Scores prompts through the tokenizer manager; one instance serves all routes."""

    def __init__(self, tokenizer_manager: PrefillTokenizerManager) -> None:
        self._manager = tokenizer_manager
        # A copy for the look-up thread: the event loop uses SGLang's, and tokenizers are not thread-safe.
        self._tokenizer = copy.deepcopy(tokenizer_manager.tokenizer)
        # Fast tokenizers encode a batch of texts without the GIL.
        self._backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if self._backend is not None:
            self._backend.no_padding()
            self._backend.no_truncation()
        # Labels by end of prompt. Per tenant: the time of a look-up would reveal other tenants' labels.
        self._known: dict[_LookUp, dict[_End, list[Label]]] = {}
        self._n_known = 0  # labels in `_known`
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="labels")

    async def score(
        self,
        obj: GenerateReqInput,
        answers: AllowedAnswers,
        raw_request: fastapi.Request | None = None,
        deadline_ms: float | None = None,
        reply: ReplyOptions = PLAIN,
    ) -> list[ScoredPrompt]:
        """Returns one result per prompt, in order. Raises BadRequestError for labels that cannot be scored; SGLang's errors pass.

        Args:
            obj: the prompts, adapter and priority; is changed.
            deadline_ms: of each prompt; a late one raises fastapi.HTTPException (429 or 504).
        """
        if media := media_of(obj):
            raise BadRequestError(
                f"the request holds {media[0]} beside {answers.field}, and labels are scored after text only: leave one of"
                " the two out"
            )
        if answers.long is not None:
            names = [label.name for label in answers.long.labels]
            self._check_reply(reply, answers, [names] * len(_prompts_of(obj)), obj)
            scored = await self._score_long(obj, answers.long, raw_request, deadline_ms, reply)
        else:
            labels = await self._labels_after(obj, answers, raw_request, reply, deadline_ms)
            outputs = await self._answered(obj, raw_request)
            n_labels = sum(map(len, labels))
            scored = await self._off_loop(n_labels, lambda: [*map(scored_of, labels, outputs)])
        return await self._with_reply(scored, reply)

    async def score_what_fits(
        self,
        obj: GenerateReqInput,
        answers: AllowedAnswers,
        raw_request: fastapi.Request | None = None,
        deadline_ms: float | None = None,
        reply: ReplyOptions = PLAIN,
    ) -> list[ScoredPrompt | UnscoredPrompt]:
        """As `score`, but a batch with prompts that are too long is not refused: it scores the others, and returns an
        UnscoredPrompt for each of these. If all are too long, it raises PromptTooLongError.
        """
        given = copy.copy(obj)
        try:
            return list(await self.score(obj, answers, raw_request, deadline_ms, reply))
        except PromptTooLongError:
            prompts = _prompts_of(given)
            if len(prompts) == 1:
                raise
            too_long = await self._manager.run_in_thread(
                lambda twin: dict(_too_long(twin, prompts)), sum(map(len, prompts))
            )
            if not 0 < len(too_long) < len(prompts):
                raise
        kept = [index for index in range(len(prompts)) if index not in too_long]
        scored = iter(await self.score(_of_prompts(given, kept), answers, raw_request, deadline_ms, reply))
        return [UnscoredPrompt(too_long[index]) if index in too_long else next(scored) for index in range(len(prompts))]

    async def written(
        self, scored: Sequence[ScoredPrompt | UnscoredPrompt], write: Callable[[int, Any], dict[str, Any]]
    ) -> list[dict[str, Any]]:
        """Returns the part of a reply about each prompt. write: makes one, from its index and result."""
        n_labels = sum(len(one.labels) for one in scored if isinstance(one, ScoredPrompt))
        return await self._off_loop(n_labels, lambda: [write(index, one) for index, one in enumerate(scored)])

    async def _off_loop(self, n_labels: int, work: Callable[[], T]) -> T:
        """Runs work on many labels in the thread for long texts: the event loop serves other requests meanwhile."""
        if n_labels <= SLICE:
            return work()
        return await self._manager.run_in_thread(lambda _: work(), n_labels * CHARACTERS_PER_LABEL)

    async def _tenant(self, raw_request: fastapi.Request | None) -> str:
        return self._manager.tenant_of(await self._manager.caller_of(raw_request))

    def _check_reply(
        self, reply: ReplyOptions, answers: AllowedAnswers, names: list[list[str]], obj: GenerateReqInput
    ) -> None:
        """Raises BadRequestError if the options do not fit the labels. names: of the labels, per prompt; lists may be shared."""
        n_alternatives = len(names) * reply.top_alternatives
        if n_alternatives and (n := n_alternatives + sum(map(len, names))) > MOST_LABELS:
            raise BadRequestError(
                f"top_alternatives {reply.top_alternatives} after {len(names)} prompts makes, with the labels, {n}"
                f" probabilities, and {MOST_LABELS} are the limit of one request: send fewer prompts in each"
            )
        if reply.calibration is not None:
            paths = obj.lora_path if isinstance(obj.lora_path, list) else [obj.lora_path]
            for of_prompt in {id(of_prompt): of_prompt for of_prompt in names}.values():
                reply.calibration.check(of_prompt, answers.way, set(paths))

    async def _with_reply(self, scored: list[ScoredPrompt], reply: ReplyOptions) -> list[ScoredPrompt]:
        if reply == PLAIN:
            return scored
        texts: dict[int, str] = {}
        if reply.top_alternatives:
            ids = list({token_id for one in scored for _, token_id, _ in one.meta_info["output_top_logprobs"][0]})
            texts = {label.token_id: label.text for label in await self._in_slices(self._labels_of, ids)}
        return [with_reply(one, reply, texts) for one in scored]

    async def _labels_after(
        self,
        obj: GenerateReqInput,
        answers: AllowedAnswers,
        raw_request: fastapi.Request | None,
        reply: ReplyOptions,
        deadline_ms: float | None = None,
    ) -> list[list[Label]]:
        """Returns the one-token labels after each prompt, and makes `obj` a request for their log-probabilities."""
        labels = await self._resolve(answers, _prompts_of(obj), await self._tenant(raw_request))
        if reply != PLAIN:
            names = {id(of_prompt): [label.text for label in of_prompt] for of_prompt in labels}
            self._check_reply(reply, answers, [names[id(of_prompt)] for of_prompt in labels], obj)
        ids = {id(of_prompt): _asked_ids(of_prompt) for of_prompt in labels}
        of_prompts = [ids[id(of_prompt)] for of_prompt in labels]
        _ask_for_logprobs(obj, deadline_ms, reply.top_alternatives)
        obj.token_ids_logprob = of_prompts if count_prompts(obj) is not None else of_prompts[0]
        return labels

    async def score_each(
        self,
        obj: GenerateReqInput,
        answers: AllowedAnswers,
        raw_request: fastapi.Request | None = None,
        reply: ReplyOptions = PLAIN,
    ) -> AsyncIterator[tuple[int, ScoredPrompt]]:
        """As `score` for one-token labels, but yields the index and result of each prompt when computed. A failure aborts all."""
        assert isinstance(obj.text, list)
        labels = await self._labels_after(obj, answers, raw_request, reply)
        obj.stream = True
        async for output in self._manager.generate_request(obj, raw_request):
            reason = output["meta_info"].get("finish_reason") or {}
            if reason.get("status_code"):  # refused by the scheduler
                caller = await self._manager.caller_of(raw_request)
                caller.refused_for, caller.retry_after_s = reason.get("reason"), reason.get("retry_after_s")
                self._manager.abort_request(obj.rid)
            (one,) = await self._with_reply([scored_of(labels[output["index"]], output)], reply)
            yield output["index"], one

    async def distributions(
        self,
        prompts: Sequence[TokenIds],
        token_ids: Sequence[Sequence[int]],
        raw_request: fastapi.Request | None = None,
        extra_key: str | None = None,
        deadline_ms: float | None = None,
    ) -> AskedPrompts:
        """For each prompt the distribution over its own tokens. What all prompts begin with is one prompt, and the rest of each a
        branch behind it; engines that compute no branches get each prompt as a request.

        extra_key: as SGLang's, for all prompts.
        """
        n_shared = _n_shared(prompts)
        if n_shared == 0 or self._manager.no_long_answers is not None:
            obj = GenerateReqInput(input_ids=list(prompts), extra_key=extra_key)
            _ask_for_logprobs(obj, deadline_ms, 0)
            obj.token_ids_logprob = token_ids
            outputs = await self._answered(obj, raw_request)
            found = [distribution_of(ids, one) for ids, one in zip(token_ids, outputs, strict=True)]
            n_own = sum(len(one) - n_shared for one in prompts)
            return AskedPrompts(found, [one["meta_info"] for one in outputs], n_shared, n_own)
        asked: list[Asked] = [
            [(tuple(one[n_shared:]), tuple(ids))] for one, ids in zip(prompts, token_ids, strict=True)
        ]
        shared = TokenIds(prompts[0][:n_shared])
        obj = GenerateReqInput(input_ids=shared, extra_key=extra_key)
        requests = BranchRequests(obj, [shared], [asked], self._manager.longest_input_tokens)
        outputs_of_requests = await self._answered_in_turn(requests.requests, raw_request, deadline_ms)
        (logprobs,) = requests.logprobs(outputs_of_requests)
        metas = [one["meta_info"] for (one,) in outputs_of_requests]
        return AskedPrompts([*map(restrict, logprobs)], metas, n_shared, requests.n_tokens[0])

    async def one_token_labels(self, prompt_end: str, labels: Sequence[str]) -> dict[str, int]:
        """The tokens of those labels that are one token after the prompt, each another one."""
        look_up = functools.partial(self._resolve_after, prompt_end[-CONTEXT_CHARACTERS:], True)
        found = await self._in_slices(look_up, labels)
        by_token = {label.token_id: label.text for label in reversed(found) if not label.rest}
        return {text: token_id for token_id, text in by_token.items()}

    async def _answered(self, obj: GenerateReqInput, raw_request: fastapi.Request | None) -> list[dict[str, Any]]:
        outputs = await self._manager.generate_request(obj, raw_request).__anext__()
        return outputs if isinstance(outputs, list) else [outputs]

    async def _answered_in_turn(
        self,
        requests: Sequence[GenerateReqInput],
        raw_request: fastapi.Request | None,
        deadline_ms: float | None,
        n_alternatives: int = 0,
    ) -> list[list[dict[str, Any]]]:
        """Returns the outputs of each request, which hits the prefixes that the earlier ones computed. deadline_ms: of all
        together; n_alternatives: of the first.
        """
        started_s = time.monotonic()
        outputs: list[list[dict[str, Any]]] = []
        for one in requests:
            if outputs and raw_request is not None and await raw_request.is_disconnected():
                raise fastapi.HTTPException(HTTPStatus.BAD_REQUEST, "the client has left, and its other labels with it")
            left_ms = None if deadline_ms is None else left_of(deadline_ms, started_s)
            _ask_for_logprobs(one, left_ms, 0 if outputs else n_alternatives)
            outputs.append(await self._answered(one, raw_request))
        return outputs

    async def _score_long(
        self,
        obj: GenerateReqInput,
        options: long_labels.AnswerOptions,
        raw_request: fastapi.Request | None,
        deadline_ms: float | None,
        reply: ReplyOptions,
    ) -> list[ScoredPrompt]:
        """As `score`, for labels of any length: their tokens are branches of their prompt."""
        tenant = await self._tenant(raw_request)
        end_ids = sorted(self._manager.end_token_ids) if options.ends_with_token else []
        if options.ends_with_token and not end_ids:
            raise BadRequestError(
                f"answer_end is {long_labels.END_TOKEN!r}, and this model's configuration names no end token"
            )
        baseline = None if options.baseline is None else _with_prompt(obj, options.baseline)
        asked = [await self._asked(obj, options, end_ids, tenant)]
        if baseline is not None:
            asked.append(await self._asked(baseline, options, end_ids, tenant))
        why_not = self._manager.no_long_answers
        if why_not is not None and any(n for one in asked for n in one.requests.n_tokens):
            raise BadRequestError(
                f"allowed_answers holds labels of several tokens, which this engine cannot compute: {why_not}. Shorten them"
            )
        all_requests = [one for each in asked for one in each.requests.requests]
        outputs = await self._answered_in_turn(all_requests, raw_request, deadline_ms, reply.top_alternatives)
        main = asked[0]
        n_main = len(main.requests.requests)

        def read() -> list[ScoredPrompt]:
            logprobs = main.logprobs(outputs[:n_main])
            without: tuple[Sequence[Tokens], dict[Tokens, float] | None] = ((), None)
            if baseline is not None:
                without = asked[1].forms[0], asked[1].logprobs(outputs[n_main:])[0]
            scored = [
                long_labels.score(options, of_prompt, end_ids, found, *without)
                for of_prompt, found in zip(main.forms, logprobs, strict=True)
            ]
            return [
                ScoredPrompt(_labels_of(options, one), one.distribution, output["meta_info"], one, n_tokens)
                for one, output, n_tokens in zip(scored, outputs[0], main.requests.n_tokens, strict=True)
            ]

        return await self._off_loop(sum(len(of_prompt) for one in asked for of_prompt in one.forms), read)

    async def _asked(
        self, obj: GenerateReqInput, options: long_labels.AnswerOptions, end_ids: list[int], tenant: str
    ) -> _AskedLabels:
        prompts = _prompts_of(obj)
        labels = await self._resolve(AllowedAnswers(options.texts, None, options), prompts, tenant)

        def ask() -> _AskedLabels:
            forms = [[label.token_ids for label in of_prompt] for of_prompt in labels]
            ways = [
                [way for answer in of_prompt for way in long_labels.ways_to_end(answer, end_ids)] for of_prompt in forms
            ]
            asked = [[asked_of_label(way) for way in of_prompt] for of_prompt in ways]
            return _AskedLabels(forms, ways, BranchRequests(obj, prompts, asked, self._manager.longest_input_tokens))

        return await self._off_loop(sum(map(len, labels)), ask)

    async def _resolve(
        self, answers: AllowedAnswers, prompts: list[str] | list[list[int]], tenant: str = ""
    ) -> list[list[Label]]:
        _check_size(answers, len(prompts))
        if answers.token_ids is not None:
            return [await self._labels_of_ids(answers.token_ids, tenant)] * len(prompts)
        return await self._labels_of_texts(answers, prompts, tenant)

    async def _labels_of_ids(self, token_ids: list[int], tenant: str) -> list[Label]:
        check_distinct(token_ids, "allowed_token_ids")
        check_ids_in_vocabulary(token_ids, self._manager.model_config.vocab_size, "allowed_token_ids")
        key: _LookUp = (tenant, tuple(token_ids), False)
        labels = self._known.get(key, {}).get(ANYWHERE)
        if labels is None:
            labels = await self._in_slices(self._labels_of, token_ids)
            self._remember(key, {ANYWHERE: labels})
        return labels

    async def _labels_of_texts(
        self, answers: AllowedAnswers, prompts: list[str] | list[list[int]], tenant: str
    ) -> list[list[Label]]:
        """Looks up each distinct end of a prompt once, in the look-up thread: prompts of one template share their end."""
        assert answers.tokens is not None
        is_long = answers.long is not None
        if not is_long:
            check_distinct(answers.tokens, "allowed_tokens")
        texts = tuple(answers.tokens)
        key: _LookUp = (tenant, texts, is_long)
        ends = [_end_of(prompt) for prompt in prompts]
        for index, end in enumerate(ends):
            if not isinstance(end, str):  # it is decoded here; the tokenizer manager checks the rest of the prompt
                check_ids_in_vocabulary(list(end), self._manager.model_config.vocab_size, f"prompt {index}")
        known = self._known.get(key, {})
        found = {end: known.get(end, []) for end in ends}
        missing = [end for end, labels in found.items() if not labels]
        if (n := len(missing) * len(texts)) > MOST_RESOLUTIONS:
            raise BadRequestError(
                f"{len(texts)} {answers.field} after {len(missing)} different ends of prompts are {n} labels to look up, and"
                f" {MOST_RESOLUTIONS} are the limit: give allowed_token_ids, or fewer prompts in one request"
            )
        for end in missing:
            found[end] = await self._in_slices(functools.partial(self._resolve_after, end, is_long), texts)
            if is_long:
                long_labels.check_tokens(texts, [label.token_ids for label in found[end]])
            else:
                _check_distinct_tokens(found[end])
        self._remember(key, {end: found[end] for end in missing})
        return [found[end] for end in ends]

    async def _in_slices(self, look_up: Callable[[Sequence[T]], list[Label]], values: Sequence[T]) -> list[Label]:
        loop, labels = asyncio.get_running_loop(), list[Label]()
        for start in range(0, len(values), SLICE):
            labels += await loop.run_in_executor(self._thread, look_up, values[start : start + SLICE])
        return labels

    def _remember(self, look_up: _LookUp, found: dict[_End, list[Label]]) -> None:
        """Stores look-ups, which a concurrent request may have stored already, and drops the oldest above the limit."""
        known = self._known.setdefault(look_up, {})
        self._n_known += len(look_up[1]) * sum(end not in known for end in found)
        known |= found
        while self._n_known > MOST_RESOLUTIONS:
            oldest = next(iter(self._known))
            self._n_known -= len(oldest[1]) * len(self._known.pop(oldest))

    def _labels_of(self, token_ids: Sequence[int]) -> list[Label]:
        return [Label(self._text_of(token_id), token_id) for token_id in token_ids]

    def _text_of(self, token_id: int) -> str:
        text = self._decode([token_id])
        if NO_TEXT in text and (found := self._bytes_of(token_id)) is not None:
            return text_of_bytes(found)
        return text

    def _bytes_of(self, token_id: int) -> bytes | None:
        """The bytes of a token of a byte-level vocabulary, or of one that stands for a byte."""
        token = self._tokenizer.convert_ids_to_tokens(token_id)
        if one := re.fullmatch(r"<0x([0-9A-F]{2})>", token):
            return bytes.fromhex(one[1])
        known = {character: byte for byte, character in bytes_to_unicode().items()}  # type: ignore[no-untyped-call]
        return bytes(map(known.__getitem__, token)) if known.keys() >= set(token) else None

    def _resolve_after(self, end: _End, is_long: bool, texts: Sequence[str]) -> list[Label]:
        prompt_end = end if isinstance(end, str) else self._decode(list(end))
        if is_long:
            found = tokens_in_context(texts, prompt_end, self._encode, self._decode)
            return [Label(text, tokens[0], tuple(tokens[1:])) for text, tokens in zip(texts, found, strict=True)]
        token_ids = resolve_in_context(texts, prompt_end, self._encode, self._decode)
        others: list[tuple[str, int] | None] = [None] * len(texts)
        if len(texts) <= MOST_HINTED:
            others = other_forms(texts, prompt_end, self._encode, self._decode)
        rows = zip(texts, token_ids, others, strict=True)
        return [Label(text, token_id, other=other) for text, token_id, other in rows]

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        if self._tokenizer is None:
            raise BadRequestError(
                "this server runs without a tokenizer: give allowed_token_ids instead of allowed_tokens"
            )
        if self._backend is not None:
            return [encoding.ids for encoding in self._backend.encode_batch(list(texts), add_special_tokens=False)]
        return [list(self._tokenizer.encode(text, add_special_tokens=False)) for text in texts]

    def _decode(self, token_ids: list[int]) -> str:
        if self._tokenizer is None:
            return ""
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text


def left_of(deadline_ms: float, started_s: float) -> float:
    """Returns the milliseconds that are left of a deadline. started_s: of the monotonic clock."""
    return max(deadline_ms - 1e3 * (time.monotonic() - started_s), LEAST_LEFT_MS)


def _n_shared(prompts: Sequence[TokenIds]) -> int:
    """Tokens that all prompts begin with."""
    first = np.frombuffer(prompts[0].array, np.int64)
    shared = len(first)
    for one in prompts[1:]:
        other = np.frombuffer(one.array, np.int64)[:shared]
        differs = np.flatnonzero(first[: len(other)] != other)
        shared = int(differs[0]) if len(differs) else len(other)
    return shared


def _check_size(answers: AllowedAnswers, n_prompts: int) -> None:
    """Raises BadRequestError for too many or too long labels."""
    labels = answers.token_ids if answers.token_ids is not None else answers.tokens or []
    if (n := n_prompts * len(labels)) > MOST_LABELS:
        raise BadRequestError(
            f"{len(labels)} allowed answers after {n_prompts} prompts are {n} probabilities, and {MOST_LABELS} are the limit"
            " of one request: send fewer prompts in each"
        )
    if (longest := max(map(len, answers.tokens or [""]), default=0)) > MOST_LABEL_CHARACTERS:
        raise BadRequestError(
            f"{answers.field} holds a label of {longest} characters, and {MOST_LABEL_CHARACTERS} are the limit: a label is"
            f" {'one token' if answers.long is None else f'at most {long_labels.MOST_FORM_TOKENS} tokens'}"
        )


def _check_distinct_tokens(labels: Sequence[Label]) -> None:
    by_id: dict[int, str] = {}
    for label in labels:
        if label.token_id in by_id:
            raise BadRequestError(
                f"allowed_tokens {by_id[label.token_id]!r} and {label.text!r} are the same token"
                f" {label.token_id} after this prompt: keep one of them"
            )
        by_id[label.token_id] = label.text


def _asked_ids(labels: Sequence[Label]) -> list[int]:
    """Returns the token ids of the labels, then those of their other forms."""
    ids = dict.fromkeys(label.token_id for label in labels)
    return list(ids | dict.fromkeys(label.other[1] for label in labels if label.other is not None))


def _end_of(prompt: str | list[int]) -> _End:
    return prompt[-CONTEXT_CHARACTERS:] if isinstance(prompt, str) else tuple(prompt[-CONTEXT_TOKENS:])


def _prompts_of(obj: GenerateReqInput) -> list[str] | list[list[int]]:
    """Returns the prompts as a list. Raises BadRequestError naming the index of an empty one."""
    given = obj.text if obj.text is not None else obj.input_ids
    if given is None:
        raise BadRequestError("label scoring needs a prompt as text or as token ids")
    is_single = isinstance(given, str) or (len(given) > 0 and isinstance(given[0], int))
    prompts: Any = [given] if is_single else given
    for index, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise BadRequestError(f"prompt {index} is empty: it must hold at least one token")
    if not prompts:
        raise BadRequestError("the prompt is empty: it must hold at least one token")
    return prompts  # type: ignore[no-any-return]


def _too_long(manager: PrefillTokenizerManager, prompts: list[str] | list[list[int]]) -> Iterator[tuple[int, str]]:
    """Yields the index of each prompt that is too long, and the error. manager: with a tokenizer of this thread."""
    for index, prompt in enumerate(prompts):
        try:
            if isinstance(prompt, str):
                manager.check_text(prompt)
                if len(prompt.encode(errors="replace")) <= manager.longest_input_tokens:
                    continue
                prompt = manager.tokenizer(prompt)["input_ids"]
            manager.check_length(len(prompt))
        except PromptTooLongError as error:
            yield index, str(error).replace("the prompt", f"prompt {index}", 1)


def _of_prompts(obj: GenerateReqInput, kept: list[int]) -> GenerateReqInput:
    """Returns a request for these prompts of a batch."""
    n_prompts, found = count_prompts(obj), copy.copy(obj)
    for name in ("text", "input_ids", "sgl_prefill_parts", *PER_PROMPT_FIELDS):
        value = getattr(obj, name, None)
        if isinstance(value, list) and len(value) == n_prompts:
            setattr(found, name, [value[index] for index in kept])
    return found


def _ask_for_logprobs(obj: GenerateReqInput, deadline_ms: float | None, n_alternatives: int) -> None:
    """Makes this a prefill-only request for log-probabilities."""
    parameters = custom_params.with_deadline(deadline_ms)
    obj.sampling_params = {"max_new_tokens": 0, "temperature": 0.0, "custom_params": parameters}
    obj.return_logprob, obj.logprob_start_len, obj.top_logprobs_num = True, -1, n_alternatives
    obj.return_text_in_logprobs = obj.stream = False


def _with_prompt(obj: GenerateReqInput, prompt: str | tuple[int, ...]) -> GenerateReqInput:
    """Returns a request for another prompt, with the adapter, priority and prefix namespace of `obj`."""

    def first(given: Any) -> Any:
        return given[0] if isinstance(given, list) and given else given

    kept = {name: first(getattr(obj, name)) for name in ("extra_key", "lora_path", "priority")}
    text, ids = (prompt, None) if isinstance(prompt, str) else (None, list(prompt))
    return type(obj)(text=text, input_ids=ids, **kept)


def _labels_of(options: long_labels.AnswerOptions, scored: long_labels.ScoredLabels) -> list[Label]:
    """Each label with the tokens of its likeliest form."""
    best = [max(forms, key=lambda form: form.logprob).token_ids for forms in scored.forms]
    return [Label(label.name, ids[0], ids[1:]) for label, ids in zip(options.labels, best, strict=True)]
