"""Tables: one prompt a row, answered with one column per label, or with columns per question about it.

A table becomes a file of requests; once all are answered, the answers become a table again. Values become text by one rule: text
stays as it is, what is missing is empty, numbers of CSV and JSON lines are as they are written there, values of Parquet are as
Arrow casts them to strings, lists and objects are JSON. Bytes have no text, and are refused.
"""

from __future__ import annotations

import csv
import json
import string
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from sgl_prefill.batch.answer_file import custom_id_of
from sgl_prefill.batch.asked import ERROR
from sgl_prefill.batch.options import JobOptions
from sgl_prefill.errors import BatchJobError

if TYPE_CHECKING:
    import pyarrow as pa

ROWS_AT_ONCE = 10_000
UTF_8 = "utf-8-sig"  # with a byte-order mark or without
MISSING = "pyarrow is not installed, and Parquet tables need it: pip install '.[batch]' in the clone"


class Template:
    """A prompt with places for columns. Raises BatchJobError where it is malformed or names no column."""

    def __init__(self, options: JobOptions) -> None:
        self._text = options.template
        self.columns = (
            [options.prompt_column] if options.prompt_column is not None else columns_of(options.template or "")
        )

    def prompt(self, row: Mapping[str, str]) -> str:
        return row[self.columns[0]] if self._text is None else self._text.format_map(row)


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
    columns = [options.id_column or "row", *options.asked.columns(), ERROR]
    if doubled := [name for name, n in Counter(columns).items() if n > 1]:
        raise BatchJobError(
            f"{doubled[0]!r} would be two columns of the answers: name another --id-column, label or question"
        )
    new = path.with_suffix(".new")
    with new.open("wb") as file:
        for number, row in enumerate(rows_of(options)):
            row_id = str(number) if options.id_column is None else row[options.id_column]
            url, body = options.asked.request(template.prompt(row))
            request = {"custom_id": row_id, "method": "POST", "url": url, "body": body}
            try:
                file.write(orjson.dumps(request) + b"\n")
            except TypeError as error:
                raise BatchJobError(f"{options.input}, row {number + 1} holds half of a surrogate pair") from error
    new.replace(path)


def rows_of(options: JobOptions) -> Iterator[Mapping[str, str]]:
    """Yields the rows of a table, as text: at least the columns that the job needs. Raises BatchJobError."""
    path = options.input
    columns = [*Template(options).columns, *([options.id_column] if options.id_column is not None else [])]
    needed = list(dict.fromkeys(columns))
    read = {".parquet": _parquet_rows, ".csv": _csv_rows, ".jsonl": _json_rows}.get(path.suffix)
    if read is None:
        raise BatchJobError(f"{path}: a table is a .parquet, .csv or .jsonl file")
    try:
        encoding = options.encoding or "utf-8"
        yield from read(path, UTF_8 if encoding == "utf-8" else encoding, needed)
    except OSError as error:
        raise BatchJobError(f"{path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise BatchJobError(_not_text(path, error)) from error


def _not_text(path: Path, error: UnicodeDecodeError) -> str:
    remedy = f"is not {error.encoding}: name the file's own --encoding, such as latin-1"
    place = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                line.decode(error.encoding)
            except UnicodeDecodeError as here:
                return (
                    f"{path}, line {number}, byte {place + here.start} of the file (0x{line[here.start]:02x}) {remedy}"
                )
            place += len(line)
    return f"{path} {remedy}"


def _check_columns(path: Path, needed: Iterable[str], columns: Sequence[str], where: str = "") -> None:
    if missing := [name for name in needed if name not in columns]:
        raise BatchJobError(f"{path} has no column {', '.join(missing)}{where}: it has {', '.join(columns)}")


def _csv_rows(path: Path, encoding: str, needed: Sequence[str]) -> Iterator[Mapping[str, str]]:
    csv.field_size_limit(sys.maxsize)
    with path.open(encoding=encoding, newline="") as file:
        lines = csv.reader(file, strict=True)
        try:
            header = next(lines, [])
            if doubled := [name for name in needed if header.count(name) > 1]:
                raise BatchJobError(f"{path} has several columns {doubled[0]!r}: rename all but one")
            _check_columns(path, needed, header)
            for row in lines:
                if row and len(row) != len(header):
                    raise BatchJobError(
                        f"{path}, line {lines.line_num}: this row has {len(row)} cells, and the header {len(header)}"
                    )
                if row:
                    yield dict(zip(header, row, strict=True))
        except csv.Error as error:
            raise BatchJobError(f"{path}, line {lines.line_num} is not CSV: {error}") from error


class _Written(str):
    """A number as it is written in JSON."""


def _json_rows(path: Path, encoding: str, needed: Sequence[str]) -> Iterator[Mapping[str, str]]:
    decoder = json.JSONDecoder(parse_float=_Written, parse_int=_Written)
    with path.open(encoding=encoding, newline="") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = decoder.decode(line)
            except json.JSONDecodeError as error:
                raise BatchJobError(f"{path}, line {number} is not JSON: {error}") from error
            if not isinstance(row, dict):
                raise BatchJobError(f"{path}, line {number} is not a JSON object")
            _check_columns(path, needed, list(row), f" in line {number}")
            yield {name: _json_text(row[name]) for name in needed}


def _json_text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return str(value)
    options = orjson.OPT_PASSTHROUGH_SUBCLASS
    return orjson.dumps(value, lambda number: orjson.Fragment(str(number)), options).decode()


def _parquet_rows(path: Path, encoding: str, needed: Sequence[str]) -> Iterator[Mapping[str, str]]:
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError as error:
        raise BatchJobError(MISSING) from error
    try:
        table = parquet.ParquetFile(path)
        _check_columns(path, needed, table.schema_arrow.names)
        for batch in table.iter_batches(ROWS_AT_ONCE, columns=list(needed)):
            columns = [texts_of(batch.column(name), f"{path}: column {name!r}") for name in needed]
            yield from (dict(zip(needed, row, strict=True)) for row in zip(*columns, strict=True))
    except pa.ArrowInvalid as error:
        raise BatchJobError(f"{path} is not a table: {error}") from error


def texts_of(column: pa.Array | pa.ChunkedArray, called: str) -> list[str]:
    """Returns the values of a column as text. Raises BatchJobError for bytes."""
    import pyarrow as pa
    from pyarrow import compute, types

    kind = column.type
    if types.is_dictionary(kind):
        return texts_of(compute.cast(column, kind.value_type), called)
    if any(is_bytes(kind) for is_bytes in (types.is_binary, types.is_large_binary, types.is_fixed_size_binary)):
        raise BatchJobError(f"{called} holds bytes ({kind}), and a prompt is text: write it as text")
    if types.is_nested(kind):
        try:
            return [
                "" if value is None else orjson.dumps(value, _text_in_json).decode() for value in column.to_pylist()
            ]
        except TypeError as error:
            raise BatchJobError(f"{called} ({kind}) has no text: {error.__cause__ or error}") from error
    return ["" if text is None else text for text in compute.cast(column, pa.string()).to_pylist()]


def _text_in_json(value: Any) -> str:
    if isinstance(value, bytes):
        raise TypeError("it holds bytes")
    return str(value)


def write_answers(options: JobOptions, answers: Iterator[bytes], errors: Iterator[bytes]) -> None:
    """Writes the table of answers, as Parquet or JSON lines by the output's name: the row's id, then what went wrong where
    something did, and between them a probability for each label, and what the labels hold of the whole vocabulary's; or for each
    question its answer, and the probability of each option of a choice."""
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
        yield {id_name: custom_id_of(line), **options.asked.values(orjson.loads(line)["response"]["body"]), ERROR: None}
    nothing = dict.fromkeys(options.asked.columns())
    for line in errors:
        yield {id_name: custom_id_of(line), **nothing, ERROR: orjson.loads(line)["error"]["message"]}


def _write_parquet(options: JobOptions, rows: Iterator[dict[str, Any]], path: Path) -> None:
    import itertools

    import pyarrow as pa
    from pyarrow import parquet

    schema = pa.schema(
        [
            (options.id_column or "row", pa.string()),
            *((name, pa.float64() if kind is float else pa.string()) for name, kind in options.asked.columns().items()),
            (ERROR, pa.string()),
        ]
    )
    with parquet.ParquetWriter(path, schema) as writer:
        while some := list(itertools.islice(rows, ROWS_AT_ONCE)):
            writer.write_batch(pa.RecordBatch.from_pylist(some, schema))
