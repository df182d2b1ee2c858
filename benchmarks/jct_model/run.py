"""How well does the fitted JCT model predict, and does it predict better than counting cache-miss tokens?

    python benchmarks/jct_model/run.py [--quick] [--json PATH]

Each model is served by a real server that fits its JCT model at start; then it is asked prompts of random lengths of
which a random part is cached, one by one, and several short ones at once, which share steps. See the README beside this file.
"""

from __future__ import annotations

import math
import os
import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "2")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import requests

from benchmarks import report, shapes
from benchmarks.harness import engines

LONGEST = 8_000
SHORTEST = 32
N_POINTS, N_QUICK = 80, 8
COLD_SHARE = 1 / 3
# Requests at once behind one cached prefix, for the prediction of packed steps.
N_BURSTS, N_QUICK_BURSTS = 60, 4
BURST_REQUESTS, BURST_OWN_TOKENS, BURST_CACHED_TOKENS = (2, 32), (4, 120), (50, 3000)
OPTIONS = ("--set", "jct_model=fitted", "--max-input-length", str(LONGEST), "--sleep-on-idle")


def main() -> int:
    arguments = report.arguments(__doc__, Path(__file__).with_name("result.json"))
    n_points, n_bursts = (N_QUICK, N_QUICK_BURSTS) if arguments.quick else (N_POINTS, N_BURSTS)
    conditions = {**report.conditions(), "points": n_points, "longest_tokens": LONGEST, "commands": {}}
    conditions["bursts"] = n_bursts
    rows: list[dict[str, Any]] = []
    packed: list[dict[str, Any]] = []
    fitted = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for model, flags in models(folder).items():
            print(f"starting {model}", file=sys.stderr)
            budget = [] if shapes.HAS_CUDA else ["--memory-budget-gb", "4"]
            # A profile of an earlier start would not be measured by this run.
            environment = {"XDG_CACHE_HOME": str(folder / "cache")}
            engine = engines.ours(model, *OPTIONS, *budget)
            with engines.running(engine, flags, folder / "log", environment) as server:
                assert server.record is not None
                fitted[model] = server.record["jct_model"]
                rows += measure(server, model, n_points)
                packed += measure_packed(server, model, n_bursts)
                conditions["commands"][model] = server.command
    figures = {model: figures_of([row for row in rows if row["model"] == model]) for model in fitted}
    for model, of_model in figures.items():
        of_model["packed"] = figures_of_packed([row for row in packed if row["model"] == model])
    report.finish(
        {"conditions": conditions, "fitted": fitted, "figures": figures, "rows": rows, "packed_rows": packed},
        targets_of(figures),
        arguments.json,
    )
    return 0


def models(folder: Path) -> dict[str, list[str]]:
    """Flags that name each model."""
    name = shapes.DEVICE_MODEL if shapes.HAS_CUDA else "llama-6-layers"
    return {
        "SmolLM2-135M-Instruct": shapes.demo_flags(),
        name: shapes.dummy_flags(shapes.write(name, folder / "model")),
    }


def measure(server: engines.Running, model: str, n_points: int) -> list[dict[str, Any]]:
    """One prompt after the other: lengths uniform in their logarithm, a third cold, of the others a random share cached."""
    rng = random.Random(1)
    ask(server, shapes.token_ids(rng, 1000))  # warm-up
    rows = []
    for number in range(n_points):
        n_input = round(math.exp(rng.uniform(math.log(SHORTEST), math.log(LONGEST))))
        n_cached = 0 if rng.random() < COLD_SHARE else round(n_input * rng.uniform(0.1, 0.98))
        prefix = shapes.token_ids(rng, n_cached)
        if prefix:
            ask(server, [*prefix, 1])
        scores = ask(server, [*prefix, *shapes.token_ids(rng, n_input - n_cached)])
        row = {name: scores[name] for name in ("prompt_tokens", "cached_tokens", "predicted_jct_ms", "actual_ms")}
        if abs(row["cached_tokens"] - n_cached) > 1:
            raise report.InvalidRunError(f"{n_cached} tokens should have been cached: {row}")
        rows.append({"model": model, **row})
        print(f"{(number + 1) / n_points:4.0%}  {row}", file=sys.stderr)
    return rows


def measure_packed(server: engines.Running, model: str, n_bursts: int) -> list[dict[str, Any]]:
    """Bursts of hits of one prefix: a row for each step that several of them shared."""
    rng = random.Random(2)
    rows = []
    for number in range(n_bursts):
        prefix = shapes.token_ids(rng, rng.randint(*BURST_CACHED_TOKENS))
        ask(server, [*prefix, 1])
        # No two go on with the same token, else one would wait for the other.
        prompts = [
            [*prefix, 1000 + index, *shapes.token_ids(rng, rng.randint(*BURST_OWN_TOKENS))]
            for index in range(rng.randint(*BURST_REQUESTS))
        ]
        steps: dict[float, list[dict[str, Any]]] = {}
        for output in generate(server, prompts):
            steps.setdefault(output["meta_info"]["forward_entry_time"], []).append(output["meta_info"]["label_scores"])
        for step in steps.values():
            if len(step) == 1:
                continue
            row = {name: step[0][name] for name in ("predicted_jct_ms", "actual_ms")}
            n_computed = sum(one["prompt_tokens"] - one["cached_tokens"] for one in step)
            shape = {"requests": len(step), "computed_tokens": n_computed, "cached_tokens": step[0]["cached_tokens"]}
            rows.append({"model": model, **shape, **row})
        print(f"{(number + 1) / n_bursts:4.0%}  {rows[-1] if rows else None}", file=sys.stderr)
    return rows


def ask(server: engines.Running, prompt: list[int]) -> dict[str, Any]:
    scores: dict[str, Any] = generate(server, prompt)["meta_info"]["label_scores"]
    return scores


def generate(server: engines.Running, prompts: list[int] | list[list[int]]) -> Any:
    """Returns the output, or a list of them for a list of prompts."""
    body = {"input_ids": prompts, "allowed_token_ids": [100, 200]}
    reply = requests.post(f"{server.url}/generate", json=body, timeout=600)
    if reply.status_code != 200:
        raise report.InvalidRunError(f"a request failed with {reply.status_code}: {reply.text[:300]}")
    return reply.json()


def figures_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Rates both predictions. The proxy's tokens become milliseconds by the factor that suits these very points best."""
    actual = [row["actual_ms"] for row in rows]
    misses = [float(row["prompt_tokens"] - row["cached_tokens"]) for row in rows]
    ms_per_token = statistics.median(ms / tokens for ms, tokens in zip(actual, misses, strict=True))
    predictions = {
        "fitted": [row["predicted_jct_ms"] for row in rows],
        "cache-miss": [tokens * ms_per_token for tokens in misses],
    }
    return {
        name: {
            "pearson_r": statistics.correlation(predicted, actual),
            "median_error": median_error(predicted, actual),
            "wrong_pairs": wrong_pairs(predicted, actual),
        }
        for name, predicted in predictions.items()
    }


def figures_of_packed(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Rates the predictions of steps that several requests shared."""
    predicted, actual = ([row[name] for row in rows] for name in ("predicted_jct_ms", "actual_ms"))
    return {"steps": len(rows), "median_error": median_error(predicted, actual)}


def median_error(predicted: list[float], actual: list[float]) -> float:
    """Takes the median of the errors, each relative to what it took."""
    return statistics.median(abs(p / a - 1) for p, a in zip(predicted, actual, strict=True))


def wrong_pairs(predicted: list[float], actual: list[float]) -> float:
    """Share of all pairs of requests that the prediction puts in the wrong order: what SRJF suffers from."""
    pairs = [(i, j) for i in range(len(actual)) for j in range(i)]
    wrong = sum((predicted[i] - predicted[j]) * (actual[i] - actual[j]) < 0 for i, j in pairs)
    return wrong / len(pairs)


def targets_of(figures: dict[str, Any]) -> list[report.Target]:
    targets = []
    for model, of_model in figures.items():
        targets += [
            report.Target.at_least(f"{model}: Pearson r, fitted", of_model["fitted"]["pearson_r"], 0.98),
            report.Target.at_most(f"{model}: median error, fitted", of_model["fitted"]["median_error"], 0.10),
            report.Target.at_most(f"{model}: median error of packed steps", of_model["packed"]["median_error"], 0.10),
        ]
    return targets


if __name__ == "__main__":
    sys.exit(main())
