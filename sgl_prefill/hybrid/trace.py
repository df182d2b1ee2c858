"""The body of a model (embedding to final norm) as one graph, recorded by Dynamo with a symbolic number of tokens.

Each input of the graph is the ids, positions or KV slots of the tokens, the number of tokens, or a tensor of the model. A body
that reads anything else of the batch is refused by name.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import fx

from sgl_prefill.errors import UntraceableModelError

# Larger than the dimensions of small models, so that none is taken for it; Dynamo treats it as a symbol.
TRACE_TOKENS = 7

TOKEN_INPUTS = ("input_ids", "positions", "out_cache_loc")


# Stands for attention in a recorded graph. It has no kernel: `split.split_body` takes it out.
ATTENTION_OP = "sgl_prefill_hybrid.attention"
_library: Any = torch.library.Library("sgl_prefill_hybrid", "DEF")  # type: ignore[no-untyped-call]
_library.define(
    "attention(Tensor query, Tensor? key, Tensor? value, Tensor(a!) output, bool save_kv_cache, int layer_id) -> ()"
)
_library.impl("attention", lambda *_: None, "Meta")


class TracedBody(NamedTuple):
    """One recorded forward pass over the body."""

    module: fx.GraphModule
    # The sympy symbols of the number of tokens: more than one where nothing in the graph ties two inputs' lengths together.
    token_symbols: frozenset[Any]
    inputs: dict[fx.Node, InputSource]  # of every placeholder


class InputSource(NamedTuple):
    """The source of a placeholder: exactly one field is set."""

    token_rows: str | None = None  # one of TOKEN_INPUTS
    is_token_count: bool = False
    constant: Any = None  # a tensor of the model, or a number


def trace_body(
    body: torch.nn.Module,
    make_batch: Callable[[torch.Tensor], Any],
    device: str,
    traces: Callable[[Any], AbstractContextManager[None]],
    sequence_mixing: frozenset[str],
) -> TracedBody:
    """Record `body.forward(input_ids, positions, forward_batch)`; no kernel runs. Raises UntraceableModelError with the reason.

    Args:
        make_batch: makes the batch of one extending request with these token ids.
        traces: while its context lasts, the body's attention is `ATTENTION_OP` and its experts are one operation each.
        sequence_mixing: other operations in which tokens see each other.
    """
    tokens = {
        "input_ids": torch.arange(TRACE_TOKENS, dtype=torch.int64, device=device),
        "positions": torch.arange(TRACE_TOKENS, dtype=torch.int64, device=device),
    }
    forward_batch = make_batch(tokens["input_ids"])
    tokens["out_cache_loc"] = forward_batch.out_cache_loc
    for rows in tokens.values():
        torch._dynamo.maybe_mark_dynamic(rows, 0)
    recorder = _Recorder()
    forward = torch.compile(types.MethodType(type(body).forward, body), backend=recorder, fullgraph=True)
    try:
        with torch.no_grad(), traces(forward_batch):
            result = forward(tokens["input_ids"], tokens["positions"], forward_batch)
    except UntraceableModelError:
        raise
    except Exception as error:  # Dynamo raises many types, all of which mean that this model cannot be recorded
        reason = str(error).strip().splitlines()
        raise UntraceableModelError(
            f"Dynamo cannot record it ({reason[0] if reason else type(error).__name__})"
        ) from error
    finally:
        torch._dynamo.reset()
    if result is not recorder.result:
        raise UntraceableModelError("its body returns something besides the hidden states")
    assert recorder.module is not None
    graph = recorder.module.graph
    placeholders = list(zip(graph.find_nodes(op="placeholder"), recorder.example_inputs, strict=True))
    row_names = {id(rows): name for name, rows in tokens.items()}
    symbols = _token_symbols(node for node, value in placeholders if id(value) in row_names)
    batch_fields = {id(value): name for name, value in vars(forward_batch).items() if isinstance(value, torch.Tensor)}
    sources = {node: _source_of(node, value, symbols, row_names, batch_fields) for node, value in placeholders}
    _refuse_sequence_mixing(graph, sequence_mixing)
    return TracedBody(recorder.module, symbols, sources)


class _Recorder:
    """A Dynamo backend that records the graph without running it."""

    def __init__(self) -> None:
        self.module: fx.GraphModule | None = None
        self.example_inputs: list[Any] = []
        self.result: torch.Tensor | None = None

    def __call__(self, module: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        self.module, self.example_inputs = module, example_inputs
        outputs: Any = module.graph.output_node().args[0]
        self.result = torch.empty(0)

        def give_result(*_: Any) -> tuple[torch.Tensor | None]:
            # Raised here and not above: Dynamo wraps what a backend raises.
            if len(outputs) != 1:
                raise UntraceableModelError(f"its body returns {len(outputs)} tensors and not the hidden states alone")
            return (self.result,)

        return give_result


def _token_symbols(token_rows: Iterable[fx.Node]) -> frozenset[Any]:
    sizes = (node.meta["example_value"].shape[0] for node in token_rows)
    symbols = frozenset(size.node.expr for size in sizes if isinstance(size, torch.SymInt))
    if not symbols:
        raise UntraceableModelError("its graph does not depend on the number of tokens")
    return symbols


def _source_of(
    node: fx.Node, real: Any, symbols: frozenset[Any], token_rows: dict[int, str], batch_fields: dict[int, str]
) -> InputSource:
    traced = node.meta["example_value"]
    if isinstance(traced, torch.SymInt):
        if traced.node.expr not in symbols:
            raise UntraceableModelError(f"its graph depends on a second size ({node.name})")
        return InputSource(is_token_count=True)
    if not isinstance(traced, torch.Tensor):
        return InputSource(constant=real)
    if id(real) in token_rows:
        return InputSource(token_rows=token_rows[id(real)])
    if id(real) in batch_fields:
        raise UntraceableModelError(f"it reads {batch_fields[id(real)]} of the batch")
    return InputSource(constant=real)


def _refuse_sequence_mixing(graph: fx.Graph, sequence_mixing: frozenset[str]) -> None:
    n_attention = 0
    for node in graph.nodes:
        name = op_name(node)
        n_attention += name == ATTENTION_OP
        if name in sequence_mixing:
            raise UntraceableModelError(f"it mixes tokens outside softmax attention ({name})")
    if n_attention == 0:
        raise UntraceableModelError("its graph holds no attention")


def op_name(node: fx.Node) -> str:
    """Returns `namespace.name` of a registered operation, without its overload; the target's name otherwise."""
    if isinstance(node.target, torch._ops.OpOverload):
        return str(node.target._schema.name).replace("::", ".")
    return str(node.target)
