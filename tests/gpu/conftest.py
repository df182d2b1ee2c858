"""Servers on a CUDA device, each started once per backend and session: with the kernels compiled, all of them fit nine minutes.

Small models with random weights in bfloat16, so that answers differ between labels, in the shapes that the kernels have.
"""

from __future__ import annotations

import json
import random
import re
import signal
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import requests
import torch

from benchmarks import shapes
from benchmarks.gpu_hits.run import Passes, passes_in
from sgl_prefill.entry import local_server
from tests.support import (
    quiet_imports,  # noqa: F401  (before all else that imports SGLang)
    tiny_models,
)

BACKENDS = shapes.attention_backends()
SHAPE = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
N_VOCABULARY, CONTEXT_TOKENS = 512, 16_384
DURABLE_TOKENS, LONGEST_TOKENS = 4_000, 12_000
# Of each server: two are up at a time, on the smallest card too.
MEMORY = ["--mem-fraction-static", "0.3"]
ON = ["--suffix-kv", "evict", "--hybrid-prefill", "on", "--set", "hybrid_chunk_tokens=1024"]
ON += ["--max-total-tokens", str(DURABLE_TOKENS), "--max-input-length", str(LONGEST_TOKENS), *MEMORY]
# Its KV pool holds the longest input whole, which is the difference that is to make none.
STOCK = ["--max-total-tokens", str(3 * LONGEST_TOKENS), "--disable-decode-cuda-graph", *MEMORY]


class Scored(NamedTuple):
    """One answer."""

    logprobs: list[float]  # of the tokens that were asked for, in that order
    cached_tokens: int
    evicted_tokens: int | None  # None: of stock SGLang


class Server(NamedTuple):
    """A running server and how to talk to it."""

    url: str
    log: Path

    def info(self) -> dict[str, Any]:
        """What `/server_info` says."""
        reply = requests.get(f"{self.url}/server_info", timeout=60)
        assert reply.status_code == 200, reply.text
        return dict(reply.json())

    def record(self) -> dict[str, Any]:
        """The activation record of ours."""
        return dict(self.info()["sgl_prefill"])

    def score(self, *prompts: list[int], token_ids: Sequence[int] = range(30, 60)) -> list[Scored]:
        """Asks for all prompts in one request, by SGLang's own fields, which both engines have."""
        body: dict[str, Any] = {
            "input_ids": list(prompts),
            "sampling_params": {"max_new_tokens": 0, "temperature": 0},
            "return_logprob": True,
            "token_ids_logprob": [list(token_ids)] * len(prompts),
        }
        reply = requests.post(f"{self.url}/generate", json=body, timeout=300)
        assert reply.status_code == 200, reply.text[:2000]
        return [_scored(one["meta_info"], token_ids) for one in reply.json()]

    def passes(self) -> Passes:
        """How many prefills so far were replayed from a CUDA graph, and how many ran without."""
        reply = requests.get(f"{self.url}/metrics", timeout=60)
        assert reply.status_code == 200, reply.text[:500]
        return passes_in(reply.text)


def _scored(meta: dict[str, Any], token_ids: Sequence[int]) -> Scored:
    by_id = {entry[1]: entry[0] for entry in meta["output_token_ids_logprobs"][0]}
    return Scored([by_id[one] for one in token_ids], meta["cached_tokens"], meta.get("evicted_tokens"))


def prompt(seed: int, n_tokens: int) -> list[int]:
    """Random tokens, none of them special, alike for all servers."""
    rng = random.Random(seed)
    return [rng.randrange(30, 500) for _ in range(n_tokens)]


def differences(one: Sequence[Scored], other: Sequence[Scored]) -> list[float]:
    """Of each log-probability. NaN is a difference that no limit allows."""
    pairs = [pair for a, b in zip(one, other, strict=True) for pair in zip(a.logprobs, b.logprobs, strict=True)]
    assert pairs
    return [abs(a - b) if a == a and b == b else float("inf") for a, b in pairs]


def difference(one: Sequence[Scored], other: Sequence[Scored]) -> float:
    return max(differences(one, other))


def mean_difference(one: Sequence[Scored], other: Sequence[Scored]) -> float:
    return statistics.fmean(differences(one, other))


def assert_as_right_as(found: Sequence[Scored], stock: Sequence[Scored], exact: Sequence[Scored]) -> None:
    """Compares both engines with float32. Ours may differ from it by a quarter more than stock on average, and in one
    log-probability by half more than stock's largest. A wrong row of K or V moves log-probabilities by units.
    """
    assert difference(found, exact) <= 1.5 * difference(stock, exact) + 0.1
    assert mean_difference(found, exact) <= 1.25 * mean_difference(stock, exact) + 0.005


def wait_until_idle(server: Server) -> None:
    """Returns when the last step has been counted: SGLang does so after it has answered."""
    assert requests.post(f"{server.url}/flush_cache", params={"timeout": 30}, timeout=60).status_code == 200


@pytest.fixture(autouse=True, scope="session")
def _servers_end_with_a_timeout() -> None:
    """`timeout` ends with a signal after which Python would leave the server of a test behind."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


@pytest.fixture(scope="session")
def write_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Writes a model of a family, with these changes of its config."""

    def write(family: str, **changes: Any) -> Path:
        folder = tiny_models.write(
            tmp_path_factory.mktemp("model") / family,
            family,
            **{**SHAPE, "torch_dtype": "bfloat16", "max_position_embeddings": CONTEXT_TOKENS, **changes},
        )
        shapes.write_tokenizer(folder, N_VOCABULARY)
        return folder

    return write


@pytest.fixture(scope="session")
def model(write_model: Callable[..., Path]) -> Path:
    return write_model("llama")


@pytest.fixture(scope="session")
def exact(model: Path) -> Callable[..., list[Scored]]:
    """Scores prompts with transformers in float32 on the card, each alone."""
    from transformers import AutoModelForCausalLM

    network: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    network.eval().to("cuda")

    @torch.inference_mode()
    def scored(*prompts: Sequence[int], token_ids: Sequence[int] = range(30, 60)) -> list[Scored]:
        found = []
        for one in prompts:
            logits = network(torch.tensor([one], device="cuda"), logits_to_keep=1).logits[0, -1]
            found.append(Scored(torch.log_softmax(logits.float(), dim=-1)[list(token_ids)].tolist(), 0, None))
        return found

    return scored


NONE: list[Any] = [pytest.param("none", marks=pytest.mark.skip(reason="needs a CUDA device"))]


@pytest.fixture(scope="session", params=BACKENDS or NONE)
def backend(request: pytest.FixtureRequest) -> str:
    """Each attention backend of this device. What depends on it is ended before the next one is tested."""
    return str(request.param)


@pytest.fixture(scope="session")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Server]]:
    """Starts a server with these flags; all end with the session, or with their `stack`."""
    with ExitStack() as session:

        def started(module: str, folder: Path, *flags: str, stack: ExitStack | None = None) -> Server:
            log = tmp_path_factory.mktemp("server") / "log"
            common = ["--model-path", str(folder), "--dtype", "bfloat16", *flags]
            running = local_server.running(module, common, log)
            server = (session if stack is None else stack).enter_context(running)
            return Server(server.url, log)

        yield started


@pytest.fixture(scope="session")
def ours(start: Callable[..., Server], model: Path, backend: str) -> Iterator[Server]:
    """Everything on, with fewer durable slots than the longest input has tokens."""
    with ExitStack() as stack:
        yield start("sgl_prefill.launch_server", model, "--attention-backend", backend, *ON, stack=stack)


@pytest.fixture(scope="session")
def stock(start: Callable[..., Server], model: Path, backend: str) -> Iterator[Server]:
    """SGLang itself, whose answers are the right ones."""
    with ExitStack() as stack:
        yield start("sglang.launch_server", model, "--attention-backend", backend, *STOCK, stack=stack)


def graph_settings(info: dict[str, Any], phase: str) -> dict[str, Any]:
    """SGLang's settings of the CUDA graphs of a phase, as `/server_info` shows them: an object, or its JSON."""
    settings = info["cuda_graph_config"]
    return dict((json.loads(settings) if isinstance(settings, str) else settings)[phase])


def in_log(server: Server, pattern: str) -> list[str]:
    """Lines of the server's log."""
    return [line for line in server.log.read_text(errors="replace").splitlines() if re.search(pattern, line)]


def free_gib() -> float:
    """Of the device, whoever holds the rest."""
    return float(torch.cuda.mem_get_info()[0] / 2**30)
