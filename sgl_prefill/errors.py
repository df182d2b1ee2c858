"""The errors that a user, a configuration, a request or SGLang can cause. Messages say what was wrong, the limit and the remedy.

    SglPrefillError
    +-- ConfigurationError      start refused: flags that contradict, a missing model, a taken port
    +-- SeamError               start refused: not the SGLang of the hooks (version, source), or a hook is not in place
    +-- UnsupportedModelError   start refused: the model needs an operation that this engine lacks
    |   +-- UntraceableModelError   hybrid prefilling cannot cut this model into token-wise pieces
    +-- AliasedMemoryError      start refused: memory for suffix-KV eviction cannot be reserved or mapped
    |   +-- NoMemoryLeftError   a device has no more of it
    +-- MemoryPlanError         start refused: the longest input does not fit the memory
    +-- ParityError             start refused: two paths of the engine give different answers
    +-- ProcessError            start failed: a process of the server ended
    +-- DemoModelError          the demo model cannot be fetched or converted
    +-- ServerStartError        a server started for a demo, test or benchmark did not become healthy
    +-- BatchJobError           a batch job cannot start or go on
    +-- BadRequestError         HTTP 400: the request is wrong; also a ValueError, which SGLang's routes answer with 400
        +-- NotFoundError       HTTP 404: it names what is not there
        +-- UnknownPrefixError  HTTP 409: it names a prefix that is not held
        +-- PromptTooLongError  HTTP 400: a prompt has more tokens than the server takes

Bugs of this package are assertions, not errors of this tree.
"""

from __future__ import annotations

from http import HTTPStatus


class SglPrefillError(Exception):
    """Root of the tree; never raised itself."""


class ConfigurationError(SglPrefillError):
    """The engine cannot start with these options on this machine."""


class SeamError(SglPrefillError):
    """The installed SGLang does not match what the hooks were written against, or a hook is not in place."""


class UnsupportedModelError(SglPrefillError):
    """The model needs an operation that this engine does not compute."""


class UntraceableModelError(UnsupportedModelError):
    """Why hybrid prefilling cannot serve a model: a clause that follows the model's name."""


class AliasedMemoryError(SglPrefillError):
    """The system refused to reserve or map the KV buffers."""


class NoMemoryLeftError(AliasedMemoryError):
    """The device has no more physical memory for the KV buffers."""


class MemoryPlanError(SglPrefillError):
    """The memory cannot serve inputs of the length asked for; the message names the longest that it can."""


class ParityError(SglPrefillError):
    """Hybrid and plain, cached and fresh, or scratch and durable KV disagree beyond the tolerance."""


class ProcessError(SglPrefillError):
    """A process of the server ended while it started; it has said why."""


class DemoModelError(SglPrefillError):
    """The demo model could not be fetched, verified or converted."""


class ServerStartError(SglPrefillError):
    """The server ended, or was not healthy in time; the message holds the end of its log."""


class BatchJobError(SglPrefillError):
    """A batch job cannot start, or cannot go on; what it has answered is kept."""


class BadRequestError(SglPrefillError, ValueError):
    """A request that can never be answered as it stands."""

    status = HTTPStatus.BAD_REQUEST
    rid: str | None = None  # of the prompt at fault, in a batch


class NotFoundError(BadRequestError):
    """The request names something that is not there; the message lists what is."""

    status = HTTPStatus.NOT_FOUND


class UnknownPrefixError(BadRequestError):
    """The request names a prefix that was never sent, or was forgotten; the remedy is to send it again."""

    status = HTTPStatus.CONFLICT


class PromptTooLongError(BadRequestError):
    """A prompt, by itself or of a batch, has more tokens than the server takes."""
