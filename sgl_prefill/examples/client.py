"""What the examples share: an OpenAI client for a local server, one scoring call, and a table."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import httpx
import openai

START = "python -m sgl_prefill.launch_server --port 30000"


def parse_url(description: str | None) -> str:
    """Reads `--url`; ends the program if no server answers there."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--url", default="http://127.0.0.1:30000", help="base URL of the server (default: %(default)s)")
    url: str = parser.parse_args().url.rstrip("/")
    try:
        httpx.get(f"{url}/health", timeout=60)
    except httpx.TransportError as error:
        sys.exit(f"no server answers at {url} ({error}): start one with `{START}`, or give --url")
    return url


def connect(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=600)


def score(client: openai.OpenAI, prompt: str, labels: Sequence[str]) -> dict[str, Any]:
    """Returns `label_scores` of one prompt: probabilities over the labels, label mass, cached tokens and times."""
    reply = client.completions.create(model="default", prompt=prompt, extra_body={"allowed_tokens": list(labels)})
    scores: dict[str, Any] = reply.choices[0].model_extra["label_scores"]  # type: ignore[index]
    return scores


def probability(scores: dict[str, Any], label: str) -> float:
    return next(float(entry["probability"]) for entry in scores["labels"] if entry["label"] == label)
