"""DSPy and Pydantic AI: programs whose outputs are decisions."""

from __future__ import annotations

from typing import Literal

import dspy
from dspy.experimental import TypeSafe
from pydantic import BaseModel, Field
from pydantic_ai import Agent
from pydantic_ai.models.openai_decisions import OpenAIDecisionsModel
from pydantic_ai.models.system_one import SystemOneModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.providers.system_one import SystemOneProvider
from work import MODEL, STATE, URL


class Triage(dspy.Signature):  # type: ignore[misc]
    """Triage the ticket."""

    ticket: str = dspy.InputField()
    desk: Literal["workshop", "sales"] = dspy.OutputField(desc="which desk")
    refund: bool = dspy.OutputField(desc="money is asked back")


class Handling(BaseModel):
    desk: Literal["workshop", "sales"] = Field(description="Which desk?")
    refund: bool = Field(description="Money is asked back")


found = dspy.Predict(Triage)(ticket=STATE["text"], lm=TypeSafe(model=MODEL, api_key="none", base_url=URL, cache=False))
assert found.desk in ("workshop", "sales")
assert isinstance(found.refund, bool)
for model in (
    SystemOneModel(MODEL, provider=SystemOneProvider(base_url=URL, api_key="none")),
    OpenAIDecisionsModel(MODEL, provider=OpenAIProvider(base_url=f"{URL}/v1", api_key="none")),
):
    assert isinstance(Agent(model, output_type=Handling).run_sync(str(STATE["text"])).output, Handling)
