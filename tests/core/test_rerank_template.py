"""Templates of rerankers: what is filled in, what is left alone, and what is no template."""

from __future__ import annotations

from pathlib import Path

import pytest

from sgl_prefill.core.rerank_template import BY_NAME, PLAIN, QWEN3_RERANKER, load, parse
from sgl_prefill.errors import ConfigurationError

LABELS = 'labels: ["good", "bad"]\n'


def test_the_document_of_a_named_template_comes_last() -> None:
    """So that all documents of a query share what is before it."""
    for template in BY_NAME.values():
        one, other = template.prompts("find", "the query", ["first", "second"])
        start = one.index("first")
        assert "the query" in one[:start]
        assert "find" in one[:start]
        assert (one[:start], one[start + len("first") :]) == (other[:start], other[start + len("second") :])


def test_qwen3s_prompt_is_a_chat_whose_answer_has_thought_already() -> None:
    (prompt,) = QWEN3_RERANKER.prompts(None, "q", ["d"])
    system, user, assistant = prompt.split("<|im_start|>")[1:]
    assert system.startswith("system\nJudge whether the Document meets the requirements")
    assert user == (
        "user\n<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n<Query>: q\n"
        "<Document>: d<|im_end|>\n"
    )
    assert assistant == "assistant\n<think>\n\n</think>\n\n"
    assert QWEN3_RERANKER.labels == ("yes", "no")


def test_braces_of_a_client_and_of_a_prompt_stay_what_they_are() -> None:
    """A query that names a place is not filled in again; JSON in a prompt is no place."""
    template = parse(LABELS + '{"q": "{query}", "d": "{document}", "x": {}}', "file")
    assert template.prompts(None, "{document} {0} {query}", ["{query}", "%s {"]) == [
        '{"q": "{document} {0} {query}", "d": "{query}", "x": {}}',
        '{"q": "{document} {0} {query}", "d": "%s {", "x": {}}',
    ]
    assert not template.takes_instruction


def test_a_file_is_a_line_with_the_labels_and_the_prompt(tmp_path: Path) -> None:
    """One newline at its end is the file's; two are one of the prompt's."""
    path = tmp_path / "own.txt"
    path.write_text(LABELS + "{instruction}|{query}|{document}\n\n")
    template = load(str(path))
    assert template.labels == ("good", "bad")
    assert template.prompts("i", "q", ["d"]) == ["i|q|d\n"]
    assert template.prompts(None, "q", ["d"]) == [f"{PLAIN.default_instruction}|q|d\n"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "begins with the line ''"),
        ("{query} {document}", "it must name two different answers"),
        ('labels: ["yes"]\n{query} {document}', r"begins with the line 'labels: \[\"yes\"\]'"),
        ('labels: ["yes", "yes"]\n{query} {document}', "two different answers"),
        ('labels: ["yes", ""]\n{query} {document}', "two different answers"),
        ("labels: yes, no\n{query} {document}", "two different answers"),
        (LABELS + "{query}", r"file holds no \{document\} below its first line"),
        (LABELS + "{instruction}", r"no \{query\} and no \{document\}"),
    ],
)
def test_what_is_no_template_is_refused_with_what_it_lacks(text: str, told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        parse(text, "file")


def test_a_name_that_nobody_knows_is_refused_with_those_that_are(tmp_path: Path) -> None:
    for unknown in ("qwen", str(tmp_path)):
        with pytest.raises(ConfigurationError, match="is none of yes-no, qwen3-reranker, and cannot be read as a file"):
            load(unknown)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigurationError, match="give one of these names, or a file of UTF-8 text"):
        load(str(tmp_path / "binary"))
