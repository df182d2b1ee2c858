"""LlamaIndex' rerankers of text-embeddings-inference, Cohere and Jina."""

from __future__ import annotations

from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.postprocessor.cohere_rerank import CohereRerank
from llama_index.postprocessor.jinaai_rerank import JinaRerank
from llama_index.postprocessor.tei_rerank import TextEmbeddingInference
from work import DOCUMENTS, MODEL, QUESTION, URL, check_ranking, index_of

for reranker in (
    TextEmbeddingInference(base_url=URL, top_n=3, timeout=300),
    CohereRerank(base_url=URL, api_key="none", model=MODEL, top_n=2),
    JinaRerank(base_url=f"{URL}/v1", api_key="none", model=MODEL, top_n=2),
):
    nodes = [NodeWithScore(node=TextNode(text=text)) for text in DOCUMENTS]
    found = reranker.postprocess_nodes(nodes, query_str=QUESTION)
    assert len(found) == reranker.top_n
    check_ranking([(index_of(one.node.get_content()), float(one.score or 0)) for one in found])
