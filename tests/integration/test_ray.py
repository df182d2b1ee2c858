"""Two actors on a local Ray cluster: with the demo model, and before servers that answer at once."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import psutil
import pytest

from sgl_prefill.batch import plan
from sgl_prefill.ray import score
from tests.support import stub_server
from tests.support.stub_server import StubServer

ray = pytest.importorskip("ray")

from ray.data.checkpoint import CheckpointConfig  # noqa: E402

from sgl_prefill.ray import scorer  # noqa: E402

# Of Ray's own code: it sets options of its own that it calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")

LABELS = [" yes", " no"]
WORDS = ["red", "river", "stone", "cloud", "seven", "music", "paper", "green", "north", "table"]
PROMPT = "Say yes or no. {prefix}. {own}. Is it so? Answer:"
POISON, TOO_LONG = "poison", "too long"


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """Two cores. Ends with all its processes."""
    with mock.patch.dict(os.environ, {"RAY_USAGE_STATS_ENABLED": "0"}):
        ray.init(num_cpus=2, include_dashboard=False, object_store_memory=200 << 20, log_to_driver=False)
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = False
        yield
        processes = [one for one in psutil.process_iter() if f"{os.getpid()}" in _session_of(one)]
        ray.shutdown()
        _, alive = psutil.wait_procs(processes, timeout=20)
        assert not alive


def _session_of(process: psutil.Process) -> str:
    try:
        return " ".join(word for word in process.cmdline() if "session_" in word and word.endswith(f"_{os.getpid()}"))
    except psutil.Error:
        return ""


@pytest.fixture
def servers() -> Iterator[list[StubServer]]:
    with stub_server.running() as one, stub_server.running() as other:
        yield [one, other]


def text(seed: int, n_words: int) -> str:
    rng = random.Random(seed)
    return " ".join(rng.choice(WORDS) for _ in range(n_words))


def rows_of(n_groups: int, n_rows: int, n_words: int = 60) -> list[dict[str, Any]]:
    """Shuffled rows of groups, each of some words and a few of its own."""
    rows = [
        {"id": group * n_rows + row, "prefix": text(group, n_words), "own": text(1000 * group + row + 50, 5)}
        for group in range(n_groups)
        for row in range(n_rows)
    ]
    random.Random(0).shuffle(rows)
    return rows


def dataset_of(rows: list[dict[str, Any]]) -> Any:
    """Few blocks: Ray makes 200 of them otherwise, a task each."""
    return ray.data.from_items(rows, override_num_blocks=3)


def share_of(rows: list[dict[str, Any]]) -> float:
    """How much of the prompts the prefix cache held."""
    return float(sum(row["cached_tokens"] for row in rows) / sum(row["prompt_tokens"] for row in rows))


def pids_of_actors() -> set[int]:
    return {one.pid for one in psutil.process_iter() if "MapWorker(MapBatches(Scorer))" in "".join(_title_of(one))}


def _title_of(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


def test_an_actor_that_is_killed_costs_no_row_and_prefixes_are_computed_once(demo_folder: Path, tokenizer: Any) -> None:
    rows = rows_of(40, 10)
    rows += [{"id": 400, "prefix": "word " * 3000, "own": TOO_LONG}]
    scored = score(
        dataset_of(rows),
        prompt=PROMPT,
        labels=LABELS,
        concurrency=2,
        engine={"model_path": str(demo_folder), "max_input_length": 2000, "skip_parity_gate": True},
        usage=True,
    )
    found: list[dict[str, Any]] = []
    before: set[int] = set()
    seen: set[int] = set()
    for batch in scored.iter_batches(batch_size=None, batch_format="pyarrow"):
        if not found:
            before = pids_of_actors()
            os.kill(min(before), 9)
        seen |= pids_of_actors()
        found += batch.to_pylist()
    assert len(before) == 2
    assert seen - before, "no actor began in the place of the one that was killed"
    assert sorted(row["id"] for row in found) == list(range(401))
    (refused,) = [row for row in found if row["error"] is not None]
    assert refused["own"] == TOO_LONG
    assert "tokens" in refused["error"]
    assert refused[" yes"] is None
    answered = [row for row in found if row["error"] is None]
    assert list(found[0]) == ["id", "prefix", "own", *LABELS, "label_mass", "error", "prompt_tokens", "cached_tokens"]
    assert all(row[" yes"] + row[" no"] == pytest.approx(1) for row in answered)
    assert len({round(row[" yes"], 3) for row in answered}) > 50
    groups = plan(tokenizer([PROMPT.format_map(row) for row in answered])["input_ids"])
    one_engine = sum(group.saved_tokens for group in groups) / sum(row["prompt_tokens"] for row in answered)
    assert share_of(answered) > one_engine - 0.01


class Plain:
    """What a user of Ray Data would write: each actor scores the batches that come."""

    def __init__(self, urls: list[str]) -> None:
        self._url = urls[os.getpid() % len(urls)]

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        from sgl_prefill import batch as whole_job

        prompts = [PROMPT.format(prefix=one, own=own) for one, own in zip(batch["prefix"], batch["own"], strict=True)]
        answers = sorted(whole_job.score(prompts, labels=LABELS, engine=self._url, max_inflight=1))
        return {
            "prompt_tokens": np.array([one.prompt_tokens for one in answers]),
            "cached_tokens": np.array([one.cached_tokens for one in answers]),
        }


def test_two_actors_share_as_much_as_one_and_shuffled_batches_do_not(servers: list[StubServer]) -> None:
    """The caches hold ten prompts of 40 groups: in batches of shuffled rows most prefixes are computed anew."""
    rows = rows_of(40, 8)
    urls = [one.url for one in servers]
    asked: dict[str, Any] = {"prompt": PROMPT, "labels": LABELS, "max_inflight": 1, "usage": True}
    prompts = [[ord(one) for one in PROMPT.format_map(row)] for row in rows]
    one = sum(group.saved_tokens for group in plan(prompts)) / sum(map(len, prompts))
    two = share_of(score(dataset_of(rows), base_urls=urls, **asked).take_all())
    assert all(len(server.asked) > 50 for server in servers), "one of the two answered nearly everything"
    plain = share_of(
        dataset_of(rows)
        .map_batches(
            Plain, fn_constructor_args=(urls,), batch_size=32, compute=ray.data.ActorPoolStrategy(size=2), num_cpus=0
        )
        .take_all()
    )
    assert two > one - 0.01
    assert one > 0.75
    assert plain < one - 0.3


def fails_at_300(batch: dict[str, Any]) -> dict[str, Any]:
    if 300 in batch["id"]:
        raise RuntimeError("the job is cut off here")
    return batch


def test_a_job_that_was_cut_off_answers_what_is_left(servers: list[StubServer], tmp_path: Path) -> None:
    rows = rows_of(60, 10, n_words=10)
    out = str(tmp_path / "out")
    checkpoint = CheckpointConfig(id_column="id", checkpoint_path=str(tmp_path / "checkpoint"))

    def job() -> Any:
        dataset = dataset_of(rows)
        dataset.context.checkpoint_config = checkpoint
        return score(dataset, prompt=PROMPT, labels=LABELS, base_urls=[one.url for one in servers])

    cut_off = job().map_batches(fails_at_300, batch_size=None)
    with pytest.raises(Exception, match="cut off"):
        cut_off.write_parquet(out)
    written = ray.data.read_parquet(out).take_all()
    assert 0 < len(written) < 600
    for server in servers:
        server.asked.clear()
    job().write_parquet(out)
    asked_again = {prompt for server in servers for prompt in server.asked}
    assert not asked_again & {PROMPT.format_map(row) for row in written}
    assert sorted(row["id"] for row in ray.data.read_parquet(out).take_all()) == list(range(600))


class Poisoned(scorer.Scorer):
    """Its engine, were it one, would take the process with it at some rows."""

    def _answers(self, unit: str, rows: list[int], prompts: list[Any]) -> Any:
        if any(POISON in prompt for prompt in prompts):
            os.kill(os.getpid(), 9)
        return super()._answers(unit, rows, prompts)


def test_rows_that_cannot_be_answered_are_rows_and_one_that_kills_its_actor_is_too(servers: list[StubServer]) -> None:
    rows = [{"id": number, "own": f"row {number}"} for number in range(40)]
    rows[3]["own"], rows[4]["own"], rows[5]["own"] = stub_server.REFUSED, POISON, None

    def prompt(row: dict[str, Any]) -> str:
        own: str = row["own"]
        return "Is it so? " + own

    with mock.patch.object(scorer, "Scorer", Poisoned):
        scored = score(dataset_of(rows), prompt=prompt, labels=LABELS, base_urls=[one.url for one in servers])
        found = {row["id"]: row for row in scored.take_all()}
    assert sorted(found) == list(range(40))
    errors = {number: row["error"] for number, row in found.items() if row["error"] is not None}
    assert errors.keys() == {3, 4, 5}
    assert errors[3] == "this prompt is refused"
    assert "engine ended" in errors[4]
    assert errors[5].startswith("prompt failed: TypeError")
