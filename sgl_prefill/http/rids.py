"""Request ids: SGLang gets unique internal ids, since clients' ids may be equal, or prefixes of each other."""

from __future__ import annotations

import uuid
from typing import Any, NamedTuple

from sglang.srt.managers.io_struct import EmbeddingReqInput, GenerateReqInput

from sgl_prefill.http.request_checks import count_prompts

HIDDEN_RID_CHARACTERS = 32  # a UUID in hexadecimal


class GivenRid(NamedTuple):
    """A client's id of one prompt."""

    given: str | None  # of the batch; None if the client gave none
    shown: str | None  # the id in the prompt's answer
    owner: str  # the client that may abort it

    @property
    def names(self) -> set[str]:
        return {name for name in (self.given, self.shown) if name is not None}


class Rids:
    """The ids of the requests in flight."""

    def __init__(self) -> None:
        self._given: dict[str, GivenRid] = {}  # by internal id
        self._inside: dict[str, dict[str, None]] = {}  # internal ids by the client's, in order

    def hide(self, obj: GenerateReqInput | EmbeddingReqInput, owner: str) -> list[str]:
        """Sets and returns one internal id per prompt. In a session, which names earlier ids, it is made from the client's."""
        session = getattr(obj, "session_params", None)
        session = session if isinstance(session, dict) and session.get("id") is not None else None
        if session is not None:
            obj.rid = obj.rid if obj.rid is not None else uuid.uuid4().hex
            if isinstance(earlier := session.get("rid"), str):
                obj.session_params = {**session, "rid": rid_of_session(earlier)}
        n_prompts, rid = count_prompts(obj), obj.rid
        shown: list[str | None]
        if isinstance(rid, list):
            given = [GivenRid(one, one, owner) for one in rid]
        else:
            is_one = rid is None or n_prompts is None or n_prompts == 1
            shown = [rid] * (n_prompts or 1) if is_one else [f"{rid}_{index}" for index in range(n_prompts or 0)]
            given = [GivenRid(rid, one, owner) for one in shown]
        hidden = {uuid.uuid4().hex if session is None else rid_of_session(str(one.shown)): one for one in given}
        self._given |= hidden
        for inside, one in hidden.items():
            for name in one.names:
                self._inside.setdefault(name, {})[inside] = None
        is_single = not isinstance(rid, list) and n_prompts is None
        obj.rid = next(iter(hidden)) if is_single else list(hidden)
        return list(hidden)

    def forget(self, inside: str) -> None:
        for name in self._given.pop(inside).names:
            of_name = self._inside[name]
            del of_name[inside]
            if not of_name:
                del self._inside[name]

    def show(self, output: dict[str, Any]) -> None:
        """Puts the client's id back into an answer. SGLang appends to the id if a prompt has several answers."""
        meta = output.get("meta_info", {})
        inside = str(meta.get("id"))
        for known in (inside, inside[:HIDDEN_RID_CHARACTERS]):
            if (given := self._given.get(known)) is not None and given.shown is not None:
                meta["id"] = given.shown + inside.removeprefix(known)
                break

    def named(self, rid: str) -> list[str]:
        """The internal ids of a client's id; an unknown id is taken for an internal one."""
        return [*self._inside.get(rid, [rid])]

    def of(self, owner: str) -> list[str]:
        return [inside for inside, given in self._given.items() if given.owner == owner]

    def belongs_to_another(self, inside: str, owner: str) -> bool:
        given = self._given.get(inside)
        return given is not None and given.owner != owner


def rid_of_session(rid: str) -> str:
    """An id that begins with its length, so that it is no prefix of another."""
    return f"{len(rid)}:{rid}"
