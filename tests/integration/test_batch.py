"""Whole jobs with the demo model: answered as a server answers them, whatever happens meanwhile."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from sgl_prefill.examples import review_table
from sgl_prefill.examples.label_reviews import NEGATIVE, POSITIVE
from tests.integration.children import forked_main
from tests.integration.conftest import NO_GATE, Server

LABELS = [" yes", " no"]
WORDS = ["red", "river", "stone", "cloud", "seven", "music", "paper", "green", "north", "table"]
SAME = 2e-2  # bfloat16 and other batches move probabilities so much


def text(seed: int, n_words: int) -> str:
    rng = random.Random(seed)
    return " ".join(rng.choice(WORDS) for _ in range(n_words))


def request(custom_id: str, url: str, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"model": "demo", **body}}


def shared_prefixes(n_groups: int, n_rows: int) -> list[dict[str, Any]]:
    """Shuffled rows of groups, each of 60 words and a few of its own."""
    rows = [
        request(
            f"{group}-{row}",
            "/v1/completions",
            prompt=f"{text(group, 60)}. {text(1000 * group + row + 50, 5)}. Is it so? Answer:",
            allowed_tokens=LABELS,
        )
        for group in range(n_groups)
        for row in range(n_rows)
    ]
    random.Random(0).shuffle(rows)
    return rows


def of_all_urls() -> list[dict[str, Any]]:
    question = "Is the sky blue?"
    parts = [{"text": text(7, 200), "keep": "end"}, {"text": f" {question} Answer:"}]
    marked = [{"role": "user", "content": text(7, 200), "keep": False}, {"role": "user", "content": question}]
    cut = {"on_overflow": "cut", "max_prompt_tokens": 100}
    return [
        request(
            "chat",
            "/v1/chat/completions",
            messages=[{"role": "user", "content": question}],
            allowed_tokens=["Yes", "No"],
        ),
        request("two", "/v1/completions", prompt=["One is", "Two is"], allowed_tokens=LABELS),
        request("ids", "/v1/completions", prompt=[100, 200, 300], allowed_token_ids=[500, 600]),
        request("one-token", "/v1/completions", prompt="The sky is", max_tokens=1, temperature=0),
        request("generate", "/generate", text=question, allowed_tokens=LABELS),
        request("parts", "/v1/completions", prompt_parts=parts, **cut, allowed_tokens=LABELS),
        request("marked", "/v1/chat/completions", messages=marked, **cut),
        request(
            "score",
            "/v1/score",
            query="The sky is",
            items=[" blue", " red"],
            label_token_ids=[500, 600],
            apply_softmax=True,
        ),
        request("rerank", "/v1/rerank", query=question, documents=["The sky is blue.", "Fish swim."]),
        request(
            "decisions",
            "/v1/decisions",
            model="m",
            input="The sky is blue.",
            questions=[{"type": "predicate", "instructions": question}],
        ),
        request(
            "systemone",
            "/v1/systemone",
            model="m",
            state={"sky": "blue"},
            questions={"q": {"type": "score", "instructions": "How blue?", "criteria": ["not", "a bit", "very"]}},
        ),
        request("cohere", "/v2/rerank", model="demo", query=question, documents=[{"text": "Fish swim."}]),
    ]


def write(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def answers_in(path: Path) -> dict[str, Any]:
    """Bodies by id. Fails where a row is answered twice."""
    found: dict[str, Any] = {}
    for line in path.read_text().splitlines():
        answer = json.loads(line)
        assert answer["custom_id"] not in found
        assert answer["error"] is None
        assert answer["response"]["status_code"] == 200
        found[answer["custom_id"]] = answer["response"]["body"]
    return found


def numbers_of(body: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """Probabilities and scores of an answer of any shape."""
    if isinstance(body, dict):
        for name, value in body.items():
            if name in ("probability", "calibrated_probability", "score", "relevance_score", "label_mass") or (
                name == "scores" and isinstance(value, list)
            ):
                yield from _flat(f"{path}/{name}", value)
            else:
                yield from numbers_of(value, f"{path}/{name}")
    elif isinstance(body, list):
        for number, value in enumerate(body):
            yield from numbers_of(value, f"{path}/{number}")


def _flat(path: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, list):
        for number, one in enumerate(value):
            yield from _flat(f"{path}/{number}", one)
    else:
        yield path, value


def assert_same(found: Any, expected: Any) -> None:
    ours, theirs = dict(numbers_of(found)), dict(numbers_of(expected))
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert value == pytest.approx(theirs[name], abs=SAME), name


def engine_flags(demo_folder: Path) -> list[str]:
    return ["--model-path", str(demo_folder), "--memory-budget-gb", "2", "--max-input-length", "2000", *NO_GATE]


def test_a_job_that_is_killed_goes_on_and_is_answered_as_by_a_server(
    server: Server, demo_folder: Path, tmp_path: Path
) -> None:
    """With the calibrations of the same folder."""
    others = [
        *of_all_urls(),
        request("calibrated", "/v1/completions", prompt="Is it so?", allowed_tokens=LABELS, calibration="turned"),
        request("alternatives", "/generate", text="Is it so?", allowed_tokens=LABELS, top_alternatives=3),
        request("scores", "/v1/score", query="Is", items=[" it", " so"], label_token_ids=[500, 600], raw_scores=True),
        request("reranked", "/v1/rerank", query="Is it so?", documents=["It is.", "No."], calibration="turned"),
    ]
    rows = [*shared_prefixes(30, 20), *others]
    output = tmp_path / "out.jsonl"
    flags = ["--calibrations", str(server.calibrations)]
    flags += ["-i", str(write(tmp_path / "in.jsonl", rows)), "-o", str(output), *engine_flags(demo_folder)]
    first = forked_main("sgl_prefill.batch.__main__", flags, tmp_path / "first.log")
    while first.is_alive() and not (output.exists() and b"\n" in output.read_bytes()):
        time.sleep(0.01)
    first.kill()
    first.join()
    before = output.read_bytes()
    before = before[: before.rindex(b"\n") + 1]  # the kill may itself have come in the middle of a line
    n_before = before.count(b"\n")
    assert 0 < n_before < len(rows)
    output.write_bytes(before + b'{"id":"batch_req_1","custom')  # what a kill in the middle of a line leaves

    second = forked_main("sgl_prefill.batch.__main__", flags, tmp_path / "second.log")
    second.join()
    log = (tmp_path / "second.log").read_text()
    assert second.exitcode == 0, log
    assert f"{n_before:,} of them answered before" in log
    assert output.read_bytes().startswith(before)
    answers = answers_in(output)
    assert answers.keys() == {row["custom_id"] for row in rows}
    for row in [*rows[:20], *others]:
        reply = server.post(row["url"], row["body"])
        assert reply.status_code == 200, reply.text
        assert_same(answers[row["custom_id"]], reply.json())
    cached = sum(
        answers[f"{group}-{row}"]["usage"]["prompt_tokens_details"]["cached_tokens"]
        for group in range(30)
        for row in range(20)
    )
    assert cached > 0


def test_rows_that_cannot_be_answered_are_all_named_before_anything_runs(demo_folder: Path, tmp_path: Path) -> None:
    rows = shared_prefixes(2, 2)
    rows += [
        request("long", "/v1/completions", prompt="word " * 3000, allowed_tokens=LABELS),
        request("label", "/v1/completions", prompt="a", allowed_tokens=[" incomprehensibilities", " no"]),
        request("0-0", "/v1/completions", prompt="a", allowed_tokens=LABELS),
        request("stream", "/v1/completions", prompt="a", stream=True),
        request("generates", "/v1/completions", prompt="a", max_tokens=7),
        request("asks nothing", "/v1/systemone", model="m", state="s", questions={}),
    ]
    input_file = write(tmp_path / "in.jsonl", rows)
    input_file.write_text(input_file.read_text() + "{\n")
    flags = ["-i", str(input_file), "-o", str(tmp_path / "out.jsonl"), *engine_flags(demo_folder)]
    child = forked_main("sgl_prefill.batch.__main__", flags, tmp_path / "log")
    child.join()
    log = (tmp_path / "log").read_text()
    assert child.exitcode == 2, log
    assert "7 of 11 rows cannot be answered" in log
    for number, complaint in (
        (5, "tokens"),
        (6, "tokens after this prompt"),
        (7, "each must be another"),
        (8, "stream"),
        (9, "max_tokens"),
        (10, "questions"),
        (11, "not JSON"),
    ):
        (line,) = [one for one in log.splitlines() if one.strip().startswith(f"line {number}")]
        assert complaint in line
    errors = [json.loads(line) for line in (tmp_path / "out.jsonl.errors.jsonl").read_text().splitlines()]
    assert [error["line"] for error in errors] == [5, 6, 7, 8, 9, 10, 11]
    assert (tmp_path / "out.jsonl").read_text() == ""


def test_a_table_is_answered_with_a_column_a_label_by_running_servers_as_by_an_own_engine(
    server: Server, demo_folder: Path, tmp_path: Path
) -> None:
    parquet, pyarrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    table = [{"name": f"n{number}", "text": text(number, 8), "stars": number % 5} for number in range(12)]
    parquet.write_table(pyarrow.Table.from_pylist(table), tmp_path / "in.parquet")
    asked = ["-i", str(tmp_path / "in.parquet"), "--template", "Text: {text}, {stars} stars. Good? Answer:"]
    asked += ["--labels", *LABELS, "--id-column", "name", "--output-order", "input"]
    found = []
    for name, backend in (("own", engine_flags(demo_folder)), ("url", ["--base-url", server.url, "--background"])):
        output = tmp_path / f"{name}.parquet"
        child = forked_main("sgl_prefill.batch.__main__", [*asked, "-o", str(output), *backend], tmp_path / name)
        child.join()
        assert child.exitcode == 0, (tmp_path / name).read_text()
        found.append(parquet.read_table(output).to_pylist())
    own, by_url = found
    assert [row["name"] for row in own] == [row["name"] for row in table]
    assert [list(row) for row in own] == [["name", *LABELS, "label_mass", "error"]] * len(table)
    for row, other in zip(own, by_url, strict=True):
        assert row[" yes"] + row[" no"] == pytest.approx(1)
        assert row[" yes"] == pytest.approx(other[" yes"], abs=SAME)
    assert len({round(row[" yes"], 3) for row in own}) > 3


def test_rows_that_generate_write_the_same_whoever_writes_beside_them(demo_folder: Path, tmp_path: Path) -> None:
    """Each prompt twice, once to a part of the length: greedy decoding begins alike. The cache holds six rows at a time."""
    rows = [
        request(f"{number}-{n_tokens}", "/v1/completions", prompt=prompt, max_tokens=n_tokens, temperature=0)
        for number, prompt in enumerate(f"{text(number % 3, 60)}. {text(number + 50, 5)}" for number in range(12))
        for n_tokens in (4, 20)
    ]
    output = tmp_path / "out.jsonl"
    flags = ["-i", str(write(tmp_path / "in.jsonl", rows)), "-o", str(output), *engine_flags(demo_folder)]
    flags += ["--allow-generation", "--max-total-tokens", "600"]
    child = forked_main("sgl_prefill.batch.__main__", flags, tmp_path / "log")
    child.join()
    assert child.exitcode == 0, (tmp_path / "log").read_text()
    answers = answers_in(output)
    assert len(answers) == len(rows)
    texts = {name: body["choices"][0]["text"] for name, body in answers.items()}
    n_longer = 0
    for number in range(12):
        assert texts[f"{number}-20"].startswith(texts[f"{number}-4"])
        n_longer += texts[f"{number}-20"] != texts[f"{number}-4"]
    assert n_longer > 6
    assert len(set(texts.values())) > 12


def test_the_reviews_of_the_readme_are_scored_right(demo_folder: Path, tmp_path: Path) -> None:
    """2,000 rows, of which the examples before all and the descriptions of 40 products are computed once."""
    review_table.write(tmp_path)
    flags = ["-i", str(tmp_path / "reviews.csv"), "-o", str(tmp_path / "scores.jsonl"), "--id-column", "id"]
    flags += ["--template", f"@{tmp_path / 'template.txt'}", "--labels", POSITIVE, NEGATIVE]
    child = forked_main("sgl_prefill.batch.__main__", [*flags, *engine_flags(demo_folder)], tmp_path / "log")
    child.join()
    assert child.exitcode == 0, (tmp_path / "log").read_text()
    truth = {row["id"]: row["truth"] for row in review_table.rows()}
    scores = [json.loads(line) for line in (tmp_path / "scores.jsonl").read_text().splitlines()]
    assert {row["id"] for row in scores} == truth.keys()
    n_right = sum((row[POSITIVE] > row[NEGATIVE]) == (truth[row["id"]] == POSITIVE) for row in scores)
    assert n_right >= 0.95 * len(scores) == 1900
    summary = json.loads((tmp_path / "scores.jsonl.job" / "summary.json").read_text())
    assert summary["cached_tokens"] == summary["tokens_saved_at_most"] > 0.9 * summary["prompt_tokens"]


def test_a_dry_run_tells_what_the_job_costs_and_leaves_nothing(demo_folder: Path, tmp_path: Path) -> None:
    input_file = write(tmp_path / "in.jsonl", shared_prefixes(4, 5))
    flags = ["-i", str(input_file), "-o", str(tmp_path / "out.jsonl"), "--dry-run", "--price-per-hour", "2"]
    child = forked_main("sgl_prefill.batch.__main__", [*flags, *engine_flags(demo_folder)], tmp_path / "log")
    child.join()
    log = (tmp_path / "log").read_text()
    assert child.exitcode == 0, log
    for part in (
        "rows: 20, prompts: 20",
        "groups that share a prefix: 4, the largest of 5",
        "predicted time",
        "at 2 an hour",
    ):
        assert part in log
    assert not (tmp_path / "out.jsonl").exists()


def test_help_needs_no_model_and_prints_nothing_else() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "sgl_prefill.batch", "--help"],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ,
    )
    assert done.stdout.startswith("usage: python -m sgl_prefill.batch")
    assert done.stderr == ""
