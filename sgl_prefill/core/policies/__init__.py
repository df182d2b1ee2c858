"""The policies by the name that `--scheduling` gives them. A new one is a file here, a line below, and its tests."""

from __future__ import annotations

from sgl_prefill.core.policies.fifo import Fifo
from sgl_prefill.core.policies.srjf import CalibratedSrjf, Srjf
from sgl_prefill.core.policies.whole_job import WholeJob
from sgl_prefill.core.policy import Policy

POLICIES: dict[str, type[Policy]] = {
    "calibrated-srjf": CalibratedSrjf,
    "srjf": Srjf,
    "fifo": Fifo,
    "whole-job": WholeJob,
}
