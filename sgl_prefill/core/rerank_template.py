"""Prompts of rerankers: Jinja templates over `instruction`, `query` and `document`, by name or from a file.

A template sets `labels`, its two answers, that of a relevant document first. Where the document comes last, all documents of a
query share the text before it in the prefix cache. Texts of clients are values, never templates.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from jinja2 import StrictUndefined, Template, TemplateError, meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from sgl_prefill.errors import ConfigurationError

FLAG = "--rerank-template"
DEFAULT = "yes-no"
BY_NAME = {name: Path(__file__).parent / f"rerank_templates/{name}.jinja" for name in (DEFAULT, "qwen3-reranker")}
INSTRUCTION, REQUIRED = "instruction", {"query", "document"}
LABELS_LINE = '{%- set labels = [" yes", " no"] -%}'
# With the options of chat templates in transformers.
ENVIRONMENT = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)


class RerankTemplate(NamedTuple):
    """A prompt's template and its two answers."""

    template: Template
    labels: tuple[str, str]  # the answer for a relevant document, and for one that is not
    takes_instruction: bool

    def prompts(self, instruction: str | None, query: str, documents: Sequence[str]) -> list[str]:
        """Renders one prompt per document. instruction: None: empty, for which a template may have a default."""
        values = {INSTRUCTION: instruction or "", "query": query}
        return [self.template.render(values, document=one) for one in documents]


def load(name_or_path: str) -> RerankTemplate:
    """Returns a template by its name, or from a file. Raises ConfigurationError for a file that cannot be read or used."""
    try:
        text = BY_NAME.get(name_or_path, Path(name_or_path)).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise ConfigurationError(
            f"{FLAG} {name_or_path} is none of {', '.join(BY_NAME)}, and cannot be read as a file"
            f" ({getattr(error, 'strerror', None) or error}): give one of these names, or a file of UTF-8 text"
        ) from error
    return parse(text, f"{FLAG} {name_or_path}")


def parse(text: str, where: str) -> RerankTemplate:
    """Compiles a template. Raises ConfigurationError; where: the beginning of its message."""
    try:
        names = meta.find_undeclared_variables(ENVIRONMENT.parse(text))
        template = ENVIRONMENT.from_string(text)
        if missing := sorted(REQUIRED - names, reverse=True):
            shown = " and no ".join(f"{{{{ {name} }}}}" for name in missing)
            raise ConfigurationError(
                f"{where} holds no {shown}: write the prompt with {{{{ query }}}}, {{{{ document }}}} and, if you like,"
                " {{ instruction }} in their places"
            )
        module = template.make_module({INSTRUCTION: "", "query": "query", "document": "document"})
    except (TemplateError, TypeError) as error:
        raise ConfigurationError(f"{where} is no Jinja template of a prompt ({error}): correct the file") from error
    labels = getattr(module, "labels", None)
    if (
        not isinstance(labels, list | tuple)
        or len(labels) != 2
        or not all(isinstance(label, str) and label for label in labels)
        or labels[0] == labels[1]
    ):
        shown = "nothing" if labels is None else repr(labels)
        raise ConfigurationError(
            f"{where} sets labels to {shown}: it must name two different answers, that of a relevant document first, as"
            f" {LABELS_LINE} does"
        )
    return RerankTemplate(template, (labels[0], labels[1]), INSTRUCTION in names)
