"""Templates of rerankers: the values that are rendered, and the files that are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from sgl_prefill.core.rerank_template import BY_NAME, load, parse
from sgl_prefill.errors import ConfigurationError

LABELS = '{%- set labels = ["good", "bad"] -%}\n'


def test_the_document_of_a_named_template_comes_last() -> None:
    """So that all documents of a query share what is before it."""
    for template in map(load, BY_NAME):
        one, other = template.prompts("find", "the query", ["first", "second"])
        start = one.index("first")
        assert "the query" in one[:start]
        assert "find" in one[:start]
        assert (one[:start], one[start + len("first") :]) == (other[:start], other[start + len("second") :])


def test_qwen3s_prompt_is_a_chat_whose_answer_has_thought_already() -> None:
    template = load("qwen3-reranker")
    (prompt,) = template.prompts(None, "q", ["d"])
    system, user, assistant = prompt.split("<|im_start|>")[1:]
    assert system.startswith("system\nJudge whether the Document meets the requirements")
    assert user == (
        "user\n<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n<Query>: q\n"
        "<Document>: d<|im_end|>\n"
    )
    assert assistant == "assistant\n<think>\n\n</think>\n\n"
    assert template.labels == ("yes", "no")


def test_the_plain_template_is_a_question_with_yes_and_no() -> None:
    template = load("yes-no")
    assert template.labels == (" yes", " no")
    assert template.prompts(None, "q", ["d", "e\n"]) == [
        "Instruction: Given a search query, find the passages that answer it\nQuery: q\n"
        "Does the passage below meet the instruction for this query? Answer yes or no.\n"
        f"Passage: {document}\nAnswer:"
        for document in ("d", "e\n")
    ]


def test_texts_of_a_client_are_values_and_never_templates() -> None:
    template = parse(LABELS + '{"q": "{{ query }}", "d": "{{ document }}", "x": {}}', "file")
    assert template.prompts(None, "{{ document }} {0} {% set labels = [] %}", ["{{ query }}", "%s {"]) == [
        '{"q": "{{ document }} {0} {% set labels = [] %}", "d": "{{ query }}", "x": {}}',
        '{"q": "{{ document }} {0} {% set labels = [] %}", "d": "%s {", "x": {}}',
    ]
    assert not template.takes_instruction


def test_a_file_sets_the_labels_and_may_have_a_default_instruction(tmp_path: Path) -> None:
    """Jinja drops one newline at the end."""
    path = tmp_path / "own.jinja"
    path.write_text(LABELS + "{{ instruction or 'own' }}|{{ query }}|{{ document }}\n\n")
    template = load(str(path))
    assert template.labels == ("good", "bad")
    assert template.takes_instruction
    assert template.prompts("i", "q", ["d"]) == ["i|q|d\n"]
    assert template.prompts(None, "q", ["d"]) == ["own|q|d\n"]
    assert parse(LABELS + "{{ instruction }}|{{ query }}|{{ document }}", "file").prompts(None, "q", ["d"]) == ["|q|d"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"holds no \{\{ query \}\} and no \{\{ document \}\}: write the prompt"),
        ("{{ query }} {{ document }}", "sets labels to nothing: it must name two different answers"),
        ("{% set labels = ['yes'] %}{{ query }} {{ document }}", r"sets labels to \['yes'\]"),
        ("{% set labels = ['yes', 'yes'] %}{{ query }} {{ document }}", "two different answers"),
        ("{% set labels = ['yes', ''] %}{{ query }} {{ document }}", "two different answers"),
        ("{% set labels = 'yes' %}{{ query }} {{ document }}", "two different answers"),
        (LABELS + "{{ query }}", r"file holds no \{\{ document \}\}: write"),
        (LABELS + "{query} {document}", r"no \{\{ query \}\} and no \{\{ document \}\}"),
        (
            LABELS + "{{ query }} {{ document }} {{ messages }}",
            "no Jinja template of a prompt .*'messages' is undefined",
        ),
        (LABELS + "{{ query }} {{ document }} {% if %}", "no Jinja template of a prompt .*: correct the file"),
        (LABELS + "{{ query.__class__.__mro__ }} {{ document }}", "no Jinja template of a prompt .*unsafe"),
    ],
)
def test_a_file_that_is_no_template_is_refused_with_the_reason(text: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        parse(text, "file")


def test_a_name_that_nobody_knows_is_refused_with_those_that_are(tmp_path: Path) -> None:
    for unknown in ("qwen", str(tmp_path)):
        with pytest.raises(ConfigurationError, match="is none of yes-no, qwen3-reranker, and cannot be read as a file"):
            load(unknown)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigurationError, match="give one of these names, or a file of UTF-8 text"):
        load(str(tmp_path / "binary"))
