"""One request after the other, first come, first served: python -m benchmarks.harness.outsiders BACKEND --model-path FOLDER

BACKEND: `transformers` (Hugging Face) on a model folder or `llama_cpp` on a GGUF file, both with the KV of the last prompt
kept for the next one's prefix. `--port`, `--host`, `--dtype` as SGLang's; a GGUF file has its own dtype.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import fastapi
import numpy as np
import uvicorn


class Backend(Protocol):
    """A model that keeps the KV of one prompt."""

    def log_probabilities(self, ids: Sequence[int], n_kept: int) -> Sequence[float]:
        """Returns log-probabilities over the vocabulary, after `ids`, whose first `n_kept` are those of the last call; at
        least one is computed."""
        ...


class Slot:
    """A backend and the prompt that it holds."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._held: list[int] = []

    def score(self, ids: list[int], labels: Sequence[int]) -> tuple[int, list[float]]:
        """(tokens that need not be computed, log-probability of each label)."""
        n_kept = min(common_prefix(self._held, ids), len(ids) - 1)
        logprobs = self._backend.log_probabilities(ids, n_kept)
        self._held = ids
        return n_kept, [float(logprobs[label]) for label in labels]

    def flush(self) -> None:
        self._held = []


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Length in tokens."""
    return next(
        (index for index, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


class Transformers:
    """Hugging Face transformers."""

    def __init__(self, folder: Path, dtype: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM, DynamicCache

        self._torch = torch
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        self._cache: Any = DynamicCache(config=self._model.config)

    def log_probabilities(self, ids: Sequence[int], n_kept: int) -> Sequence[float]:
        with self._torch.inference_mode():
            self._cache.crop(n_kept - self._cache.get_seq_length())  # tokens to remove, as a negative number
            rest = self._torch.tensor([list(ids[n_kept:])])
            reply = self._model(rest, past_key_values=self._cache, use_cache=True, logits_to_keep=1)
            logprobs: Sequence[float] = reply.logits[0, -1].float().log_softmax(-1).tolist()
        return logprobs


class LlamaCpp:
    """llama.cpp through its Python package, in whatever dtype the file is."""

    def __init__(self, file: Path, dtype: str) -> None:
        import llama_cpp

        n_threads = int(os.environ["OMP_NUM_THREADS"])
        self._model: Any = llama_cpp.Llama(
            str(file), n_ctx=8192, n_batch=2048, n_threads=n_threads, n_threads_batch=n_threads, verbose=False
        )

    def log_probabilities(self, ids: Sequence[int], n_kept: int) -> Sequence[float]:
        self._model.n_tokens = n_kept  # `eval` goes on from here and forgets what was behind
        self._model.eval(ids[n_kept:])
        row = self._model._ctx.get_logits_ith(-1)
        logits = np.ctypeslib.as_array(row, shape=(self._model.n_vocab(),)).astype(np.float64)
        logprobs: Sequence[float] = (logits - np.logaddexp.reduce(logits)).tolist()
        return logprobs


BACKENDS: dict[str, type[Transformers] | type[LlamaCpp]] = {"transformers": Transformers, "llama_cpp": LlamaCpp}


def app_of(slot: Slot) -> fastapi.FastAPI:
    """SGLang's routes, as far as the client of the benchmarks asks for them."""
    app = fastapi.FastAPI()
    turn = asyncio.Lock()  # first in, first out

    @app.get("/health")
    async def health() -> dict[str, Any]:
        return {}

    @app.get("/server_info")
    async def server_info() -> dict[str, Any]:
        return {}

    @app.post("/flush_cache")
    async def flush_cache() -> dict[str, Any]:
        slot.flush()
        return {}

    @app.post("/generate")
    async def generate(request: fastapi.Request) -> dict[str, Any]:
        body = await request.json()
        ids, labels = body["input_ids"], body["token_ids_logprob"]
        async with turn:
            started = time.perf_counter()
            n_kept, logprobs = await asyncio.to_thread(slot.score, ids, labels)
        pairs = [[logprob, label, None] for logprob, label in zip(logprobs, labels, strict=True)]
        meta = {"prompt_tokens": len(ids), "cached_tokens": n_kept, "e2e_latency": time.perf_counter() - started}
        return {"meta_info": {**meta, "output_token_ids_logprobs": [pairs]}}

    return app


def parsed(command: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backend", choices=BACKENDS)
    parser.add_argument("--model-path", type=Path, required=True)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    return parser.parse_args(command)


def main() -> None:
    arguments = parsed()
    slot = Slot(BACKENDS[arguments.backend](arguments.model_path, arguments.dtype))
    uvicorn.run(app_of(slot), host=arguments.host, port=arguments.port, log_level="warning")


if __name__ == "__main__":
    main()
