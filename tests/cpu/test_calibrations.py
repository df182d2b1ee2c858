"""How a calibration is made: what is asked of the model, and what of its answers is fitted and measured."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.io_struct import GenerateReqInput

from sgl_prefill.api.calibration_requests import CalibrationRequest
from sgl_prefill.api.calibrations import CROSS_VALIDATED, EVALUATED, Calibrations
from sgl_prefill.api.scored_prompt import ScoredPrompt
from sgl_prefill.config import PrefillConfig
from sgl_prefill.core.labels import Label, restrict
from sgl_prefill.errors import BadRequestError
from sgl_prefill.port.client import Caller

LABELS = ["no", "yes"]
REQUEST: Any = None  # HTTP's, which nothing here looks at


class Model:
    """Answers with log-odds that stand in the prompt: `+1.5` of a text, the first token of tokens. It notes what it is asked."""

    def __init__(self) -> None:
        self.asked: list[GenerateReqInput] = []

    async def label_texts(self, *_: Any) -> list[str]:
        return LABELS

    async def score(self, obj: GenerateReqInput, *_: Any) -> list[ScoredPrompt]:
        self.asked.append(obj)
        prompts = obj.text if obj.text is not None else [ids[0] for ids in obj.input_ids]
        labels = [Label(text, 5 + index) for index, text in enumerate(LABELS)]
        odds = [float(prompt) for prompt in prompts]
        return [ScoredPrompt(labels, restrict([min(-one, 0.0), min(one, 0.0)]), {}) for one in odds]


def calibrations(folder: Path, model: Any, **config: Any) -> Calibrations:
    async def caller_of(_: Any) -> Caller:
        return Caller()

    async def convert(body: Any, _: Any) -> GenerateReqInput:
        if body.prompt == "refused":
            raise BadRequestError("the prompt is refused")
        field = "text" if isinstance(body.prompt, str) else "input_ids"
        return GenerateReqInput(**{field: body.prompt}, extra_key=body.cache_salt)

    names = (
        "quantization",
        "chat_template",
        "completion_template",
        "load_format",
        "json_model_override_args",
        "revision",
    )
    args = SimpleNamespace(served_model_name="demo", model_path="nobody/none", **dict.fromkeys(names))
    manager: Any = SimpleNamespace(
        prefill_config=PrefillConfig(calibrations=str(folder), **config),
        server_args=args,
        caller_of=caller_of,
        tenant_of=lambda _: "",
    )
    return Calibrations(manager, model, convert)


def made(folder: Path, model: Model, **body: Any) -> dict[str, Any]:
    request = CalibrationRequest.model_validate({"name": "a", "allowed_tokens": LABELS, **body})
    return asyncio.run(calibrations(folder, model).make(request, REQUEST))


def examples(n: int, shift: float = 0.0) -> list[dict[str, Any]]:
    """The truth follows log-odds of half of what the model says, whose sign `shift` moves."""
    return [
        {"prompt": f"{odds + shift}", "label": "yes" if odds + (odds % 3 - 1) > 0 else "no"}
        for odds in (index % 11 - 5 for index in range(n))
    ]


def test_texts_and_tokens_are_two_batches_and_keep_their_places(tmp_path: Path) -> None:
    """Their answers belong to the examples whose they are, whatever the order."""
    mixed = examples(30)
    for index in range(0, 30, 3):
        mixed[index]["prompt"] = [int(mixed[index]["prompt"].partition(".")[0]), 1]
    model, texts = Model(), Model()
    found = made(tmp_path, model, method="vector", examples=mixed, cache_salt="own")
    same = made(tmp_path, texts, method="vector", examples=examples(30), name="b")
    assert found["calibration"] == same["calibration"]
    assert found["measured"] == same["measured"]
    assert [len(obj.text or obj.input_ids) for obj in model.asked] == [20, 10]
    assert {obj.extra_key for obj in model.asked} == {"own"}
    assert [len(obj.text) for obj in texts.asked] == [30]


def test_what_is_measured_was_not_fitted(tmp_path: Path) -> None:
    """By cross-validation, or on `evaluate_on`, which changes nothing of the calibration."""
    own = made(tmp_path, Model(), method="vector", examples=examples(40, shift=3.0))
    assert (own["measured"]["how"], own["n_examples"]) == (CROSS_VALIDATED, 40)
    assert own["measured"]["after"]["accuracy"] > own["measured"]["before"]["accuracy"]
    told = {"examples": examples(40, shift=3.0), "evaluate_on": examples(4, shift=3.0)}
    other = made(tmp_path, Model(), method="vector", name="b", **told)
    assert (other["measured"]["how"], other["measured"]["after"]["n_examples"]) == (EVALUATED, 4)
    assert other["calibration"] == own["calibration"]


def test_prompts_without_content_need_no_labels(tmp_path: Path) -> None:
    """The mean of their distributions is divided by; nothing is measured where nothing was labelled."""
    found = made(tmp_path, Model(), method="contextual", content_free=["1.0", {"prompt": "1.0"}])
    no, yes = found["calibration"]["biases"]
    assert no - yes == pytest.approx(1.0)
    assert (found["measured"], found["n_examples"]) == (None, 2)
    measured = made(tmp_path, Model(), method="contextual", content_free=["1.0"], evaluate_on=examples(9), name="b")
    assert measured["measured"]["before"]["n_examples"] == 9


def test_what_is_wrong_is_found_before_the_model_is_asked(tmp_path: Path) -> None:
    """And nothing is stored; a prompt that SGLang refuses is named by its place."""
    model = Model()
    for body, told in (
        ({"examples": [*examples(20), {"prompt": "refused", "label": "no"}]}, r"examples\[20\]: the prompt is refused"),
        ({"examples": examples(19)}, "examples holds 19, and a calibration needs at least 20"),
        ({"examples": [*examples(20), {"prompt": "1", "label": "maybe"}]}, r"examples\[20\].*'maybe'.*'no', 'yes'"),
        ({"examples": [{"prompt": "1", "label": "no"}] * 20}, "all 20 examples have the label 'no'"),
    ):
        with pytest.raises(BadRequestError, match=told):
            made(tmp_path, model, method="temperature", **body)
    assert model.asked == []
    assert list(tmp_path.rglob("*.json")) == []


def test_an_answer_that_the_model_rules_out_does_not_stop_the_fit(tmp_path: Path) -> None:
    """Probability 0 for the right label, and 1 for a wrong one."""
    extreme = [{"prompt": f"{sign * 1e4}", "label": label} for sign in (1, -1) for label in LABELS for _ in range(5)]
    found = made(tmp_path, Model(), method="vector", examples=extreme)
    numbers = [*found["calibration"]["scales"], *found["calibration"]["biases"], found["measured"]["after"]["log_loss"]]
    assert all(math.isfinite(number) for number in numbers)
