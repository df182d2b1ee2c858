"""Haystack's Cohere ranker, which always sends max_tokens_per_doc, and its OpenAI generator."""

from __future__ import annotations

from haystack import Document
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.utils import Secret
from haystack_integrations.components.rankers.cohere import CohereRanker
from work import DOCUMENTS, LABELS, MODEL, PROMPT, QUESTION, URL, check_ranking, index_of

ranker = CohereRanker(model=MODEL, api_base_url=URL, api_key=Secret.from_token("none"))
ranker.warm_up()
ranked = ranker.run(query=QUESTION, documents=[Document(content=text) for text in DOCUMENTS])["documents"]
check_ranking([(index_of(one.content), one.score) for one in ranked])

extra = {"max_tokens": 1, "extra_body": {"allowed_tokens": [label.strip() for label in LABELS]}}
generator = OpenAIChatGenerator(
    model=MODEL, api_base_url=f"{URL}/v1", api_key=Secret.from_token("none"), generation_kwargs=extra
)
(reply,) = generator.run([ChatMessage.from_user(PROMPT)])["replies"]
assert reply.text in {label.strip() for label in LABELS}, reply
