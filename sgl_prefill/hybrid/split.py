"""The traced body cut at its attention layers.

    piece 0 | attention 0 | piece 1 | attention 1 | ... | last piece

A piece is token-wise: row i of what it returns depends on row i of what it takes, so it may run on any chunk of rows. A
value that crosses a cut has one row per token and a full-length buffer. K and V cross no cut: they go to the KV pool.
A buffer is reused as soon as its value has been read for the last time, also by an output of the piece that reads it
(a chunk's rows are all read before they are written), so that two buffers or three serve all layers:

    Llama:   piece i reads  residual, attention output  ->  writes  residual, query      (in the same two buffers)
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch import fx

from sgl_prefill.errors import UntraceableModelError
from sgl_prefill.hybrid.trace import ATTENTION_OP, TracedBody, op_name


class BufferSpec(NamedTuple):
    """One full-length tensor: [tokens, *row_shape]."""

    row_shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def row_bytes(self) -> int:
        return int(torch.Size(self.row_shape).numel()) * self.dtype.itemsize


class Piece(NamedTuple):
    """Token-wise code between two attentions."""

    module: fx.GraphModule  # takes `arguments` in order, returns a tuple
    arguments: tuple[Argument, ...]
    outputs: tuple[int | None, ...]  # buffer of each result; None: K and V, for the pool


class Argument(NamedTuple):
    """One argument of a piece: exactly one field is set."""

    buffer: int | None = None  # this chunk's rows of a buffer
    token_rows: str | None = None  # this chunk's rows of an input of the forward pass
    is_chunk_length: bool = False
    constant: Any = None


class Attention(NamedTuple):
    """One attention layer."""

    layer_id: int
    query: int  # buffer
    output: int  # buffer; may be that of the query
    writes_kv: bool  # False where a fused kernel of the piece before has written K and V to the pool


class SplitBody(NamedTuple):
    """len(pieces) == len(attentions) + 1."""

    pieces: list[Piece]
    attentions: list[Attention]
    buffers: list[BufferSpec]
    result: int  # buffer of the hidden states after the last piece

    def count_of(self, operation: str) -> int:
        """Counts the calls of an operation, `namespace.name`, in all pieces together."""
        return sum(op_name(node) == operation for piece in self.pieces for node in piece.module.graph.nodes)

    def n_reads(self, buffers: frozenset[int]) -> int:
        """Counts how often pieces read a chunk of one of these."""
        return sum(argument.buffer in buffers for piece in self.pieces for argument in piece.arguments)


def split_body(traced: TracedBody, *, attention_in_place: bool) -> SplitBody:
    """Cut the graph. Raises UntraceableModelError where something other than rows of tokens crosses a cut.

    `attention_in_place`: the attention backend may write its output over the query.
    """
    cut = _Cut(traced)
    buffers = _BufferUse(cut, attention_in_place)
    pieces = [_build_piece(index, cut, buffers) for index in range(cut.n_pieces)]
    attentions = [
        Attention(cut.layer_id(node), buffers.of[cut.query(node)], buffers.of[node], cut.writes_kv(node))
        for node in cut.attentions
    ]
    return SplitBody(pieces, attentions, buffers.specs, buffers.of[cut.result])


class _Cut:
    """Which piece each node belongs to, and which values cross from one to another.

    An attention node stands for its output; the empty output tensor in SGLang's graph is dropped.
    """

    def __init__(self, traced: TracedBody) -> None:
        self.traced = traced
        self.graph = traced.module.graph
        self.attentions = [node for node in self.graph.nodes if op_name(node) == ATTENTION_OP]
        self.n_pieces = len(self.attentions) + 1
        self._stands_for: dict[fx.Node, fx.Node] = {self._argument(node, 3, "output"): node for node in self.attentions}
        for node in self.attentions:
            self._check_attention(node)
        self.piece_of = self._assign_pieces()
        outputs: Any = self.graph.output_node().args[0]
        self.result = self.resolve(outputs[0])
        self.readers = self._find_readers()

    def resolve(self, node: fx.Node) -> fx.Node:
        """Returns the value behind a node: an attention's output buffer is the attention."""
        return self._stands_for.get(node, node)

    @staticmethod
    def _argument(node: fx.Node, position: int, name: str) -> Any:
        return node.args[position] if len(node.args) > position else node.kwargs[name]

    def query(self, attention: fx.Node) -> fx.Node:
        return self.resolve(self._argument(attention, 0, "query"))

    def key_value(self, attention: fx.Node) -> tuple[fx.Node, fx.Node]:
        return self._argument(attention, 1, "key"), self._argument(attention, 2, "value")

    def writes_kv(self, attention: fx.Node) -> bool:
        return bool(self._argument(attention, 4, "save_kv_cache"))

    def layer_id(self, attention: fx.Node) -> int:
        return int(self._argument(attention, 5, "layer_id"))

    def _check_attention(self, node: fx.Node) -> None:
        if None in self.key_value(node):
            raise UntraceableModelError(f"attention layer {self.layer_id(node)} uses the K and V of another layer")

    def _assign_pieces(self) -> dict[fx.Node, int]:
        piece_of: dict[fx.Node, int] = {}
        current = 0
        for node in self.graph.nodes:
            if node in self.attentions:
                current += 1
                piece_of[node] = current  # its output is there from this piece on
            elif node.op not in ("placeholder", "output") and node not in self._stands_for:
                # One part of a tuple is taken where the tuple is made: only tensors cross a cut.
                is_part = node.target is operator.getitem and isinstance(node.args[0], fx.Node)
                source = node.args[0] if is_part else None
                piece_of[node] = piece_of.get(source, current) if isinstance(source, fx.Node) else current
        return piece_of

    def _find_readers(self) -> dict[fx.Node, list[int]]:
        """Finds the step at which each crossing value is read: 2 i for piece i, 2 i + 1 for the attention behind it."""
        readers: dict[fx.Node, list[int]] = {}
        for node in self.graph.nodes:
            if node in self.attentions:
                readers.setdefault(self.query(node), []).append(2 * self.piece_of[node] - 1)
                continue
            if node not in self.piece_of:
                continue
            for source in map(self.resolve, node.all_input_nodes):
                if source in self.attentions or self.piece_of.get(source, self.piece_of[node]) != self.piece_of[node]:
                    readers.setdefault(source, []).append(2 * self.piece_of[node])
        readers.setdefault(self.result, []).append(2 * self.n_pieces)
        return readers

    def row_spec(self, node: fx.Node) -> BufferSpec:
        """Returns the shape of one token's row. Raises UntraceableModelError where the value has no row a token."""
        empty = {attention: output for output, attention in self._stands_for.items()}
        value = empty.get(node, node).meta.get("example_value")
        symbols = self.traced.token_symbols
        if isinstance(value, torch.Tensor) and value.dim() > 0 and _is_symbol(value.shape[0], symbols):
            row = value.shape[1:]
            if all(isinstance(size, int) for size in row):
                return BufferSpec(tuple(row), value.dtype)
        shape = tuple(value.shape) if isinstance(value, torch.Tensor) else value
        raise UntraceableModelError(f"a value between two layers ({node.name}, {shape}) has no row for each token")


def _is_symbol(size: Any, symbols: frozenset[Any]) -> bool:
    return isinstance(size, torch.SymInt) and size.node.expr in symbols


class _BufferUse:
    """A buffer for every crossing value, reused when its value is dead (a linear scan over the steps).

    Queries and attention outputs have buffers of their own, since only the others may be divided over ranks (`shared_rows`).
    """

    def __init__(self, cut: _Cut, attention_in_place: bool) -> None:
        self.specs: list[BufferSpec] = []
        self.of: dict[fx.Node, int] = {}
        free: list[int] = []
        attended = {*cut.attentions, *map(cut.query, cut.attentions)}
        is_of_attended: list[bool] = []
        made_at: dict[int, list[fx.Node]] = {}
        for node in cut.readers:
            is_attention = node in cut.attentions
            step = 2 * cut.piece_of[node] - 1 if is_attention else 2 * cut.piece_of[node]
            made_at.setdefault(step, []).append(node)
        for step in range(2 * cut.n_pieces):
            dead = [n for n, buffer in self.of.items() if max(cut.readers[n]) == step]
            reusable_now = step % 2 == 0 or attention_in_place
            if reusable_now:
                free += [self.of[node] for node in dead]
            for node in made_at.get(step, []):
                spec = cut.row_spec(node)
                kind = spec, node in attended
                match = next((one for one in free if (self.specs[one], is_of_attended[one]) == kind), None)
                if match is None:
                    self.specs.append(spec)
                    is_of_attended.append(node in attended)
                    match = len(self.specs) - 1
                else:
                    free.remove(match)
                self.of[node] = match
            if not reusable_now:
                free += [self.of[node] for node in dead]


def _build_piece(index: int, cut: _Cut, buffers: _BufferUse) -> Piece:
    body = [node for node in cut.graph.nodes if cut.piece_of.get(node) == index and node not in cut.attentions]
    inside = set(body)
    outside = dict.fromkeys(
        source for node in body for source in map(cut.resolve, node.all_input_nodes) if source not in inside
    )
    graph = fx.Graph()
    copies = {source: graph.placeholder(source.name) for source in outside}
    for node in body:
        copies[node] = graph.node_copy(node, lambda source: copies[cut.resolve(source)])
    crossing = [node for node in body if node in buffers.of]
    for_the_pool: list[fx.Node] = []
    if index < len(cut.attentions) and cut.writes_kv(cut.attentions[index]):
        for_the_pool = list(cut.key_value(cut.attentions[index]))
        if not inside.issuperset(for_the_pool):
            raise UntraceableModelError(f"attention layer {index} takes K or V from another layer")
    graph.output(tuple(copies[node] for node in [*crossing, *for_the_pool]))
    return Piece(
        module=fx.GraphModule(cut.traced.module, graph, class_name=f"Piece{index}"),
        arguments=tuple(_argument_for(source, cut, buffers) for source in outside),
        outputs=(*(buffers.of[node] for node in crossing), *(None for _ in for_the_pool)),
    )


def _argument_for(source: fx.Node, cut: _Cut, buffers: _BufferUse) -> Argument:
    if source.op == "placeholder":
        given = cut.traced.inputs[source]
        return Argument(None, given.token_rows, given.is_token_count, given.constant)
    return Argument(buffer=buffers.of[source])
