"""Who asks, as HTTP and the scheduler see it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import fastapi
import pytest
from sglang.srt.sampling.sampling_params import SamplingParams

from sgl_prefill.config import PrefillConfig
from sgl_prefill.errors import ConfigurationError
from sgl_prefill.port import client


def request_of(**headers: str) -> fastapi.Request:
    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return fastapi.Request({"type": "http", "headers": raw})


def seen_by_scheduler(params: dict[str, Any]) -> str:
    req: Any = SimpleNamespace(sampling_params=SamplingParams(**params))
    return client.of(req)


def test_a_header_goes_before_the_user_of_a_body() -> None:
    named, plain = request_of(x_user_id="ann"), request_of()
    for request in (named, plain):
        client.remember_user(request, "bob")
    assert [client.name(request, "user") for request in (named, plain, request_of())] == ["ann", "bob", ""]
    assert client.name(named, "none") == ""


def test_a_key_is_not_carried_but_its_hash() -> None:
    keys = [client.name(request_of(authorization=f"Bearer {key}"), "key") for key in ("one", "two", "one")]
    assert keys[0] == keys[2] != keys[1]
    assert "one" not in keys[0]
    assert client.name(request_of(), "key") == ""


def test_the_scheduler_hears_it_and_nobody_names_another_in_a_body() -> None:
    assert seen_by_scheduler(client.mark({"max_new_tokens": 1}, "ann")) == "ann"
    forged = {"custom_params": {client.PARAMETER: "bob", "deadline_ms": 5.0}}
    assert seen_by_scheduler(client.mark(forged, "")) == ""
    assert seen_by_scheduler(client.mark(forged, "ann")) == "ann"
    assert client.mark(forged, "")["custom_params"] == {"deadline_ms": 5.0}
    assert client.mark({}, "") == {}


@pytest.mark.parametrize("scheduling", ["fifo", "stock", "whole-job"])
def test_shares_are_of_policies_that_have_them(scheduling: str) -> None:
    assert not PrefillConfig(scheduling=scheduling).is_fair
    with pytest.raises(ConfigurationError, match=f"--fair-by user is not for --scheduling {scheduling}"):
        PrefillConfig(scheduling=scheduling, fair_by="user")
    assert PrefillConfig().fair_by == "user"
    assert not PrefillConfig(paper=True).is_fair
