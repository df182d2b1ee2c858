"""Request bodies with `Content-Encoding`: gzip, deflate and zstd, decoded up to the limit of what comes out."""

from __future__ import annotations

import io
import zlib
from collections.abc import Callable
from http import HTTPStatus
from typing import IO

import zstandard
from fastapi import HTTPException

READ_AT_ONCE = 1 << 16


def decode(body: bytes, encodings: str, most_bytes: int) -> bytes:
    """Undoes the encodings of a header, the last one first. Raises HTTPException: 415 for an unknown one, 413 for more than
    `most_bytes`, 400 for a body that is not what the header says."""
    for name in reversed([one.strip().lower() for one in encodings.split(",")]):
        if name in ("", "identity"):
            continue
        if name not in _DECODERS:
            raise HTTPException(
                HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
                f"Content-Encoding is {name!r}, and this server reads {', '.join(_DECODERS)}: send the body in one of these, or"
                " as it is",
            )
        try:
            body = _DECODERS[name](body, most_bytes)
        except (zlib.error, zstandard.ZstdError, EOFError) as error:
            raise HTTPException(
                HTTPStatus.BAD_REQUEST, f"Content-Encoding is {name}, and the body is not: {error}"
            ) from error
        if len(body) > most_bytes:
            raise HTTPException(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                f"the {name} body holds more than the {most_bytes} bytes that this server takes: send fewer prompts in one"
                " request, or start the server with a larger --max-body-mb",
            )
    return body


def _zlib(body: bytes, most_bytes: int) -> bytes:
    """gzip, with any number of members, and deflate, with zlib's header or without."""
    is_raw = body[:2] != b"\x1f\x8b" and (len(body) < 2 or int.from_bytes(body[:2], "big") % 31 != 0)
    parts, n_bytes = list[bytes](), 0
    while body and n_bytes <= most_bytes:
        member = zlib.decompressobj(-zlib.MAX_WBITS if is_raw else 32 + zlib.MAX_WBITS)
        parts.append(member.decompress(body, most_bytes + 1 - n_bytes))
        n_bytes += len(parts[-1])
        if not member.eof and n_bytes <= most_bytes:
            raise EOFError("it ends too early")
        body = member.unused_data
    return b"".join(parts)


def _zstd(body: bytes, most_bytes: int) -> bytes:
    reader: IO[bytes] = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(body), read_across_frames=True)
    parts, n_bytes = list[bytes](), 0
    while n_bytes <= most_bytes and (part := reader.read(READ_AT_ONCE)):
        parts.append(part)
        n_bytes += len(part)
    return b"".join(parts)


_DECODERS: dict[str, Callable[[bytes, int], bytes]] = {"gzip": _zlib, "x-gzip": _zlib, "deflate": _zlib, "zstd": _zstd}
