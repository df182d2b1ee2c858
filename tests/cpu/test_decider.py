"""Decisions without a server: chat templates that can be asked, and calibrations by option names."""

from __future__ import annotations

import asyncio
import functools
import itertools
import math
from types import SimpleNamespace
from typing import Any

import pytest

from sgl_prefill.core.label_calibration import Calibration
from sgl_prefill.core.labels import restrict
from sgl_prefill.errors import BadRequestError, PromptTooLongError
from sgl_prefill.http import decision_bodies, decisions, label_scoring
from sgl_prefill.http.decisions import Decided, Decider
from sgl_prefill.http.label_scoring import AskedPrompts
from sgl_prefill.http.token_ids import TokenIds
from sgl_prefill.startup.calibrations import ModelName, StoredCalibration

CODES = [*"ABCDEFGHIJKLMNOPQRSTUVWXYZ", *"0123456789", "yes", "no"]
STATE = "It broke."


class Manager:
    """Tokenises by characters. Templates: what comes before a reply, and before what the model writes itself."""

    is_generation, longest_input_tokens, context_len, served_model_name = True, 500, 600, "served"

    def __init__(self, before_reply: str = "", before_written: str = "", calibrations: Any = None) -> None:
        self._before_reply, self._before_written = before_reply, before_written
        self.calibrations = calibrations or {}
        self.tokenizer = SimpleNamespace(apply_chat_template=self._apply)

    def _apply(self, messages: list[dict[str, str]], *, tokenize: bool, **options: Any) -> str:
        assert not tokenize
        assert options["enable_thinking"] is False
        shown = f"<user>{messages[0]['content']}</user><assistant>"
        if len(messages) == 2:
            return f"{shown}{self._before_reply}{messages[1]['content']}"
        return shown + self._before_written

    async def caller_of(self, request: Any) -> Any:
        return SimpleNamespace(salt="")

    def check_count(self, n: int, things: str) -> None:
        assert n < 100

    def check_text(self, text: str) -> None:
        assert len(text) < 1000

    async def encode_in_thread(self, texts: list[str], *, add_special_tokens: bool) -> list[TokenIds]:
        assert not add_special_tokens
        return [TokenIds([*map(ord, text)]) for text in texts]


class Scorer:
    """The first of the asked tokens is twice as likely as each other one."""

    def __init__(self, several_tokens: tuple[str, ...] = ()) -> None:
        self._several_tokens = several_tokens
        self.prompts: list[str] = []
        self.deadlines_ms: list[float | None] = []

    async def one_token_labels(self, prompt_end: str, labels: list[str]) -> dict[str, int]:
        return {label: index for index, label in enumerate(CODES) if label not in self._several_tokens}

    async def distributions(
        self, prompts: Any, token_ids: Any, raw_request: Any, extra_key: Any, deadline_ms: float | None
    ) -> AskedPrompts:
        self.deadlines_ms.append(deadline_ms)
        self.prompts = ["".join(map(chr, one)) for one in prompts]
        meta = {"cached_tokens": 0, "prefill_finished_time": 2.0, "forward_entry_time": 1.0}
        found = [restrict([math.log((2 if one == min(ids) else 1) / 1000) for one in ids]) for ids in token_ids]
        return AskedPrompts(found, [meta], len(prompts[0]), 0)


def decide(manager: Manager, question: dict[str, Any], options: Any = None, scorer: Scorer | None = None) -> Decided:
    body = {"model": "m", "state": STATE, "questions": {"q": question}, "x_options": options and {"q": options}}
    _, asked = decision_bodies.read_system_one(body)
    decider: Any = Decider(manager, scorer or Scorer())  # type: ignore[arg-type]
    found: Decided = asyncio.run(decider.decide(asked))
    return found


CHOICE = {"type": "choice", "criteria": {"a": None, "b": None}}


def test_the_state_comes_first_and_the_answer_is_the_next_token() -> None:
    scorer = Scorer()
    found = decide(
        Manager(), {"type": "noul", "instructions": "Why?", "criteria": {"false": "no reason"}}, None, scorer
    )
    assert scorer.prompts == [
        "<user>It broke.\n\nIs the following true? Why?\nno: no reason\nAnswer with yes or no only.</user><assistant>"
    ]
    assert found.answers[0].probabilities == pytest.approx([2 / 3, 1 / 3])
    assert found.input_tokens == len(scorer.prompts[0])


def test_a_preference_for_a_place_is_gone_from_the_mean_of_the_orders() -> None:
    assert decide(Manager(), CHOICE).answers[0].probabilities == pytest.approx([0.5, 0.5])
    assert decide(Manager(), CHOICE, {"orders": 1}).answers[0].probabilities == pytest.approx([2 / 3, 1 / 3])
    with_baseline = decide(Manager(), CHOICE, {"orders": 1, "baseline": True})
    assert with_baseline.answers[0].probabilities == pytest.approx([0.5, 0.5])


def test_a_deadline_holds_for_the_answers_with_and_without_the_state_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at the clock finds it 10 ms later."""
    clock = SimpleNamespace(monotonic=functools.partial(next, itertools.count(step=0.01)))
    for module in (decisions, label_scoring):
        monkeypatch.setattr(module, "time", clock)
    scorer = Scorer()
    decide(Manager(), CHOICE, {"orders": 1, "baseline": True, "deadline_ms": 80}, scorer)
    assert scorer.deadlines_ms == pytest.approx([70, 60])


@pytest.mark.parametrize("before", ["", "<think>\n\n</think>\n\n"])
def test_a_template_with_an_empty_think_block_is_asked_behind_it(before: str) -> None:
    scorer = Scorer()
    decide(Manager(before, before), CHOICE, None, scorer)
    assert all(one.endswith(f"<assistant>{before}") for one in scorer.prompts)


@pytest.mark.parametrize(("before_reply", "before_written"), [("", "<think>\n"), ("<think>\n\n</think>\n\n", "")])
def test_a_template_that_thinks_first_is_refused(before_reply: str, before_written: str) -> None:
    with pytest.raises(BadRequestError, match="think before it answers"):
        decide(Manager(before_reply, before_written), CHOICE)


def test_a_model_without_a_template_is_refused() -> None:
    manager = Manager()
    manager.tokenizer.apply_chat_template = lambda *_, **__: (_ for _ in ()).throw(ValueError("no template"))
    with pytest.raises(BadRequestError, match="--chat-template"):
        decide(manager, CHOICE)


def test_a_code_of_several_tokens_and_a_long_state_are_refused() -> None:
    with pytest.raises(BadRequestError, match="'B' as several tokens"):
        decide(Manager(), CHOICE, None, Scorer(several_tokens=("B",)))
    long = {**CHOICE, "instructions": "x" * 500}
    with pytest.raises(
        PromptTooLongError, match=r"question 'q' have \d+ tokens, \d+ too many: this server takes at most 500"
    ):
        decide(Manager(), long)


def test_a_calibration_is_for_names_of_options() -> None:
    model = ModelName("m", "fingerprint", None)
    made = StoredCalibration(
        "sure", "temperature", model, ["b", "a"], Calibration([2.0, 2.0], [0.0, 0.0]), 20, None, {}
    )
    manager = Manager(calibrations={"sure": made})
    found = decide(manager, CHOICE, {"orders": 1, "calibration": "sure"})
    assert found.answers[0].probabilities == pytest.approx([4 / 5, 1 / 5])
    with pytest.raises(BadRequestError, match="'sure' is for the labels"):
        decide(manager, {"type": "choice", "criteria": {"a": None, "c": None}}, {"calibration": "sure"})
    with pytest.raises(BadRequestError, match="does not exist"):
        decide(manager, CHOICE, {"calibration": "unknown"})
