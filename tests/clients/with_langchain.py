"""LangChain's OpenAI models with labels, and its Cohere reranker."""

from __future__ import annotations

from cohere import ClientV2
from langchain_cohere import CohereRerank
from langchain_core.documents import Document
from langchain_openai import ChatOpenAI, OpenAI
from work import DOCUMENTS, LABELS, MODEL, PROMPT, QUESTION, URL, check_ranking, index_of

address = {"base_url": f"{URL}/v1", "api_key": "none", "model": MODEL, "max_tokens": 1}
completion = OpenAI(**address, extra_body={"allowed_tokens": LABELS}).invoke(PROMPT)
assert completion == LABELS[0], completion
words = [label.strip() for label in LABELS]
chat = ChatOpenAI(**address, logprobs=True, top_logprobs=2, extra_body={"allowed_tokens": words}).invoke(PROMPT)
(token,) = chat.response_metadata["logprobs"]["content"]
assert chat.content == token["token"] == token["top_logprobs"][0]["token"], chat
assert {one["token"] for one in token["top_logprobs"]} == set(words)

reranker = CohereRerank(client=ClientV2("none", base_url=URL), model=MODEL, top_n=2)
found = reranker.compress_documents([Document(page_content=text) for text in DOCUMENTS], QUESTION)
check_ranking([(index_of(one.page_content), one.metadata["relevance_score"]) for one in found])
