"""A prompt's token ids, converted once: a list for SGLang's code, an array for range checks and the scheduler process."""

from __future__ import annotations

import reprlib
from array import array
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import PlainValidator


class TokenIds(list[int]):
    """Never changed, but for SGLang's truncation: compare lengths before using `array`."""

    __slots__ = ("array",)

    def __init__(self, ids: list[int], converted: array[int] | None = None) -> None:
        """Raises TypeError or OverflowError for what is no integer of 64 bits."""
        super().__init__(ids)
        self.array = array("q", ids) if converted is None else converted

    @classmethod
    def of(cls, ids: NDArray[np.int64]) -> TokenIds:
        return cls(ids.tolist(), array("q", ids.tobytes()))

    def followed_by(self, ids: list[int]) -> TokenIds:
        return TokenIds([*self, *ids], self.array + array("q", ids))


def is_within(ids: list[int], size: int) -> bool:
    """Whether all ids are from 0 to size - 1."""
    if isinstance(ids, TokenIds):
        values = np.frombuffer(ids.array, np.int64)
        return bool(values.min() >= 0 and values.max() < size)
    return min(ids) >= 0 and max(ids) < size


def read(value: Any) -> Any:
    """Validates `input_ids` of a request: one prompt, a list of prompts, or None. Raises ValueError."""
    if value is None or value == []:
        return value
    if not isinstance(value, list):
        raise ValueError(f"must be a list of token ids, or a list of such lists; it is {shown(value)}")
    if not isinstance(value[0], list):
        return _read_one(value, "")
    return [_read_one(one, f"prompt {index}: ") for index, one in enumerate(value)]


def read_prompt(value: Any) -> Any:
    """Validates `prompt` of a request: a text, texts, or as `read`. Raises ValueError."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and isinstance(value[0], str):
        for index, one in enumerate(value):
            if not isinstance(one, str):
                raise ValueError(f"prompt {index}: {shown(one)} beside texts: give texts only, or token ids only")
        return value
    if value is None or not isinstance(value, list):
        raise ValueError(f"must be a text, token ids, or a list of either; it is {shown(value)}")
    return read(value)


def _read_one(ids: Any, where: str) -> TokenIds:
    if isinstance(ids, TokenIds):
        return ids
    if not isinstance(ids, list):
        raise ValueError(f"{where}{shown(ids)} is no list of token ids")
    try:
        return TokenIds(ids)
    except (TypeError, OverflowError):
        bad = next(one for one in ids if not isinstance(one, int) or not -(2**63) <= one < 2**63)
        raise ValueError(f"{where}{shown(bad)} is no token id: give whole numbers") from None


_REPR = reprlib.Repr()
_REPR.maxlevel, _REPR.maxstring, _REPR.maxother = 3, 60, 60


def shown(value: Any) -> str:
    """A value of a request for an error message: short, whatever it is."""
    return _REPR.repr(value)


# Types of fields of requests.
InputIds = Annotated[
    list[list[int]] | list[int] | None,
    PlainValidator(read, json_schema_input_type=list[list[int]] | list[int] | None),
]
PromptOrPrompts = Annotated[
    list[int] | list[list[int]] | str | list[str],
    PlainValidator(read_prompt, json_schema_input_type=list[int] | list[list[int]] | str | list[str]),
]
