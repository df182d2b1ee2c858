"""What is asked of each row of a table, and the columns of its answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from sgl_prefill.core.decision_prompts import Kind
from sgl_prefill.errors import BadRequestError, BatchJobError
from sgl_prefill.http.decision_bodies import read_system_one

MASS, ERROR = "label_mass", "error"


class Asked(NamedTuple):
    """Labels, or questions about the row's prompt as /v1/systemone has them."""

    labels: Sequence[str] = ()
    questions: dict[str, Any] | None = None

    def request(self, prompt: Any) -> tuple[str, dict[str, Any]]:
        """Returns route and body. Raises BadRequestError for questions about token ids."""
        if self.questions is None:
            labelled = {"allowed_answers": list(self.labels), "max_tokens": 1}
            return "/v1/completions", {"model": "default", "prompt": prompt, **labelled}
        if not isinstance(prompt, str):
            raise BadRequestError("questions are asked about a text, and the prompt holds token ids: give its text")
        return "/v1/systemone", {"model": "default", "state": prompt, "questions": self.questions}

    def columns(self) -> dict[str, type]:
        """Returns what each column holds. Raises BatchJobError for questions that /v1/systemone does not take."""
        if self.questions is None:
            return {**dict.fromkeys(self.labels, float), MASS: float}
        try:
            _, asked = read_system_one({"model": "default", "state": "any", "questions": self.questions})
        except BadRequestError as error:
            raise BatchJobError(f"questions: {error}") from error
        found: dict[str, type] = {}
        for name, question in zip(self.questions, asked.questions, strict=True):
            is_choice = question.kind is Kind.CHOICE
            options = [f"{name}: {option.name}" for option in question.options] if is_choice else []
            if doubled := found.keys() & {name, *options}:
                raise BatchJobError(
                    f"questions: {min(doubled)!r} would be two columns of the answers: name a question otherwise"
                )
            found |= {name: str if is_choice else float, **dict.fromkeys(options, float)}
        return found

    def values(self, body: dict[str, Any]) -> dict[str, Any]:
        """Returns the columns' values of a reply."""
        if self.questions is None:
            scores = body["choices"][0]["label_scores"]
            return {**{one["label"]: one["probability"] for one in scores["labels"]}, MASS: scores["label_mass"]}
        found: dict[str, Any] = {}
        for name, answer in body["answers"].items():
            found[name] = answer[answer["type"]]
            if answer["type"] == "choice":
                found |= {f"{name}: {option}": p for option, p in answer["probabilities"].items()}
        return found
