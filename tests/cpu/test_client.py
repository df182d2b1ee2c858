"""Who asks, as HTTP and the scheduler see it, and whose prefixes a request may find."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import fastapi
import pytest
from sglang.srt.sampling.sampling_params import SamplingParams

from sgl_prefill.config import PrefillConfig
from sgl_prefill.errors import BadRequestError, ConfigurationError
from sgl_prefill.port.kv import namespaces
from sgl_prefill.port.runner.runner_state import RunnerState
from sgl_prefill.port.steps import clients, custom_params
from sgl_prefill.port.steps.clients import Caller
from sgl_prefill.startup.record import StartRecord


def request_of(body: Any) -> fastapi.Request:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body if isinstance(body, bytes) else json.dumps(body).encode()}

    return fastapi.Request({"type": "http", "headers": []}, receive)


def caller(body: Any = b"", **headers: str) -> Caller:
    found = Caller.of_headers({name.replace("_", "-").encode(): value.encode() for name, value in headers.items()})
    asyncio.run(found.read_body(request_of(body)))
    return found


def seen_by_scheduler(params: dict[str, Any], lora_id: str | None = None, extra_key: str | None = None) -> Any:
    req: Any = SimpleNamespace(
        sampling_params=SamplingParams(**params), lora_id=lora_id, extra_key=extra_key, cache_salt=None
    )
    namespaces.after_req_init(RunnerState(StartRecord(PrefillConfig())), None, req)
    return req


def test_a_header_goes_before_the_user_of_a_body() -> None:
    body = {"user": "bob"}
    assert [caller(body, x_user_id="ann").user, caller(body).user, caller().user] == ["ann", "bob", ""]
    assert caller(body, x_user_id="ann").name("none") == ""


def test_a_background_job_says_so_by_a_header_or_where_a_gateway_drops_it_in_the_body() -> None:
    """It was lost on the way through SGLang's gateway, and the job took turns with everybody."""
    assert caller(x_prefill_background="1").is_background
    assert caller({"prefill_background": True}).is_background
    for nobody in (caller(), caller({"prefill_background": False}), caller(x_prefill_background="0")):
        assert not nobody.is_background
    with pytest.raises(BadRequestError, match="prefill_background is 1: it must be true or false"):
        caller({"prefill_background": 1})


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b"[1]", b'"user"', {"user": None}])
def test_a_body_that_names_nobody_is_nobodys(body: Any) -> None:
    """What is wrong with it is for its route to say."""
    assert caller(body).user == ""


@pytest.mark.parametrize("body", [{"user": 5}, {"cache_salt": 1}])
def test_a_name_that_is_no_text_is_refused(body: dict[str, Any]) -> None:
    with pytest.raises(BadRequestError, match="it must be a text"):
        caller(body)


def test_a_key_is_not_carried_but_its_hash() -> None:
    keys = [
        caller(authorization=f"{scheme} {key}").key
        for scheme, key in (("Bearer", "1"), ("Bearer", "2"), ("bearer", "1"))
    ]
    assert keys[0] == keys[2] != keys[1]
    assert keys[0] != "1"
    assert len(keys[0]) == 64
    assert caller().key == ""


def test_the_scheduler_hears_it_and_nobody_names_another_in_a_body() -> None:
    told = {clients.PARAMETER: "ann", namespaces.PARAMETER: "a/"}
    req = seen_by_scheduler(custom_params.put_ours({"max_new_tokens": 1}, told), extra_key="salt")
    assert (clients.of(req), req.extra_key) == ("ann", "a/salt")
    forged = {"custom_params": {**told, namespaces.PUBLIC_PARAMETER: True, "deadline_ms": 5.0}}
    req = seen_by_scheduler(custom_params.put_ours(forged, {}), extra_key="a/salt")
    assert (clients.of(req), req.extra_key, namespaces.is_public(req)) == ("", "a/salt", False)
    assert custom_params.put_ours(forged, {})["custom_params"] == {"deadline_ms": 5.0}
    assert custom_params.put_ours({}, {}) == {}


def test_tenants_are_told_apart_whatever_they_write() -> None:
    """A salt cannot make one tenant's namespace out of another's: the tenant comes first, and has always the same length."""
    names = ["", "a", "ab", "a/", "ann" * 100]
    tenants = [namespaces.of_caller(Caller(user=name), "user") for name in names]
    assert len(set(tenants)) == len(names)
    assert len({len(tenant) for tenant in tenants}) == 1
    assert namespaces.of_caller(Caller(user="a"), "none") == ""
    assert namespaces.of_caller(Caller(user="a", key="k"), "key") == namespaces.of_caller(
        Caller(user="b", key="k"), "key"
    )


def test_what_an_adapter_computes_is_no_prefix_that_all_share() -> None:
    told = custom_params.put_ours({}, {namespaces.PARAMETER: "a/"})
    assert isinstance(seen_by_scheduler(told).extra_key, namespaces.Namespace)
    assert not isinstance(seen_by_scheduler(told, lora_id="l", extra_key="l").extra_key, namespaces.Namespace)


@pytest.mark.parametrize("scheduling", ["fifo", "stock", "whole-job"])
def test_shares_are_of_policies_that_have_them(scheduling: str) -> None:
    assert not PrefillConfig(scheduling=scheduling).is_fair
    with pytest.raises(ConfigurationError, match=f"--fair-by user is not for --scheduling {scheduling}"):
        PrefillConfig(scheduling=scheduling, fair_by="user")
    assert PrefillConfig().fair_by == "user"
    assert not PrefillConfig(paper=True).is_fair


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            {"scheduling": "stock", "max_waiting": "5t"},
            "--max-waiting: --scheduling stock has no such limits",
        ),
        ({"fair_by": "none", "max_client_waiting": "5"}, "there are no clients with --fair-by none"),
        ({"max_waiting": "0"}, "--max-waiting is '0': it must be a number of prompts"),
        ({"max_waiting": "5 t"}, "like 100000t"),
        ({"shared_prefix": "x"}, "--shared-prefix is for --isolate-by"),
        (
            {"shared_prefix": "x", "isolate_by": "key", "scheduling": "stock", "suffix_kv": "keep"},
            "--shared-prefix needs this package's prefix cache",
        ),
    ],
)
def test_limits_and_tenants_that_nobody_would_heed_are_refused(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigurationError, match=expected):
        PrefillConfig(**options)
