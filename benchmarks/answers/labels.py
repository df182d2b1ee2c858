"""What do labels of several tokens cost, and are their probabilities right?

    python benchmarks/answers/labels.py [--quick]

The demo model and real text. Time: one request at a time on an empty cache, 8 labels of 1 to 4 tokens against 8 of one token, in
turns; the same labels by SGLang's `select`, and by one request a label on stock as a user gets it. Numbers: log P(label) in
float32 against transformers, behind prompts that are cold, cached, evicted, and packed with others into one step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "2")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import requests
import sglang as sgl
import torch

from benchmarks import report, shapes
from benchmarks.harness import engines, traffic
from sgl_prefill.examples import demo_model

SHORT = [" sports", " music", " food", " weather", " politics", " science", " history", " art"]
# Two of each length from 1 to 4 tokens.
LONG = [
    *(" sports", " music", " classical music", " video games", " the weather forecast", " a cooking recipe"),
    *(" the history of science", " a piece of art"),
]
LENGTHS = (200, 1000)
MOST_RATIO = {200: 1.3, 1000: 1.1}
N_TURNS = 15
# Of the comparison with transformers: prompts of 40 tokens come several to a step; durable slots for half of the longest.
NUMBER_LENGTHS, N_PACKED, LONGEST, DURABLE = (40, 300), 6, 2000, 1000


def measure(quick: bool = False) -> dict[str, Any]:
    """Returns `targets`, `rows` and `commands`. Raises InvalidRunError."""
    commands: dict[str, str] = {}
    tokenizer = _tokenizer()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        flags = [*shapes.demo_flags(), "--sleep-on-idle"]
        with (
            engines.running(engines.OURS, [*flags, *shapes.budget(2)], folder / "ours.log") as ours,
            engines.running(
                engines.stock("lpm", *engines.AS_SHIPPED.flags),
                [*flags, "--max-total-tokens", "20000"],
                folder / "stock.log",
                {engines.KERNEL_VARIABLE: engines.AS_SHIPPED.kernel},
            ) as stock,
        ):
            commands |= {"ours": ours.command, "stock": stock.command}
            times = _times(ours, stock, tokenizer, 2 if quick else N_TURNS)
        flags = [*shapes.weight_flags(demo_model.ensure("float32"), "float32"), *shapes.budget(3)]
        flags += ["--max-total-tokens", str(DURABLE), "--max-input-length", str(LONGEST + 100)]
        with engines.running(engines.OURS, flags, folder / "float32.log") as ours:
            commands["float32"] = ours.command
            numbers = _numbers(ours, tokenizer, quick=quick)
    found = {(row["tokens"], row["how"]): row["median_ms"] for row in times}
    targets = []
    for n in LENGTHS:
        ratio = found[n, "ours, 8 labels of 1 to 4 tokens"] / found[n, "ours, 8 labels of one token"]
        targets.append(
            report.Target.at_most(f"{n} new tokens: 8 labels of 1 to 4 tokens / 8 of one", ratio, MOST_RATIO[n])
        )
    for how in ("ours, select", "stock, select", "stock, one request a label"):
        ratio = min(found[n, how] / found[n, "ours, 8 labels of 1 to 4 tokens"] for n in LENGTHS)
        targets.append(report.Target.at_least(f"{how} / ours, the lesser of both lengths", ratio, 3.0))
    worst = max(row["largest_difference"] for row in numbers)
    targets.append(report.Target.at_most("log P(label) against transformers, float32: largest difference", worst, 1e-4))
    return {
        "targets": [target._asdict() for target in targets],
        "times": times,
        "numbers": numbers,
        "commands": commands,
    }


def _tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(demo_model.ensure())


class _Texts:
    """Prompts of that many tokens, which share no prefix."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self._ids = tokenizer, tokenizer.encode(traffic.real_text())
        self._number = 0

    def next(self, n_tokens: int) -> str:
        self._number += 1
        start = 37 * self._number % (len(self._ids) - n_tokens)
        head = self._tokenizer.encode(f"Text {self._number}:")
        end = self._tokenizer.encode("\nThis text is about")
        middle = self._ids[start : start + n_tokens - len(head) - len(end)]
        text: str = self._tokenizer.decode([*head, *middle, *end])
        return text


def _times(ours: engines.Running, stock: engines.Running, tokenizer: Any, n_turns: int) -> list[dict[str, Any]]:
    texts = _Texts(tokenizer)
    ways: dict[str, Callable[[str], Any]] = {
        "ours, 8 labels of one token": lambda text: _ask(ours.url, text, SHORT),
        "ours, 8 labels of 1 to 4 tokens": lambda text: _ask(ours.url, text, LONG),
        "ours, 8 labels of one token, again": lambda text: _ask(ours.url, text, SHORT),
        "ours, select": lambda text: _select(ours.url, text),
        "stock, select": lambda text: _select(stock.url, text),
        "stock, one request a label": lambda text: _one_request_a_label(stock.url, text, tokenizer),
    }
    spent: dict[tuple[int, str], list[float]] = {}
    for turn in range(n_turns + 1):  # the first is for what is made at first use
        for n_tokens in LENGTHS:
            for how, ask in ways.items():
                text = texts.next(n_tokens)
                begin_s = time.perf_counter()
                ask(text)
                if turn:
                    spent.setdefault((n_tokens, how), []).append(1e3 * (time.perf_counter() - begin_s))
    return [
        {"tokens": n_tokens, "how": how, "median_ms": round(statistics.median(all_ms), 2), "n": len(all_ms)}
        for (n_tokens, how), all_ms in spent.items()
    ]


_session = requests.Session()


def _ask(url: str, prompt: Any, labels: list[str]) -> list[dict[str, Any]]:
    body = {"model": "default", "prompt": prompt, "allowed_answers": labels}
    reply = _session.post(f"{url}/v1/completions", json=body, timeout=300)
    if reply.status_code != 200:
        raise report.InvalidRunError(reply.text)
    return [choice["label_scores"] for choice in reply.json()["choices"]]


@sgl.function  # type: ignore[untyped-decorator]
def _program(s: Any, text: str) -> None:
    s += text
    s += sgl.select("label", choices=LONG)


def _select(url: str, text: str) -> None:
    state = _program.run(text=text, backend=_backend(url))
    if state["label"] not in LONG:
        raise report.InvalidRunError(f"select gave {state['label']!r}")


_backends: dict[str, Any] = {}


def _backend(url: str) -> Any:
    if url not in _backends:
        _backends[url] = sgl.RuntimeEndpoint(url)
    return _backends[url]


def _one_request_a_label(url: str, text: str, tokenizer: Any) -> None:
    """One after the other: each but the first finds the prompt in the prefix cache."""
    prompt = tokenizer.encode(text)
    for label in LONG:
        answer = tokenizer.encode(label)
        body = {
            "input_ids": [*prompt, *answer],
            "sampling_params": {"max_new_tokens": 0, "temperature": 0},
            "return_logprob": True,
            "logprob_start_len": len(prompt) - 1,
        }
        reply = _session.post(f"{url}/generate", json=body, timeout=300)
        if len(reply.json()["meta_info"]["input_token_logprobs"]) < len(answer):
            raise report.InvalidRunError(reply.text)


def _numbers(server: engines.Running, tokenizer: Any, *, quick: bool) -> list[dict[str, Any]]:
    from transformers import AutoModelForCausalLM

    texts = _Texts(tokenizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model: Any = AutoModelForCausalLM.from_pretrained(demo_model.ensure("float32"), dtype=torch.float32)
    asked: list[tuple[str, list[str]]] = []
    for n_tokens in NUMBER_LENGTHS:
        for prompt in [texts.next(n_tokens) for _ in range(N_PACKED)]:
            asked += [("cold", [prompt]), ("cached", [prompt])]
    asked += [("packed", [texts.next(NUMBER_LENGTHS[0]) for _ in range(N_PACKED)]) for _ in range(2)]
    asked += [("evicted", [texts.next(LONGEST)]) for _ in range(1 if quick else 3)]
    found: dict[str, list[float]] = {}
    for state, prompts in asked:
        ids = [tokenizer.encode(prompt) for prompt in prompts]
        for prompt, scores in zip(ids, _ask(server.url, ids, LONG), strict=True):
            holds = {"cold": scores["cached_tokens"] < 10, "cached": scores["cached_tokens"] > 30}
            holds["evicted"] = scores["evicted_tokens"] > 0
            if not holds.get(state, True):
                raise report.InvalidRunError(f"not {state}: {scores}")
            for entry in scores["labels"]:
                expected = _reference(model, prompt, entry["forms"][0]["token_ids"])
                found.setdefault(state, []).append(abs(entry["logprob"] - expected))
    return [
        {"prompts are": state, "log-probabilities": len(differences), "largest_difference": max(differences)}
        for state, differences in found.items()
    ]


def _reference(model: Any, prompt: list[int], answer: list[int]) -> float:
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
    return float(logits.log_softmax(-1)[range(len(answer)), answer].sum())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smoke run")
    print(json.dumps(measure(parser.parse_args().quick), indent=1))
