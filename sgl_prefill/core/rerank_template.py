"""What a causal model is asked about a document: prompts of rerankers by name, or from a file of the user's.

A template stands as it is: only `{instruction}`, `{query}` and `{document}` are filled in, once and at the same time, so that
other braces, and braces in a client's text, stay what they are. Where the document comes last, all documents of a query share
what is before it in the prefix cache.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from sgl_prefill.errors import ConfigurationError

FLAG = "--rerank-template"
INSTRUCTION, QUERY, DOCUMENT = "instruction", "query", "document"
PLACES = re.compile(rf"\{{({INSTRUCTION}|{QUERY}|{DOCUMENT})\}}")
LABELS_LINE = 'labels: [" yes", " no"]'  # as a file begins with
LONGEST_SHOWN = 80


class RerankTemplate(NamedTuple):
    """A prompt with places in it, and its two answers."""

    parts: tuple[str, ...]  # text, name of a place, text, ...: it begins and ends with text
    labels: tuple[str, str]  # of a document that is relevant, and of one that is not
    default_instruction: str

    @property
    def takes_instruction(self) -> bool:
        return INSTRUCTION in self.parts[1::2]

    def prompts(self, instruction: str | None, query: str, documents: Sequence[str]) -> list[str]:
        """Fills the places. instruction: None: the default."""
        values = {INSTRUCTION: instruction or self.default_instruction, QUERY: query}
        return [self._filled({**values, DOCUMENT: document}) for document in documents]

    def _filled(self, values: dict[str, str]) -> str:
        return "".join(values[part] if index % 2 else part for index, part in enumerate(self.parts))


def _template(prompt: str, labels: tuple[str, str], default_instruction: str) -> RerankTemplate:
    return RerankTemplate(tuple(PLACES.split(prompt)), labels, default_instruction)


PLAIN = _template(
    """Instruction: {instruction}
Query: {query}
Does the passage below meet the instruction for this query? Answer yes or no.
Passage: {document}
Answer:""",
    (" yes", " no"),
    "Given a search query, find the passages that answer it",
)
# The form that Qwen3-Reranker was trained on, with its default instruction.
QWEN3_RERANKER = _template(
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct provided."
    ' Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n\n</think>\n\n",
    ("yes", "no"),
    "Given a web search query, retrieve relevant passages that answer the query",
)
BY_NAME = {"yes-no": PLAIN, "qwen3-reranker": QWEN3_RERANKER}


def load(name_or_path: str) -> RerankTemplate:
    """Returns a template by its name, or from a file. Raises ConfigurationError where there is none, or none that can be used."""
    if (known := BY_NAME.get(name_or_path)) is not None:
        return known
    try:
        text = Path(name_or_path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise ConfigurationError(
            f"{FLAG} {name_or_path} is none of {', '.join(BY_NAME)}, and cannot be read as a file"
            f" ({getattr(error, 'strerror', None) or error}): give one of these names, or a file of UTF-8 text"
        ) from error
    return parse(text, f"{FLAG} {name_or_path}")


def parse(text: str, where: str) -> RerankTemplate:
    """Reads a file: a line with the labels, and the prompt, which the last newline does not belong to. Raises
    ConfigurationError; where: what its message begins with.
    """
    first, _, prompt = text.partition("\n")
    labels = _labels(first, where)
    found = set(PLACES.findall(prompt))
    if missing := [f"{{{name}}}" for name in (QUERY, DOCUMENT) if name not in found]:
        raise ConfigurationError(
            f"{where} holds no {' and no '.join(missing)} below its first line: write the prompt with {{query}}, {{document}}"
            " and, if you like, {instruction} in their places"
        )
    return _template(prompt.removesuffix("\n"), labels, PLAIN.default_instruction)


def _labels(line: str, where: str) -> tuple[str, str]:
    name, _, value = line.partition(":")
    try:
        labels = json.loads(value) if name == "labels" else None
    except json.JSONDecodeError:
        labels = None
    if (
        not isinstance(labels, list)
        or len(labels) != 2
        or not all(isinstance(label, str) and label for label in labels)
        or labels[0] == labels[1]
    ):
        raise ConfigurationError(
            f"{where} begins with the line {line[:LONGEST_SHOWN]!r}: it must name two different answers, that of a relevant"
            f" document first, as {LABELS_LINE} does"
        )
    return labels[0], labels[1]
