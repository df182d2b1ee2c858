"""32 real prompts, and the log-probabilities of labels after them by Hugging Face transformers.

`python -m tests.integration.prompts` writes those anew.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch

from sgl_prefill.examples import demo_model, label_reviews, select_topics

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


REFERENCE = Path(__file__).parent / "transformers_reference.json"


class Reference(NamedTuple):
    """Log-probabilities by transformers, with weights and arithmetic in float32."""

    candidates: list[list[float]]  # [PROMPTS, CANDIDATES]: of each candidate's first token
    long_labels: list[list[float]]  # [LONG_PROMPTS, LONG_LABELS]: of all tokens of a label


def read_reference() -> Reference:
    return Reference(**json.loads(REFERENCE.read_text()))


def make_reference(folder: Path) -> Reference:
    """Runs transformers on the model in `folder`; takes half a minute."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def logprobs_of(prompt: list[int], answer: list[int]) -> torch.Tensor:
        """Log-probabilities of the token after the prompt and after each token of the answer. [tokens, vocabulary]."""
        with torch.inference_mode():
            logits: torch.Tensor = model(torch.tensor([[*prompt, *answer]]), logits_to_keep=len(answer) + 1).logits[0]
        return logits.log_softmax(-1)

    first_tokens = [tokenizer.encode(label)[0] for label in CANDIDATES]
    candidates = [logprobs_of(tokenizer.encode(prompt), [])[0, first_tokens].tolist() for prompt in PROMPTS]
    long_labels = []
    for prompt in map(tokenizer.encode, LONG_PROMPTS):
        answers = [tokenizer.encode(label) for label in LONG_LABELS]
        long_labels.append([logprobs_of(prompt, one)[range(len(one)), one].sum().item() for one in answers])
    return Reference(candidates, long_labels)


if __name__ == "__main__":
    made = make_reference(demo_model.ensure("float32"))
    rounded = {name: [[round(x, 6) for x in row] for row in rows] for name, rows in made._asdict().items()}
    REFERENCE.write_text(json.dumps(rounded).replace("], ", "],\n") + "\n")
