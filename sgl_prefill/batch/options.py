"""Options of a job."""

from __future__ import annotations

import argparse
import codecs
import dataclasses
import json
from pathlib import Path
from typing import Any

from sgl_prefill.batch.asked import Asked
from sgl_prefill.errors import BatchJobError

# Rows in flight: enough to fill the engine's steps. More would queue in a server's HTTP process, and delay other requests.
INFLIGHT_OWN_ENGINE, INFLIGHT_SERVER, INFLIGHT_BACKGROUND = 1024, 128, 16
SCHEDULING = "whole-job"  # of the own engine, unless its flags name another


@dataclasses.dataclass(frozen=True)
class JobOptions:
    """Options of the job; the engine's are separate."""

    input: Path
    output: Path
    error_file: Path
    base_urls: tuple[str, ...] = ()
    background: bool = False
    output_order: str = "completion"
    max_inflight: int = INFLIGHT_OWN_ENGINE
    overwrite: bool = False
    skip_bad_rows: bool = False
    shard: tuple[int, int] = (1, 1)  # number from 1, count
    dry_run: bool = False
    price_per_hour: float | None = None
    metrics_port: int | None = None
    prompt_column: str | None = None
    template: str | None = None
    labels: tuple[str, ...] = ()
    questions: dict[str, Any] | None = None  # as `questions` of /v1/systemone; the prompt is the state
    id_column: str | None = None
    encoding: str | None = None

    @property
    def is_table(self) -> bool:
        return self.prompt_column is not None or self.template is not None

    @property
    def asked(self) -> Asked:
        """Of each row of a table."""
        return Asked(self.labels, self.questions)

    def meaning(self) -> dict[str, Any]:
        """Options that the answers depend on: two runs of one job must agree in them."""
        names = ("output_order", "shard", "prompt_column", "template", "labels", "questions", "id_column", "encoding")
        return {name: _plain(getattr(self, name)) for name in names}


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m sgl_prefill.batch",
        description="Answers a file of requests, durably and in the order that computes least. Takes every flag of"
        " sgl_prefill.launch_server too; without --model-path and --base-url the demo model answers.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    made.add_argument("-i", "--input", "--input-file", type=Path, required=True, help="requests (JSONL), or a table")
    made.add_argument("-o", "--output", "--output-file", type=Path, required=True, help="answers: .jsonl or .parquet")
    made.add_argument("--error-file", type=Path, help="rows without an answer (default: OUTPUT.errors.jsonl)")
    made.add_argument(
        "--base-url",
        dest="base_urls",
        nargs="+",
        metavar="URL",
        help="running servers that answer in place of an own engine",
    )
    made.add_argument(
        "--background", action="store_true", help="with --base-url: let all other requests of our servers go first"
    )
    made.add_argument(
        "--output-order", choices=("completion", "input"), help="of the answers (default: as they are completed)"
    )
    made.add_argument(
        "--max-inflight",
        type=int,
        help=f"rows with the engine, or with each server, at a time (default: {INFLIGHT_OWN_ENGINE}, of a server"
        f" {INFLIGHT_SERVER}, with --background {INFLIGHT_BACKGROUND})",
    )
    made.add_argument("--overwrite", action="store_true", help="discard what an earlier run has answered")
    made.add_argument("--skip-bad-rows", action="store_true", help="answer the others where rows cannot be answered")
    made.add_argument("--shard", type=_shard, metavar="I/N", help="answer the I-th of N parts, which share no prefix")
    made.add_argument(
        "--dry-run", action="store_true", help="print the plan, answer nothing; with --price-per-hour also the time"
    )
    made.add_argument("--price-per-hour", type=float, help="of this machine: --dry-run prints what the job costs")
    made.add_argument("--metrics-port", type=int, help="serve Prometheus metrics here while the job runs")
    table = made.add_argument_group("tables", "Parquet, CSV or JSONL, one prompt a row")
    table.add_argument("--prompt-column", help="the column that is the prompt")
    table.add_argument(
        "--template",
        help="the prompt, with {column} where a column's text belongs; @FILE: from a file, less one line break at its end",
    )
    table.add_argument("--labels", nargs="+", help="the allowed answers")
    table.add_argument(
        "--questions",
        type=Path,
        help="instead of labels: a JSON file of questions about each prompt (`questions` of /v1/systemone)",
    )
    table.add_argument("--id-column", help="the column that names a row (default: its number)")
    table.add_argument("--encoding", help="of a CSV or JSONL table, such as latin-1 (default: utf-8)")
    return made


def options_of(namespace: argparse.Namespace) -> JobOptions:
    """Raises BatchJobError with every contradiction."""
    given = dict(vars(namespace))
    given.setdefault("error_file", given["output"].with_name(given["output"].name + ".errors.jsonl"))
    for name in ("base_urls", "labels"):
        given[name] = tuple(given.get(name, ()))
    if given["base_urls"]:
        given.setdefault("max_inflight", INFLIGHT_BACKGROUND if given.get("background") else INFLIGHT_SERVER)
    template = given.get("template")
    if template is not None and template.startswith("@"):
        try:
            text = Path(template[1:]).read_bytes().decode()
        except OSError as error:
            raise BatchJobError(f"--template: {template[1:]} cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise BatchJobError(f"--template: {template[1:]} is not UTF-8: {error}") from error
        given["template"] = text.removesuffix("\n").removesuffix("\r")  # an editor's, which a prompt does not end with
    if "questions" in given:
        given["questions"] = _questions_in(given["questions"])
    options = JobOptions(**given)
    problems = []
    if options.max_inflight < 1:
        problems.append(f"--max-inflight is {options.max_inflight}: it must be at least 1")
    if options.prompt_column is not None and options.template is not None:
        problems.append("--prompt-column and --template are both given: a prompt is one of the two")
    if options.is_table and bool(options.labels) == (options.questions is not None):
        problems.append(
            "a table needs --labels, the allowed answers, or --questions, a file of questions: give one of the two"
        )
    if not options.is_table and (options.labels or options.questions or options.id_column):
        problems.append("--labels, --questions and --id-column are for tables: give --prompt-column or --template too")
    if not options.is_table and options.input.suffix in (".csv", ".parquet"):
        problems.append(f"{options.input} is a table: say what the prompt is, with --prompt-column or --template")
    if not options.is_table and options.output.suffix == ".parquet":
        problems.append(f"{options.output}: the answers to requests are JSON lines, name a .jsonl file")
    if options.encoding is not None:
        try:
            codecs.lookup(options.encoding)
        except LookupError:
            problems.append(f"--encoding is {options.encoding!r}, which Python does not know: utf-8, latin-1, cp1252")
        if not options.is_table or options.input.suffix == ".parquet":
            problems.append("--encoding is for CSV and JSONL tables: leave it out")
    if options.background and not options.base_urls:
        problems.append("--background lets others of a server go first: name it with --base-url")
    if options.price_per_hour is not None and not options.price_per_hour >= 0:
        problems.append(f"--price-per-hour is {options.price_per_hour}: it must be a number >= 0")
    same = {path.resolve() for path in (options.input, options.output, options.error_file)}
    if len(same) < 3:
        problems.append("input, output and error file must be three files")
    if problems:
        raise BatchJobError("\n".join(problems))
    return options


def _questions_in(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise BatchJobError(f"--questions: {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise BatchJobError(f"--questions: {path} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise BatchJobError(f"--questions: {path} is no JSON object of questions by name")
    return found


def _shard(text: str) -> tuple[int, int]:
    which, _, of = text.partition("/")
    if not which.isdigit() or not of.isdigit() or not 1 <= int(which) <= int(of):
        raise argparse.ArgumentTypeError(f"{text!r} is not I/N with I from 1 to N")
    return int(which), int(of)
