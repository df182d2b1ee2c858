"""A job without an engine: what is answered, kept and told, whatever happens to its files."""

from __future__ import annotations

import json
import socket
import urllib.request
from collections.abc import AsyncIterator, Callable
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from sgl_prefill.answer import Answer
from sgl_prefill.batch.__main__ import only_plan, open_input
from sgl_prefill.batch.backends import OwnEngine, RequestOf
from sgl_prefill.batch.batch_job import ALL_ANSWERED, SOME_NOT, Job
from sgl_prefill.batch.options import options_of, parser
from sgl_prefill.batch.progress import Progress
from sgl_prefill.batch.prompts import FoundPrompt, Prompts
from sgl_prefill.batch.run import RowAnswer
from sgl_prefill.core.batch.batch_plan import JobPlan
from sgl_prefill.errors import BatchJobError

N_ROWS = 12


class Echo:
    """Answers with the prompt, a row at a time; prompts are compared by their characters."""

    unit = "tokens"
    n_prompt_tokens = n_cached_tokens = 0
    adds: dict[str, float] = {}  # to each answer

    def __init__(self, before_each: Callable[[int], None] = lambda n: None) -> None:
        self._before_each = before_each
        self.answered: list[int] = []

    async def find_prompts(self, url: str, body: dict[str, Any]) -> list[FoundPrompt]:
        return [([ord(one) for one in body["prompt"]], 1)]

    def start(self) -> None:
        """Does nothing."""

    async def answers(
        self, order: JobPlan, prompts: Prompts, request_of: RequestOf, max_inflight: int
    ) -> AsyncIterator[list[RowAnswer]]:
        for row in prompts.row[order.rows].tolist():
            self._before_each(len(self.answered))
            self.answered.append(row)
            prompt = request_of(row)[1]["prompt"]
            if prompt.endswith("!"):
                yield [RowAnswer(row, Answer(400, b'{"error": {"message": "no"}}'))]
            else:
                yield [RowAnswer(row, Answer(200, json.dumps({"echo": prompt, **self.adds}).encode()))]


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    """Shuffled rows of three groups."""
    path = tmp_path / "in.jsonl"
    rows = [(number, f"{10 * str(number % 3)} is the group of row {number}") for number in range(N_ROWS)]
    path.write_text("".join(line(f"r{number}", prompt) for number, prompt in rows))
    return path


def line(custom_id: str, prompt: str) -> str:
    return json.dumps({"custom_id": custom_id, "url": "/v1/completions", "body": {"prompt": prompt}}) + "\n"


def run(job_file: Path, backend: Echo, *flags: str, output: str = "out.jsonl", engine: str = "one") -> int:
    namespace = parser().parse_args(["-i", str(job_file), "-o", str(job_file.with_name(output)), *flags])
    job = Job(options_of(namespace), {"model": engine})
    try:
        return job.answer(backend, job.plan(backend))
    finally:
        job.close()


def ids(path: Path) -> list[str]:
    return [json.loads(one)["custom_id"] for one in path.read_text().splitlines()]


def test_rows_run_group_by_group_and_a_failed_one_is_in_the_error_file(job_file: Path, tmp_path: Path) -> None:
    job_file.write_text(job_file.read_text() + line("bad", f"{10 * '1'}!"))
    backend = Echo()
    assert run(job_file, backend) == SOME_NOT
    groups = [1 if row == N_ROWS else row % 3 for row in backend.answered]
    assert groups == sorted(groups)
    assert sorted(ids(tmp_path / "out.jsonl")) == sorted(f"r{number}" for number in range(N_ROWS))
    (error,) = (tmp_path / "out.jsonl.errors.jsonl").read_text().splitlines()
    assert json.loads(error)["custom_id"] == "bad"
    assert json.loads(error)["line"] == N_ROWS + 1
    assert "no" in error


def test_an_input_that_changes_stops_the_job_and_what_was_answered_is_kept(
    job_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sgl_prefill.batch.batch_job.FLUSH_EVERY_S", 0.0)
    before = job_file.read_text()

    def change(n_answered: int) -> None:
        if n_answered == 5:
            job_file.write_text(before + line("new", "0"))

    with pytest.raises(BatchJobError, match="has changed since the job began"):
        run(job_file, Echo(change))
    kept = ids(tmp_path / "out.jsonl")
    assert len(kept) == 5
    with pytest.raises(BatchJobError, match="input"):
        run(job_file, Echo())
    job_file.write_text(before)
    goes_on = Echo()
    assert run(job_file, goes_on) == ALL_ANSWERED
    assert len(goes_on.answered) == N_ROWS - 5
    assert ids(tmp_path / "out.jsonl")[:5] == kept
    assert sorted(ids(tmp_path / "out.jsonl")) == sorted(f"r{number}" for number in range(N_ROWS))


def test_a_job_with_another_model_is_not_mixed_with_what_was_answered(job_file: Path, tmp_path: Path) -> None:
    assert run(job_file, Echo()) == ALL_ANSWERED
    answered = (tmp_path / "out.jsonl").read_bytes()
    with pytest.raises(BatchJobError, match="model"):
        run(job_file, Echo(), engine="another")
    assert (tmp_path / "out.jsonl").read_bytes() == answered
    assert run(job_file, Echo(), "--overwrite", engine="another") == ALL_ANSWERED
    assert len(ids(tmp_path / "out.jsonl")) == N_ROWS


def test_shards_answer_each_row_once_and_split_no_group(job_file: Path, tmp_path: Path) -> None:
    found = []
    for which in (1, 2, 3):
        assert run(job_file, Echo(), "--shard", f"{which}/3", output=f"out{which}.jsonl") == ALL_ANSWERED
        found.append(ids(tmp_path / f"out{which}.jsonl"))
    assert sorted(one for of_shard in found for one in of_shard) == sorted(f"r{number}" for number in range(N_ROWS))
    assert [len({int(one[1:]) % 3 for one in of_shard}) for of_shard in found] == [1, 1, 1]


def test_a_dry_run_loads_no_model(job_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Engine:
        async def prompts_of(self, url: str, body: dict[str, Any]) -> list[SimpleNamespace]:
            return [SimpleNamespace(tokens=[ord(one) for one in body["prompt"]], max_new_tokens=1)]

        def start(self) -> None:
            pytest.fail("it loads the model")

    options = options_of(parser().parse_args(["-i", str(job_file), "-o", str(tmp_path / "out.jsonl"), "--dry-run"]))
    assert only_plan(options, OwnEngine(cast(Any, Engine())), open_input(options)) == ALL_ANSWERED
    assert f"rows: {N_ROWS}, prompts: {N_ROWS}\ntokens of all prompts: " in capsys.readouterr().out


def test_progress_is_served_to_prometheus_and_a_taken_port_says_so() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(BatchJobError, match="--metrics-port"):
            Progress(1, 0, 1, 0).serve_metrics(taken.getsockname()[1])
        with socket.socket() as other:
            other.bind(("127.0.0.1", 0))
            free = other.getsockname()[1]
    progress = Progress(10, 2, 100, 60, out=StringIO())
    progress.serve_metrics(free)
    progress.add(3, 1, 50, 20)
    with urllib.request.urlopen(f"http://127.0.0.1:{free}/metrics") as reply:
        text = reply.read().decode()
    for name, value in (("rows_done", 6), ("rows_failed", 1), ("tokens_done", 50), ("tokens_saved", 20)):
        assert f"sgl_prefill_job_{name} {value}.0" in text
    assert "6 of 10 rows" in progress.line()
    assert "40.0% saved (most: 60.0%)" in progress.line()


def test_a_job_without_a_tokenizer_says_how_long_it_takes_by_its_rows() -> None:
    """Its plan has counted bytes, and answers tell of tokens."""
    progress = Progress(100, 20, 1_000_000, 500_000, "bytes", out=StringIO())
    progress.bar._began_s -= 1000
    progress.add(20, 0, 4_000, 1_000)
    assert progress.line().startswith("25%, 40 of 100 rows, 50:00 left, 4 tokens/s")


@pytest.mark.parametrize(("mass", "is_said"), [(0.0006, True), (0.59, False)])
def test_labels_that_the_model_would_not_say_are_named(
    job_file: Path, mass: float, is_said: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    backend = Echo()
    backend.adds = {"label_mass": mass}
    assert run(job_file, backend) == ALL_ANSWERED
    assert ("the labels hold 0.06% of the probability, mean of 12 answers" in capfd.readouterr().err) is is_said


def test_two_rows_of_one_id_are_one_answer_and_one_error(job_file: Path, tmp_path: Path) -> None:
    job_file.write_text(job_file.read_text() + line("r3", "another prompt"))
    assert run(job_file, Echo(), "--skip-bad-rows") == SOME_NOT
    assert sorted(ids(tmp_path / "out.jsonl")) == sorted(f"r{number}" for number in range(N_ROWS))
    assert ids(tmp_path / "out.jsonl.errors.jsonl") == ["r3"]
