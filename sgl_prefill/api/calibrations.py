"""/v1/calibrations: label probabilities that are corrected by examples, made here once and applied by name.

The server scores the examples itself, as it will score the requests; what they say is not kept.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any

import fastapi
from fastapi.responses import Response
from sglang.srt.entrypoints.http_server import validate_json_request
from sglang.srt.managers.io_struct import GenerateReqInput

from sgl_prefill.api.calibration_requests import CalibrationRequest, Example, Prompt, check_labels, check_request
from sgl_prefill.api.calibration_store import (
    Measured,
    ModelName,
    StoredCalibration,
    fingerprint_of,
    logs_of,
    store_of,
)
from sgl_prefill.api.label_scoring import LabelScorer
from sgl_prefill.api.protocol import LabelChatCompletionRequest, LabelCompletionRequest, allowed_answers
from sgl_prefill.api.reliability_plot import reliability_png
from sgl_prefill.api.request_checks import MOST_PROMPTS
from sgl_prefill.api.scored_prompt import ScoredPrompt
from sgl_prefill.core import label_calibration
from sgl_prefill.core.label_calibration import N_FOLDS
from sgl_prefill.errors import BadRequestError

if TYPE_CHECKING:
    from fastapi import FastAPI, Request

    from sgl_prefill.api.tokenizer_manager import PrefillTokenizerManager

PATH = "/v1/calibrations"
CROSS_VALIDATED = f"{N_FOLDS}-fold cross-validation of the examples"
EVALUATED = "the examples of evaluate_on"

ConvertBody = Callable[
    [Any, Any], Coroutine[Any, Any, GenerateReqInput]
]  # a body of /v1/completions or /v1/chat/completions


class Calibrations:
    """Makes calibrations, and finds them for requests."""

    def __init__(self, manager: PrefillTokenizerManager, scorer: LabelScorer, convert: ConvertBody) -> None:
        self._manager, self._scorer, self._convert = manager, scorer, convert
        self.store = store_of(manager)

    async def of_request(self, name: str, raw_request: Request | None) -> StoredCalibration:
        """Returns the caller's calibration of this name. Raises NotFoundError or ConflictError."""
        tenant = await self._tenant(raw_request)
        found = self.store.recent(tenant, name)
        return await asyncio.to_thread(self.store.get, tenant, name) if found is None else found

    async def make(self, request: CalibrationRequest, raw_request: Request) -> dict[str, Any]:
        """Serves POST."""
        check_request(request)
        tenant = await self._tenant(raw_request)
        await asyncio.to_thread(self.store.check_new, tenant, request.name, replace=request.replace)
        n_given, n_measured_on = len(request.examples or request.content_free or []), len(request.evaluate_on or [])
        if (n := n_given + n_measured_on) > MOST_PROMPTS:
            raise BadRequestError(
                f"the request has {n} prompts, and this server takes at most {MOST_PROMPTS}: give fewer"
            )
        objects = [
            await self._object_of(request, prompt, f"{field}[{index}]", raw_request)
            for field in ("examples", "content_free", "evaluate_on")
            for index, prompt in enumerate(getattr(request, field) or [])
        ]
        answers = allowed_answers(request)
        assert answers is not None
        labels = await self._scorer.label_texts(objects[0], answers, raw_request)
        check_labels(request, labels)
        scored = await self._score(objects, answers, raw_request)
        logprobs = [logs_of(one.distribution.probabilities) for one in scored]
        calibration, measured = await asyncio.to_thread(
            _fitted, request, labels, logprobs[:n_given], logprobs[n_given:]
        )
        model = ModelName(
            self._manager.server_args.served_model_name or self._manager.server_args.model_path,
            await asyncio.to_thread(fingerprint_of, self._manager),
            objects[0].lora_path,
        )
        stored = StoredCalibration(
            request.name, request.method, model, labels, calibration, n_given, int(time.time()), measured, answers.way
        )
        await asyncio.to_thread(self.store.put, tenant, stored, replace=request.replace)
        return await self._shown(stored)

    async def list_all(self, raw_request: Request) -> dict[str, Any]:
        """Serves GET."""
        tenant = await self._tenant(raw_request)
        found = await asyncio.to_thread(self._all, tenant)
        return {"object": "list", "data": found}

    async def show(self, name: str, raw_request: Request) -> dict[str, Any]:
        """Serves GET of one."""
        return await self._shown(await self._look_at(name, raw_request))

    async def plot(self, name: str, raw_request: Request) -> Response:
        """Serves GET of its reliability plot."""
        found = await self._look_at(name, raw_request)
        return Response(await asyncio.to_thread(reliability_png, found), media_type="image/png")

    async def delete(self, name: str, raw_request: Request) -> dict[str, Any]:
        """Serves DELETE."""
        await asyncio.to_thread(self.store.delete, await self._tenant(raw_request), name)
        return {"name": name, "deleted": True}

    async def _tenant(self, raw_request: Request | None) -> str:
        return self._manager.tenant_of(await self._manager.caller_of(raw_request))

    async def _look_at(self, name: str, raw_request: Request) -> StoredCalibration:
        return await asyncio.to_thread(self.store.look_at, await self._tenant(raw_request), name)

    async def _shown(self, stored: StoredCalibration) -> dict[str, Any]:
        return await asyncio.to_thread(self._entry, stored)

    def _all(self, tenant: str) -> list[dict[str, Any]]:
        entries = []
        for name in self.store.names(tenant):
            try:
                entry = self._entry(self.store.look_at(tenant, name))
                del entry["calibration"], entry["measured"]
            except BadRequestError as error:
                entry = {"name": name, "problem": str(error)}
            entries.append(entry)
        return entries

    def _entry(self, stored: StoredCalibration) -> dict[str, Any]:
        entry = {"object": "calibration", **stored.to_json(), "fits_this_model": self.store.fits(stored)}
        del entry["format"]
        return entry

    async def _object_of(
        self, request: CalibrationRequest, prompt: str | Prompt, where: str, raw_request: Request
    ) -> GenerateReqInput:
        """Returns what a request with this prompt becomes."""
        one = Prompt(prompt=prompt) if isinstance(prompt, str) else prompt
        salts = {"cache_salt": request.cache_salt, "extra_key": request.extra_key}
        body: LabelCompletionRequest | LabelChatCompletionRequest
        if one.prompt is not None:
            body = LabelCompletionRequest(model=request.model, prompt=one.prompt, max_tokens=1, **salts)
        else:
            asked = {"messages": one.messages, "chat_template_kwargs": request.chat_template_kwargs}
            body = LabelChatCompletionRequest(model=request.model, max_completion_tokens=1, **asked, **salts)
        try:
            # In a context of its own, since a template that was filled beside is kept in it.
            obj = await asyncio.create_task(self._convert(body, raw_request))
        except BadRequestError as error:
            raise BadRequestError(f"{where}: {error}") from error
        if obj.contains_mm_input():
            raise BadRequestError(f"{where} holds an image or the like, and calibrations are made with texts")
        return obj

    async def _score(
        self, objects: Sequence[GenerateReqInput], answers: Any, raw_request: Request
    ) -> list[ScoredPrompt]:
        """Returns the answers in the order of the prompts, which are sent as one batch of texts and one of tokens."""
        found: dict[int, ScoredPrompt] = {}
        for field in ("text", "input_ids"):
            places = [place for place, obj in enumerate(objects) if getattr(obj, field) is not None]
            if not places:
                continue
            first = objects[places[0]]
            batch = GenerateReqInput(
                **{field: [getattr(objects[place], field) for place in places]},
                extra_key=first.extra_key,
                lora_path=first.lora_path,
            )
            scored = await self._scorer.score(batch, answers, raw_request)
            found |= dict(zip(places, scored, strict=True))
        return [found[place] for place in range(len(objects))]


def add_routes(app: FastAPI, calibrations: Callable[[], Calibrations]) -> None:
    """calibrations: is called when a request has come, since SGLang makes what it needs late."""
    only_json = [fastapi.Depends(validate_json_request)]

    @app.post(PATH, dependencies=only_json)
    async def make_calibration(request: CalibrationRequest, raw_request: fastapi.Request) -> dict[str, Any]:
        return await calibrations().make(request, raw_request)

    @app.get(PATH)
    async def list_calibrations(raw_request: fastapi.Request) -> dict[str, Any]:
        return await calibrations().list_all(raw_request)

    @app.get(PATH + "/{name}")
    async def show_calibration(name: str, raw_request: fastapi.Request) -> dict[str, Any]:
        return await calibrations().show(name, raw_request)

    @app.get(PATH + "/{name}/plot")
    async def plot_calibration(name: str, raw_request: fastapi.Request) -> Response:
        return await calibrations().plot(name, raw_request)

    @app.delete(PATH + "/{name}")
    async def delete_calibration(name: str, raw_request: fastapi.Request) -> dict[str, Any]:
        return await calibrations().delete(name, raw_request)


def _fitted(
    request: CalibrationRequest,
    labels: Sequence[str],
    given: Sequence[Sequence[float]],
    measured_on: Sequence[Sequence[float]],
) -> tuple[label_calibration.Calibration, Measured | None]:
    """Returns the calibration, and its worth on what it was not fitted to.

    given, measured_on: log-probabilities of the labels, a row a prompt."""

    def answers(examples: Sequence[Example]) -> list[int]:
        return [labels.index(example.label) for example in examples]

    if request.examples is None:
        calibration = label_calibration.fit_contextual(given)
    else:
        calibration = label_calibration.fit(request.method, given, answers(request.examples))
    if request.evaluate_on is not None:
        how, truth = EVALUATED, answers(request.evaluate_on)
        before = [label_calibration.identity(len(labels)).probabilities(row) for row in measured_on]
        after = [calibration.probabilities(row) for row in measured_on]
    elif request.examples is not None:
        how, truth = CROSS_VALIDATED, answers(request.examples)
        before = [label_calibration.identity(len(labels)).probabilities(row) for row in given]
        after = label_calibration.cross_validated(request.method, given, truth)
    else:
        return calibration, None
    return calibration, Measured(how, label_calibration.quality(before, truth), label_calibration.quality(after, truth))
