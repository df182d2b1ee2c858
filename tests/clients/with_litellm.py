"""LiteLLM as OpenAI's client with labels, and as Cohere's, Jina's, vLLM's and infinity's reranker."""

from __future__ import annotations

import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # not from the network

import litellm
from work import DOCUMENTS, LABELS, MODEL, PROMPT, QUESTION, URL, check_ranking

address = {"api_base": f"{URL}/v1", "api_key": "none"}
completion = litellm.text_completion(
    model=f"text-completion-openai/{MODEL}",
    prompt=PROMPT,
    max_tokens=1,
    extra_body={"allowed_tokens": LABELS},
    **address,
)
assert completion.choices[0].text == LABELS[0], completion
words = [label.strip() for label in LABELS]
chat = litellm.completion(
    model=f"openai/{MODEL}",
    messages=[{"role": "user", "content": PROMPT}],
    max_tokens=1,
    extra_body={"allowed_tokens": words},
    **address,
)
assert chat.choices[0].message.content in words, chat

# LiteLLM reads vLLM's documents at /rerank as objects, infinity's as texts; this server sends objects.
for model, base, more in (
    (f"cohere/{MODEL}", f"{URL}/v2/rerank", {}),
    (f"jina_ai/{MODEL}", URL, {}),
    (f"hosted_vllm/{MODEL}", URL, {}),
    (f"infinity/{MODEL}", URL, {"return_documents": False}),
):
    reply = litellm.rerank(
        model=model, query=QUESTION, documents=DOCUMENTS, top_n=2, api_base=base, api_key="none", **more
    )
    check_ranking([(one["index"], one["relevance_score"]) for one in reply.results])
