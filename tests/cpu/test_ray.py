"""What `sgl_prefill.ray` says before Ray is asked for anything."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from typing import Any
from unittest import mock

import pytest

from sgl_prefill.errors import BatchJobError, ConfigurationError
from sgl_prefill.ray import scorer
from sgl_prefill.ray.scorer import DIED, PROMPT, REFUSED, Prompt, Register

pa: Any = pytest.importorskip("pyarrow")


def test_the_import_brings_neither_ray_nor_torch() -> None:
    """`import ray` means Ray's package, also within ours."""
    code = "import sys; import sgl_prefill.ray; assert not {'ray', 'torch', 'sglang'} & sys.modules.keys(), sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("version", "complaint"),
    [(importlib.metadata.PackageNotFoundError(), "not installed"), (["2.59.0"], "ray is 2.59.0, .* for 2.60.0")],
)
def test_a_ray_that_is_missing_or_another_is_refused_with_the_extra(version: Any, complaint: str) -> None:
    with (
        mock.patch.object(importlib.metadata, "version", side_effect=version),
        pytest.raises(ConfigurationError, match=complaint) as refused,
    ):
        scorer.check_ray()
    assert ".[ray]" in str(refused.value)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_ray_that_is_not_initialised_is_refused() -> None:
    pytest.importorskip("ray")
    with pytest.raises(ConfigurationError, match=r"call ray\.init\(\)"):
        scorer.score(mock.Mock(), prompt="text", labels=["a"])


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"labels": []}, "labels is"),
        ({"labels": " yes"}, "give a list"),
        ({"labels": ["a", "a"]}, "twice"),
        ({"labels": ["a"], "concurrency": 0}, "concurrency is 0"),
        ({"labels": ["a"], "engine": {}, "base_urls": ["http://one"]}, "both given"),
    ],
)
def test_what_cannot_be_meant_is_refused(options: dict[str, Any], complaint: str) -> None:
    with mock.patch.object(scorer, "check_ray"), pytest.raises(ConfigurationError, match=complaint):
        scorer.score(mock.Mock(), prompt="text", **options)


@pytest.mark.parametrize("taken", ["a", "label_mass", "error"])
def test_a_column_of_the_dataset_is_never_overwritten(taken: str) -> None:
    dataset = mock.Mock(**{"schema.return_value.names": ["text", taken]})
    with pytest.raises(ConfigurationError, match=f"a column '{taken}' already"):
        scorer._check_columns(dataset, ["a", "label_mass", "error"])


def test_a_checkpoint_of_a_column_that_is_not_there_is_refused() -> None:
    dataset = mock.Mock(**{"schema.return_value.names": ["text"], "context.checkpoint_config.id_column": "id"})
    with pytest.raises(ConfigurationError, match="'id', and the dataset has text"):
        scorer._check_columns(dataset, ["a"])


ROWS = pa.table({"text": ["one", None], "stars": [4, 5], "ids": [[1, 2], [3]]})


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("text", ["one", ""]),
        ("ids", [[1, 2], [3]]),
        ("{text}, {stars} {{stars}}", ["one, 4 {stars}", ", 5 {stars}"]),
        (lambda row: row["text"].upper(), ["ONE", None]),
        (lambda row: row["stars"], [None, None]),
    ],
)
def test_a_prompt_is_a_column_a_template_or_what_a_function_returns(given: Any, expected: list[Any]) -> None:
    """A row whose prompt cannot be made says why."""
    made = Prompt.of(given, ROWS.column_names)(ROWS)
    assert made[PROMPT].to_pylist() == expected
    assert [one is None for one in made[PROMPT].to_pylist()] == [one is not None for one in made[REFUSED].to_pylist()]


@pytest.mark.parametrize(
    ("given", "complaint"), [("{nobody}", "column 'nobody'"), ("tekst", "names no column"), ("{", "prompt: ")]
)
def test_a_prompt_that_names_no_column_of_the_dataset_is_refused(given: str, complaint: str) -> None:
    with pytest.raises((ConfigurationError, BatchJobError), match=complaint):
        Prompt.of(given, ROWS.column_names)


def test_actors_ask_different_servers_and_the_same_one_after_a_death() -> None:
    register = Register(["http://one", "http://other"])
    asked = [register.url_of(actor) for actor in ("a", "b", "a", "c", "d", "b")]
    assert asked == ["http://one", "http://other", "http://one", "http://one", "http://other", "http://other"]


def test_a_row_that_was_alone_when_its_engine_ended_is_known() -> None:
    register = Register()
    assert register.begin("unit") == (0, {})
    assert register.begin("unit") == (1, {})
    register.alone("unit", 3)
    assert register.begin("unit") == (2, {3: DIED})
    register.alone("unit", 4)
    register.failed("unit", 4, "it said this")
    assert register.begin("unit").killers == {3: DIED, 4: "it said this"}
    register.end("unit")
    assert register.begin("unit") == (0, {})
