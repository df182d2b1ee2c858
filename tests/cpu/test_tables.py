"""Tables are read as their writer meant them: text is text, and each row is answered or refused exactly once."""

from __future__ import annotations

import csv
import datetime
import decimal
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sgl_prefill.batch import options, tables
from sgl_prefill.batch.prompts import FoundPrompt, prepare
from sgl_prefill.batch.rows import RequestFile
from sgl_prefill.errors import BatchJobError

CELLS = st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from('\r\n",; \t\0\ufeff\u2028'), max_size=12)
ROWS = st.lists(st.tuples(CELLS, CELLS, CELLS), min_size=1, max_size=8)


def read(path: Path, *flags: str) -> list[tuple[str, str]]:
    """Id and prompt of each row."""
    argv = ["-i", str(path), "-o", str(path.parent / "out.jsonl"), "--labels", " yes", "--id-column", "id", *flags]
    if "--template" not in flags:
        argv += ["--prompt-column", "text"]
    made = path.parent / "requests"
    tables.write_requests(options.options_of(options.parser().parse_args(argv)), made)
    lines = [json.loads(line) for line in made.read_bytes().splitlines()]
    return [(line["custom_id"], line["body"]["prompt"]) for line in lines]


def write_csv(path: Path, rows: Sequence[tuple[str, ...]], **dialect: Any) -> None:
    with path.open("w", newline="", encoding=dialect.pop("encoding", "utf-8")) as file:
        csv.writer(file, **dialect).writerows([("id", "more", "text"), *rows])


@settings(max_examples=60)
@given(
    rows=ROWS,
    end=st.sampled_from(["\r\n", "\n"]),
    quoting=st.sampled_from([csv.QUOTE_ALL, csv.QUOTE_MINIMAL]),
    encoding=st.sampled_from(["utf-8", "utf-8-sig"]),
)
def test_csv_is_read_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, ...]], end: str, quoting: Any, encoding: str
) -> None:
    # Python's writer quotes a "\r" only if it is part of the line end.
    assume(end == "\r\n" or quoting == csv.QUOTE_ALL or not any("\r" in cell for row in rows for cell in row))
    path = tmp_path_factory.mktemp("table") / "in.csv"
    write_csv(path, rows, lineterminator=end, quoting=quoting, encoding=encoding)
    assert read(path) == [(first, last) for first, _, last in rows]


def test_csv_of_several_megabytes_with_line_breaks_keeps_its_rows(tmp_path: Path) -> None:
    rows = [(f"{number:05}", "", f'line "one"\nline two, {number}\r\n' * 20) for number in range(4000)]
    write_csv(tmp_path / "in.csv", rows)
    assert (tmp_path / "in.csv").stat().st_size > 2 << 20
    assert read(tmp_path / "in.csv") == [(name, text) for name, _, text in rows]


@settings(max_examples=60)
@given(rows=ROWS)
def test_json_lines_are_read_as_they_were_written(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, ...]]
) -> None:
    path = tmp_path_factory.mktemp("table") / "in.jsonl"
    path.write_text("".join(json.dumps({"id": a, "text": b}, ensure_ascii=False) + "\n" for a, _, b in rows))
    assert read(path) == [(a, b) for a, _, b in rows]


def test_numbers_are_as_they_are_written(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("id,text\n007,1.10\n7,true\n")
    assert read(tmp_path / "in.csv") == [("007", "1.10"), ("7", "true")]
    (tmp_path / "in.jsonl").write_text(
        '{"id": 12345678901234567890123, "text": 1.10}\n{"id": "7", "text": [1.0, {"a": 1e5, "b": null}, true]}\n'
        '{"id": 7.0, "text": null}\n'
    )
    assert read(tmp_path / "in.jsonl") == [
        ("12345678901234567890123", "1.10"),
        ("7", '[1.0,{"a":1e5,"b":null},true]'),
        ("7.0", ""),
    ]


def test_values_of_parquet_are_told_apart(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    moments = pa.array([1, 1_000_000_000, None], pa.timestamp("ns"))
    columns: dict[str, tuple[Any, list[str]]] = {
        "moment": (moments, ["1970-01-01 00:00:00.000000001", "1970-01-01 00:00:01.000000000", ""]),
        "day": (pa.array([datetime.date(2026, 11, 27)] * 3), ["2026-11-27"] * 3),
        "price": (pa.array([decimal.Decimal("1.10"), decimal.Decimal("1.00"), None]), ["1.10", "1.00", ""]),
        "share": (pa.array([0.1, 1.0, 1e300]), ["0.1", "1", "1e+300"]),
        "kind": (pa.array(["a", "b", "a"]).dictionary_encode(), ["a", "b", "a"]),
        "tags": (pa.array([["x", None], [], None]), ['["x",null]', "[]", ""]),
        "is_good": (pa.array([True, False, None]), ["true", "false", ""]),
    }
    path = tmp_path / "in.parquet"
    parquet.write_table(
        pa.table({"id": pa.array([1, 2, 3]), **{name: one for name, (one, _) in columns.items()}}), path
    )
    for name, (_, expected) in columns.items():
        assert read(path, "--template", f"{{{name}}}") == list(zip("123", expected, strict=True))


@pytest.mark.parametrize("values", [[b"plain"], [[b"plain"]]])
def test_bytes_are_refused(tmp_path: Path, values: list[Any]) -> None:
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pa.table({"id": ["a"], "text": values}), tmp_path / "in.parquet")
    with pytest.raises(BatchJobError, match=r"column 'text'.*bytes"):
        read(tmp_path / "in.parquet")


def test_another_encoding_is_named_or_refused_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "in.csv"
    write_csv(path, [("1", "", "plain"), ("2", "", "caf\xe9")], encoding="latin-1")
    with pytest.raises(BatchJobError, match=r"line 3, byte 30 of the file \(0xe9\) is not utf-8.*--encoding"):
        read(path)
    assert read(path, "--encoding", "latin-1") == [("1", "plain"), ("2", "caf\xe9")]
    with pytest.raises(BatchJobError, match="'latin-99', which Python does not know"):
        read(path, "--encoding", "latin-99")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("id,text\n1,a,b\n", "line 2: this row has 3 cells, and the header 2"),
        ("id,text\n1\n", "line 2: this row has 1 cells"),
        ('id,text\n1,"a"b\n', "line 2 is not CSV"),
        ('id,text\n1,"a\n', "line 2 is not CSV"),
        ("id,text,text\n1,a,b\n", "several columns 'text'"),
        ("id;text\n1;a\n", "no column text, id: it has id;text"),
    ],
)
def test_a_csv_that_is_none_is_refused_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "in.csv").write_text(text)
    with pytest.raises(BatchJobError, match=message):
        read(tmp_path / "in.csv")


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_the_last_line_break_of_a_template_file_is_not_part_of_it(tmp_path: Path, end: str) -> None:
    (tmp_path / "in.csv").write_text("id,text\n1,a\n")
    (tmp_path / "template").write_bytes(f"One{end}{end}{{text}}: answer{end}{end}".encode())
    ((_, prompt),) = read(tmp_path / "in.csv", "--template", f"@{tmp_path / 'template'}")
    assert prompt == f"One{end}{end}a: answer{end}"


@settings(max_examples=30)
@given(ids=st.lists(st.sampled_from(["a", "b", "c", "", None, 7]), min_size=1, max_size=12))
def test_each_row_is_answered_or_refused_once(tmp_path_factory: pytest.TempPathFactory, ids: list[Any]) -> None:
    folder = tmp_path_factory.mktemp("job")
    lines = [{"custom_id": one, "url": "/v1/completions", "body": {"prompt": "x"}} for one in ids]
    (folder / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    async def find(url: str, body: dict[str, Any]) -> list[FoundPrompt]:
        return [([1, 2], 1)]

    found = prepare(RequestFile(folder / "in.jsonl"), find, folder)
    assert sorted([*found.row.tolist(), *(bad.row for bad in found.bad)]) == list(range(len(ids)))
    assert len({ids[row] for row in found.row}) == len(found.row)


QUESTIONS: dict[str, Any] = {
    "refund": {"type": "noul", "instructions": "Is money asked back?"},
    "desk": {"type": "choice", "criteria": {"workshop": None, "sales": None}},
    "mood": {"type": "score", "criteria": ["calm", "furious"]},
}
ANSWERS = {
    "refund": {"type": "noul", "noul": 0.25},
    "desk": {"type": "choice", "choice": "sales", "probabilities": {"workshop": 0.4, "sales": 0.6}},
    "mood": {"type": "score", "score": 0.5},
}


def asked(folder: Path, questions: Any, *flags: str) -> options.JobOptions:
    write_csv(folder / "in.csv", [("a", "", "It broke."), ("b", "", "")])
    (folder / "questions.json").write_text(json.dumps(questions))
    argv = [
        "-i",
        str(folder / "in.csv"),
        "-o",
        str(folder / "out.parquet"),
        "--prompt-column",
        "text",
        "--id-column",
        "id",
    ]
    return options.options_of(
        options.parser().parse_args([*argv, "--questions", str(folder / "questions.json"), *flags])
    )


def test_questions_are_asked_about_each_row_and_answered_in_columns(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    made = asked(tmp_path, QUESTIONS)
    tables.write_requests(made, tmp_path / "requests")
    first, _ = map(json.loads, (tmp_path / "requests").read_bytes().splitlines())
    assert (first["url"], first["body"]["state"], first["body"]["questions"]) == (
        "/v1/systemone",
        "It broke.",
        QUESTIONS,
    )
    answer = {"custom_id": "a", "response": {"body": {"answers": ANSWERS}}}
    failed = {"custom_id": "b", "error": {"message": "blank"}}
    tables.write_answers(made, iter([json.dumps(answer).encode()]), iter([json.dumps(failed).encode()]))
    rows = parquet.read_table(tmp_path / "out.parquet").to_pylist()
    found = {"refund": 0.25, "desk": "sales", "desk: workshop": 0.4, "desk: sales": 0.6, "mood": 0.5}
    assert rows == [{"id": "a", **found, "error": None}, {"id": "b", **dict.fromkeys(found), "error": "blank"}]


@pytest.mark.parametrize(
    ("questions", "flags", "message"),
    [
        (["desk"], [], "no JSON object"),
        ({"desk": {"type": "choice", "criteria": {}}}, [], "questions: questions.desk"),
        ({"id": {"type": "noul", "instructions": "x?"}}, [], "'id' would be two columns"),
        ({**QUESTIONS, "desk: sales": QUESTIONS["refund"]}, [], "'desk: sales' would be two columns"),
        (QUESTIONS, ["--labels", " yes"], "give one of the two"),
    ],
)
def test_questions_that_cannot_be_columns_are_refused(
    tmp_path: Path, questions: Any, flags: list[str], message: str
) -> None:
    with pytest.raises(BatchJobError, match=message):
        tables.write_requests(asked(tmp_path, questions, *flags), tmp_path / "requests")
