"""The scheduler's decisions as they are made, each with what the policy was told before it: enough to make them again.

A policy hears and answers through `RecordedPolicy`, which passes everything on and writes it down. A record is closed when its
step has ended, or when the next decision is made: then it is one line, kept here and appended to `--decision-log`.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Protocol

import orjson

from sgl_prefill.core.deadlines import Refusal
from sgl_prefill.core.job import Job
from sgl_prefill.core.policy import Decision, Forecast, Policy, ScoreParts, Writing
from sgl_prefill.scheduling.alike import Alike
from sgl_prefill.scheduling.decision_record import Calibrated, fields_of, text

KEPT_DECISIONS = 2000  # for /decisions
KEPT_BYTES = 16_000_000  # of them: a step of 256 requests is a line of 100 kB, and more with --show-prompts


class LineWriter(Protocol):
    """Where lines go that are kept; writing raises nothing."""

    def write(self, line: bytes) -> None: ...


class _Known:
    """A job that waits or writes."""

    __slots__ = ("calibrated", "number")

    def __init__(self, number: int, calibrated: Calibrated) -> None:
        self.number, self.calibrated = number, calibrated


class DecisionRecorder:
    """One a scheduler process whose policy decides.

    Args:
        log: where each line goes too; then the records also say which prompts began alike.
        shows_prompts: token ids stand in the records.
    """

    def __init__(self, log: LineWriter | None = None, *, shows_prompts: bool = False) -> None:
        self.lines: collections.deque[bytes] = collections.deque()  # the last ones
        self._kept_bytes = 0
        self._log = log
        self._shows_prompts = shows_prompts
        self._alike = None if log is None else Alike()
        self._n_jobs = self.n_decisions = 0
        self._jobs: dict[Job, _Known] = {}
        self._pages = _Pages()
        self._told: list[Any] = []
        self._open: dict[str, Any] | None = None  # the last decision, while its step runs
        self._run: dict[str, dict[str, Any]] = {}  # of it, by request id

    def begin(self, header: Mapping[str, Any]) -> None:
        """Says what the following lines of the log were made with."""
        if self._log is not None:
            self._log.write(orjson.dumps(header))

    def added(self, job: Job) -> None:
        self._told.append(["add", self._new(job)])

    def refused_at_the_door(self, job: Job, refusal: Refusal) -> None:
        """Hears that a job may not begin to wait."""
        self._told.append(["refuse", self._new(job), refusal.reason])
        self._forget(job)

    def removed(self, job: Job) -> None:
        if (known := self._jobs.get(job)) is not None:
            self._told.append(["remove", known.number])
            self._pages.leave(known.calibrated.page)
            known.calibrated = known.calibrated._replace(page=None)
            if job.most_output_tokens <= 1:  # others may write, and are forgotten once they do not
                del self._jobs[job]

    def changed(self, job: Job) -> None:
        """Hears that calibration has written into a job."""
        known = self._jobs.get(job)
        if known is None:
            return
        calibrated = Calibrated.of(job, self._pages.move(job.next_page, known.calibrated.page))
        changes = calibrated.changes(known.calibrated)
        known.calibrated = calibrated
        self._told.append(["change", known.number, changes] if changes else ["change", known.number])

    def told(self, kind: str, jobs: Sequence[Job], *more: Any) -> None:
        """Hears what else the policy was told of jobs."""
        self._told.append([kind, self._numbers(jobs), *more])

    def decided(
        self, now_s: float, writing: Sequence[Writing], decision: Decision, scores: Sequence[ScoreParts | None]
    ) -> None:
        """Hears a decision. scores: of those that run."""
        self.close()
        self.n_decisions += 1
        run = [self._picked(job, score, now_s) for job, score in zip(decision.run, scores, strict=True)]
        self._run = {job.rid: shown for job, shown in zip(decision.run, run, strict=True)}
        told, self._told = self._told, []
        self._open = {
            "step": self.n_decisions,
            "time_s": now_s,
            "unix_s": round(time.time(), 3),
            "told": told,
            "first": run[0] if run else None,
            "riders": run[1:],
            "refuse": [
                {"job": self._jobs[job].number, "id": text(job.rid), "reason": why.reason, "message": why.message}
                for job, why in decision.refuse.items()
            ],
            "predicted_ms": None,
            "actual_ms": None,
        }
        if writing:
            self._open["writing"] = [
                [self._jobs[job].number, n_tokens] for job, n_tokens in writing if job in self._jobs
            ]
        if not run:
            self.close()

    def predicted(self, predicted_ms: float | None) -> None:
        if self._open is not None:
            self._open["predicted_ms"] = predicted_ms

    def step_ended(self, actual_ms: float | None, found_tokens: Mapping[str, int]) -> None:
        """Hears that the last decision's step has ended. found_tokens: what it found in the prefix cache, by request id."""
        if self._open is None:
            return
        self._open["actual_ms"] = actual_ms
        for rid, n_tokens in found_tokens.items():
            if rid in self._run:
                shown = self._run[rid]
                shown["found_tokens"] = n_tokens
                shown["new_tokens"] += shown["cached_tokens"] - n_tokens
        self.close()

    def close(self) -> None:
        """Makes the open record a line."""
        if self._open is None:
            return
        line = orjson.dumps(self._open)
        self._open = None
        self._keep(line)
        if self._log is not None:
            self._log.write(line)

    def _keep(self, line: bytes) -> None:
        self.lines.append(line)
        self._kept_bytes += len(line)
        while len(self.lines) > KEPT_DECISIONS or (self._kept_bytes > KEPT_BYTES and len(self.lines) > 1):
            self._kept_bytes -= len(self.lines.popleft())

    def forget_all_but(self, waiting: Mapping[Job, None], writing: Sequence[Writing]) -> None:
        """Forgets those that have written all, or were cancelled while they did."""
        if len(self._jobs) > len(waiting):
            kept = {job for job, _ in writing}
            for job in [job for job in self._jobs if job not in waiting and job not in kept]:
                del self._jobs[job]

    def _new(self, job: Job) -> dict[str, Any]:
        self._n_jobs += 1
        known = _Known(self._n_jobs, Calibrated.of(job, self._pages.join(job.next_page)))
        self._jobs[job] = known
        fields = fields_of(job, known.number, known.calibrated)
        if self._alike is not None and (found := self._alike.find_and_keep(job.tokens, job.namespace, known.number)):
            fields["begins_like"] = list(found)
        if self._shows_prompts:
            fields["prompt_token_ids"] = list(job.tokens)
        return fields

    def _forget(self, job: Job) -> None:
        self._pages.leave(self._jobs.pop(job).calibrated.page)

    def _picked(self, job: Job, score: ScoreParts | None, now_s: float) -> dict[str, Any]:
        shown: dict[str, Any] = {
            "job": self._jobs[job].number,
            "id": text(job.rid),
            "waited_ms": round(1000 * (now_s - job.arrival_s), 3),
            "input_tokens": job.n_input_tokens,
            "cached_tokens": job.n_cached_tokens,
            "found_tokens": None,
            "new_tokens": job.n_miss_tokens,
        }
        if job.client:
            shown["client"] = text(job.client)
        if score is not None:
            # float: a policy of one's own may calculate with NumPy's numbers.
            shown["score"], shown["credit"] = (
                round(float(value), 3) for value in (score.cost - score.credit, score.credit)
            )
        return shown

    def _numbers(self, jobs: Sequence[Job]) -> list[int]:
        return [self._jobs[job].number for job in jobs if job in self._jobs]


class _Pages:
    """Numbers for pages while a job waits for them: the pages themselves hold tokens."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, tuple[int, int]] = {}  # of each page its number, and how many wait for it
        self._page_of: dict[int, Hashable] = {}
        self._next = 1

    def join(self, page: Hashable | None) -> int | None:
        """Counts one more job that waits for a page. Returns its number."""
        if page is None:
            return None
        number, n_jobs = self._numbers.get(page, (0, 0))
        if number == 0:
            number, self._next = self._next, self._next + 1
            self._page_of[number] = page
        self._numbers[page] = number, n_jobs + 1
        return number

    def leave(self, number: int | None) -> None:
        """Counts one less."""
        if number is None:
            return
        page = self._page_of[number]
        _, n_jobs = self._numbers[page]
        if n_jobs > 1:
            self._numbers[page] = number, n_jobs - 1
        else:
            del self._numbers[page], self._page_of[number]

    def move(self, page: Hashable | None, before: int | None) -> int | None:
        """Counts a job at another page, or at the same."""
        number = self.join(page)
        self.leave(before)
        return number


class RecordedPolicy(Policy):
    """A policy of which everything is written down that it hears and says."""

    def __init__(self, policy: Policy, recorder: DecisionRecorder) -> None:
        self._policy = policy
        self._recorder = recorder
        self.settings = policy.settings
        self.writing: Sequence[Writing] = ()

    @property
    def waiting(self) -> dict[Job, None]:  # type: ignore[override]
        return self._policy.waiting

    def refusal(self, job: Job) -> Refusal | None:
        refusal = self._policy.refusal(job)
        if refusal is not None:
            self._recorder.refused_at_the_door(job, refusal)
        return refusal

    def add(self, job: Job) -> None:
        self._recorder.added(job)
        self._policy.add(job)

    def remove(self, job: Job) -> None:
        self._recorder.removed(job)
        self._policy.remove(job)

    def recalibrated(self, job: Job) -> None:
        self._recorder.changed(job)
        self._policy.recalibrated(job)

    def prefix_computed(self, jobs: Sequence[Job]) -> None:
        self._recorder.told("prefix", jobs)
        self._policy.prefix_computed(jobs)

    def started(self, jobs: Sequence[Job]) -> None:
        self._recorder.told("start", jobs)
        self._policy.started(jobs)

    def ended(self, job: Job, n_output_tokens: int) -> None:
        self._recorder.told("end", [job], n_output_tokens)
        self._policy.ended(job, n_output_tokens)

    def decide(self, now_s: float) -> Decision:
        """Decides; where nobody waits there is nothing to write down."""
        self._policy.writing = self.writing
        self._recorder.forget_all_but(self.waiting, self.writing)
        if not self.waiting:
            return self._policy.decide(now_s)
        decision = self._policy.decide(now_s)
        scores = [self._policy.parts_of_score(job, now_s) for job in decision.run]
        self._recorder.decided(now_s, self.writing, decision, scores)
        return decision

    @property
    def output_share(self) -> float | None:
        return self._policy.output_share

    def forecast(self, job: Job) -> Forecast | None:
        return self._policy.forecast(job)

    def parts_of_score(self, job: Job, now_s: float) -> ScoreParts | None:
        return self._policy.parts_of_score(job, now_s)

    def drain_ms(self, client: str | None = None) -> float | None:
        return self._policy.drain_ms(client)

    def choose(self, now_s: float) -> list[Job]:
        return self._policy.choose(now_s)

    def oldest(self) -> Job | None:
        return self._policy.oldest()
