"""On a device: the next step is chosen and launched while one runs.

A request without generation ends, for scheduling, with its launch. On one stream whatever is launched later reads KV that was
written earlier, and overwrites slots that were given back earlier. So at the launch of a step its prefixes enter the prefix cache
and its scratch is given back; shortly before its predicted end the next step is chosen, with exact knowledge of the cache, and
launched behind it; only then is the result of the first read, on another stream, which does not wait for the second.

SGLang's overlap loop chooses a step before the last one's prefix is in the cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

from sgl_prefill.startup.device import Accelerator, this_device

POLL_S = 0.0002
# A step is chosen so long before the running one's predicted end. The margin grows by the first factor where the device was done
# before the launch, and else shrinks by the second: one launch in twenty is late, whatever choices take and predictions miss.
FIRST_MARGIN_S, LARGEST_MARGIN_S = 0.01, 1.0
GROWS, SHRINKS = 1.25, 0.99


class Stream(Protocol):
    """The device's work, in order of its launches (`startup.device.Accelerator`)."""

    def mark(self) -> Any:
        """Marks the end of what has been launched so far."""

    def is_reached(self, mark: Any) -> bool: ...

    def ms_between(self, begin: Any, end: Any) -> float: ...

    def reading_after(self, mark: Any) -> AbstractContextManager[Any]:
        """Within the block, reads wait for the mark, and not for what was launched later."""


class LaunchedStep(NamedTuple):
    reqs: Sequence[Any]
    read: Callable[[], None]  # SGLang's: reads the result and answers
    learn: Callable[[float], None]  # called after it with the step's milliseconds on the device
    begin: Any  # marks of the stream
    end: Any
    end_s: float  # predicted, on `time.perf_counter`


class Pipeline:
    """The step that was launched last, until its result is read. One per scheduler process."""

    def __init__(self, stream: Stream) -> None:
        self.launched: LaunchedStep | None = None
        self._stream = stream
        self._begin: Any = None
        self._margin_s = FIRST_MARGIN_S
        self._could_be_ahead = False  # requests waited for the choice while the launched step ran

    def await_decision(self, take_in: Callable[[], bool]) -> None:
        """Returns when the next step is to be chosen. Reads the result of the last one where nothing is to run behind it.

        take_in: receives requests; whether any wait.
        """
        self._could_be_ahead = False
        while (launched := self.launched) is not None:
            is_waited_for, is_done = take_in(), self._stream.is_reached(launched.end)
            self._could_be_ahead |= is_waited_for and not is_done
            if is_waited_for and (is_done or time.perf_counter() >= launched.end_s - self._margin_s):
                return
            if is_done:
                self.finish()
            else:
                time.sleep(POLL_S)

    def begin(self) -> None:
        """Notes that a step is about to be launched."""
        self._begin = self._stream.mark()

    def launch(
        self, reqs: Sequence[Any], predicted_ms: float, read: Callable[[], None], learn: Callable[[float], None]
    ) -> None:
        """Notes that a step was launched, whose requests end with it; then reads the result of the one before."""
        before, end, begin_s = self.launched, self._stream.mark(), time.perf_counter()
        is_late = before is None or self._stream.is_reached(before.end)
        if before is not None and not is_late:
            begin_s = max(begin_s, before.end_s)
        if self._could_be_ahead:
            self._margin_s = min(self._margin_s * (GROWS if is_late else SHRINKS), LARGEST_MARGIN_S)
        self.finish()
        self.launched = LaunchedStep(reqs, read, learn, self._begin, end, begin_s + predicted_ms / 1000)

    def finish(self) -> None:
        """Waits for the result of the last step, if it has not been read, and answers."""
        if (launched := self.launched) is None:
            return
        self.launched = None
        for req in launched.reqs:
            req.finished_reason = None  # what the model says counts
        with self._stream.reading_after(launched.end):
            launched.read()
        launched.learn(self._stream.ms_between(launched.begin, launched.end))


def pipeline_of(*, has_predictor: bool, n_ranks: int) -> Pipeline | None:
    """Returns None on a host, which computes a step when it is launched, and for several ranks, which must decide alike."""
    device = this_device()
    return Pipeline(device) if isinstance(device, Accelerator) and has_predictor and n_ranks == 1 else None
