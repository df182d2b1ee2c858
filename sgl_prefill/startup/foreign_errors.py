"""Errors of SGLang, PyTorch and transformers while a model starts, as one sentence."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sgl_prefill.errors import SglPrefillError, UnsupportedModelError

logger = logging.getLogger(__name__)

PACKAGE = Path(__file__).resolve().parents[1]
MOST_CHARACTERS = 300


@contextmanager
def as_refusals(model_path: str) -> Iterator[None]:
    """Turns an error that SGLang or another library raises into an UnsupportedModelError. Errors of this package pass."""
    try:
        yield
    except SglPrefillError:
        raise
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        if Path(last.filename).is_relative_to(PACKAGE):
            raise
        logger.debug("SGLang cannot start %s", model_path, exc_info=True)
        said = " ".join(f"{type(error).__name__}: {error}".split()).rstrip(": ")
        said = said if len(said) <= MOST_CHARACTERS else f"{said[:MOST_CHARACTERS]}..."
        raise UnsupportedModelError(
            f"SGLang cannot start {model_path} with these flags on this machine. {Path(last.filename).name}, line"
            f" {last.lineno}, says: {said}\n--log-level debug shows the whole error. Where sglang.launch_server starts"
            " the same model, it is a fault of this package"
        ) from error
