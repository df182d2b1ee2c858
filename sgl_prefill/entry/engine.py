"""`sgl_prefill.Engine`: the offline counterpart of `sglang.Engine`, with the same hooks and checks as the server."""

from __future__ import annotations

import dataclasses
import functools
import signal
from typing import Any

from sglang.srt.entrypoints.engine import Engine as StockEngine
from sglang.srt.plugins import load_plugins

from sgl_prefill.config import PrefillConfig
from sgl_prefill.entry import activation, fingerprints, launch, prefork, processes
from sgl_prefill.errors import BadRequestError, ConfigurationError, SeamError
from sgl_prefill.http.cut_requests import CutRequests
from sgl_prefill.http.decision_bodies import read_system_one
from sgl_prefill.http.decisions import Decider, reply_of_typesafe
from sgl_prefill.http.label_scoring import AllowedAnswers, LabelScorer
from sgl_prefill.http.parted_requests import attach_parts
from sgl_prefill.http.protocol import LabelGenerateReqInput
from sgl_prefill.http.protocol import allowed_answers as answers_of
from sgl_prefill.http.scored_prompt import ReplyOptions, ScoredPrompt, check_alternatives
from sgl_prefill.startup import arguments, calibrations, examine, techniques
from sgl_prefill.startup.device import this_device


class Engine(StockEngine):  # type: ignore[misc]
    """Takes the arguments of `sglang.Engine` (names of ServerArgs) and those of PrefillConfig.

    Raises ConfigurationError or SeamError before anything is started. Use it in a `with` statement, or call
    `shutdown()`. As with `sglang.Engine`, the calling script needs `if __name__ == "__main__":`.
    """

    def __init__(self, **kwargs: Any) -> None:
        config, server_args = arguments_of({"log_level": "error", **kwargs})
        activation.activate(config, "http")
        environment = prefork.ParentEnvironment(signal.SIGQUIT)
        self.init_tokenizer_manager_func = functools.partial(processes.init_tokenizer_manager, config)
        self.run_scheduler_process_func = functools.partial(processes.run_scheduler_process, config, environment)
        self.run_detokenizer_process_func = functools.partial(processes.run_detokenizer_process, config, environment)
        super().__init__(server_args=server_args)
        self.tokenizer_manager.scheduler_info = self._scheduler_init_result.scheduler_infos[0]

    def score_labels(
        self,
        prompts: str | list[str] | list[int] | list[list[int]] | None = None,
        *,
        allowed_tokens: list[str] | None = None,
        allowed_token_ids: list[int] | None = None,
        prompt_parts: list[Any] | None = None,
        on_overflow: str | None = None,
        max_prompt_tokens: int | None = None,
        allowed_answers: list[Any] | dict[str, list[str]] | None = None,
        answer_end: str | dict[str, str] | None = None,
        normalise: str | None = None,
        baseline_prompt: str | list[int] | None = None,
        calibration: str | None = None,
        top_alternatives: int = 0,
    ) -> list[ScoredPrompt]:
        """Returns the distribution over the allowed answers after each prompt. The options are those of /v1/completions;
        `prompt_parts` replaces `prompts`, and `calibration` names a file of the folder `calibrations`.

        Raises BadRequestError or LabelError.
        """
        if top_alternatives:
            check_alternatives(top_alternatives)
        found = None if calibration is None else calibrations.by_name(self.tokenizer_manager.calibrations, calibration)
        reply = ReplyOptions(found, top_alternatives=top_alternatives)
        given: Any = prompts
        is_text = isinstance(given, str) or bool(given and isinstance(given[0], str))
        obj = LabelGenerateReqInput(
            text=given if is_text else None,
            input_ids=None if is_text else given,
            allowed_tokens=allowed_tokens,
            allowed_token_ids=allowed_token_ids,
            allowed_answers=allowed_answers,
            answer_end=answer_end,
            normalise=normalise,
            baseline_prompt=baseline_prompt,
            prompt_parts=prompt_parts,
            on_overflow=on_overflow,
            max_prompt_tokens=max_prompt_tokens,
        )
        answers = answers_of(obj)
        if answers is None:
            raise BadRequestError("give allowed_tokens, allowed_token_ids or allowed_answers")
        return self.loop.run_until_complete(self._score(obj, answers, reply))  # type: ignore[no-any-return]

    def decide(self, state: Any, questions: dict[str, Any], *, options: dict[str, Any] | None = None) -> dict[str, Any]:
        """Answers typed questions about one state. Returns the reply of /v1/systemone, whose fields the arguments are
        (`options`: `x_options`).

        Raises BadRequestError.
        """
        given = {"model": self.tokenizer_manager.served_model_name, "state": state, "questions": questions}
        body, asked = read_system_one({**given, "x_options": options})
        decided = self.loop.run_until_complete(self._decider.decide(asked))
        return reply_of_typesafe(self._decider.model, body, asked, decided)

    async def _score(
        self, obj: LabelGenerateReqInput, answers: AllowedAnswers, reply: ReplyOptions
    ) -> list[ScoredPrompt]:
        attach_parts(obj, await self._cuts.of_generate(obj))
        return await self._label_scorer.score(obj, answers, reply=reply)

    @functools.cached_property
    def _cuts(self) -> CutRequests:
        return CutRequests(self.tokenizer_manager)

    @functools.cached_property
    def _decider(self) -> Decider:
        return Decider(self.tokenizer_manager, self._label_scorer)

    @functools.cached_property
    def _label_scorer(self) -> LabelScorer:
        return LabelScorer(self.tokenizer_manager)


def arguments_of(options: dict[str, Any], defaults: dict[str, Any] | None = None) -> tuple[PrefillConfig, Any]:
    """Divides options by name into this package's, less the techniques that model and arguments do not allow, and SGLang's
    (ServerArgs). Raises ConfigurationError or SeamError.

    defaults: of options that are not given.
    """
    if problem := fingerprints.version_problem():
        raise SeamError(problem)
    names = {field.name for field in dataclasses.fields(PrefillConfig)}
    given = {name: value for name, value in options.items() if name not in names}
    config = PrefillConfig(**{name: value for name, value in options.items() if name in names})
    if reasons := techniques.stock_only(config, given):
        raise ConfigurationError("\n".join(f"{reason}: leave it out, or use sglang.Engine" for reason in reasons))
    config = techniques.step_back(config.with_default(defaults or {}), techniques.of_flags(given))
    if problems := arguments.early_problems(config, given.get("model_path")):
        raise ConfigurationError("\n".join(problems))
    if not this_device().is_host:
        examine.prepare_cuda()
    load_plugins()

    def build(config: PrefillConfig) -> Any:
        made = StockEngine.server_args_class(**{**sglang_defaults(config, given.get("prefill_max_requests")), **given})
        made.resolve_once()
        return made

    config, server_args = launch.settle(config, build)
    arguments.check_server_args(config, launch.resolved(server_args), listens=False)
    return config, server_args


def sglang_defaults(config: PrefillConfig, max_requests: int | None = None) -> dict[str, Any]:
    """Returns arguments of SGLang's that this configuration requires, and defaults for this machine."""
    needs = {need.field: need.value for need in arguments.required_for(config)}
    return {"enable_metrics": True, **needs, **arguments.default_settings(config, max_requests)}
