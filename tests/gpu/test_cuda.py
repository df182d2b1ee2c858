"""Aliased KV memory and hybrid prefilling on a CUDA device, against the same server without them."""

from __future__ import annotations

import random
import signal
from pathlib import Path

import pytest
import requests
import torch

from benchmarks import shapes
from sgl_prefill import local_server
from tests.support import tiny_models

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

# The kernels' shapes: heads of 64, and bfloat16, whose rounding is all that may differ.
SHAPE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "torch_dtype": "bfloat16"}
MAX_LOGPROB_DIFFERENCE = 0.1
DURABLE_TOKENS, LONG_TOKENS = 2_000, 6_000
LABELS = [5, 6, 7]
ON = ["--suffix-kv", "evict", "--hybrid-prefill", "on", "--hybrid-chunk-tokens", "512"]
OFF = ["--suffix-kv", "keep", "--hybrid-prefill", "off"]


def answers(folder: Path, backend: str, flags: list[str], n_slots: int) -> list[list[float]]:
    """Log-probabilities of a long prompt cold, of one that shares its beginning, and of the long one again."""
    rng = random.Random(0)
    long = [rng.randrange(30, 500) for _ in range(LONG_TOKENS)]
    sharer = [*long[:1_500], *(rng.randrange(30, 500) for _ in range(700))]
    model = tiny_models.write(folder / "model", "llama", max_position_embeddings=16_384, **SHAPE)
    shapes.write_tokenizer(model, 512)
    common = ["--model-path", str(model), "--dtype", "bfloat16", "--attention-backend", backend]
    common += ["--max-total-tokens", str(n_slots), "--max-input-length", "8000", "--mem-fraction-static", "0.3"]
    found = []
    with local_server.running("sgl_prefill.launch_server", [*common, *flags], folder / "log") as server:
        for prompt in (long, sharer, long):
            body = {"input_ids": prompt, "allowed_token_ids": LABELS}
            reply = requests.post(f"{server.url}/generate", json=body, timeout=300)
            assert reply.status_code == 200, reply.text
            labels = reply.json()["meta_info"]["label_scores"]["labels"]
            found.append([label["logprob"] for label in labels])
    return found


@pytest.fixture(autouse=True)
def _servers_end_with_a_timeout() -> None:
    """`timeout` ends with a signal after which Python would leave the server of a test behind."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


@pytest.mark.parametrize("backend", shapes.attention_backends())
def test_evicting_hybrid_prefill_gives_the_answers_of_the_plain_one(tmp_path: Path, backend: str) -> None:
    """The long prompt is three times the durable slots; the parity gate at start has compared the paths too."""
    expected = answers(tmp_path, backend, OFF, 3 * LONG_TOKENS)
    found = answers(tmp_path, backend, ON, DURABLE_TOKENS)
    assert max(expected[0]) - min(expected[0]) > MAX_LOGPROB_DIFFERENCE, "the answers must differ between labels"
    for one, other in zip(found, expected, strict=True):
        assert max(abs(a - b) for a, b in zip(one, other, strict=True)) <= MAX_LOGPROB_DIFFERENCE
