"""What runs `sgl_prefill.Engine` in processes of its own (`children.run_scenario`).

SGLang's engine leaves sockets and signal handlers behind, which a test process cannot bear.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sgl_prefill import Engine
from sgl_prefill.core.label_calibration import Calibration
from sgl_prefill.core.labels import LabelError
from sgl_prefill.entry import prefork
from sgl_prefill.errors import BadRequestError, SglPrefillError
from sgl_prefill.examples import demo_model
from sgl_prefill.startup.calibrations import ModelName, StoredCalibration
from tests.integration.prompts import CANDIDATES, LONG_LABELS, LONG_PROMPTS, PROMPTS

SHORT: dict[str, Any] = {"memory_budget_gb": 3, "max_input_length": 1000, "skip_parity_gate": True}


def float32(_: Path) -> dict[str, Any]:
    """Label scores of all prompts, cold and cached, and what the engine refuses."""
    prefork.begin()
    folder = str(demo_model.ensure("float32"))
    result: dict[str, Any] = {"refused": {}}
    try:
        Engine(model_path=folder, scheduling="calibrated-srjf", chunked_prefill_size=512, schedule_policy="lpm")
    except SglPrefillError as error:
        result["refused"]["contradiction"] = str(error)
    with Engine(model_path=folder, dtype="float32", jct_model="cache-miss", **SHORT) as engine:
        ids = _candidate_ids(engine)
        for name in ("cold", "cached"):
            scored = engine.score_labels(PROMPTS, allowed_token_ids=ids)
            result[name] = [one.distribution.logprobs for one in scored]
        result["reused"] = [one.meta_info["cached_tokens"] - one.meta_info["prompt_tokens"] for one in scored]
        for name in ("long_cold", "long_cached"):
            scored = engine.score_labels(LONG_PROMPTS, allowed_answers=LONG_LABELS)
            result[name] = [one.distribution.logprobs for one in scored]
        result["long_tokens"] = [[label.token_ids for label in one.labels] for one in scored]
        (one,) = engine.score_labels("The capital of France is", allowed_tokens=[" Paris", " Rome"])
        result["best"] = one.best.text
        result["calibrated"] = _calibrated(engine)
        question = {"type": "noul", "instructions": "Is Paris in France?"}
        result["decided"] = [engine.decide("Paris is in France.", {name: question}) for name in ("a", "b")]
        parts = [{"text": "Far too long. " * 50, "keep": "end"}, {"text": "The capital of France is"}]
        cutting: dict[str, Any] = {"on_overflow": "cut", "max_prompt_tokens": 20}
        (one,) = engine.score_labels(prompt_parts=parts, **cutting, allowed_tokens=[" Paris", " Rome"])
        result["best_of_cut"] = [one.best.text, one.meta_info["prompt_tokens"], one.meta_info["prompt_parts"]]
        try:
            engine.generate("The capital of France is", {"max_new_tokens": 5})
        except BadRequestError as error:
            result["refused"]["generation"] = str(error)
        try:
            engine.score_labels("Is it so?", allowed_tokens=[" yes", " yes"])
        except LabelError as error:
            result["refused"]["duplicate"] = str(error)
        result["hooks"] = engine.get_server_info()["sgl_prefill"]["hooks"]
    return result


def _calibrated(engine: Engine) -> dict[str, Any]:
    """What a calibration makes of two labels, beside the likeliest tokens."""
    model, calibration = ModelName("demo", "this model", None), Calibration([2.0, 2.0], [0.0, 0.0])
    made = StoredCalibration("sure", "temperature", model, [" Rome", " Paris"], calibration, 20, None, {})
    engine.tokenizer_manager.calibrations["sure"] = made
    asked: dict[str, Any] = {"allowed_tokens": [" Paris", " Rome"], "calibration": "sure", "top_alternatives": 2}
    (one,) = engine.score_labels("The capital of France is", **asked)
    return {"raw": one.distribution.probabilities, "calibrated": one.calibrated, "alternatives": one.alternatives}


def features_off(_: Path) -> dict[str, Any]:
    """SGLang's own scheduler and logits inside our engine: its answers to the prompts, one at a time.

    It has the threads of `stock_server`: a float32 product has other last digits with another number.
    """
    os.environ["OMP_NUM_THREADS"] = "2"
    prefork.begin()
    folder = str(demo_model.ensure())
    off: dict[str, Any] = {"scheduling": "stock", "logits_dtype": "model", "hybrid_prefill": "off", "suffix_kv": "keep"}
    with Engine(model_path=folder, **off, **SHORT) as engine:
        options = {"return_logprob": True, "token_ids_logprob": _candidate_ids(engine), "top_logprobs_num": 3}
        params = {"max_new_tokens": 1, "temperature": 0}
        return {"outputs": [engine.generate(prompt, params, **options) for prompt in PROMPTS]}


def _candidate_ids(engine: Any) -> list[int]:
    return [engine.tokenizer_manager.tokenizer.encode(label)[0] for label in CANDIDATES]


SCENARIOS: dict[str, Callable[[Path], Any]] = {"float32": float32, "features_off": features_off}
