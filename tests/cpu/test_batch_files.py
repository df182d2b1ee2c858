"""What a batch job reads and writes: requests, tables, answers that survive a kill, and the folder of a job."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import orjson
import pytest

from sgl_prefill.batch import answer_file, prompts, tables
from sgl_prefill.batch.answer_file import AnswerFile
from sgl_prefill.batch.job_folder import JobFolder
from sgl_prefill.batch.options import JobOptions, options_of, parser
from sgl_prefill.batch.prompts import FoundPrompt, prepare
from sgl_prefill.batch.rows import RequestFile, parse
from sgl_prefill.errors import BadRequestError, BatchJobError
from sgl_prefill.startup import progress_bar


def line(custom_id: str, prompt: str = "a b", **fields: Any) -> bytes:
    made = {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": {"prompt": prompt}, **fields}
    return orjson.dumps(made)


@pytest.fixture
def input_file(tmp_path: Path) -> Path:
    return tmp_path / "in.jsonl"


def test_lines_are_found_wherever_they_end(input_file: Path) -> None:
    """Empty lines do not count, but in the number of a line; the last one needs no end."""
    input_file.write_bytes(line("one") + b"\n\n" + line("two") + b"\r\n" + line("three"))
    found = RequestFile(input_file)
    assert [found.request(row).custom_id for row in range(len(found))] == ["one", "two", "three"]
    assert [found.line_number(row) for row in range(len(found))] == [1, 3, 4]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (b"{", "not JSON"),
        (b"[1]", "must be a JSON object"),
        (line(""), "custom_id is"),
        (orjson.dumps({"url": "/generate", "body": {}}), "custom_id is null"),
        (line("a", method="GET"), 'method is "GET"'),
        (line("a", url="/v1/files"), 'url is "/v1/files": it must be one of /v1/completions'),
        (line("a", body=[]), "body is []"),
        (line("a", body={"stream": True}), "do not stream"),
    ],
)
def test_a_line_that_is_no_request_says_why(text: bytes, complaint: str) -> None:
    with pytest.raises(BadRequestError, match=complaint.replace("[", r"\[")):
        parse(text)


def test_an_input_that_is_none_says_so(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    for name, complaint in (("empty", "is empty"), (".", "is a directory"), ("nothing", "No such file")):
        with pytest.raises(BatchJobError, match=complaint):
            RequestFile(tmp_path / name)


def test_a_file_that_grows_is_seen_to_have_changed(input_file: Path) -> None:
    input_file.write_bytes(line("one") + b"\n")
    found = RequestFile(input_file)
    assert not found.has_changed()
    with input_file.open("ab") as file:
        file.write(line("two"))
    assert found.has_changed()


async def find_prompts(url: str, body: dict[str, Any]) -> list[FoundPrompt]:
    """Each word is a prompt, each of its letters a token."""
    if "!" in body["prompt"]:
        raise BadRequestError("it shouts")
    return [([ord(letter) for letter in word], 1) for word in body["prompt"].split()]


@pytest.mark.parametrize("n_processes", [1, 3])
def test_prompts_of_all_rows_are_on_disk_once_whatever_number_of_processes_finds_them(
    tmp_path: Path, input_file: Path, n_processes: int, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = ["ab abc", "no!", "x", *(f"w{number} v" for number in range(30))]
    input_file.write_bytes(b"\n".join(line(f"row-{number}", text) for number, text in enumerate(texts)))
    requests = RequestFile(input_file)
    cores = mock.patch.object(os, "sched_getaffinity", return_value=range(n_processes))
    at_once = mock.patch.object(progress_bar, "FILE_EVERY_S", 0.0)
    with cores, at_once, mock.patch.object(prompts, "ROWS_AT_ONCE", 1):
        found = prepare(requests, find_prompts, tmp_path)
    shown = capsys.readouterr().err.splitlines()[-1]
    assert shown.startswith(
        f"{(len(texts) - n_processes) / len(texts):.0%}, {len(texts) - n_processes} of 33 rows read"
    )
    words = [(row, word) for row, text in enumerate(texts) if "!" not in text for word in text.split()]
    assert ["".join(map(chr, found.tokens[index])) for index in range(len(words))] == [word for _, word in words]
    assert found.row.tolist() == [row for row, _ in words]
    assert found.bad == [(1, "row-1", "it shouts")]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "prompts.npz", "tokens.bin"]

    async def never(url: str, body: dict[str, Any]) -> list[FoundPrompt]:
        raise AssertionError("they are there already")

    again = prepare(requests, never, tmp_path)
    assert again.tokens.tokens.tolist() == found.tokens.tokens.tolist()
    some = found.subset(np.array([2, 3]))
    assert ["".join(map(chr, some.tokens[index])) for index in range(3)] == ["x", "w0", "v"]


def test_a_doubled_id_is_named_with_the_line_that_had_it_first(tmp_path: Path, input_file: Path) -> None:
    input_file.write_bytes(b"\n".join([line("same"), line("other"), line("same"), line("same")]))
    found = prepare(RequestFile(input_file), find_prompts, tmp_path)
    assert [(bad.row, bad.custom_id) for bad in found.bad] == [(2, "same"), (3, "same")]
    assert "line 1" in found.bad[0].message


def test_a_torn_last_line_is_taken_back_and_the_others_stay(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_bytes(b"one\ntwo\nthr")
    answers = AnswerFile(path)
    assert list(answers.lines()) == [b"one", b"two"]
    answers.append([b"three"])
    answers.close()
    assert path.read_bytes() == b"one\ntwo\nthree\n"


def test_a_file_with_nothing_but_a_torn_line_is_empty(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_bytes(b"x" * 3_000_000)
    assert list(AnswerFile(path).lines()) == []


def test_answers_that_do_not_fit_the_disk_leave_those_before_them(tmp_path: Path) -> None:
    answers = AnswerFile(tmp_path / "out")
    answers.append([b"one"])
    write, calls = os.pwrite, iter([None, OSError(errno.ENOSPC, "No space left on device")])

    def fills_up(file: int, text: bytes, offset: int) -> int:
        if (error := next(calls)) is not None:
            raise error
        return write(file, text[:5], offset)

    with mock.patch.object(os, "pwrite", fills_up), pytest.raises(BatchJobError, match="No space left on device"):
        answers.append([b"two", b"three"])
    assert (tmp_path / "out").read_bytes() == b"one\n"


def test_an_output_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(BatchJobError, match="cannot be written"):
        AnswerFile(tmp_path / "out")


def test_the_second_process_on_one_output_is_refused_and_told_who_has_it(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    folder = JobFolder(output)
    code = (
        "import sys, pathlib; from sgl_prefill.batch.job_folder import JobFolder; JobFolder(pathlib.Path(sys.argv[1]))"
    )
    other = subprocess.run([sys.executable, "-c", code, str(output)], capture_output=True, text=True, check=False)
    assert other.returncode != 0
    assert f"pid {os.getpid()}" in other.stderr
    assert "lock" in other.stderr
    folder.close()
    JobFolder(output).close()


def test_another_job_in_the_same_folder_is_refused_with_all_differences(tmp_path: Path) -> None:
    folder = JobFolder(tmp_path / "out.jsonl")
    assert not folder.check_manifest({"input": "abc", "options": {"labels": ["x"]}})
    assert folder.check_manifest({"input": "abc", "options": {"labels": ["x"]}})
    with pytest.raises(BatchJobError) as refused:
        folder.check_manifest({"input": "abd", "options": {"labels": ["y"]}})
    assert 'input: was "abc", is "abd"' in str(refused.value)
    assert 'options: was {"labels": ["x"]}' in str(refused.value)
    folder.close()


def test_lines_in_the_order_of_a_number(tmp_path: Path) -> None:
    answers = AnswerFile(tmp_path / "out")
    answers.append([b"3 c", b"1 a", b"2 b"])
    assert list(answers.in_order(lambda text: int(text[:1]))) == [b"1 a", b"2 b", b"3 c"]


def options(tmp_path: Path, *argv: str) -> JobOptions:
    flags = ["-i", str(tmp_path / "in.csv"), "-o", str(tmp_path / "out.jsonl"), *argv]
    namespace, rest = parser().parse_known_args(flags)
    assert rest == []
    return options_of(namespace)


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["--template", "no column"], "names no column"),
        (["--template", "{a.b}"], "'a.b' is not the name of a column"),
        (["--template", "{a"], "--template"),
        (["--template", "{c}"], "no column c: it has a, b"),
        (["--prompt-column", "a", "--id-column", "z"], "no column z"),
        (["--prompt-column", "a", "--labels", "error", "x"], "'error' would be two columns"),
    ],
)
def test_a_table_that_cannot_be_meant_says_why(tmp_path: Path, argv: Sequence[str], complaint: str) -> None:
    (tmp_path / "in.csv").write_text("a,b\n1,2\n")
    labels = [] if "--labels" in argv else ["--labels", "x", "y"]
    with pytest.raises(BatchJobError, match=complaint):
        tables.write_requests(options(tmp_path, *argv, *labels), tmp_path / "requests.jsonl")


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_a_table_becomes_requests_and_its_answers_a_table(tmp_path: Path, suffix: str) -> None:
    rows = [{"id": "p", "text": "good", "stars": 5}, {"id": "q", "text": "bad", "stars": 1}]
    table = tmp_path / f"in{suffix}"
    if suffix == ".csv":
        table.write_text("id,text,stars\np,good,5\nq,bad,1\n")
    elif suffix == ".jsonl":
        table.write_bytes(b"\n".join(map(orjson.dumps, rows)))
    else:
        parquet = pytest.importorskip("pyarrow.parquet")
        pyarrow = pytest.importorskip("pyarrow")
        parquet.write_table(pyarrow.Table.from_pylist(rows), table)
    asked = ["--template", "{text} ({stars} of 5):", "--labels", " +", " -", "--id-column", "id"]
    given = options(tmp_path, *asked)
    given = JobOptions(**{**vars(given), "input": table})
    tables.write_requests(given, tmp_path / "requests.jsonl")
    written = RequestFile(tmp_path / "requests.jsonl")
    bodies = [written.request(row).body for row in range(2)]
    assert [body["prompt"] for body in bodies] == ["good (5 of 5):", "bad (1 of 5):"]
    assert bodies[0]["allowed_answers"] == [" +", " -"]

    scores = {"labels": [{"label": " +", "probability": 0.75}, {"label": " -", "probability": 0.25}], "label_mass": 0.5}
    answered = answer_file.answered("p", 200, orjson.dumps({"choices": [{"label_scores": scores}]}))
    failed = answer_file.refused("q", 2, "too long", status=400)
    tables.write_answers(given, iter([answered]), iter([failed]))
    found = [orjson.loads(text) for text in given.output.read_bytes().splitlines()]
    assert found == [
        {"id": "p", " +": 0.75, " -": 0.25, "label_mass": 0.5, "error": None},
        {"id": "q", " +": None, " -": None, "label_mass": None, "error": "too long"},
    ]


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["--prompt-column", "a"], "needs --labels"),
        (["--labels", "x"], "are for tables"),
        (["--prompt-column", "a", "--template", "{a}", "--labels", "x"], "both given"),
        (["--max-inflight", "0"], "--max-inflight is 0"),
        (["--error-file", "OUTPUT"], "must be three files"),
    ],
)
def test_options_that_contradict_are_refused(tmp_path: Path, argv: Sequence[str], complaint: str) -> None:
    with pytest.raises(BatchJobError, match=complaint):
        options(tmp_path, *(str(tmp_path / "out.jsonl") if word == "OUTPUT" else word for word in argv))
