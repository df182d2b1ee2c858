"""Classify 8 short texts with an SGLang frontend program; runs unchanged against this server and against stock SGLang.

python -m sgl_prefill.examples.select_topics [--url http://127.0.0.1:30000]
"""

from __future__ import annotations

from typing import Any

import sglang as sgl

from sgl_prefill.examples import client

TOPICS = [" sports", " food", " music", " weather"]

SHOTS = (
    ("The striker scored twice in the last ten minutes.", " sports"),
    ("Simmer the lentils with cumin until they are soft.", " food"),
    ("The orchestra tuned up before the second symphony.", " music"),
    ("Expect heavy rain and strong winds in the evening.", " weather"),
)

TEXTS = (
    "The goalkeeper saved a penalty and the team won the cup.",
    "Bake the bread for forty minutes and let it cool.",
    "The singer released a new album with twelve songs.",
    "Snow is likely in the mountains, with frost at night.",
    "She won the tennis match in two sets.",
    "Add salt, pepper and a little butter to the soup.",
    "The guitar solo in this song is wonderful.",
    "A storm will bring thunder and hail on Friday.",
)


@sgl.function  # type: ignore[untyped-decorator]
def classify(s: Any, text: str) -> None:
    for shot, topic in SHOTS:
        s += f"Text: {shot}\nTopic:{topic}\n\n"
    s += f"Text: {text}\nTopic:"
    s += sgl.select("topic", choices=TOPICS)


def decisions(url: str) -> list[str]:
    """Returns the topic of each text, in order."""
    sgl.set_default_backend(sgl.RuntimeEndpoint(url))
    return [state["topic"] for state in classify.run_batch([{"text": text} for text in TEXTS], num_threads=4)]


if __name__ == "__main__":
    for text, topic in zip(TEXTS, decisions(client.parse_url(__doc__)), strict=True):
        print(f"{topic.strip():8}  {text}")
