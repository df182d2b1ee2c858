"""What others print for their own developers, or at length, kept from the terminal of a user."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import warnings
from collections.abc import Iterator

from sgl_prefill.errors import ConfigurationError


def quiet() -> None:
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # warns about a missing CUDA


@contextlib.contextmanager
def usage_as_error() -> Iterator[None]:
    """An argument parser prints its usage, tens of lines, before what is wrong. Raises ConfigurationError with the latter."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            yield
    except SystemExit as error:
        if not error.code:  # it has shown its help
            raise
        _, _, problem = said.getvalue().rpartition(": error: ")
        raise ConfigurationError(f"{problem.strip()}; --help shows all flags") from error
    finally:
        if ": error: " not in said.getvalue():
            sys.stderr.write(said.getvalue())


@contextlib.contextmanager
def unlogged(module: str) -> Iterator[None]:
    """Within the block a module of SGLang's logs nothing."""
    logger = logging.getLogger(module)
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before
