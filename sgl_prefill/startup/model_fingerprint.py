"""A hash of a model's files: equal for a copy of them, different for another fine-tune."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Of weights, config, tokenizer and templates.
SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".json", ".jinja", ".model", ".txt", ".tiktoken"}
WHOLE_BYTES = 1 << 24
# Of a larger file 1,024 pieces are read: a fine-tune of a few matrices changes one of them.
N_PIECES, PIECE_BYTES = 1024, 1024


def fingerprint(model_path: str, settings: Mapping[str, Any], revision: str | None = None) -> str:
    """Returns 16 hexadecimal digits. Reads megabytes, not gigabytes.

    Args:
        model_path: a folder, a file, or a name on the hub; without files in the hub's cache the name is hashed.
        settings: further values on which the answers depend.
    """
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode())
    files = _files(model_path, revision)
    if not files:
        digest.update(f"{model_path}@{revision}".encode())
    for file in files:
        size = file.stat().st_size
        digest.update(f"\0{file.name}\0{size}\0".encode())
        with file.open("rb") as opened:
            if size <= WHOLE_BYTES:
                digest.update(opened.read())
                continue
            for piece in range(N_PIECES):
                opened.seek(piece * (size - PIECE_BYTES) // (N_PIECES - 1))
                digest.update(opened.read(PIECE_BYTES))
    return digest.hexdigest()[:16]


def _files(model_path: str, revision: str | None) -> list[Path]:
    path = Path(model_path)
    if path.is_file():
        return [path]
    folder = path if path.is_dir() else _hub_folder(model_path, revision)
    if folder is None:
        return []
    return sorted(file for file in folder.iterdir() if file.suffix in SUFFIXES and file.is_file())


def _hub_folder(name: str, revision: str | None) -> Path | None:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, "config.json", revision=revision)
    except HFValidationError:
        return None
    return Path(found).parent if isinstance(found, str) else None
