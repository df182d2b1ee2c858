"""What do labels of several tokens cost?

The demo model and real text: one request at a time on an empty cache, 8 labels of 1 to 4 tokens against 8 of one token, in turns;
the same labels by SGLang's `select`, and by one request a label on stock as a user gets it.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "2")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import requests
import sglang as sgl

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
    return {
        "targets": [target._asdict() for target in targets],
        "times": times,
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
