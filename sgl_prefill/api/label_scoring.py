"""Label scoring (PrefillOnly, section 2.3): the probabilities of a few allowed answers in one prefill.

A scoring request runs with `max_new_tokens=0` and `token_ids_logprob`, SGLang's prefill-only path: no sampling, one
log-softmax row. Everything here works on prompts that SGLang's own routes have rendered.
"""

from __future__ import annotations

import asyncio
import copy
import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import fastapi

from sgl_prefill.api.answer_options import AnswerOptions
from sgl_prefill.api.request_checks import check_has_logprobs, check_ids_in_vocabulary
from sgl_prefill.core.labels import (
    CONTEXT_CHARACTERS,
    CONTEXT_TOKENS,
    Label,
    LabelDistribution,
    check_distinct,
    resolve_in_context,
    restrict,
)
from sgl_prefill.errors import BadRequestError
from sgl_prefill.port import client, deadlines

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import GenerateReqInput

    from sgl_prefill.api.tokenizer_manager import PrefillTokenizerManager

# To look up a label after an end of a prompt takes some 30 microseconds: this is a second of one core. Others' are looked up in
# between, after each slice.
MOST_RESOLUTIONS = 30_000
SLICE = 500
MOST_LABEL_CHARACTERS = 1_000

PLAIN = AnswerOptions()
ANYWHERE = ""  # the end of a prompt after which labels are tokens already

T = TypeVar("T")
_End = str | tuple[int, ...]  # of a prompt
_Asked = tuple[str, tuple[str, ...] | tuple[int, ...]]  # by a tenant


class AllowedAnswers(NamedTuple):
    """What a request asked for; exactly one of the two is set."""

    tokens: list[str] | None  # as text, resolved after each prompt
    token_ids: list[int] | None  # as ids, the same after every prompt


class Alternative(NamedTuple):
    """One of the likeliest tokens after a prompt."""

    token_id: int
    text: str
    logprob: float  # over the whole vocabulary
    is_label: bool


class ScoredPrompt(NamedTuple):
    """The answer to one prompt."""

    labels: list[Label]  # in the order of the request
    distribution: LabelDistribution
    meta_info: dict[str, Any]  # SGLang's, of this prompt
    options: AnswerOptions = PLAIN
    calibrated: list[float] | None = None  # P(label) by the calibration that was asked for
    alternatives: list[Alternative] | None = None  # the likeliest first

    @property
    def best_index(self) -> int:
        """Says which label is the answer: of the calibrated distribution where there is one; the first one of equals."""
        if self.calibrated is None:
            return self.distribution.best
        return max(range(len(self.calibrated)), key=self.calibrated.__getitem__)

    @property
    def best(self) -> Label:
        return self.labels[self.best_index]

    def labels_json(self) -> list[dict[str, Any]]:
        """Returns the entry of each label in `label_scores`."""
        probabilities, logprobs, calibrated = (
            self.distribution.probabilities,
            self.distribution.logprobs,
            self.calibrated,
        )
        entries: list[dict[str, Any]] = []
        for index, label in enumerate(self.labels):
            entry: dict[str, Any] = {"label": label.text, "token_id": label.token_id}
            if not self.options.raw_scores:
                entry["probability"] = probabilities[index]
            if calibrated is not None:
                entry["calibrated_probability"] = calibrated[index]
            entry["raw_score" if self.options.raw_scores else "logprob"] = logprobs[index]
            entries.append(entry)
        return entries

    def extras_json(self) -> dict[str, Any]:
        """Returns what else `label_scores` holds where it was asked for."""
        extras: dict[str, Any] = {}
        if self.options.calibration is not None:
            extras["calibration"] = self.options.calibration.name
        if self.alternatives is not None:
            extras["top_alternatives"] = [one._asdict() for one in self.alternatives]
        return extras

    def to_json(self) -> dict[str, Any]:
        """Returns the reply's `label_scores` object."""
        meta = self.meta_info
        actual_s = meta["prefill_finished_time"] - meta["forward_entry_time"]
        queue_s = meta["forward_entry_time"] - meta["api_server_dispatch_finish_ts"]
        return {
            "labels": self.labels_json(),
            "label_mass": self.distribution.label_mass,
            **self.extras_json(),
            "prompt_tokens": meta["prompt_tokens"],
            "cached_tokens": meta["cached_tokens"],
            "kept_tokens": meta.get("kept_tokens", meta["prompt_tokens"]),
            "evicted_tokens": meta.get("evicted_tokens", 0),
            "queue_ms": round(max(queue_s, 0.0) * 1e3, 3),
            "predicted_jct_ms": meta.get("predicted_jct_ms"),
            "actual_ms": round(actual_s * 1e3, 3),
        }


class LabelScorer:
    """Scores prompts through the tokenizer manager; one instance serves all routes."""

    def __init__(self, tokenizer_manager: PrefillTokenizerManager) -> None:
        self._manager = tokenizer_manager
        # A copy that one thread alone uses: the event loop goes on meanwhile, with SGLang's, which is not safe for two.
        self._tokenizer = copy.deepcopy(tokenizer_manager.tokenizer)
        # Of fast tokenizers: what looks several texts up while Python goes on.
        self._backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if self._backend is not None:
            self._backend.no_padding()
            self._backend.no_truncation()
        # What was looked up, by tenant and labels, and ends of prompts: its time would tell one tenant what another asked.
        self._known: dict[_Asked, dict[_End, list[Label]]] = {}
        self._n_known = 0  # labels
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="labels")

    async def score(
        self,
        obj: GenerateReqInput,
        answers: AllowedAnswers,
        raw_request: fastapi.Request | None = None,
        deadline_ms: float | None = None,
        options: AnswerOptions = PLAIN,
    ) -> list[ScoredPrompt]:
        """Returns one result a prompt, in order. `obj` names the prompts (and adapter, priority, images) and is changed.

        `deadline_ms`: of each prompt, see `port.deadlines`; a late one raises fastapi.HTTPException (429 or 504).

        Raises BadRequestError (400) for labels that cannot be scored; what SGLang raises for the rest passes through.
        """
        prompts = _prompts_of(obj)
        caller = await self._manager.caller_of(raw_request)
        labels = await self._resolve(answers, prompts, self._manager.tenant_of(caller))
        self._check_options(options, labels, obj)
        ids = [[label.token_id for label in of_prompt] for of_prompt in labels]
        is_batch = isinstance(obj.text, list) or (obj.input_ids is not None and isinstance(obj.input_ids[0], list))
        parameters = deadlines.custom_params(deadline_ms)
        obj.sampling_params = {"max_new_tokens": 0, "temperature": 0.0, "custom_params": parameters}
        obj.return_logprob, obj.logprob_start_len, obj.top_logprobs_num = True, -1, options.top_alternatives
        obj.token_ids_logprob = ids if is_batch else ids[0]
        obj.return_text_in_logprobs = obj.stream = False
        outputs = await self._manager.generate_request(obj, raw_request).__anext__()
        outputs = outputs if isinstance(outputs, list) else [outputs]
        scored = [_scored(of_prompt, output) for of_prompt, output in zip(labels, outputs, strict=True)]
        return scored if options == PLAIN else await self._with_options(scored, options)

    async def label_texts(
        self, obj: GenerateReqInput, answers: AllowedAnswers, raw_request: fastapi.Request | None = None
    ) -> list[str]:
        """Returns what the labels are called in answers to these prompts, without asking the model."""
        tenant = self._manager.tenant_of(await self._manager.caller_of(raw_request))
        labels = await self._resolve(answers, _prompts_of(obj)[:1], tenant)
        return [label.text for label in labels[0]]

    def _check_options(self, options: AnswerOptions, labels: list[list[Label]], obj: GenerateReqInput) -> None:
        """Raises BadRequestError where the options do not fit the labels, before anything is computed."""
        n_alternatives, most = len(labels) * options.top_alternatives, self._manager.prefill_config.max_labels
        if n_alternatives and (n := n_alternatives + sum(map(len, labels))) > most:
            raise BadRequestError(
                f"top_alternatives {options.top_alternatives} after {len(labels)} prompts makes, with the labels, {n}"
                f" probabilities, and --max-labels {most} is the limit of one request: send fewer prompts in each"
            )
        if options.calibration is not None:
            paths = obj.lora_path if isinstance(obj.lora_path, list) else [obj.lora_path]
            for of_prompt in {id(of_prompt): of_prompt for of_prompt in labels}.values():  # prompts share them
                options.calibration.check([label.text for label in of_prompt], set(paths))

    async def _with_options(self, scored: list[ScoredPrompt], options: AnswerOptions) -> list[ScoredPrompt]:
        """Returns the answers with what the options ask for."""
        texts: dict[int, str] = {}
        if options.top_alternatives:
            ids = list({token_id for one in scored for _, token_id, _ in one.meta_info["output_top_logprobs"][0]})
            texts = {label.token_id: label.text for label in await self._in_slices(self._labels_of, ids)}
        return [_with_options(one, options, texts) for one in scored]

    async def _resolve(
        self, answers: AllowedAnswers, prompts: list[str] | list[list[int]], tenant: str = ""
    ) -> list[list[Label]]:
        """Returns the labels after each prompt. Prompts of one template share their end, and so do requests: each end is
        looked up once, in another thread, while the event loop goes on.
        """
        _check_size(answers, len(prompts), self._manager.prefill_config.max_labels)
        vocab_size = self._manager.model_config.vocab_size
        if answers.token_ids is not None:
            check_distinct(answers.token_ids, "allowed_token_ids")
            check_ids_in_vocabulary(answers.token_ids, vocab_size, "allowed_token_ids")
            ids = tuple(answers.token_ids)
            same = self._known.get((tenant, ids), {}).get(ANYWHERE)
            if same is None:
                same = await self._in_slices(self._labels_of, ids)
                self._remember((tenant, ids), {ANYWHERE: same})
            return [same] * len(prompts)
        assert answers.tokens is not None
        check_distinct(answers.tokens, "allowed_tokens")
        texts = tuple(answers.tokens)
        ends = [_end_of(prompt) for prompt in prompts]
        for index, end in enumerate(ends):
            if not isinstance(end, str):  # which is decoded here; the tokenizer manager looks at the whole prompt
                check_ids_in_vocabulary(list(end), vocab_size, f"prompt {index}")
        known = self._known.get((tenant, texts), {})
        found = {end: known.get(end, []) for end in ends}
        missing = [end for end, labels in found.items() if not labels]
        if (n := len(missing) * len(texts)) > MOST_RESOLUTIONS:
            raise BadRequestError(
                f"{len(texts)} allowed_tokens after {len(missing)} different ends of prompts are {n} labels to look up, and"
                f" {MOST_RESOLUTIONS} are the limit: give allowed_token_ids, or fewer prompts in one request"
            )
        client.end_turn()
        for end in missing:
            found[end] = await self._in_slices(functools.partial(self._resolve_after, end), texts)
            _check_distinct_tokens(found[end])
        self._remember((tenant, texts), {end: found[end] for end in missing})
        return [found[end] for end in ends]

    async def _in_slices(self, look_up: Callable[[Sequence[T]], list[Label]], asked: Sequence[T]) -> list[Label]:
        """Looks labels up in the one thread, in slices between which those of other requests come in."""
        loop, labels = asyncio.get_running_loop(), list[Label]()
        for start in range(0, len(asked), SLICE):
            labels += await loop.run_in_executor(self._thread, look_up, asked[start : start + SLICE])
        return labels

    def _remember(self, asked: _Asked, found: dict[_End, list[Label]]) -> None:
        """Forgets the oldest where there is too much; another request may have looked up the same meanwhile."""
        known = self._known.setdefault(asked, {})
        self._n_known += len(asked[1]) * sum(end not in known for end in found)
        known |= found
        while self._n_known > MOST_RESOLUTIONS:
            oldest = next(iter(self._known))
            self._n_known -= len(oldest[1]) * len(self._known.pop(oldest))

    def _labels_of(self, token_ids: Sequence[int]) -> list[Label]:
        return [Label(self._decode([token_id]), token_id) for token_id in token_ids]

    def _resolve_after(self, end: _End, texts: Sequence[str]) -> list[Label]:
        prompt_end = end if isinstance(end, str) else self._decode(list(end))
        token_ids = resolve_in_context(texts, prompt_end, self._encode, self._decode)
        return [Label(text, token_id) for text, token_id in zip(texts, token_ids, strict=True)]

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        if self._tokenizer is None:
            raise BadRequestError(
                "this server runs without a tokenizer: give allowed_token_ids instead of allowed_tokens"
            )
        if self._backend is not None:
            return [encoding.ids for encoding in self._backend.encode_batch(list(texts), add_special_tokens=False)]
        return [list(self._tokenizer.encode(text, add_special_tokens=False)) for text in texts]

    def _decode(self, token_ids: list[int]) -> str:
        """Decodes, to nothing where the server runs without a tokenizer."""
        if self._tokenizer is None:
            return ""
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text


def _check_size(answers: AllowedAnswers, n_prompts: int, most: int) -> None:
    """Raises BadRequestError where a request asks for more than is answered at once: each label of each prompt is a line of the
    answer, which the event loop writes."""
    asked = answers.token_ids if answers.token_ids is not None else answers.tokens or []
    if (n := n_prompts * len(asked)) > most:
        raise BadRequestError(
            f"{len(asked)} allowed answers after {n_prompts} prompts are {n} probabilities, and --max-labels {most} is the limit"
            " of one request: send fewer prompts in each"
        )
    if (longest := max(map(len, answers.tokens or [""]), default=0)) > MOST_LABEL_CHARACTERS:
        raise BadRequestError(
            f"allowed_tokens holds a label of {longest} characters, and {MOST_LABEL_CHARACTERS} are the limit: a label is"
            " one token"
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


def _end_of(prompt: str | list[int]) -> _End:
    return prompt[-CONTEXT_CHARACTERS:] if isinstance(prompt, str) else tuple(prompt[-CONTEXT_TOKENS:])


def _prompts_of(obj: GenerateReqInput) -> list[str] | list[list[int]]:
    """Returns the prompts as a list. Raises BadRequestError where one is empty, naming its place."""
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


def _scored(labels: list[Label], output: dict[str, Any]) -> ScoredPrompt:
    meta_info = output["meta_info"]
    check_has_logprobs(meta_info)
    by_id = {token_id: logprob for logprob, token_id, _ in meta_info["output_token_ids_logprobs"][0]}
    return ScoredPrompt(labels, restrict([by_id[label.token_id] for label in labels]), meta_info)


def _with_options(scored: ScoredPrompt, options: AnswerOptions, texts: dict[int, str]) -> ScoredPrompt:
    """texts: of all tokens that are alternatives."""
    calibrated = alternatives = None
    if options.calibration is not None:
        names = [label.text for label in scored.labels]
        calibrated = options.calibration.probabilities(names, scored.distribution.probabilities)
    if options.top_alternatives:
        label_ids = {label.token_id for label in scored.labels}
        alternatives = [
            Alternative(token_id, texts[token_id], logprob, token_id in label_ids)
            for logprob, token_id, _ in scored.meta_info["output_top_logprobs"][0]
        ]
    return scored._replace(options=options, calibrated=calibrated, alternatives=alternatives)
