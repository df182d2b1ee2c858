"""Decisions: `/v1/decisions` (OpenAI's) and `/v1/systemone` (TypeSafe's). Questions about one state, answered by the
probabilities of their options' codes (`core.decision_prompts`); no text is generated.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson
from fastapi import Request
from fastapi.responses import Response
from jinja2 import TemplateError

from sgl_prefill.core.decision_prompts import (
    DIGITS,
    LETTERS,
    PAIRS,
    WORDING,
    YES_NO_CODES,
    Answer,
    Kind,
    Prompt,
    Question,
    answer_of,
    confidence_of,
    last_line,
    prompts_of,
)
from sgl_prefill.core.labels import LabelDistribution
from sgl_prefill.errors import BadRequestError, PromptTooLongError
from sgl_prefill.http import decision_bodies, decision_checkpoints
from sgl_prefill.http.decision_bodies import Asked, BodyError, DecisionsBody, Options, SystemOneBody, Unread
from sgl_prefill.http.label_scoring import left_of
from sgl_prefill.http.request_checks import MOST_LABELS
from sgl_prefill.http.token_ids import TokenIds
from sgl_prefill.startup import calibrations
from sgl_prefill.startup.calibrations import StoredCalibration

if TYPE_CHECKING:
    from sgl_prefill.http.label_scoring import AskedPrompts, LabelScorer
    from sgl_prefill.http.tokenizer_manager import PrefillTokenizerManager

CONTENT = "sgl_prefill.content"  # stands for the user's message in a rendered template
REPLY = "sgl_prefill.reply"
THINK, END_OF_THINK = "<think>", "</think>"
NO_THINKING = {"enable_thinking": False, "thinking": False}  # switches of templates; others ignore them


class Template(NamedTuple):
    """A model's chat template around one user message."""

    head: str
    tail: str  # ends where the answer begins


class Decided(NamedTuple):
    answers: list[Answer]
    shared_tokens: int  # of the template's head and the state
    own_tokens: int  # beyond them, of all questions and orders: what several begin with counts once
    cached_tokens: int  # before this request
    predicted_ms: float | None  # sum of the requests' predictions
    actual_ms: float

    @property
    def input_tokens(self) -> int:
        return self.shared_tokens + self.own_tokens


class _Work(NamedTuple):
    """One prompt of a question."""

    question: int
    prompt: Prompt
    is_baseline: bool  # without the state


class DecisionRoutes:
    """The endpoint functions. decider, sglangs: called at a request, since SGLang creates its serving objects late."""

    def __init__(self, decider: Callable[[], Decider], sglangs: Callable[[], Any]) -> None:
        self._decider, self._sglangs = functools.cache(decider), sglangs

    async def openai(self, raw_request: Request) -> Response:
        return await self.answer_openai(await _json_of(raw_request), raw_request)

    async def typesafe(self, raw_request: Request) -> Response:
        return await self.answer_typesafe(await _json_of(raw_request), raw_request)

    async def answer_openai(self, given: Any, raw_request: Request) -> Response:
        try:
            body, asked = decision_bodies.read_decisions(given)
        except BodyError as error:
            place = decision_bodies.path_of(error.errors[0]["loc"]) if error.errors[0]["loc"] else None
            problem = {"message": str(error), "type": "invalid_request_error", "param": place, "code": None}
            return _json({"error": problem}, HTTPStatus.BAD_REQUEST)
        if decision_checkpoints.is_one(self._sglangs().tokenizer_manager.model_config):
            raise BadRequestError(
                "this is a decision checkpoint, which answers /v1/systemone: send its questions there"
            )
        decided = await self._decider().decide(asked, raw_request)
        return _json(reply_of_openai(self._decider().model, body, asked, decided))

    async def answer_typesafe(self, given: Any, raw_request: Request) -> Response:
        serving = self._sglangs()
        try:
            if decision_checkpoints.is_one(serving.tokenizer_manager.model_config):
                return await decision_checkpoints.answer(serving, given, raw_request)
            body, asked = decision_bodies.read_system_one(given)
        except BodyError as error:
            return _json({"detail": decision_bodies.details_of(error.errors)}, HTTPStatus.UNPROCESSABLE_ENTITY)
        try:
            decided = await self._decider().decide(asked, raw_request)
        except PromptTooLongError as error:
            detail = {"error_type": "invalid_request_error", "message": str(error)}
            return _json({"detail": detail}, HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
        return _json(reply_of_typesafe(self._decider().model, body, asked, decided))


def _json(content: Any, status: HTTPStatus = HTTPStatus.OK) -> Response:
    return Response(orjson.dumps(content), status, media_type="application/json")


async def _json_of(raw_request: Request) -> Any:
    """The body; an `Unread` where it is no JSON."""
    if raw_request.headers.get("content-type", "").startswith("multipart/"):
        return Unread("images_not_served", "this server's model reads text only: leave images out, and send JSON")
    try:
        return await raw_request.json()
    except ValueError as error:
        return Unread("json_invalid", f"it is not JSON: {error}")


class Decider:
    def __init__(self, manager: PrefillTokenizerManager, scorer: LabelScorer) -> None:
        self._manager, self._scorer = manager, scorer
        self.model: str = manager.served_model_name
        self._ids: dict[str, dict[str, int]] = {}  # by a prompt's last line: of codes that are one token there

    async def decide(self, asked: Asked, raw_request: Request | None = None) -> Decided:
        """Raises BadRequestError; errors of SGLang and of the scheduler pass."""
        if not self._manager.is_generation:
            raise BadRequestError("decisions need a causal language model, and this server's model is none")
        template = self._template
        calibrated_by = [self._calibration(*one) for one in zip(asked.questions, asked.options, strict=True)]
        pairs = await self._pairs() if any(len(one.options) > len(LETTERS) for one in asked.questions) else PAIRS
        works = list(_works(asked, pairs))
        self._manager.check_count(len(works), "prompts, one for each order of a question")
        if (n := sum(len(one.prompt.codes) for one in works)) > MOST_LABELS:
            raise BadRequestError(
                f"the questions have {n} options, counted for each order, and {MOST_LABELS} are the limit of one request: ask"
                " fewer in each, or in one order (x_options)"
            )
        code_ids = [await self._ids_of(one, asked) for one in works]
        states = ["" if one.is_baseline else asked.state for one in works]
        texts = [
            f"{template.head}{state}\n\n{one.prompt.text}{template.tail}"
            for state, one in zip(states, works, strict=True)
        ]
        for text in texts:
            self._manager.check_text(text)
        caller = await self._manager.caller_of(raw_request)  # whose texts may be cached
        prompts = await self._manager.encode_in_thread(texts, add_special_tokens=False)
        self._check_length(asked, works, prompts)
        extra_key = asked.cache_key
        if extra_key is not None:
            extra_key += caller.salt
        of_questions: list[tuple[list[LabelDistribution], list[LabelDistribution]]] = [
            ([], []) for _ in asked.questions
        ]
        deadlines_ms = [one.deadline_ms for one in asked.options if one.deadline_ms is not None]
        deadline_ms = min(deadlines_ms, default=None)  # the questions are answered together
        started_s = time.monotonic()
        found: list[AskedPrompts] = []  # with the state, then without
        for is_baseline in sorted({one.is_baseline for one in works}):
            some = [index for index, one in enumerate(works) if one.is_baseline is is_baseline]
            left_ms = None if deadline_ms is None else left_of(deadline_ms, started_s)
            found.append(
                await self._scorer.distributions(
                    [prompts[index] for index in some],
                    [code_ids[index] for index in some],
                    raw_request,
                    extra_key,
                    left_ms,
                )
            )
            for index, distribution in zip(some, found[-1].distributions, strict=True):
                of_questions[works[index].question][is_baseline].append(distribution)
        with_state = found[0]
        return Decided(
            answers=[
                _calibrated(answer_of(*of_question), question, calibration)
                for question, of_question, calibration in zip(asked.questions, of_questions, calibrated_by, strict=True)
            ],
            shared_tokens=with_state.shared_tokens,
            own_tokens=with_state.own_tokens,
            cached_tokens=with_state.meta_info[0]["cached_tokens"],
            predicted_ms=_sum([one.get("predicted_jct_ms") for one in with_state.meta_info]),
            actual_ms=1e3
            * (
                max(one["prefill_finished_time"] for one in with_state.meta_info)
                - min(one["forward_entry_time"] for one in with_state.meta_info)
            ),
        )

    def _calibration(self, question: Question, options: Options) -> StoredCalibration | None:
        if options.calibration is None:
            return None
        found = calibrations.by_name(self._manager.calibrations, options.calibration)
        found.check([one.name for one in question.options], {}, {None})
        return found

    @functools.cached_property
    def _template(self) -> Template:
        """Raises BadRequestError where the model's template cannot ask for an answer without thinking."""
        user = [{"role": "user", "content": CONTENT}]
        asked = self._rendered(user, add_generation_prompt=True)
        head, _, tail = asked.partition(CONTENT)
        replied = (
            self._rendered([*user, {"role": "assistant", "content": REPLY}]).partition(CONTENT)[2].partition(REPLY)[0]
        )
        if tail.count(THINK) > tail.count(END_OF_THINK) or (THINK in replied and END_OF_THINK not in tail):
            raise BadRequestError(
                "this model's chat template makes it think before it answers, so the next token is no answer: serve a model"
                " whose template takes enable_thinking, or start the server with another --chat-template"
            )
        return Template(head, tail)

    def _rendered(self, messages: list[dict[str, str]], **options: Any) -> str:
        try:
            found = self._manager.tokenizer.apply_chat_template(messages, tokenize=False, **NO_THINKING, **options)
        except (ValueError, AttributeError, TemplateError) as error:
            raise BadRequestError(
                f"decisions are asked through a chat template, and this model's cannot be used ({error}): start the server with"
                " --chat-template FILE"
            ) from error
        assert isinstance(found, str)
        return found

    async def _ids_of(self, work: _Work, asked: Asked) -> list[int]:
        """The token of each code after the prompt. Raises BadRequestError where one has several."""
        question = asked.questions[work.question]
        known = await self._known_after(last_line(question.kind, len(question.options)))
        if missing := [code for code in work.prompt.codes if code not in known]:
            raise BadRequestError(
                f"this model's tokenizer writes the answer {missing[0]!r} as several tokens, so it cannot be asked so"
            )
        return [known[code] for code in work.prompt.codes]

    async def _pairs(self) -> list[str]:
        """Codes of two letters that are one token."""
        known = await self._known_after(last_line(Kind.CHOICE, len(LETTERS) + 1))
        return [code for code in PAIRS if code in known]

    async def _known_after(self, line: str) -> dict[str, int]:
        if line not in self._ids:
            codes = [*LETTERS, *DIGITS, *YES_NO_CODES, *PAIRS]
            self._ids[line] = await self._scorer.one_token_labels(line + self._template.tail, codes)
        return self._ids[line]

    def _check_length(self, asked: Asked, works: Sequence[_Work], prompts: Sequence[TokenIds]) -> None:
        longest = max(range(len(prompts)), key=lambda index: len(prompts[index]))
        n, limit = len(prompts[longest]), self._manager.longest_input_tokens
        if n > limit:
            index = works[longest].question
            name = asked.names[index]
            raise PromptTooLongError(
                f"the state and question {index if name is None else repr(name)} have {n} tokens, {n - limit} too many: this"
                f" server takes at most {limit} (the model's context length is {self._manager.context_len}). Shorten the state,"
                " or start the server with a larger --max-input-length"
            )


def _works(asked: Asked, pairs: Sequence[str]) -> Iterator[_Work]:
    for index, (question, options) in enumerate(zip(asked.questions, asked.options, strict=True)):
        if len(question.options) > max(len(LETTERS), len(pairs)):
            raise BadRequestError(
                f"question {index} has {len(question.options)} options, and this model's tokenizer has codes of one token for"
                f" {len(pairs)}: ask with fewer"
            )
        for prompt in prompts_of(question, options.orders, pairs):
            yield _Work(index, prompt, False)
            if options.baseline:
                yield _Work(index, prompt, True)


def _calibrated(answer: Answer, question: Question, calibration: StoredCalibration | None) -> Answer:
    if calibration is None:
        return answer
    names = [one.name for one in question.options]
    return answer._replace(probabilities=calibration.probabilities(names, answer.probabilities))


def _sum(values: Sequence[float | None]) -> float | None:
    known = [one for one in values if one is not None]
    return sum(known) if known else None


def reply_of_openai(model: str, body: DecisionsBody, asked: Asked, decided: Decided) -> dict[str, Any]:
    answers = []
    for question, asks, options, answer in zip(
        body.questions, asked.questions, asked.options, decided.answers, strict=True
    ):
        probabilities, head = answer.probabilities, {"type": question.type, "name": question.name}
        confidence = confidence_of(asks.kind, probabilities)
        if question.type == "predicate":
            shown: dict[str, Any] = {"probability": probabilities[0]}
        elif question.type == "choice":
            rows = [
                {"value": one.value, "probability": p} for one, p in zip(question.choices, probabilities, strict=True)
            ]
            shown = {"choice": rows[answer.best]["value"], "probabilities": rows, "confidence": confidence}
        else:
            levels = zip(question.levels, probabilities, strict=True)
            rows = [{"value": index, "label": one.label, "probability": p} for index, (one, p) in enumerate(levels)]
            shown = {"score": answer.score, "probabilities": rows, "confidence": confidence}
        answers.append({**head, **shown, **_own_facts(answer, options, confidence)})
    usage = {
        "input_tokens": decided.input_tokens,
        "input_tokens_details": {"cached_tokens": decided.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": 0,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": decided.input_tokens,
    }
    return {"model": model, "answers": answers, "usage": usage, **_own_usage(decided)}


def reply_of_typesafe(model: str, body: SystemOneBody, asked: Asked, decided: Decided) -> dict[str, Any]:
    answers = {}
    for (name, question), asks, options, answer in zip(
        body.questions.items(), asked.questions, asked.options, decided.answers, strict=True
    ):
        probabilities, kind = answer.probabilities, {"type": question.type}
        confidence = confidence_of(asks.kind, probabilities)
        if question.type == "noul":
            shown: dict[str, Any] = {"noul": probabilities[0]}
        elif question.type == "choice":
            names = list(question.criteria)
            by_name = dict(zip(names, probabilities, strict=True))
            shown = {"choice": names[answer.best], "confidence": confidence, "probabilities": by_name}
        elif question.type == "score":
            legend = {str(index): level for index, level in enumerate(question.criteria)}
            by_level = {str(index): p for index, p in enumerate(probabilities)}
            shown = {"score": answer.score, "confidence": confidence, "legend": legend, "probabilities": by_level}
        answers[name] = {**kind, **shown, **_own_facts(answer, options, confidence)}
    usage = {"input_tokens": decided.input_tokens, "output_tokens": 0}
    return {"model": model, "answers": answers, "usage": usage, **_own_usage(decided)}


def _own_facts(answer: Answer, options: Options, confidence: float) -> dict[str, Any]:
    found: dict[str, Any] = {"x_label_mass": answer.label_mass, "x_orders": answer.orders}
    if options.calibration is not None:
        found["x_calibration"] = options.calibration
    if options.abstain_below is not None:
        found["x_abstains"] = confidence < options.abstain_below
    return found


def _own_usage(decided: Decided) -> dict[str, Any]:
    return {
        "x_wording": WORDING,
        "x_shared_tokens": decided.shared_tokens,
        "x_cached_tokens": decided.cached_tokens,
        "x_predicted_ms": decided.predicted_ms,
        "x_actual_ms": round(decided.actual_ms, 3),
    }
