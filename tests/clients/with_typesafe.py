"""TypeSafe's own client, which compresses bodies from 1,024 bytes on, system-one, and LangChain's classifier."""

from __future__ import annotations

import langchain_typesafe
from system_one import HTTPConfig, SystemOne
from typesafe_sdk import Choice, Image, Noul, RetryPolicy, Score, TypeSafeAPIError, TypeSafeClient
from work import CRITERIA, DESK, MODEL, MOOD, REFUND, STATE, URL, decided

questions = {
    "money back?": Noul(instructions=REFUND["instructions"]),
    "desk": Choice(instructions=DESK["instructions"], criteria=CRITERIA),
    "mood 😡": Score(instructions=MOOD["instructions"], criteria=MOOD["criteria"]),
}
with TypeSafeClient(api_key="none", base_url=URL, retry=RetryPolicy(max_retries=0)) as client:
    for state in (STATE, [STATE, "x" * 3000]):  # the second is sent compressed
        reply = client.system_one(state=state, questions=questions)
        assert reply.nouls["money back?"].noul == decided(REFUND, state)["noul"]
        assert reply.choices["desk"].probabilities == decided(DESK, state)["probabilities"]
        assert reply.choices["desk"].choice == decided(DESK, state)["choice"]
        assert reply.scores["mood 😡"].score == decided(MOOD, state)["score"]
        assert reply.scores["mood 😡"].legend == dict(enumerate(MOOD["criteria"]))
    assert [one.name for one in client.models.list().models] == [reply.model]
    refused = ""
    try:
        client.system_one(state={"photo": Image(b"\x89PNG\r\n\x1a\n0000")}, questions=questions)
    except TypeSafeAPIError as error:
        refused = str(error)
    assert "images" in refused, refused

found = SystemOne(HTTPConfig(base_url=URL, model=MODEL, api_key="none")).ask("A state.", {"q": REFUND, "r": DESK})
assert abs(found.answers["q"].noul - decided(REFUND, "A state.")["noul"]) < 1e-6, found
chain = langchain_typesafe.TypeSafeClassifier(model=MODEL, api_key="none", base_url=URL)
asked = {"state": "A state.", "questions": {"q": langchain_typesafe.Noul(instructions=REFUND["instructions"])}}
assert str(decided(REFUND, "A state.")["noul"])[:6] in str(chain.invoke(asked)), chain.invoke(asked)
