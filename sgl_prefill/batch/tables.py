"""Tables: one prompt a row, answered with one column per label.

A table becomes a file of requests; once all are answered, the answers become a table again.
"""

from __future__ import annotations

import string
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from sgl_prefill.batch.answer_file import custom_id_of
from sgl_prefill.batch.options import JobOptions
from sgl_prefill.errors import BatchJobError

ROWS_AT_ONCE = 10_000
URL = "/v1/completions"
MASS, ERROR = "label_mass", "error"
MISSING = "pyarrow is not installed, and tables need it: pip install 'sgl-prefill[batch]'"


class Template:
    """A prompt with places for columns. Raises BatchJobError where it is malformed or names no column."""

    def __init__(self, options: JobOptions) -> None:
        self._text = options.template
        self.columns = (
            [options.prompt_column] if options.prompt_column is not None else columns_of(options.template or "")
        )

    def prompt(self, row: Mapping[str, Any]) -> str:
        values = {name: shown(row[name]) for name in self.columns}
        return values[self.columns[0]] if self._text is None else self._text.format_map(values)


def shown(value: Any) -> str:
    """Returns what a value of a column looks like in a prompt."""
    return "" if value is None else str(value)


def _places_of(template: str) -> list[str]:
    return [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]


def columns_of(template: str, called: str = "--template") -> list[str]:
    """The columns that a template names. Raises BatchJobError where it is malformed or names none."""
    try:
        found = _places_of(template)
    except ValueError as error:
        raise BatchJobError(f"{called}: {error}: write {{column}}, and {{{{ or }}}} for a brace itself") from error
    if not found:
        raise BatchJobError(f"{called} names no column: write {{column}} where a column's text belongs")
    if strange := [name for name in found if not name or set(name) & set(".[]!:")]:
        raise BatchJobError(f"{called}: {strange[0]!r} is not the name of a column")
    return list(dict.fromkeys(found))


def write_requests(options: JobOptions, path: Path) -> None:
    """Writes the requests of a table to a file. Raises BatchJobError for a table that cannot be read, or lacks a column."""
    template = Template(options)
    needed = [*template.columns, *([options.id_column] if options.id_column is not None else [])]
    taken = {options.id_column or "row", MASS, ERROR}
    if doubled := [label for label in options.labels if label in taken]:
        raise BatchJobError(
            f"--labels: {doubled[0]!r} is a column of the answers already: name another --id-column or label"
        )
    new = path.with_suffix(".new")
    with new.open("wb") as file:
        for number, row in enumerate(_checked_rows(options.input, needed)):
            body = {
                "model": "default",
                "prompt": template.prompt(row),
                "allowed_answers": options.labels,
                "max_tokens": 1,
            }
            row_id = number if options.id_column is None else row[options.id_column]
            request = {"custom_id": str(row_id), "method": "POST", "url": URL, "body": body}
            file.write(orjson.dumps(request) + b"\n")
    new.replace(path)


def _checked_rows(path: Path, needed: Sequence[str]) -> Iterator[Mapping[str, Any]]:
    for number, row in enumerate(_rows(path)):
        if missing := [name for name in needed if name not in row]:
            raise BatchJobError(
                f"{path} has no column {', '.join(missing)} in row {number + 1}: it has {', '.join(row)}"
            )
        yield row


def _rows(path: Path) -> Iterator[Mapping[str, Any]]:
    """Yields the rows of a table, some thousand in memory at a time."""
    try:
        if path.suffix == ".jsonl":
            yield from _json_rows(path)
            return
        for batch in _batches(path):
            yield from batch.to_pylist()
    except OSError as error:
        raise BatchJobError(f"{path} cannot be read: {error.strerror or error}") from error


def _json_rows(path: Path) -> Iterator[Mapping[str, Any]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = orjson.loads(line)
            except orjson.JSONDecodeError as error:
                raise BatchJobError(f"{path}, line {number} is not JSON: {error}") from error
            if not isinstance(row, dict):
                raise BatchJobError(f"{path}, line {number} is not a JSON object")
            yield row


def _batches(path: Path) -> Iterator[Any]:
    try:
        import pyarrow as pa
        from pyarrow import csv, parquet
    except ImportError as error:
        raise BatchJobError(MISSING) from error
    try:
        if path.suffix == ".parquet":
            yield from parquet.ParquetFile(path).iter_batches(ROWS_AT_ONCE)
        elif path.suffix == ".csv":
            yield from csv.open_csv(path)
        else:
            raise BatchJobError(f"{path}: a table is a .parquet, .csv or .jsonl file")
    except pa.ArrowInvalid as error:
        raise BatchJobError(f"{path} is not a table: {error}") from error


def write_answers(options: JobOptions, answers: Iterator[bytes], errors: Iterator[bytes]) -> None:
    """Writes the table of answers, as Parquet or JSON lines by the output's name: the row's id, a probability for each label,
    what the labels hold of the whole vocabulary's, and what went wrong where something did."""
    rows = _answer_rows(options, answers, errors)
    new = options.output.with_name(options.output.name + ".new")
    if options.output.suffix != ".parquet":
        with new.open("wb") as file:
            file.writelines(orjson.dumps(row) + b"\n" for row in rows)
    else:
        _write_parquet(options, rows, new)
    new.replace(options.output)


def _answer_rows(options: JobOptions, answers: Iterator[bytes], errors: Iterator[bytes]) -> Iterator[dict[str, Any]]:
    id_name = options.id_column or "row"
    for line in answers:
        scores = orjson.loads(line)["response"]["body"]["choices"][0]["label_scores"]
        by_label = {one["label"]: one["probability"] for one in scores["labels"]}
        yield {id_name: custom_id_of(line), **by_label, MASS: scores["label_mass"], ERROR: None}
    for line in errors:
        nothing = dict.fromkeys((*options.labels, MASS))
        yield {id_name: custom_id_of(line), **nothing, ERROR: orjson.loads(line)["error"]["message"]}


def _write_parquet(options: JobOptions, rows: Iterator[dict[str, Any]], path: Path) -> None:
    import itertools

    import pyarrow as pa
    from pyarrow import parquet

    schema = pa.schema(
        [
            (options.id_column or "row", pa.string()),
            *((name, pa.float64()) for name in (*options.labels, MASS)),
            (ERROR, pa.string()),
        ]
    )
    with parquet.ParquetWriter(path, schema) as writer:
        while some := list(itertools.islice(rows, ROWS_AT_ONCE)):
            writer.write_batch(pa.RecordBatch.from_pylist(some, schema))
