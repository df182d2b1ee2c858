"""What else a server on a card is asked, once each: the paper's engine, answers of several tokens, reranking, generation,
embeddings, a batch job and the offline engine.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import requests
import torch

from benchmarks import report
from tests.gpu.conftest import MEMORY, Scored, Server, prompt
from tests.support import tiny_models

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

FLAGS = ["--max-total-tokens", "20000", "--max-input-length", "8000", *MEMORY]
MAX_LOGPROB_DIFFERENCE = 1.0  # of bfloat16 from float32, see test_shared_prefix


def post(server: Server, path: str, body: dict[str, Any]) -> Any:
    reply = requests.post(f"{server.url}{path}", json=body, timeout=300)
    assert reply.status_code == 200, reply.text[:2000]
    return reply.json()


def largest(found: list[float], expected: list[float]) -> float:
    return max(abs(a - b) if a == a else math.inf for a, b in zip(found, expected, strict=True))


def test_the_papers_engine(start: Callable[..., Server], model: Path, exact: Callable[..., list[Scored]]) -> None:
    prefix = prompt(1, 3_000)
    asked = [[*prefix, *prompt(10 + number, 20)] for number in range(8)] + [prompt(2, 6_000)]
    with ExitStack() as stack:
        server = start("sgl_prefill.launch_server", model, "--paper", *FLAGS, stack=stack)
        found = server.score(*asked)
    for one, expected in zip(found, exact(*asked), strict=True):
        assert largest(one.logprobs, expected.logprobs) <= MAX_LOGPROB_DIFFERENCE
    assert sum(one.cached_tokens >= 3_000 for one in found) >= 7


def test_answers_of_several_tokens_and_reranking(
    start: Callable[..., Server], model: Path, exact: Callable[..., list[Scored]]
) -> None:
    """The log-probability of `t40 t50` is that of t40 after the prompt and of t50 after both."""
    asked = prompt(3, 1_500)
    with ExitStack() as stack:
        server = start("sgl_prefill.launch_server", model, *FLAGS, stack=stack)
        answers = ["t40 t50", "t40 t60 t70", "t80 t90"]
        reply = post(server, "/v1/completions", {"model": "default", "prompt": asked, "allowed_answers": answers})
        scores = [entry["logprob"] for entry in reply["choices"][0]["label_scores"]["labels"]]
        documents = ["t31 t32 t33", "t34 t35", "t36 t37 t38 t39"] * 5
        ranked = post(server, "/v1/rerank", {"model": "default", "query": "t30 t31", "documents": documents})
    expected = []
    for answer in ([40, 50], [40, 60, 70], [80, 90]):
        steps = [exact([*asked, *answer[:n]], token_ids=[token])[0].logprobs[0] for n, token in enumerate(answer)]
        expected.append(sum(steps))
    assert largest(scores, expected) <= 2 * MAX_LOGPROB_DIFFERENCE
    assert len(ranked["results"]) == 15
    of_document: dict[str, list[float]] = {}
    for one in ranked["results"]:
        of_document.setdefault(documents[one["index"]], []).append(one["relevance_score"])
    assert all(max(scores) - min(scores) <= 0.2 for scores in of_document.values()), "the same document, other scores"


def test_generation(start: Callable[..., Server], model: Path, exact: Callable[..., list[Scored]]) -> None:
    """Eight tokens: the likeliest of float32 first, or one that bfloat16 may take for it."""
    asked = prompt(4, 500)
    with ExitStack() as stack:
        server = start("sgl_prefill.launch_server", model, "--allow-generation", *FLAGS, stack=stack)
        params = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}
        reply = post(server, "/generate", {"input_ids": asked, "sampling_params": params})
        (scored,) = server.score(asked)
    written = reply["output_ids"]
    assert len(written) == 8
    every = exact(asked, token_ids=range(512))[0].logprobs
    assert every[written[0]] >= max(every) - MAX_LOGPROB_DIFFERENCE
    assert largest(scored.logprobs, every[30:60]) <= MAX_LOGPROB_DIFFERENCE


def test_embeddings(start: Callable[..., Server], write_model: Callable[..., Path]) -> None:
    folder = write_model("llama-embedding")
    asked = prompt(5, 700)
    with ExitStack() as stack:
        server = start("sgl_prefill.launch_server", folder, "--is-embedding", *FLAGS, stack=stack)
        reply = post(server, "/v1/embeddings", {"model": "default", "input": asked})
    found = reply["data"][0]["embedding"]
    expected = tiny_models.last_hidden_state(folder, asked)
    assert sum(a * b for a, b in zip(found, expected, strict=True)) >= 0.99  # both of length 1


def test_a_batch_job(model: Path, exact: Callable[..., list[Scored]], tmp_path: Path) -> None:
    prefixes = [prompt(6 + number, 1_000) for number in range(3)]
    asked = [[*prefixes[number % 3], *prompt(100 + number, 30)] for number in range(50)]
    lines = [
        {
            "custom_id": f"{number}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": "m", "prompt": one, "allowed_token_ids": [30, 31, 32]},
        }
        for number, one in enumerate(asked)
    ]
    source, target = tmp_path / "jobs.jsonl", tmp_path / "answers.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = [sys.executable, "-m", "sgl_prefill.batch", "-i", str(source), "-o", str(target)]
    command += ["--model-path", str(model), "--dtype", "bfloat16", *FLAGS]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=report.REPOSITORY)
    assert done.returncode == 0, done.stderr[-3000:]
    answers = {line["custom_id"]: line for line in map(json.loads, target.read_text().splitlines())}
    expected = exact(*asked, token_ids=[30, 31, 32])
    for number, one in enumerate(expected):
        labels = answers[f"{number}"]["response"]["body"]["choices"][0]["label_scores"]["labels"]
        assert largest([entry["logprob"] for entry in labels], one.logprobs) <= MAX_LOGPROB_DIFFERENCE


def test_the_offline_engine(model: Path, exact: Callable[..., list[Scored]], tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import json, sys, sgl_prefill\n"
        "if __name__ == '__main__':\n"
        "    with sgl_prefill.Engine(model_path=sys.argv[1], dtype='bfloat16', max_total_tokens=20000,\n"
        "                            mem_fraction_static=0.3) as engine:\n"
        "        found = engine.score_labels([json.loads(sys.argv[2])], allowed_token_ids=[30, 31, 32])\n"
        "    print(json.dumps(list(found[0].distribution.logprobs)))\n"
    )
    asked = prompt(7, 300)
    command = [sys.executable, str(program), str(model), json.dumps(asked)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=report.REPOSITORY)
    assert done.returncode == 0, done.stderr[-3000:]
    (expected,) = exact(asked, token_ids=[30, 31, 32])
    assert largest(json.loads(done.stdout.splitlines()[-1]), expected.logprobs) <= MAX_LOGPROB_DIFFERENCE
