"""The examples of the README, against the shared server."""

from __future__ import annotations

import csv
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from sgl_prefill.examples import label_reviews, recommend_posts
from tests.integration.conftest import Server

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def test_the_requests_of_the_readme_are_answered_as_printed(server: Server) -> None:
    """The same fields, labels, tokens and choices; other numbers may differ."""
    commands = re.findall(r"^curl .*?'$", README, re.M | re.S)
    printed = re.findall(r"```json\n(.*?)```", README, re.S)
    replies = []
    for command, one in zip(commands, printed, strict=True):
        words = shlex.split(command.replace("http://127.0.0.1:30000", server.url))
        replies.append(json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout))
        assert_has_the_fields_of(json.loads(one), replies[-1])
    labelled, decided = replies
    found = labelled["choices"][0]["label_scores"]["labels"]
    assert [(one["label"], one["token_id"]) for one in found] == [(" Paris", 7042), (" Rome", 7268)]
    assert decided["answers"]["desk"]["choice"] == json.loads(printed[1])["answers"]["desk"]["choice"]


def assert_has_the_fields_of(printed: Any, reply: Any) -> None:
    if isinstance(printed, dict):
        for name, value in printed.items():
            assert name in reply, name
            assert_has_the_fields_of(value, reply[name])
    if isinstance(printed, list):
        for one, other in zip(printed, reply, strict=True):
            assert_has_the_fields_of(one, other)


def test_the_engine_of_the_readme_runs_as_printed(demo_folder: Path, tmp_path: Path) -> None:
    """DIR is a model's folder."""
    (block,) = [one for one in re.findall(r"```python\n(.*?)```", README, re.S) if "Engine(" in one]
    script = tmp_path / "readme.py"
    script.write_text(block.replace('"DIR"', repr(str(demo_folder))))
    done = subprocess.run([sys.executable, script], check=True, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1].startswith(" Paris [0.99")


def test_the_job_of_the_readme_runs_as_printed(tmp_path: Path) -> None:
    (block,) = re.findall(r"```sh\n([^`]*sgl_prefill\.batch[^`]*)```", README)
    for line in block.splitlines():
        words = [sys.executable if word == ".venv/bin/python" else word for word in shlex.split(line)]
        subprocess.run(words, check=True, cwd=tmp_path, capture_output=True)
    answers = [json.loads(line) for line in (tmp_path / "jobs" / "scores.jsonl").read_text().splitlines()]
    with (tmp_path / "jobs" / "reviews.csv").open(newline="") as table:
        n_rows = len(list(csv.DictReader(table)))
    assert len(answers) == n_rows > 20
    assert all(0 < one[" positive"] < 1 and one["label_mass"] > 0.5 for one in answers)


def test_the_reviews_are_separated_and_share_their_few_shot_prompt(server: Server) -> None:
    """All 24 labelled right, one computes the shared prompt, the others find it cached."""
    rows = label_reviews.label_all(server.url)
    assert sum(row.is_right for row in rows) == 24
    assert [row.p_positive for row in rows] == sorted((row.p_positive for row in rows), reverse=True)
    shared = max(row.scores["cached_tokens"] for row in rows)
    assert shared > 250
    assert sum(row.scores["cached_tokens"] < 250 for row in rows) <= 1
    assert "labelled right: 24 of 24 (100%)" in label_reviews.table(rows)


def test_the_profile_of_the_recommendation_example_is_computed_once(server: Server) -> None:
    """12 posts behind a few thousand tokens: 11 of them compute their own post alone."""
    ranked = recommend_posts.recommend(server.url)
    assert sorted(one.post for one in ranked) == sorted(recommend_posts.POSTS)
    profile_tokens = 2000
    computed = sorted(one.scores["prompt_tokens"] - one.scores["cached_tokens"] for one in ranked)
    assert all(n_tokens < 50 for n_tokens in computed[:11])
    assert computed[11] > profile_tokens
    assert all(0 < one.p_yes < 1 for one in ranked)
    assert recommend_posts.table(ranked).count("\n") == 12
