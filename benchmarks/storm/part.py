"""What the parts of the storm share: our server of a small model whose answers tell prompts apart, and what an answer says."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from benchmarks import shapes
from benchmarks.harness import engines
from sgl_prefill.examples import demo_model

SAME = 1e-3  # float32, log-probabilities near -11: in steps of other requests sums differ in their last bits
KV_TOKENS = 20_000
TRIPLES = "output_token_ids_logprobs"
LOGPROBS, SCORES = ("logprob", "token_logprobs", TRIPLES), ("score", "scores")
LEAST_SCORE = 1e-30


def flags_in(folder: Path, *flags: str, kv_tokens: int = KV_TOKENS) -> list[str]:
    """Writes a model of two layers with random weights and the demo model's tokenizer, whose requests take milliseconds, and
    returns the flags to serve it in float32: the same prompt has the same answer whatever runs beside it."""
    demo = demo_model.ensure()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).write_text((demo / name).read_text())
    config = json.loads((demo / "config.json").read_text())
    small = {"num_hidden_layers": 2, "hidden_size": 144, "head_dim": 16}
    (folder / "config.json").write_text(json.dumps({**config, **small}))
    shapes.write_weights(folder)
    common = ["--context-length", "8192", "--max-total-tokens", str(kv_tokens), "--sleep-on-idle"]
    common += ["--set", "skip_parity_gate=true"]
    return [*shapes.weight_flags(folder, "float32"), *common, *shapes.budget(2), *flags]


@contextmanager
def serving(*flags: str, kv_tokens: int = KV_TOKENS) -> Iterator[engines.Running]:
    """Our server; ends with the block."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        all_flags = flags_in(folder, *flags, kv_tokens=kv_tokens)
        with engines.running(engines.OURS, all_flags, folder / "log") as server:
            yield server


def processes(pid: int) -> list[psutil.Process]:
    """The launcher and what it has started."""
    launcher = psutil.Process(pid)
    return [launcher, *launcher.children(recursive=True)]


def scores(answer: Any, of: str = "") -> list[float]:
    """Returns the log-probabilities, and the logarithms of the scores, of a reply in the order of its prompts or documents.

    of: the name that `answer` has in the reply. NaN, which JSON has as null, stays NaN.
    """
    if isinstance(answer, dict):
        answer = {
            name: value for name, value in answer.items() if (name, value) != ("token_logprobs", None)
        }  # not asked for
        return [
            one for name, value in answer.items() for one in scores(value, name if name in LOGPROBS + SCORES else of)
        ]
    if isinstance(answer, list):
        if answer and isinstance(answer[0], dict) and "index" in answer[0]:
            answer = sorted(answer, key=lambda one: int(one["index"]))
        if of == TRIPLES and answer and not isinstance(answer[0], list):
            answer = answer[:2]  # log-probability and id of a token; its text is not asked for
        return [one for value in answer for one in scores(value, of)]
    if not of or isinstance(answer, bool | str):
        return []
    number = math.nan if answer is None else float(answer)
    return [math.log(max(number, LEAST_SCORE)) if of in SCORES else number]


def differ(one: list[float], other: list[float]) -> bool:
    """Says whether two answers to the same request are not the same; none and NaN are no agreement."""
    return not one or len(one) != len(other) or not all(abs(a - b) <= SAME for a, b in zip(one, other, strict=True))
