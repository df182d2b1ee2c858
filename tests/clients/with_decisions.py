"""OpenAI's client for /v1/decisions, and LangChain's and LiteLLM's."""

from __future__ import annotations

import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm
import openai
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_openai import decisions as langchain
from work import DESK, MODEL, REFUND, URL, decided

client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0, timeout=300)
choices = [{"value": "workshop", "description": "repairs"}, {"value": True}, {"value": "true"}]
questions = [
    {"type": "predicate", "name": "refund", "instructions": REFUND["instructions"]},
    {"type": "choice", "instructions": [{"type": "input_text", "text": DESK["instructions"]}], "choices": choices},
    {
        "type": "score",
        "instructions": "How annoyed?",
        "levels": [{"label": "calm"}, {"label": "furious", "description": "!"}],
    },
]
items = [
    {
        "role": "user",
        "content": [{"type": "input_text", "text": "It broke."}, {"type": "input_json", "data": {"days": 2}}],
    },
    {"role": "user", "content": "I want my money back."},
]
reply = client.decisions.create(model="gpt-6-luna", input=items, questions=questions)
refund, desk, mood = reply.answers
state = 'It broke.\n{"days":2}\n\nI want my money back.'
assert refund.probability == decided(REFUND, state)["noul"]
assert (refund.name, desk.name, mood.name) == ("refund", None, None)
assert [one.value for one in desk.probabilities] == ["workshop", True, "true"]
assert desk.choice == max(desk.probabilities, key=lambda one: one.probability).value
assert type(desk.choice) is type(max(desk.probabilities, key=lambda one: one.probability).value)
assert [(one.value, one.label) for one in mood.probabilities] == [(0, "calm"), (1, "furious")]
assert abs(mood.score - mood.probabilities[1].probability) < 1e-9
assert reply.usage.total_tokens == reply.usage.input_tokens > 50
param = ""
try:
    client.decisions.create(model=MODEL, input="x", questions=[{**questions[1], "choices": choices[:1]}])
except openai.BadRequestError as error:
    param = error.param
assert param == "questions[0].choices", "a choice of one was accepted"

chain = langchain.OpenAIDecisions(model=MODEL, base_url=f"{URL}/v1", api_key="none", max_retries=0)
asked = {"refund": langchain.Predicate(instructions=REFUND["instructions"])}
found = chain.invoke({"input": state, "questions": asked})
assert found.answers["refund"].probability == refund.probability, found
chain.invoke({"input": [SystemMessage("Bicycles."), HumanMessage("It broke."), AIMessage("When?")], "questions": asked})

q = {"q": REFUND, "r": DESK}
for model, base in (("hosted_vllm", URL), ("typesafe", URL), ("openai", f"{URL}/v1")):
    of_system_one = litellm.systemone(model=f"{model}/{MODEL}", api_base=base, api_key="none", state=state, questions=q)
    assert f"{refund.probability:.6f}" in f"{of_system_one.answers['q'].noul:.6f}", of_system_one
for model, base in (("hosted_vllm", URL), ("openai", f"{URL}/v1")):
    of_decisions = litellm.decisions(
        model=f"{model}/{MODEL}", api_base=base, api_key="none", input=state, questions=questions[:1]
    )
    assert abs(of_decisions.answers[0].probability - refund.probability) < 1e-6, of_decisions
