"""One model over two ranks, each with a core of its own: everything on, and with the answers of one."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import torch

from benchmarks import shapes
from tests.integration import ranks_child
from tests.integration.children import begin_server
from tests.integration.conftest import Server, healthy
from tests.support import tiny_models

LABELS = list(range(3, 40))
CHUNK_TOKENS = 64
N_LAYERS = 4
FLAGS = [
    "--tp-size",
    "2",
    "--dtype",
    "float32",
    "--hybrid-prefill",
    "on",
    "--set",
    f"hybrid_chunk_tokens={CHUNK_TOKENS}",
]
CHILD = "tests.integration.ranks_child"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_models.write(tmp_path_factory.mktemp("tp") / "llama", "llama")
    shapes.write_tokenizer(folder, 512)
    return folder


def flags_of(model: Path) -> list[str]:
    return ["--model-path", str(model), "--served-model-name", "demo", "--memory-budget-gb", "0.4", *FLAGS]


@pytest.fixture(scope="module")
def orders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("orders")


@pytest.fixture(scope="module")
def two_ranks(orders: Path, model: Path) -> Iterator[Server]:
    """`--max-total-tokens` makes the prefix cache so small that a long input is kept in part."""
    flags = [*flags_of(model), "--max-total-tokens", "600", "--max-input-length", "3000"]
    with healthy(begin_server(CHILD, flags, orders / "log", {ranks_child.FOLDER: str(orders)})) as server:
        yield server


def prompt(rng: random.Random, n_tokens: int) -> list[int]:
    return [rng.randrange(50, 500) for _ in range(n_tokens)]


def reference(model: Path, prompts: list[list[int]]) -> torch.Tensor:
    """Log-probabilities of the labels by transformers, in one process. [prompts, labels]."""
    from transformers import AutoModelForCausalLM

    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("ignore")
        llama = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()  # type: ignore[no-untyped-call]
        rows = [llama(torch.tensor([one])).logits[0, -1].log_softmax(-1)[LABELS] for one in prompts]
    return torch.stack(rows)


def test_answers_are_those_of_one_process(two_ranks: Server, model: Path) -> None:
    """Short, longer than a chunk, longer than the prefix cache, and behind a cached prefix: float32, 1e-4."""
    rng = random.Random(1)
    prefix = prompt(rng, 300)
    prompts = [
        *(prompt(rng, n) for n in (1, 2, 63, 64, 65, 500, 2500)),
        *([*prefix, *prompt(rng, 40)] for _ in range(4)),
    ]
    scored = [two_ranks.scores(one, allowed_token_ids=LABELS)[0] for one in prompts]
    found = torch.tensor([[label["logprob"] for label in one["labels"]] for one in scored])
    assert (found - reference(model, prompts)).abs().max() < 1e-4
    assert max(one["evicted_tokens"] for one in scored) >= 2500 - 600
    assert [one["cached_tokens"] for one in scored[-3:]] == [300] * 3


def test_the_record_counts_ranks_and_what_they_sum(two_ranks: Server) -> None:
    """Of a chunk: the embedding, and each layer's attention and MLP; a rank holds half of the residual stream, and each piece
    but the first reads it."""
    import requests

    record = requests.get(f"{two_ranks.url}/server_info", timeout=30).json()["sgl_prefill"]
    assert record["ranks"] == {"count": 2, "sums_a_chunk": 1 + 2 * N_LAYERS, "gathers_a_chunk": N_LAYERS}
    assert set(record["parity_gate"]) == {
        "native kernels and plain",
        "hybrid and plain",
        "cache hit and miss",
        "scratch and durable slots",
    }
    assert record["memory"]["durable_tokens"] <= 600


def test_both_ranks_run_a_thousand_requests_in_one_order(two_ranks: Server, orders: Path) -> None:
    """Their clocks differ, and so do their measured speeds: rank 0 decides. Some are refused, and some leave."""
    rng = random.Random(2)
    prefixes = [prompt(rng, 200) for _ in range(6)]
    before = [len(lines_of(orders, rank)) for rank in range(2)]

    def ask(n: int) -> int:
        body = {
            "model": "demo",
            "prompt": [*prefixes[n % 6], *prompt(random.Random(n), 1 + n % 90)],
            "allowed_token_ids": LABELS,
            "user": f"user-{n % 3}",
        }
        deadline = {"deadline_ms": 0.01} if n % 50 == 0 else {}
        return two_ranks.post("/v1/completions", {**body, **deadline}).status_code

    with ThreadPoolExecutor(64) as pool:
        statuses = list(pool.map(ask, range(1000)))
    assert {n for n, status in enumerate(statuses) if status in (429, 504)} == set(range(0, 1000, 50))
    assert statuses.count(200) == 980
    first, second = (lines_of(orders, rank)[begin:] for rank, begin in enumerate(before))
    assert first == second
    assert len(first) == 980


def lines_of(orders: Path, rank: int) -> list[str]:
    return (orders / f"rank-{rank}").read_text().splitlines()


def test_a_killed_rank_ends_the_server(two_ranks: Server) -> None:
    """The last test with this server: within 10 seconds, status not 0, and nothing is left."""
    processes = psutil.Process(two_ranks.process.pid).children(recursive=True)
    (rank,) = [
        one
        for one in processes
        if "scheduler" in one.name() + " ".join(one.cmdline()) and "TP1" in " ".join(one.cmdline())
    ]
    rank.kill()
    assert two_ranks.process.wait(timeout=10) != 0
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert not alive
