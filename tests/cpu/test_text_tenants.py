"""Whose texts the tokenizer's cache may know: the time of a request would tell tenants of each other's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.io_struct import GenerateReqInput

from sgl_prefill.http.tokenizer_manager import PrefillTokenizerManager
from sgl_prefill.port.steps import clients


def tenant(caller: Any, isolate_by: str) -> str | None:
    manager: Any = SimpleNamespace(prefill_config=SimpleNamespace(isolate_by=isolate_by))
    manager.tenant_of = lambda one: PrefillTokenizerManager.tenant_of(manager, one)
    with clients.calling(caller):
        return PrefillTokenizerManager._tenant_of_texts(manager)


@pytest.mark.parametrize("isolate_by", ["none", "user"])
def test_tenants_and_salts_have_texts_of_their_own(isolate_by: str) -> None:
    callers = [
        clients.Caller(user="ann", is_read=True),
        clients.Caller(user="bob", is_read=True),
        clients.Caller(user="bob", salt="s", is_read=True),
    ]
    found = {tenant(caller, isolate_by) for caller in callers}
    assert len(found) == (2 if isolate_by == "none" else 3)


def test_a_client_has_no_texts_before_its_body_is_read() -> None:
    """The body may name another user than the headers."""
    assert tenant(clients.Caller(user="ann"), "user") is None


def test_prompts_with_salts_of_their_own_share_no_texts() -> None:
    """/generate takes a list of salts."""
    assert tenant(clients.Caller(user="ann", is_read=True, has_several_salts=True), "none") is None


def test_the_offline_engine_has_one_tenant() -> None:
    assert tenant(None, "none") == ""


def test_long_names_are_kept_as_hashes_that_tell_them_apart() -> None:
    names = ["u" * clients.LONGEST_NAME, *("u" * 5_000_000 + end for end in ("a", "b", "\ud800"))]
    found = [clients.short(name) for name in names]
    assert found[0] == names[0]
    assert {len(one) for one in found[1:]} == {64}
    assert len(set(found)) == 4
    assert clients.Caller.of_headers({b"x-user-id": names[1].encode()}).user == found[1]


@pytest.mark.parametrize("field", clients.SALTS)
def test_long_salts_reach_the_scheduler_as_hashes(field: str) -> None:
    manager: Any = SimpleNamespace(
        tenant_of=lambda caller: "", prefill_config=SimpleNamespace(fair_by="user", isolate_by="none")
    )
    for given in ("s" * 5000, ["s" * 5000, "t"]):
        obj = GenerateReqInput(input_ids=[[1], [2]], **{field: given})
        PrefillTokenizerManager._params_of_caller(manager, clients.Caller(), obj)
        kept = getattr(obj, field)
        assert kept == (clients.short(given) if isinstance(given, str) else [clients.short(given[0]), "t"])
