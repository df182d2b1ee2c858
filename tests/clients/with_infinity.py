"""infinity's generated client, which checks the names and types of the reply."""

from __future__ import annotations

from infinity_client import Client
from infinity_client.api.default import rerank
from infinity_client.models import RerankInput, ReRankResult
from work import DOCUMENTS, MODEL, QUESTION, URL, check_ranking

with Client(base_url=URL, raise_on_unexpected_status=True, timeout=300) as client:
    for top_n in (None, 2):
        body = RerankInput(query=QUESTION, documents=DOCUMENTS, model=MODEL, top_n=top_n, return_documents=True)
        reply = rerank.sync(client=client, body=body)
        assert isinstance(reply, ReRankResult)
        assert len(reply.results) == (top_n or len(DOCUMENTS))
        check_ranking([(one.index, one.relevance_score) for one in reply.results])
