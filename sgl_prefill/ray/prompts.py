"""What the model reads of a row: made in Ray's tasks, where the rows are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from sgl_prefill.batch.tables import columns_of, shown
from sgl_prefill.errors import ConfigurationError

if TYPE_CHECKING:
    import pyarrow as pa

# Beside the columns of a dataset, until its rows are answered.
PROMPT, REFUSED = "__sgl_prefill_prompt", "__sgl_prefill_refused"


class Prompt(NamedTuple):
    """Makes the prompt of a row: one of these three."""

    column: str | None = None
    template: str | None = None
    function: Callable[[dict[str, Any]], str] | None = None

    @classmethod
    def of(cls, given: str | Callable[[dict[str, Any]], str], columns: Sequence[str]) -> Prompt:
        """Understands what a user gives: a string that is no column is a template.

        Raises BatchJobError for a template that is malformed, and ConfigurationError for one of other columns.
        """
        if callable(given):
            return cls(function=given)
        if given in columns:
            return cls(column=given)
        if missing := [name for name in columns_of(given, "prompt") if name not in columns]:
            raise ConfigurationError(
                f"prompt names the column {missing[0]!r}, and the dataset has {', '.join(columns)}"
            )
        return cls(template=given)

    def __call__(self, rows: pa.Table) -> pa.Table:
        """Adds two columns: the prompt, and where there is none why."""
        import pyarrow as pa

        if self.column is not None and _holds_token_ids(rows.schema.field(self.column).type):
            nothing = pa.nulls(rows.num_rows, pa.string())
            return rows.append_column(PROMPT, rows[self.column]).append_column(REFUSED, nothing)
        made = list(self._texts(rows))
        texts, refused = zip(*made, strict=True) if made else ((), ())
        return rows.append_column(PROMPT, pa.array(texts, pa.string())).append_column(
            REFUSED, pa.array(refused, pa.string())
        )

    def _texts(self, rows: pa.Table) -> Iterator[tuple[str | None, str | None]]:
        if self.column is not None:
            yield from ((shown(value), None) for value in rows[self.column].to_pylist())
        elif self.template is not None:
            needed = columns_of(self.template)
            for row in rows.select(needed).to_pylist():
                yield self.template.format_map({name: shown(value) for name, value in row.items()}), None
        else:
            assert self.function is not None
            yield from (_called(self.function, row) for row in rows.to_pylist())


def _called(function: Callable[[dict[str, Any]], Any], row: dict[str, Any]) -> tuple[str | None, str | None]:
    try:
        text = function(row)
    except Exception as error:  # of this row alone, whatever a user's function may do
        return None, f"prompt failed: {type(error).__name__}: {error}"
    return (text, None) if isinstance(text, str) else (None, f"prompt returned {type(text).__name__} and no text")


def _holds_token_ids(arrow_type: Any) -> bool:
    import pyarrow as pa

    is_list: bool = pa.types.is_list(arrow_type) or pa.types.is_large_list(arrow_type)
    return is_list and bool(pa.types.is_integer(arrow_type.value_type))
