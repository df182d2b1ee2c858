"""32 real prompts, and what Hugging Face transformers in float32 says to them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from sgl_prefill.examples import label_reviews, select_topics

CANDIDATES = [" positive", " negative", " sports", " food", " music", " weather", " yes", " no", " Paris", " the"]

PROMPTS = [
    *(label_reviews.prompt_for(text) for text, _ in label_reviews.REVIEWS[:12]),
    *(
        "".join(f"Text: {shot}\nTopic:{topic}\n\n" for shot, topic in select_topics.SHOTS) + f"Text: {text}\nTopic:"
        for text in select_topics.TEXTS
    ),
    "The capital of France is",
    "The capital of Italy is",
    "Question: Is the sky blue? Answer yes or no.\nAnswer:",
    "Question: Can fish fly to the moon? Answer yes or no.\nAnswer:",
    "Once upon a time there was",
    "def add(a, b):\n    return",
    "1, 2, 3, 4,",
    "Water boils at a temperature of",
    "To be or not to be, that is",
    "<|im_start|>user\nName a colour.<|im_end|>\n<|im_start|>assistant\n",
    "Der Himmel ist",
    "The quick brown fox jumps over",
]
assert len(PROMPTS) == 32

# Of one to five tokens; none begins another.
LONG_LABELS = [
    " positive",
    " not relevant",
    " the weather forecast",
    " a piece of music",
    " Paris",
    " somewhat unlikely to be",
]
# Ends after which other tests have asked for nothing.
LONG_PROMPTS = [f"{prompt} It is" for prompt in PROMPTS[-8:]]


def reference_answer_logprobs(folder: Path, prompts: list[str], answers: list[list[list[int]]]) -> list[list[float]]:
    """Log-probabilities of answers of several tokens after each prompt, in the same way."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rows = []
    for prompt, of_prompt in zip(prompts, answers, strict=True):
        before = tokenizer.encode(prompt)
        row = []
        for answer in of_prompt:
            with torch.inference_mode():
                logits = model(torch.tensor([[*before, *answer]])).logits[0, len(before) - 1 : -1]
            row.append(logits.log_softmax(-1)[range(len(answer)), answer].sum().item())
        rows.append(row)
    return rows


def reference_logprobs(folder: Path, prompts: list[str], token_ids: list[int]) -> list[list[float]]:
    """Log-probabilities of `token_ids` after each prompt: transformers, float32 weights and arithmetic."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rows: list[list[float]] = []
    for prompt in prompts:
        with torch.inference_mode():
            logits = model(torch.tensor([tokenizer.encode(prompt)])).logits[0, -1]
        rows.append(logits.log_softmax(-1)[token_ids].tolist())
    return rows
