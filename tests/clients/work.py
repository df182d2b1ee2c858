"""What each client of this folder asks, and what SGLang's own route answers to it. A client is run as `python FILE URL`."""

from __future__ import annotations

import json
import sys
import urllib.request
from typing import Any

URL = sys.argv[1]
MODEL = "demo"
QUESTION = "What is the capital of France?"
DOCUMENTS = ["Bananas are yellow.", "Paris is the capital of France.", "The moon is far away."]
STATE = {"order": 71, "text": "The chain broke after two days. I want my money back."}
CRITERIA = {"workshop": "repairs", "sales": None}
PROMPT, LABELS = "The capital of France is", [" Paris", " Rome"]


def post(path: str, body: Any) -> Any:
    request = urllib.request.Request(URL + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as reply:
        return json.load(reply)


def check_ranking(found: list[tuple[int, float]]) -> None:
    """found: the index and score of each document, the best first."""
    scored = post("/v1/rerank", {"query": QUESTION, "documents": DOCUMENTS})
    expected = [(one["index"], one["score"]) for one in scored][: len(found)]
    assert [index for index, _ in found] == [index for index, _ in expected], (found, expected)
    differences = [abs(score - of_route) for (_, score), (_, of_route) in zip(found, expected, strict=True)]
    assert max(differences) < 1e-6, (found, expected)


def index_of(text: str) -> int:
    return DOCUMENTS.index(text)


def decided(question: dict[str, Any], state: Any = STATE) -> Any:
    """What /v1/systemone answers to one question."""
    body = {"model": MODEL, "state": state, "questions": {"q": question}}
    return post("/v1/systemone", body)["answers"]["q"]


REFUND = {"type": "noul", "instructions": "Is money asked back?"}
DESK = {"type": "choice", "instructions": "Who handles it?", "criteria": CRITERIA}
MOOD = {"type": "score", "instructions": "How annoyed is the writer?", "criteria": ["calm", "annoyed", "furious"]}
