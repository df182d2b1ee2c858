"""What the examples share: an OpenAI client for a local server, one scoring call, and a table."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import openai


def parse_url(description: str | None) -> str:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--url", default="http://127.0.0.1:30000", help="base URL of the server (default: %(default)s)")
    url: str = parser.parse_args().url
    return url.rstrip("/")


def connect(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=600)


def score(client: openai.OpenAI, prompt: str, labels: Sequence[str]) -> dict[str, Any]:
    """Returns `label_scores` of one prompt: probabilities over the labels, label mass, cached tokens and times."""
    reply = client.completions.create(model="default", prompt=prompt, extra_body={"allowed_tokens": list(labels)})
    scores: dict[str, Any] = reply.choices[0].model_extra["label_scores"]  # type: ignore[index]
    return scores


def probability(scores: dict[str, Any], label: str) -> float:
    return next(float(entry["probability"]) for entry in scores["labels"] if entry["label"] == label)
