"""A log of decisions, read and made again by the same policy: it hears what it heard then, and is asked at the same times."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from sgl_prefill.config import PrefillConfig
from sgl_prefill.core import policies
from sgl_prefill.core.job import Job
from sgl_prefill.core.policy import Policy, Writing
from sgl_prefill.errors import ConfigurationError
from sgl_prefill.scheduling.decision_record import VERSION, Calibrated, Start, calibrated_of, job_of

HOW_TO_MAKE_ONE = "a log is made by a server that was started with --decision-log FILE"


class Line(NamedTuple):
    """One line of a log, parsed."""

    number: int
    fields: dict[str, Any]

    @property
    def is_header(self) -> bool:
        return "decisions_version" in self.fields


class Began(NamedTuple):
    """A server started here."""

    start: Start


class Decided(NamedTuple):
    """A decision of the server that started last."""

    record: dict[str, Any]


class Unusable(NamedTuple):
    """Lines that are left out of a replay, in words."""

    reason: str


def read(path: Path) -> Iterator[Began | Decided | Unusable]:
    """Yields what a log holds. Raises ValueError that names a line which belongs to no log, and OSError."""
    expected: int | None = None  # the number of the next decision; None where the rest of a start cannot be replayed
    for line in _lines(path):
        if isinstance(line, Unusable):
            yield line
        elif line.is_header:
            yield Began(_start(path, line))
            expected = 1
        elif line.number == 1:
            raise ValueError(
                f"{path} does not begin with what a server was started with, so that what waited before its first line is not"
                " known (what /decisions shows can be read, and not replayed; nor can a log that was cut at its beginning):"
                f" {HOW_TO_MAKE_ONE}"
            )
        elif expected is not None:
            step = line.fields.get("step")
            if step != expected:
                yield Unusable(
                    f"line {line.number} is decision {step}, and decision {expected} is missing (a full disk?): what the same"
                    " server decided afterwards cannot be replayed, and is left out"
                )
                expected = None
                continue
            expected += 1
            yield Decided(line.fields)


def _lines(path: Path) -> Iterator[Line | Unusable]:
    """A line that was cut off counts where nothing or another start follows: there a server has ended in the middle of it."""
    torn: int | None = None
    number = 0
    with path.open("rb") as file:
        for number, content in enumerate(file, start=1):
            line = _parsed(number, content)
            if torn is not None and (line is None or not line.is_header):
                raise ValueError(f"{path}, line {torn}: this is no decision: {HOW_TO_MAKE_ONE}")
            if torn is not None:
                yield _cut_off(torn)
            torn = number if line is None else None
            if line is not None:
                yield line
    if torn == 1 or number == 0:
        raise ValueError(f"{path} holds no decision: {HOW_TO_MAKE_ONE}")
    if torn is not None:
        yield _cut_off(torn)


def _cut_off(number: int) -> Unusable:
    return Unusable(f"line {number} is cut off, where its server or its disk ended: it is left out")


def _parsed(number: int, content: bytes) -> Line | None:
    try:
        fields = orjson.loads(content)
    except ValueError:
        return None
    return Line(number, fields) if isinstance(fields, dict) and content.endswith(b"\n") else None


def _start(path: Path, line: Line) -> Start:
    if (version := line.fields["decisions_version"]) != VERSION:
        raise ValueError(
            f"{path}, line {line.number}: this log is of version {version}, written by sgl-prefill"
            f" {line.fields.get('engine_version')}, and this one reads version {VERSION}: replay it with that release"
        )
    try:
        return Start.of(line.fields)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path}, line {line.number}: this is no beginning of a log ({error!r}): {HOW_TO_MAKE_ONE}"
        ) from error
    except ConfigurationError as error:
        raise ValueError(
            f"{path}, line {line.number}: its policy cannot be made here ({error}): a policy of your own must be registered, as"
            " STRUCTURE.md shows"
        ) from error


class Again(NamedTuple):
    """One decision, made again."""

    is_same: bool
    then: tuple[list[int], list[int]]  # the jobs that ran, in order, and those that were refused
    now: tuple[list[int], list[int]]
    step: int  # its number since the start of the server
    unix_s: float  # when it was made
    in_words: str  # what differs; empty where nothing does

    @property
    def name(self) -> str:
        when = datetime.datetime.fromtimestamp(self.unix_s, datetime.UTC)
        return f"decision {self.step} ({when:%Y-%m-%d %H:%M:%S} UTC)"


class PolicyReplay:
    """The policy of one start of a server.

    Args:
        config: other options than the server's; None: its own.
    """

    def __init__(self, start: Start, config: PrefillConfig | None = None) -> None:
        start = start if config is None else start._replace(config=config)
        self.policy: Policy = policies.make(start.config.scheduling, start.settings(), is_fair=start.config.is_fair)
        self._predictor = self.policy.settings.predictor
        self._jobs: dict[int, Job] = {}
        self._numbers: dict[Job, int] = {}
        self._started: list[tuple[int, int]] = []  # tokens of the step that runs: (inputs, cached)
        self._actual_ms: float | None = None  # of the decision before
        self._is_same_at_the_door = True

    def decide(self, record: dict[str, Any]) -> Again:
        """Makes a decision again, once the policy has heard what it heard before it. Raises KeyError for a broken record."""
        self._is_same_at_the_door = True
        for kind, *what in record["told"]:
            getattr(self, f"_hear_{kind}")(*what)
        self._observe()
        self.policy.writing = [Writing(self._jobs[job], n_tokens) for job, n_tokens in record.get("writing", ())]
        decision = self.policy.decide(record["time_s"])
        self._actual_ms = record["actual_ms"]
        now = [self._numbers[job] for job in decision.run], [self._numbers[job] for job in decision.refuse]
        then = jobs_of(record), [one["job"] for one in record["refuse"]]
        is_same = now == then and self._is_same_at_the_door
        in_words = "" if is_same else self._difference(then, now, record["time_s"])
        return Again(is_same, then, now, record["step"], record["unix_s"], in_words)

    def _difference(self, then: tuple[list[int], list[int]], now: tuple[list[int], list[int]], now_s: float) -> str:
        if then[1] != now[1]:
            return f"refused {self._shown(then[1], now_s)}; now refuses {self._shown(now[1], now_s)}"
        if then[0] == now[0]:
            return "came after a request was refused on arrival (no room in the queue); now there is room for it"
        at = next((n for n, (old, new) in enumerate(zip(then[0], now[0], strict=False)) if old != new), None)
        if at is None:
            return f"ran {len(then[0])} requests, of which the first are the same; now runs {len(now[0])}"
        place = "ran" if at == 0 else f"ran, at place {at + 1} of its step,"
        return f"{place} {self._shown([then[0][at]], now_s)}; now runs {self._shown([now[0][at]], now_s)}"

    def _shown(self, numbers: list[int], now_s: float) -> str:
        """Names the first of these jobs, and says of it what the policy looked at."""
        if not numbers:
            return "nobody"
        job = self._jobs[numbers[0]]
        more = f" and {len(numbers) - 1} more" if len(numbers) > 1 else ""
        client = f" of {job.client!r}" if job.client else ""
        return (
            f"request {job.rid!r}{client} (waited {1000 * (now_s - job.arrival_s):.0f} ms, {job.n_input_tokens} tokens,"
            f" {job.n_cached_tokens} of them cached){more}"
        )

    def _observe(self) -> None:
        """The predictions that refuse what comes too late are corrected by what steps have taken."""
        if self._predictor is not None and self._started and self._actual_ms is not None:
            self._predictor.observe(self._predictor.model.of_step(self._started), self._actual_ms)
            self._started = []

    def _job(self, fields: dict[str, Any]) -> Job:
        job = self._jobs[fields["job"]] = job_of(fields)
        self._numbers[job] = fields["job"]
        return job

    def _hear_add(self, fields: dict[str, Any]) -> None:
        self.policy.add(self._job(fields))

    def _hear_refuse(self, fields: dict[str, Any], reason: str) -> None:
        job = self._job(fields)
        refusal = self.policy.refusal(job)
        self._is_same_at_the_door &= refusal is not None and refusal.reason == reason
        self._forget(job)

    def _hear_remove(self, number: int) -> None:
        if (job := self._jobs.get(number)) is None:
            return
        self.policy.remove(job)
        if job.most_output_tokens <= 1:
            self._forget(job)

    def _hear_change(self, number: int, changes: dict[str, Any] | None = None) -> None:
        job = self._jobs[number]
        page: Any = job.next_page
        calibrated_of(changes or {}, Calibrated.of(job, page)).put_into(job)
        self.policy.recalibrated(job)

    def _hear_prefix(self, numbers: list[int]) -> None:
        self.policy.prefix_computed([self._jobs[number] for number in numbers])

    def _hear_start(self, numbers: list[int]) -> None:
        jobs = [self._jobs[number] for number in numbers]
        self._started = [(job.n_input_tokens, job.n_cached_tokens) for job in jobs] or self._started
        # Under other options the policy may have refused some of them.
        self.policy.started([job for job in jobs if job in self.policy.waiting])

    def _hear_end(self, numbers: list[int], n_output_tokens: int) -> None:
        for number in numbers:
            job = self._jobs[number]
            self.policy.ended(job, n_output_tokens)
            self._forget(job)

    def _forget(self, job: Job) -> None:
        del self._jobs[self._numbers.pop(job)]


def jobs_of(record: dict[str, Any]) -> list[int]:
    """Returns the numbers of the jobs that ran, the first picked first."""
    return [] if record["first"] is None else [record["first"]["job"], *(one["job"] for one in record["riders"])]


class Agreement(NamedTuple):
    """What a replay came to."""

    n_decisions: int
    n_same: int
    first_difference: Again | None
    left_out: list[str]  # why, of lines that were

    @property
    def is_whole(self) -> bool:
        return self.n_same == self.n_decisions


def replay(log: Iterable[Began | Decided | Unusable], change: Any = None) -> Agreement:
    """Replays all starts of a log.

    Args:
        change: makes other options of a server's; None: its own.
    """
    n_decisions = n_same = 0
    difference: Again | None = None
    left_out: list[str] = []
    policy: PolicyReplay | None = None
    for one in log:
        if isinstance(one, Unusable):
            left_out.append(one.reason)
        elif isinstance(one, Began):
            policy = PolicyReplay(one.start, None if change is None else change(one.start.config))
        else:
            assert policy is not None  # `read` sees to it
            again = policy.decide(one.record)
            n_decisions, n_same = n_decisions + 1, n_same + again.is_same
            if not again.is_same and difference is None:
                difference = again
    return Agreement(n_decisions, n_same, difference, left_out)
