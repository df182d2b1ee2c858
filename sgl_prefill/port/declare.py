"""The ways in which this package touches SGLang's insides. `hooks.py` lists every use of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple


class Hook(NamedTuple):
    """One change of SGLang's behaviour at run time."""

    target: str  # dotted path of the hooked function
    kind: Literal["after", "around"]  # as in SGLang's HookRegistry
    process: Literal["scheduler", "detokenizer", "http"]  # where it is applied
    feature: str  # the option that asks for it; "always" where every server of ours needs it
    reason: str  # what would go wrong without it
    function: Callable[..., Any]
    takes_state: bool = False  # the function's first argument is the process's EngineState


class Override(NamedTuple):
    """One method of a class of SGLang's that a subclass of ours defines anew."""

    target: str  # dotted path of SGLang's method
    by: str  # name of our class
    reason: str


class Poke(NamedTuple):
    """One attribute of an object of SGLang's that we set."""

    owner: str  # dotted path of the class or module that owns it
    attribute: str
    reason: str


class Switch(NamedTuple):
    """One of SGLang's environment switches that we set; it reads the variable of this name."""

    name: str
    reason: str


class Route(NamedTuple):
    """One HTTP route of SGLang's that ours takes the place of, in the HTTP process."""

    method: str
    path: str
    stock_endpoint: str  # dotted path of the endpoint function that it replaces, and may call
    reason: str


class Relied(NamedTuple):
    """A function of SGLang's that we call or mirror without changing it; a new version of it may break us."""

    target: str
    reason: str
