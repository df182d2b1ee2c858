"""Stock SGLang with our package installed: unhooked, on the same CPU platform, with the same answers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import requests

from sgl_prefill.examples import select_topics
from tests.integration.conftest import Server
from tests.integration.prompts import CANDIDATES, PROMPTS


def logprobs(server: Server, prompts: list[str], token_ids: list[int]) -> list[list[float]]:
    """Through SGLang's own fields, which both servers have; one prompt at a time."""
    rows = []
    for prompt in prompts:
        body = {
            "text": prompt,
            "sampling_params": {"max_new_tokens": 0, "temperature": 0},
            "return_logprob": True,
            "token_ids_logprob": token_ids,
        }
        output = server.post("/generate", body).json()
        rows.append([entry[0] for entry in output["meta_info"]["output_token_ids_logprobs"][0]])
    return rows


def test_stock_sglang_is_unhooked_with_our_package_installed(stock_server: Server) -> None:
    """No record, no hook in its log, it generates, and it knows nothing of allowed tokens."""
    info = requests.get(stock_server.url + "/server_info", timeout=30).json()
    assert "sgl_prefill" not in info
    assert "Applied" not in stock_server.log.read_text()
    body = {"model": "demo", "prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}
    reply = stock_server.post("/v1/completions", {**body, "allowed_tokens": [" Rome"]}).json()
    assert reply["choices"][0]["text"].startswith(" Paris")
    assert reply["usage"]["completion_tokens"] == 4
    assert "label_scores" not in reply["choices"][0]


def test_both_servers_use_the_cpu_attention_backend(server: Server, stock_server: Server) -> None:
    """So that stock is a fair baseline on this machine."""
    for one in (server, stock_server):
        info = requests.get(one.url + "/server_info", timeout=30).json()
        assert info["attention_backend"] == "cpu_flash"


def test_scores_are_close_to_stock(server: Server, stock_server: Server, tokenizer: Any) -> None:
    """*close*: probabilities within 0.05.

    Stock rounds logits of 16 to 32 to bfloat16, by up to 2^-4 each, where ours are float32; a probability p moves by
    p (1 - p) times the difference of two logits, at most 0.25 * 2^-3. Layers that round in other places move a log-probability
    by 0.035 from float32 in the mean, stock's as well as ours.
    """
    ids = [tokenizer.encode(label)[0] for label in CANDIDATES]
    ours, stock = (logprobs(one, PROMPTS[:16], ids) for one in (server, stock_server))
    for left, right in zip(ours, stock, strict=True):
        assert [math.exp(x) for x in left] == pytest.approx([math.exp(x) for x in right], abs=0.05)


def test_the_select_example_decides_the_same_on_both(server: Server, stock_server: Server) -> None:
    """The same frontend program, unchanged, and the right topics."""
    ours = select_topics.decisions(server.url)
    assert ours == select_topics.decisions(stock_server.url)
    assert ours == [" sports", " food", " music", " weather"] * 2
