"""What the record of a decision says of a job, and the job again: one place for the names of the fields (`planner/DECISIONS.md`).

Fields that are as in most jobs are left out.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from sgl_prefill.config import LIMITS_OF_WAITING, PrefillConfig
from sgl_prefill.core.batch.planned_row import PlannedRow
from sgl_prefill.core.jct import FittedJct
from sgl_prefill.core.job import BACKGROUND, Job
from sgl_prefill.core.packing import StepSize
from sgl_prefill.core.policy import PolicySettings
from sgl_prefill.scheduling import server_settings

VERSION = 1  # of lines, and of what follows from them
LONGEST_TEXT = 200  # of ids and names, which clients give
MOST_RANK = 2**63 - 1  # that JSON's readers agree on
# On which decisions depend; --paper is what it stands for.
OPTIONS = (
    *("scheduling", "fairness_lambda", "jct_model", "sharers", "max_queue_s", "pack_step_tokens", "fair_by"),
    *("background_step_ms", *LIMITS_OF_WAITING),
)


class Calibrated(NamedTuple):
    """What calibration writes into a waiting job."""

    cached_tokens: int = 0
    page: int | None = None  # a number for the page that it waits for
    is_follower: bool = False
    sharers: int = 0
    shared_tokens: int = 0

    @classmethod
    def of(cls, job: Job, page: int | None) -> Calibrated:
        return cls(job.n_cached_tokens, page, job.is_follower, job.n_sharers, job.n_shared_tokens)

    def changes(self, before: Calibrated) -> dict[str, Any]:
        """Returns the fields that differ."""
        return {name: new for name, new, old in zip(self._fields, self, before, strict=True) if new != old}

    def put_into(self, job: Job) -> None:
        job.n_cached_tokens, job.next_page, job.is_follower = self.cached_tokens, self.page, self.is_follower
        job.n_sharers, job.n_shared_tokens = self.sharers, self.shared_tokens


UNKNOWN = Calibrated()  # a job that has not been matched


def text(name: str) -> str:
    """Returns a client's text as JSON can hold it: what is no character stands as its escape. Of a long one the beginning, its
    length and a hash stand, which still tells it from others."""
    content = name.encode("utf-8", "backslashreplace")
    if len(name) <= LONGEST_TEXT:
        return content.decode()
    digest = hashlib.blake2b(content, digest_size=8).hexdigest()
    return f"{text(name[:LONGEST_TEXT])}... ({len(name)} characters, hash {digest})"


def fields_of(job: Job, number: int, calibrated: Calibrated) -> dict[str, Any]:
    """Says of a job what a policy may ask, and nothing of what its prompt says."""
    optional: dict[str, tuple[Any, Any]] = {
        "client": (text(job.client), ""),
        "rank": (None if job.is_background else min(max(job.rank, -MOST_RANK), MOST_RANK), 0),
        "deadline_ms": (job.deadline_ms, None),
        "answer_tokens": (job.n_answer_tokens, 0),
        "most_output_tokens": (job.most_output_tokens, 1),
        "planned": (job.planned and list(job.planned), None),
    }
    return {
        "job": number,
        "id": text(job.rid),
        "arrival_s": job.arrival_s,
        "prompt_tokens": len(job.tokens),
        "most_cached_tokens": job.most_cached_tokens,
        **{name: value for name, (value, usual) in optional.items() if value != usual},
        **calibrated.changes(UNKNOWN),
    }


def calibrated_of(fields: Mapping[str, Any], before: Calibrated = UNKNOWN) -> Calibrated:
    return before._replace(**{name: fields[name] for name in Calibrated._fields if name in fields})


def job_of(fields: Mapping[str, Any], tokens: Any = None) -> Job:
    """Makes the job again. Raises KeyError where a field is missing.

    Args:
        tokens: None where nobody looks at more than their number.
    """
    nameless: Any = range(fields["prompt_tokens"])
    rank = fields.get("rank", 0)
    planned = fields.get("planned")
    job = Job(
        nameless if tokens is None else tokens,
        fields["arrival_s"],
        fields["most_cached_tokens"],
        rank=BACKGROUND if rank is None else rank,
        planned=None if planned is None else PlannedRow(*planned),
        most_output_tokens=fields.get("most_output_tokens", 1),
        n_answer_tokens=fields.get("answer_tokens", 0),
        deadline_ms=fields.get("deadline_ms"),
        client=fields.get("client", ""),
        rid=fields["id"],
    )
    calibrated_of(fields).put_into(job)
    return job


def header(
    config: PrefillConfig, jct_ms: FittedJct | None, settings: PolicySettings, *, engine_version: str, unix_s: float
) -> dict[str, Any]:
    """Says what the decisions behind it were made with: the first line of each start.

    Args:
        jct_ms: what the start has measured.
    """
    return {
        "decisions_version": VERSION,
        "engine_version": engine_version,
        "unix_s": round(unix_s, 3),
        "config": {name: value for name, value in dataclasses.asdict(config).items() if name in OPTIONS},
        "jct_model": None if jct_ms is None else jct_ms._asdict(),
        "step_size": settings.step._asdict(),
        "kv_tokens": settings.kv_tokens,
    }


class Start(NamedTuple):
    """What a header says."""

    config: PrefillConfig
    jct_ms: FittedJct | None
    step_size: StepSize
    kv_tokens: int

    @classmethod
    def of(cls, header: Mapping[str, Any]) -> Start:
        """Raises KeyError, TypeError or ConfigurationError where it is no header."""
        jct_ms = header["jct_model"]
        return cls(
            PrefillConfig(**{name: header["config"][name] for name in OPTIONS}),
            None if jct_ms is None else FittedJct(**jct_ms),
            StepSize(**header["step_size"]),
            int(header["kv_tokens"]),
        )

    def settings(self) -> PolicySettings:
        return server_settings.settings_of(self.config, self.jct_ms, self.step_size, self.kv_tokens)
