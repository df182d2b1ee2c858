"""The longest input without output preallocation or in-place computation (section 4.3), which the product cannot leave out.

python -m benchmarks.hybrid.variants whole|not-preallocated|not-in-place FLAGS...      # flags: of sgl_prefill.mil
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch

from sgl_prefill import mil
from sgl_prefill.hybrid import body, split

IN_PLACE = "step % 2 == 0 or attention_in_place"


def not_preallocated() -> None:
    """The results of all chunks are there when they are put together."""

    def run_in_chunks(
        self: body.HybridBody, piece: Any, attention: Any, buffers: list[Any], token_rows: dict[str, Any], io: Any
    ) -> None:
        parts: list[list[torch.Tensor]] = []
        for start, end in self._chunks(token_rows["input_ids"].shape[0]):
            results = self._run_chunk(piece, attention, buffers, token_rows, start, end, io)
            crossing = zip(piece.outputs, results, strict=True)
            parts.append([result for buffer, result in crossing if buffer is not None])
        written = [buffer for buffer in piece.outputs if buffer is not None]
        for buffer, chunks in zip(written, zip(*parts, strict=True), strict=True):
            buffers[buffer] = torch.cat(chunks)

    setattr(body.HybridBody, "_run_in_chunks", run_in_chunks)  # noqa: B010


def not_in_place() -> None:
    """What a layer writes gets a buffer of its own, also where it could overwrite what the layer has read."""
    source = inspect.getsource(split._BufferUse)
    if IN_PLACE not in source:
        raise ValueError(f"split._BufferUse does not say {IN_PLACE!r}: this variant must follow it")
    exec(source.replace(IN_PLACE, "False"), vars(split))


VARIANTS: dict[str, Callable[[], None]] = {
    "whole": lambda: None,
    "not-preallocated": not_preallocated,
    "not-in-place": not_in_place,
}


def main() -> int:
    VARIANTS[sys.argv[1]]()
    # A memory profile computes what decides the memory of the product, which is not all that these take.
    setattr(body.HybridBody, "only_what_decides_memory", property(lambda _: False, lambda _, __: None))  # noqa: B010
    return mil.main(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
