"""The policies by the name that `--scheduling` gives them. A new one is a file here, a line below, and its tests."""

from __future__ import annotations

from sgl_prefill.core.policies.fair import Fair
from sgl_prefill.core.policies.fifo import Fifo
from sgl_prefill.core.policies.srjf import CalibratedSrjf, Srjf
from sgl_prefill.core.policies.whole_job import WholeJob
from sgl_prefill.core.policy import Policy, PolicySettings

POLICIES: dict[str, type[Policy]] = {
    "calibrated-srjf": CalibratedSrjf,
    "srjf": Srjf,
    "fifo": Fifo,
    "whole-job": WholeJob,
}


def can_be_fair(name: str) -> bool:
    """Tells whether this policy can order the jobs within a client of the fair policy."""
    return issubclass(POLICIES.get(name, Policy), CalibratedSrjf)


def make(name: str, settings: PolicySettings, *, is_fair: bool) -> Policy:
    """is_fair: fair shares between clients, and this policy within each client."""
    kind = POLICIES[name]
    if is_fair:
        assert issubclass(kind, CalibratedSrjf), name
        return Fair(settings, kind)
    return kind(settings)
